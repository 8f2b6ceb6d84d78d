"""How scores become weights: closed forms, and rows walked key by key."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.special import softmax as scipy_softmax
from torch import nn
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.normalizers import SoftmaxFamily

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor
ENGINES = ["reference", "fused"]
EVERY = [mk.Softmax(0.5), mk.SinkSoftmax(0.4), mk.ScalableSoftmax(0.7), mk.Sigmoid(), mk.Sparsemax(), mk.Entmax()]
ONE_PER_HEAD = [(name, engine) for name in ("temperature", "logit", "s") for engine in ENGINES]
ONE_PER_HEAD += [("bias", "reference"), ("alpha", "reference")]


def _row(logits: list[float], normalizer: mk.Normalizer, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The weights of one query whose scores are `logits`: keys of width 1, and a query of 1."""
    keys = torch.tensor(logits, dtype=dtype).unsqueeze(-1)
    return mk.weights(torch.ones(1, 1, dtype=dtype), keys, mk.Dot(), normalizer=normalizer)[0]


def test_softmax_is_scipys() -> None:
    logits = draw(40).tolist()
    for temperature in (0.1, 1.0, 7.0):
        truth = torch.from_numpy(scipy_softmax([x / temperature for x in logits]))
        assert_close(_row(logits, mk.Softmax(temperature)), truth)


def test_softmax_of_two_is_the_logistic_function() -> None:
    for gap in (0.0, 0.3, -4.0, 600.0):
        weight = 1 / (1 + math.exp(-gap))
        assert_close(_row([gap, 0.0], mk.Softmax()), torch.tensor([weight, 1 - weight], dtype=torch.float64))


def test_ln_2_is_twice_the_weight() -> None:
    assert_close(_row([math.log(2.0), 0.0], mk.Softmax()), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [float, torch.tensor, lambda x: nn.Parameter(torch.tensor([x], dtype=torch.float64))])
def test_temperature_as_number_tensor_and_parameter(make: Any, engine: str) -> None:
    q, k, v = inputs(3)
    out = mk.attend(q, k, v, normalizer=mk.Softmax(make(0.6)), engine=engine)
    for h in range(3):
        assert_close(out[h], by_loop(q[h], k[h], v[h], factor=lambda _: 1 / 0.6), rtol=1e-6, atol=1e-6)


def _per_head(name: str, value: Tensor) -> mk.Normalizer:
    return {
        "temperature": lambda: mk.Softmax(value),
        "logit": lambda: mk.SinkSoftmax(value),
        "s": lambda: mk.ScalableSoftmax(value),
        "bias": lambda: mk.Sigmoid(value),
        "alpha": lambda: mk.Entmax(value),
    }[name]()


@pytest.mark.parametrize(("name", "engine"), ONE_PER_HEAD)
def test_one_value_per_head(name: str, engine: str) -> None:
    q, k, v = inputs(2, 3)
    value = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) + (name == "alpha")
    out = mk.attend(q, k, v, normalizer=_per_head(name, value), engine=engine)
    for b in range(2):
        for h, x in enumerate(value.tolist()):
            how: dict[str, Any] = {
                "temperature": {"factor": lambda _, x=x: 1 / x},
                "logit": {"sink": x},
                "s": {"factor": lambda m, x=x: x * math.log(m)},
                "bias": {"normalize": oracle.sigmoid(x)},
                "alpha": {"normalize": oracle.entmax(x)},
            }[name]
            assert_close(out[b, h], by_loop(q[b, h], k[b, h], v[b, h], **how))


@pytest.mark.parametrize(("name", "engine"), ONE_PER_HEAD)
@pytest.mark.parametrize("causal", [False, True])
def test_values_are_learned(name: str, causal: bool, engine: str) -> None:
    """Gradients of first and second order, against finite differences, with a key mask besides."""
    entries = [1.2, 1.4, 1.3] if name == "alpha" else [0.5, 1.3, 0.9]
    value = nn.Parameter(torch.tensor(entries, dtype=torch.float64))
    q, k, v = inputs(3, n=4, m=4)
    keys = torch.tensor([True, True, False, True])

    def run(x: Tensor, q: Tensor) -> Tensor:
        normalizer = _per_head(name, value)
        bound = {name: x}
        return torch.func.functional_call(_Attend(normalizer, engine, causal, keys), _prefixed(bound), (q, k, v))

    leaves = (value, q.requires_grad_())
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)
    slope = torch.autograd.grad(run(*leaves).sin().sum(), value)[0]
    assert bool((slope != 0).all())


def _prefixed(bound: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"normalizer.{key}": x for key, x in bound.items()}


class _Attend(nn.Module):
    def __init__(self, normalizer: mk.Normalizer, engine: str, causal: bool, mask: Tensor) -> None:
        super().__init__()
        self.normalizer, self.call = normalizer, {"engine": engine, "causal": causal, "mask": mask}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mk.attend(q, k, v, normalizer=self.normalizer, **self.call)


# The sink.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("logit", [0.0, 1.7, -3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_is_a_key_with_that_logit_and_no_value(logit: float, causal: bool, engine: str) -> None:
    """torch's own attention, with one more key: the score comes in by a float mask, the value is zero."""
    q, k, v = inputs(2, 3, n=6, m=6, width=4)
    more_k = torch.cat([k, torch.zeros(2, 3, 1, 4, dtype=torch.float64)], -2)
    more_v = torch.cat([v, torch.zeros(2, 3, 1, 4, dtype=torch.float64)], -2)
    bias = torch.zeros(6, 7, dtype=torch.float64)
    bias[:, 6] = logit
    if causal:
        bias[:, :6] = torch.full((6, 6), -math.inf).triu(1)
    truth = torch.nn.functional.scaled_dot_product_attention(q, more_k, more_v, attn_mask=bias)
    assert_close(mk.attend(q, k, v, normalizer=mk.SinkSoftmax(logit), causal=causal, engine=engine), truth)


def test_softmax_one_in_closed_form() -> None:
    """m equal scores of s: each weight is e^s / (1 + m e^s)."""
    for score in (-30.0, 0.0, 2.0, 800.0):
        weights = _row([score] * 5, mk.SinkSoftmax())
        assert_close(weights, torch.full((5,), 1 / (math.exp(-score) + 5), dtype=torch.float64))
    assert float(_row([-1000.0] * 5, mk.SinkSoftmax()).sum()) == 0.0
    assert float(_row([0.0] * 5, mk.SinkSoftmax(-1000.0)).sum()) == 1.0


def test_a_constant_moves_only_what_is_not_shift_invariant() -> None:
    logits = draw(6).tolist()
    for normalizer in (*EVERY, mk.Entmax(1.3), mk.Sigmoid(0.4)):
        moved = (_row([x + 1.3 for x in logits], normalizer) - _row(logits, normalizer)).abs().max()
        assert (float(moved) < 1e-12) == normalizer.shift_invariant


# Scalable softmax.


@pytest.mark.parametrize(
    ("n", "plain", "scalable"),
    [(10, 0.943, 0.940), (100, 0.600, 0.995), (1000, 0.129, 0.9996), (10000, 0.0146, 1.0), (100000, 0.0015, 1.0)],
)
def test_scalable_softmax_does_not_fade(n: int, plain: float, scalable: float) -> None:
    """Nakanishi 2025, Fig. 1: one score of +3 among scores of −2, s = 0.43; and the closed form behind the figure."""
    logits = [3.0] + [-2.0] * (n - 1)
    assert_close(float(_row(logits, mk.Softmax())[0]), plain, rtol=0.03, atol=0.0005)
    ours = float(_row(logits, mk.ScalableSoftmax(0.43))[0])
    assert_close(ours, scalable, rtol=0.0, atol=0.001)
    assert_close(ours, 1 / (1 + (n - 1) * n ** (-0.43 * 5)), rtol=1e-9, atol=0.0)


def test_scalable_softmax_with_one_key_is_one() -> None:
    assert _row([-7.0], mk.ScalableSoftmax(2.0)).tolist() == [1.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_changes_nothing(engine: str) -> None:
    normalizers = EVERY if engine == "reference" else EVERY[:3]
    q, k, v = inputs(3, n=4, m=4)
    padded_k = torch.cat([k, draw(3, 5, 4, seed=7)], -2)
    padded_v = torch.cat([v, draw(3, 5, 3, seed=8)], -2)
    real = torch.arange(9) < 4
    for normalizer in normalizers:
        for causal in (False, True):
            short = mk.attend(q, k, v, normalizer=normalizer, causal=causal, engine=engine)
            at = torch.arange(4)
            long = mk.attend(
                q, padded_k, padded_v, normalizer=normalizer, causal=causal, mask=real,
                query_position=at, key_position=torch.arange(9), engine=engine,
            )  # fmt: skip
            assert_close(long, short)


# The sigmoid.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, 0.0, -1.7])
def test_sigmoid_key_by_key(bias: float | None, causal: bool) -> None:
    q, k, v = inputs(n=6, m=6)
    mask = torch.tensor([True, True, False, True, True, True])
    out = mk.attend(q, k, v, normalizer=mk.Sigmoid(bias), causal=causal, mask=mask)
    truth = by_loop(
        q, k, v, allowed=lambda i, j: j != 2 and (j <= i or not causal), normalize=oracle.sigmoid(bias)
    )  # fmt: skip
    assert_close(out, truth)


def test_sigmoid_in_closed_form() -> None:
    """m scores of 0: each weight is 1/(m + 1) with the default bias, and a half without."""
    for m in (1, 2, 5, 1000):
        assert_close(_row([0.0] * m, mk.Sigmoid()).sum(), torch.tensor(m / (m + 1), dtype=torch.float64))
        assert_close(_row([0.0] * m, mk.Sigmoid(0.0)).sum(), torch.tensor(m / 2, dtype=torch.float64))
    assert _row([-1e4, 1e4], mk.Sigmoid()).tolist() == [0.0, 1.0]
    nothing = torch.zeros(5, 7, dtype=torch.bool)
    assert mk.attend(*inputs(), normalizer=mk.Sigmoid(), mask=nothing).tolist() == [[0.0] * 3] * 5


def test_a_float_mask_and_the_bias_add_up() -> None:
    q, k, v = inputs()
    bias = draw(5, 7, seed=5)
    bias[1, 2] = -math.inf
    truth = by_loop(
        q, k, v, bias=lambda i, j: float(bias[i, j]), allowed=lambda i, j: (i, j) != (1, 2), normalize=oracle.sigmoid()
    )
    assert_close(mk.attend(q, k, v, normalizer=mk.Sigmoid(), mask=bias), truth)


def test_the_count_of_keys_is_asked_for_only_where_it_is_needed() -> None:
    like = draw(5, 7)
    assert mk.Sigmoid().counts_keys and not mk.Sigmoid(0.3).counts_keys
    assert mk.Sigmoid(0.3).shift(None, like) == 0.3 and mk.Softmax().shift(None, like) == 0.0
    with pytest.raises(ValueError, match=r"Sigmoid\(\) needs the number of visible keys"):
        mk.Sigmoid().shift(None, like)


# Extremes.


@pytest.mark.parametrize("normalizer", [*EVERY, mk.Entmax(1.2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_neither_overflow_nor_vanish(normalizer: mk.Normalizer, dtype: torch.dtype) -> None:
    q = torch.tensor([[1e4]], dtype=dtype)
    k = torch.tensor([[1.0], [0.999], [-1.0]], dtype=dtype)
    v = torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype)
    # A sigmoid takes both of the keys that score high.
    truth = 3.0 if isinstance(normalizer, mk.Sigmoid) else 1.0
    for engine in ENGINES if isinstance(normalizer, SoftmaxFamily) else ["reference"]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = mk.attend(*leaves, mk.Dot(), normalizer=normalizer, engine=engine)
        assert_close(out.item(), truth, rtol=1e-3, atol=0.0)
        for grad in torch.autograd.grad(out.sum(), leaves):
            assert bool(grad.isfinite().all())


@pytest.mark.parametrize("normalizer", [*EVERY, mk.Entmax(1.2), mk.Entmax(3.0)], ids=repr)
def test_a_logit_of_minus_infinity_is_a_missing_key(normalizer: mk.Normalizer) -> None:
    scores = torch.tensor([[0.4, -math.inf, -0.2, -math.inf]], dtype=torch.float64, requires_grad=True)
    weights = normalizer.weigh(scores)
    assert_close(weights[0, [0, 2]], normalizer.weigh(scores[:, [0, 2]])[0])
    assert weights[0, [1, 3]].tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(weights[0, 0], scores)
    assert bool(grad.isfinite().all())
    empty = normalizer.weigh(torch.full((2, 3), -math.inf))
    assert empty.tolist() == [[0.0] * 3] * 2
    assert normalizer.weigh(torch.zeros(2, 0)).shape == (2, 0)


def test_a_normalizer_says_what_it_is() -> None:
    assert repr(mk.Softmax()) == "Softmax()"
    assert repr(mk.Softmax(0.5)) == "Softmax(temperature=0.5)"
    assert repr(mk.SinkSoftmax()) == "SinkSoftmax(logit=0)"
    assert repr(mk.ScalableSoftmax(nn.Parameter(torch.tensor(0.5)))) == "ScalableSoftmax(s=0.5 (learned))"
    assert repr(mk.Softmax(torch.ones(3))) == "Softmax(temperature=<per head, 3 heads>)"
    assert (repr(mk.Sigmoid()), repr(mk.Sigmoid(-2))) == ("Sigmoid()", "Sigmoid(bias=-2)")
    assert (repr(mk.Entmax()), repr(mk.Entmax(1.2))) == ("Entmax()", "Entmax(alpha=1.2)")
    assert repr(mk.Sparsemax()) == "Sparsemax()"


def test_a_normalizer_of_ones_own() -> None:
    class Squares(mk.Normalizer):
        def weigh(self, scores: Tensor) -> Tensor:
            squares = torch.where(scores == -math.inf, 0.0, scores).square()
            return squares / squares.sum(-1, keepdim=True)

    q, k, v = inputs()
    squares = (q @ k.mT).square()
    assert_close(mk.attend(q, k, v, mk.Dot(), normalizer=Squares()), squares / squares.sum(-1, keepdim=True) @ v)
    assert mk.explain(q, k, v, normalizer=Squares()).engine == "reference"
    with pytest.raises(NotImplementedError, match=r"Squares needs whole rows of scores"):
        Squares().start(q[..., 0])
    with pytest.raises(NotImplementedError, match=r"Normalizer must define weigh\(scores\)"):
        mk.attend(q, k, v, normalizer=mk.Normalizer())


def test_state_moves_with_the_module() -> None:
    for normalizer, name in (
        (mk.Softmax(torch.tensor([1.0, 2.0])), "temperature"),
        (mk.SinkSoftmax(nn.Parameter(torch.zeros(2))), "logit"),
        (mk.ScalableSoftmax(nn.Parameter(torch.ones(()))), "s"),
        (mk.Sigmoid(nn.Parameter(torch.zeros(2))), "bias"),
        (mk.Entmax(nn.Parameter(torch.full((2,), 1.5))), "alpha"),
    ):
        assert list(normalizer.state_dict()) == [name]
        assert normalizer.double().state_dict()[name].dtype == torch.float64
