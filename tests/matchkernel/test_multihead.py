"""MultiHeadAttention against heads computed one by one, pair by pair, from the layer's weights."""

import copy
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.masks import from_key_padding

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from oracle import draw

Tensor = torch.Tensor
Score = Callable[[list[float], list[float]], float]
"""Of two tokens of one head, whose last coordinate is the position."""


class Cauchy(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.log1p(mk.squared_distance(q, k))


def layer(*args: Any, seed: int = 0, **settings: Any) -> mk.MultiHeadAttention:
    """A float64 layer whose biases are not zero."""
    generator = torch.Generator().manual_seed(seed)
    made = mk.MultiHeadAttention(*args, generator=generator, **settings).double()
    for projection in (made.q_proj, made.k_proj, made.v_proj, made.out_proj):
        if projection.bias is not None:
            with torch.no_grad():
                projection.bias.normal_(generator=generator)
    return made


def _square(q: list[float], k: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(q, k, strict=True))


def _turn(x: list[float]) -> list[float]:
    """The coordinates as complex numbers, half and half, each turned at its own rate by the position."""
    *content, position = x
    half = len(content) // 2
    turned = [
        complex(content[t], content[t + half]) * complex(math.cos(a), math.sin(a))
        for t in range(half)
        for a in [position * 10000.0 ** (-t / half)]
    ]
    return [z.real for z in turned] + [z.imag for z in turned]


DOT: Score = lambda q, k: oracle.scaled_dot(q[:-1], k[:-1])  # noqa: E731
CAUCHY: Score = lambda q, k: -math.log1p(_square(q[:-1], k[:-1]))  # noqa: E731
ROTARY: Score = lambda q, k: oracle.scaled_dot(_turn(q), _turn(k))  # noqa: E731


def gaussian(bandwidth: float) -> Score:
    return lambda q, k: -_square(q[:-1], k[:-1]) / (2.0 * bandwidth**2)


def dot_and_alibi(slope: float) -> Score:
    return lambda q, k: DOT(q, k) - slope * abs(q[-1] - k[-1])


def kernels(kind: str, heads: int) -> tuple[Any, list[Score]]:
    """What is handed to the layer, and how each head then scores."""
    per_head = [0.5 + 0.25 * head for head in range(heads)]
    match kind:
        case "default":
            return None, [DOT] * heads
        case "gaussian per head":
            return mk.Gaussian(torch.tensor(per_head, dtype=torch.float64)), [gaussian(b) for b in per_head]
        case "alibi":
            return mk.ScaledDot() + mk.ALiBi(heads), [dot_and_alibi(s) for s in mk.alibi_slopes(heads)]
        case "rotary":
            return mk.Rotary(6), [ROTARY] * heads
        case "own":
            return Cauchy(), [CAUCHY] * heads
    # A list: three kernels in turn, so that heads that run together do not stand together.
    given = [mk.ScaledDot(), mk.Gaussian(0.8), Cauchy()]
    return [given[head % 3] for head in range(heads)], [[DOT, gaussian(0.8), CAUCHY][head % 3] for head in range(heads)]


def normalizers(kind: str, heads: int) -> tuple[Any, list[dict[str, Any]]]:
    """What is handed to the layer, and what `by_loop` needs for each head."""
    per_head = [0.6 + 0.2 * head for head in range(heads)]
    match kind:
        case "default":
            return None, [{}] * heads
        case "temperature per head":
            made: Any = mk.Softmax(torch.tensor(per_head, dtype=torch.float64))
            return made, [{"factor": lambda keys, t=t: 1.0 / t} for t in per_head]
        case "sink per head":
            return mk.SinkSoftmax(torch.tensor(per_head, dtype=torch.float64)), [{"sink": b} for b in per_head]
        case "scalable":
            return mk.ScalableSoftmax(0.7), [{"factor": lambda keys: 0.7 * math.log(max(keys, 1))}] * heads
        case "sigmoid":
            return mk.Sigmoid(), [{"normalize": oracle.sigmoid()}] * heads
        case "entmax":
            return mk.Entmax(1.5), [{"normalize": oracle.entmax(1.5)}] * heads
    raise AssertionError(kind)


def by_hand(
    made: mk.MultiHeadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: list[Score],
    weighing: list[dict[str, Any]],
    allowed: Callable[[int, int, int, int], bool],
    bias: Callable[[int, int, int, int], float],
) -> Tensor:
    """The output (batch, n, embed_dim); `allowed` and `bias` are asked with sequence, head, query and key."""
    state = made.state_dict()
    heads, groups = made.heads, made.heads // made.kv_heads
    n, m = query.shape[1], key.shape[1]

    def project(name: str, x: Tensor, head: int, width: int) -> Tensor:
        rows = slice(head * width, (head + 1) * width)
        out = torch.einsum("td,od->to", x, state[f"{name}.weight"][rows])
        return out + state[f"{name}.bias"][rows] if f"{name}.bias" in state else out

    def placed(x: Tensor, first: int) -> Tensor:
        position = torch.arange(first, first + x.shape[0], dtype=torch.float64)
        return torch.cat([x, position[:, None]], dim=-1)

    texts = []
    for b in range(query.shape[0]):
        answers = []
        for h in range(heads):
            q = placed(project("q_proj", query[b], h, made.head_dim), m - n)
            k = placed(project("k_proj", key[b], h // groups, made.head_dim), 0)
            v = project("v_proj", value[b], h // groups, made.value_dim)
            answers.append(
                oracle.by_loop(
                    q,
                    k,
                    v,
                    scores[h],
                    allowed=lambda i, j, b=b, h=h: allowed(b, h, i, j),
                    bias=lambda i, j, b=b, h=h: bias(b, h, i, j),
                    **weighing[h],
                )
            )
        joined = torch.cat(answers, dim=-1)
        out = torch.einsum("tv,ev->te", joined, state["out_proj.weight"])
        texts.append(out + state["out_proj.bias"] if "out_proj.bias" in state else out)
    return torch.stack(texts)


def from_weights(made: mk.MultiHeadAttention, weights: Tensor, tokens: Tensor) -> Tensor:
    """The output that these weights make of the values of these tokens."""
    batch, m = tokens.shape[:2]
    values = made.v_proj(tokens).reshape(batch, m, made.kv_heads, made.value_dim)
    groups = made.heads // made.kv_heads
    answers = [weights[:, h] @ values[:, :, h // groups] for h in range(made.heads)]
    return made.out_proj(torch.cat(answers, dim=-1))


KERNELS = ("default", "gaussian per head", "alibi", "rotary", "own", "list")
NORMALIZERS = ("default", "temperature per head", "sink per head", "scalable", "sigmoid", "entmax")
MASKS = ("none", "rows", "keys", "heads", "float", "all")


@pytest.mark.parametrize("seed", range(108))
def test_any_configuration_is_its_heads_one_by_one(seed: int) -> None:
    pick = random.Random(seed)
    kernel_kind, normalizer_kind = KERNELS[seed % 6], NORMALIZERS[(seed // 6) % 6]
    kv_heads, groups = pick.randint(1, 3), pick.randint(1, 3)
    heads, batch = kv_heads * groups, pick.randint(1, 3)
    n, m = pick.randint(1, 6), pick.randint(1, 7)
    embed_dim = pick.choice([5, 8, heads * 6])
    crossed = pick.random() < 0.5
    key_dim = pick.choice([None, 7, (4, 9)]) if crossed else None
    kernel, scores = kernels(kernel_kind, heads)
    normalizer, weighing = normalizers(normalizer_kind, heads)
    made = layer(
        embed_dim,
        heads,
        kernel=kernel,
        normalizer=normalizer,
        kv_heads=kv_heads,
        head_dim=6 if kernel_kind == "rotary" else pick.randint(1, 7),
        value_dim=pick.choice([None, 1, 4]),
        key_dim=key_dim,
        bias=pick.random() < 0.7,
        seed=seed,
    )
    query = draw(batch, n, embed_dim, seed=seed)
    key, value = query, query
    call: dict[str, Any] = {}
    if crossed:
        key = draw(batch, m, made.k_proj.in_features, seed=seed + 1000)
        value = key
        call = {"key": key}
        if isinstance(key_dim, tuple) or pick.random() < 0.5:
            value = draw(batch, m, made.v_proj.in_features, seed=seed + 2000)
            call["value"] = value
    m = key.shape[1]
    causal, window = pick.random() < 0.4, pick.choice([None, None, 2, (1, 2)])
    shapes = {"rows": (n, m), "keys": (batch, 1, 1, m), "heads": (1, heads, n, m), "all": (batch, heads, n, m)}
    mask_kind = pick.choice(MASKS)
    mask = draw(*shapes.get(mask_kind, (batch, 1, n, m)), seed=seed + 3000)
    if mask_kind != "float":
        mask = mask > -0.7
    full = mask.expand(batch, heads, n, m)
    left, right = {None: (99, 99), 2: (1, 1), (1, 2): (1, 2)}[window]

    def allowed(b: int, h: int, i: int, j: int) -> bool:
        ahead = j - (i + m - n)
        by_mask = mask_kind in ("none", "float") or bool(full[b, h, i, j])
        return by_mask and -left <= ahead <= right and not (causal and ahead > 0)

    def bias(b: int, h: int, i: int, j: int) -> float:
        return float(full[b, h, i, j]) if mask_kind == "float" else 0.0

    if mask_kind != "none":
        call["mask"] = mask
    expected = by_hand(made, query, key, value, scores, weighing, allowed, bias)
    assert_close(made(query, causal=causal, window=window, **call), expected, rtol=1e-7, atol=1e-9)
    out, weights = made(query, causal=causal, window=window, need_weights=True, **call)
    assert_close(out, expected, rtol=1e-7, atol=1e-9)
    assert weights.shape == (batch, heads, n, m)
    assert_close(from_weights(made, weights, value), out, rtol=0, atol=1e-11)
    forbidden = [
        not allowed(b, h, i, j) for b in range(batch) for h in range(heads) for i in range(n) for j in range(m)
    ]
    assert not weights.flatten()[torch.tensor(forbidden)].any()


# ---- what the weights are --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["default", "list"])
def test_weights_are_those_that_made_the_output_dropout_included(kernel: str) -> None:
    made = layer(12, 4, kernel=kernels(kernel, 4)[0], kv_heads=2, value_dim=5, dropout=0.4)
    x = draw(3, 20, 12)
    torch.manual_seed(0)
    out, weights = made(x, need_weights=True)
    assert_close(from_weights(made, weights, x), out, rtol=0, atol=1e-12)
    whole = made.eval()(x, need_weights=True)[1]
    dropped = weights == 0.0
    assert_close(weights, torch.where(dropped, 0.0, whole / 0.6), rtol=0, atol=1e-14)
    # 4800 coins with a standard deviation of 0.007.
    assert abs(dropped.double().mean().item() - 0.4) < 0.035
    for head in range(4):
        assert 0.3 < dropped[:, head].double().mean().item() < 0.5


def test_dropout_drops_without_weights_too_and_never_in_eval() -> None:
    made = layer(8, 2, dropout=0.5)
    x = draw(2, 9, 8)
    first, second = made(x), made(x)
    assert not torch.equal(first, second)
    whole = layer(8, 2)(x)
    assert_close(made.eval()(x), whole, rtol=0, atol=1e-14)
    assert_close(made.eval()(x, need_weights=True)[0], whole, rtol=0, atol=1e-14)
    made.train()
    torch.manual_seed(0)
    mean = torch.stack([made(x).detach() for _ in range(4000)]).mean(0)
    # The mean over coins is the output without them: dropout acts on weights, and what is left is scaled up.
    assert_close(mean, whole.detach(), rtol=0, atol=0.08)


def test_a_nan_that_nobody_may_attend_to_reaches_nothing() -> None:
    made = layer(8, 2, kv_heads=1)
    x = draw(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    mask = from_key_padding(padding)
    spoilt = torch.where(padding[..., None], float("nan"), x)
    expected = made(x, mask=mask)
    for need_weights in (False, True):
        for values in (spoilt, x):
            found = made(x, spoilt, values, mask=mask, need_weights=need_weights)
            out, weights = found if need_weights else (found, torch.zeros(()))
            assert_close(out, expected, rtol=0, atol=1e-13)
            assert not weights.isnan().any()


def test_a_query_without_keys_gets_the_bias_of_the_output() -> None:
    made = layer(6, 2)
    x = draw(2, 3, 6)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    for out in (made(x, mask=mask), made(x, mask=mask, need_weights=True)[0]):
        assert_close(out[:, 1], made.out_proj.bias.expand(2, 6), rtol=0, atol=0)
    assert_close(made(x, x[:, :0]), made.out_proj.bias.expand(2, 3, 6), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_batches_and_texts(shape: tuple[int, int]) -> None:
    for kernel in ("default", "own", "list"):
        made = layer(6, 3, kernel=kernels(kernel, 3)[0])
        x = draw(*shape, 6).requires_grad_()
        out, weights = made(x, need_weights=True)
        assert made(x).shape == out.shape == (*shape, 6)
        assert weights.shape == (shape[0], 3, shape[1], shape[1])
        made(x, causal=True).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


# ---- masks -----------------------------------------------------------------------------------------------------


def test_a_mask_without_a_dimension_for_the_heads_is_refused_and_not_guessed_at() -> None:
    """With as many sequences as heads, a mask (batch, n, m) would pass for one of (heads, n, m)."""
    made = layer(8, 2)
    x, mask = draw(2, 3, 8), draw(2, 3, 3) > 0
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3, 3\): expected \(n, m\), or 4 dimensions"):
        made(x, mask=mask)
    assert not torch.equal(made(x, mask=mask[:, None]), made(x, mask=mask[None]))


def test_unbatched_and_twice_batched_tokens() -> None:
    made = layer(8, 2, kv_heads=1, kernel=[mk.ScaledDot(), mk.Gaussian()])
    x, mask = draw(2, 3, 5, 8), draw(2, 3, 2, 5, 5) > -1.0
    out, weights = made(x, mask=mask, need_weights=True)
    for a in range(2):
        assert_close(made(x[a], mask=mask[a]), out[a], rtol=0, atol=1e-13)
        for b in range(3):
            alone, alone_weights = made(x[a, b], mask=mask[a, b], need_weights=True)
            assert_close(alone, out[a, b], rtol=0, atol=1e-13)
            assert_close(alone_weights, weights[a, b], rtol=0, atol=1e-13)


def test_one_key_text_serves_a_batch_of_queries() -> None:
    made = layer(8, 4, kv_heads=2)
    x, y = draw(3, 5, 8), draw(1, 7, 8, seed=1)
    assert_close(made(x, y), made(x, y.expand(3, 7, 8)), rtol=0, atol=1e-13)
    assert_close(made(x, y[0]), made(x, y.expand(3, 7, 8)), rtol=0, atol=1e-13)


# ---- a module --------------------------------------------------------------------------------------------------


def test_gradients_are_exact_and_can_be_derived_again() -> None:
    per_head = torch.nn.Parameter(torch.tensor([0.7, 1.2, 0.9, 1.5], dtype=torch.float64))
    made = layer(4, 4, kernel=mk.Gaussian(per_head), kv_heads=2, head_dim=2, value_dim=3)
    x, y = draw(1, 3, 4).requires_grad_(), draw(1, 4, 4, seed=1).requires_grad_()
    names = [name for name, _ in made.named_parameters()]
    assert "kernel.bandwidth" in names and len(names) == 9

    def call(x: Tensor, y: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (x, y))

    leaves = (x, y, *made.parameters())
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_weights_have_the_gradient_of_the_output(kernel: str) -> None:
    """With and without `need_weights` the same function is computed, so its derivative is the same."""
    made = layer(8, 4, kernel=kernels(kernel, 4)[0], kv_heads=2, head_dim=6)
    x, mask = draw(2, 5, 8).requires_grad_(), draw(2, 1, 1, 5) > -0.8
    leaves = [x, *made.parameters()]
    plain = torch.autograd.grad(made(x, mask=mask, causal=True).sin().sum(), leaves)
    out, weights = made(x, mask=mask, causal=True, need_weights=True)
    assert weights.requires_grad
    for ours, expected in zip(torch.autograd.grad(out.sin().sum(), leaves), plain, strict=True):
        assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_copy_and_a_state_dict_carry_everything(kernel: str) -> None:
    made = layer(8, 4, kernel=kernels(kernel, 4)[0], head_dim=6, normalizer=mk.SinkSoftmax(torch.arange(4.0)))
    x = draw(2, 5, 8)
    copied = copy.deepcopy(made)
    assert_close(copied(x), made(x), rtol=0, atol=0)
    # Heads that ran together in the original do so in the copy.
    assert [at for at, _ in copied._shares()] == [at for at, _ in made._shares()]
    other = layer(8, 4, kernel=kernels(kernel, 4)[0], head_dim=6, normalizer=mk.SinkSoftmax(torch.zeros(4)), seed=1)
    assert not torch.equal(other(x), made(x))
    other.load_state_dict(made.state_dict())
    assert_close(other(x), made(x), rtol=0, atol=0)


def test_heads_of_a_list_that_share_a_kernel_run_together() -> None:
    calls = []

    class Counting(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            calls.append(q.shape[-3])
            return q @ k.mT

    one, other = Counting(), Counting()
    made = layer(8, 4, kernel=[one, other, one, one])
    made(draw(1, 3, 8), need_weights=True)
    assert calls == [3, 1]


def test_a_value_per_head_in_a_list_counts_the_heads_that_share_it() -> None:
    widths = torch.tensor([0.6, 1.4], dtype=torch.float64)
    pair, dot = mk.Gaussian(widths), mk.ScaledDot()
    together = layer(12, 4, kernel=[dot, pair, dot, pair], kv_heads=2)
    apart = layer(12, 4, kernel=[dot, mk.Gaussian(0.6), dot, mk.Gaussian(1.4)], kv_heads=2)
    x = draw(2, 5, 12)
    assert_close(together(x), apart(x), rtol=0, atol=1e-13)


def test_a_learned_value_per_head_learns_beside_a_list_of_kernels() -> None:
    dot, own = mk.ScaledDot(), Cauchy()
    x = draw(2, 5, 12)
    logit = torch.nn.Parameter(draw(4))
    made = layer(12, 4, kernel=[dot, own, dot, own], normalizer=mk.SinkSoftmax(logit))
    made(x).sin().sum().backward()
    slopes = []
    for sign in (1.0, -1.0):
        for head in range(4):
            with torch.no_grad():
                logit[head] += sign * 1e-6
                slopes.append(made(x).sin().sum().item() * sign / 2e-6)
                logit[head] -= sign * 1e-6
    by_difference = torch.tensor(slopes, dtype=torch.float64).reshape(2, 4).sum(0)
    assert logit.grad is not None
    assert_close(logit.grad, by_difference, rtol=1e-6, atol=1e-8)
    assert logit.shape == (4,) and made.normalizer.logit is logit


def test_a_normaliser_inside_another_is_cut_to_its_heads_too() -> None:
    class Outer(mk.Normalizer):
        def __init__(self, inner: mk.Softmax) -> None:
            super().__init__()
            self.inner = inner

        def factor(self, visible: Tensor | None, like: Tensor) -> Any:
            return self.inner.factor(visible, like)

        def weigh(self, scores: Tensor) -> Tensor:
            return self.inner.weigh(scores)

    dot, own = mk.ScaledDot(), Cauchy()
    inner, x = mk.Softmax(torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)), draw(2, 5, 12)
    found = layer(12, 4, kernel=[dot, own, dot, own], normalizer=Outer(inner))(x)
    assert_close(found, layer(12, 4, kernel=[dot, own, dot, own], normalizer=inner)(x), rtol=0, atol=1e-12)


def test_another_kernel_can_be_put_in() -> None:
    made, x = layer(8, 2), draw(2, 4, 8)
    made.kernel = Cauchy()
    assert_close(made(x), layer(8, 2, kernel=Cauchy())(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("kernel", torch.nn.ModuleList([Cauchy()] * 2), ValueError, "kernel: a list of 2, expected one for each of 4"),
        ("kernel", torch.nn.ModuleList([Cauchy()] * 8), ValueError, "kernel: a list of 8, expected one for each of 4"),
        ("kernel", torch.nn.ModuleList([torch.nn.Tanh()] * 4), TypeError, "kernel: expected a MatchKernel or a list"),
        ("kernel", torch.nn.Tanh(), TypeError, r"kernel: expected a MatchKernel or a list .*, got Tanh\(\)"),
        ("kernel", None, TypeError, "kernel: expected a MatchKernel or a list .*, got None"),
        ("normalizer", None, TypeError, "normalizer: expected a Normalizer, got None"),
        ("normalizer", torch.nn.Tanh(), TypeError, r"normalizer: expected a Normalizer, got Tanh\(\)"),
    ],
)
@pytest.mark.parametrize("kernel", [None, [Cauchy() for _ in range(4)]])
def test_what_is_put_in_is_checked_like_what_is_made(
    kernel: Any, name: str, given: Any, error: type[Exception], message: str
) -> None:
    made = layer(8, 4, kernel=kernel)
    setattr(made, name, given)
    for settings in ({}, {"need_weights": True}, {"cache": mk.KeyValueCache()}):
        with pytest.raises(error, match=message):
            made(draw(2, 4, 8), **settings)


def test_no_input_is_written_to() -> None:
    made = layer(8, 2, dropout=0.3, kernel=[mk.ScaledDot(), Cauchy()])
    given = [draw(2, 5, 8), draw(2, 6, 8, seed=1), draw(2, 6, 8, seed=2), draw(5, 6)]
    before = [x.clone() for x in given]
    for need_weights in (False, True):
        made(*given[:3], mask=given[3], need_weights=need_weights)
    for x, kept in zip(given, before, strict=True):
        assert torch.equal(x, kept)


def test_first_weights_are_torchs() -> None:
    """Xavier over the stacked matrix in self-attention, over each otherwise; zero biases."""
    made = mk.MultiHeadAttention(64, 4, kv_heads=2, value_dim=8, generator=torch.Generator().manual_seed(0))
    rows = 64 + 32 + 16
    for projection in (made.q_proj, made.k_proj, made.v_proj):
        assert projection.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (rows + 64)), rel=0.02)
        assert projection.weight.mean().item() == pytest.approx(0.0, abs=0.02)
    assert made.out_proj.weight.abs().max().item() == pytest.approx(1 / math.sqrt(32), rel=0.02)
    assert all(not x.any() for name, x in made.named_parameters() if name.endswith("bias"))
    crossed = mk.MultiHeadAttention(64, 4, key_dim=(32, 64))
    for projection, width in ((crossed.q_proj, 64), (crossed.k_proj, 32), (crossed.v_proj, 64)):
        assert projection.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (64 + width)), rel=0.02)
    theirs = torch.nn.MultiheadAttention(64, 4)
    ours = mk.MultiHeadAttention(64, 4)
    assert theirs.in_proj_weight.std().item() == pytest.approx(ours.k_proj.weight.std().item(), rel=0.05)
    assert theirs.out_proj.weight.std().item() == pytest.approx(ours.out_proj.weight.std().item(), rel=0.05)


def test_a_generator_is_all_the_chance_there_is() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (mk.MultiHeadAttention(8, 2, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for ours, expected in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, expected)
    first.reset_parameters()
    assert not torch.equal(first.q_proj.weight, second.q_proj.weight)
    torch.nn.init.ones_(first.out_proj.bias)
    first.reset_parameters(torch.Generator().manual_seed(5))
    for ours, expected in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_what_it_prints() -> None:
    made = mk.MultiHeadAttention(8, 4, kernel=mk.Gaussian(2.0), kv_heads=2, value_dim=3, dropout=0.1)
    assert made.extra_repr() == "8, heads=4, kv_heads=2, head_dim=2, value_dim=3, dropout=0.1"
    assert mk.MultiHeadAttention(8, 4).extra_repr() == "8, heads=4, head_dim=2"
    assert "(kernel): Gaussian(bandwidth=2)" in repr(made) and "(normalizer): Softmax()" in repr(made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", KERNELS)
def test_smaller_types(kernel: str, dtype: torch.dtype) -> None:
    made = layer(16, 4, kernel=kernels(kernel, 4)[0], head_dim=6, kv_heads=2)
    x = 0.5 * draw(2, 9, 16)
    expected, weights = made(x, causal=True, need_weights=True)
    made, x = made.to(dtype), x.to(dtype)
    out, table = made(x, causal=True, need_weights=True)
    assert out.dtype == table.dtype == made(x).dtype == dtype
    budget = 12 * torch.finfo(dtype).eps
    for ours, truth in ((out, expected), (made(x, causal=True), expected), (table, weights)):
        assert_close(ours.double(), truth, rtol=budget, atol=budget)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_device(kernel: str, device: str) -> None:
    made = layer(8, 4, kernel=kernels(kernel, 4)[0], normalizer=mk.SinkSoftmax(torch.arange(4.0)), head_dim=6)
    x, mask = draw(2, 5, 8), draw(2, 1, 1, 5) > -0.8
    expected = made(x, mask=mask, causal=True, need_weights=True)
    made, x, mask = made.to(device), x.to(device), mask.to(device)
    found = made(x, mask=mask, causal=True, need_weights=True)
    cache = mk.KeyValueCache()
    pieces = [made(x[:, :3], mask=mask[..., :3], causal=True, cache=cache)]
    pieces.append(made(x[:, 3:], mask=mask, causal=True, cache=cache))
    assert cache.keys is not None and cache.keys.device.type == device
    for ours, truth in zip((*found, torch.cat(pieces, dim=1)), (*expected, expected[0]), strict=True):
        assert ours.device.type == device
        assert_close(ours.cpu(), truth, rtol=1e-6, atol=1e-6)


def test_autocast() -> None:
    made = layer(16, 4).float()
    x = draw(2, 9, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x, causal=True)
        # As it comes from a layer before, in the smaller type.
        again = made(x.bfloat16(), causal=True)
        # What autocast leaves as it is has to fit already.
        for wrong in (x.double(), x.long()):
            with pytest.raises(TypeError, match=r"query has dtype .*: expected the layer's, torch.float32"):
                made(wrong)
        with pytest.raises(TypeError, match=r"query has dtype torch.float32: expected the layer's, torch.float64"):
            layer(16, 4)(x)
    assert out.dtype == again.dtype == torch.bfloat16
    for found in (out, again):
        assert_close(found.float(), made(x, causal=True), rtol=0.05, atol=0.05)


def test_vmap_and_forward_mode() -> None:
    made = layer(8, 2, kernel=mk.ScaledDot() + mk.Gaussian())
    x = draw(3, 2, 5, 8)
    rows = torch.stack([made(row, causal=True) for row in x])
    assert_close(torch.func.vmap(lambda row: made(row, causal=True))(x), rows, rtol=0, atol=1e-12)
    weights = torch.stack([made(row, need_weights=True)[1] for row in x])
    assert_close(torch.func.vmap(lambda row: made(row, need_weights=True)[1])(x), weights, rtol=0, atol=1e-12)
    tangent = draw(2, 5, 8, seed=9)
    slope = torch.func.jvp(lambda row: made(row, causal=True), (x[0],), (tangent,))[1]
    step = 1e-6
    by_difference = (made(x[0] + step * tangent, causal=True) - made(x[0] - step * tangent, causal=True)) / (2 * step)
    assert_close(slope, by_difference, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kernel", ["default", "list"])
def test_one_graph_when_compiled(kernel: str) -> None:
    torch._dynamo.reset()
    dot, cosine = mk.ScaledDot(), mk.Cosine(0.5)
    made = mk.MultiHeadAttention(
        16,
        4,
        kernel=None if kernel == "default" else [dot, cosine, dot, cosine],
        normalizer=mk.Softmax(torch.nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))),
        kv_heads=2,
        generator=torch.Generator().manual_seed(0),
    )
    compiled = torch.compile(made, fullgraph=True)
    for n in (12, 20):
        x = draw(2, n, 16, dtype=torch.float32, seed=n).requires_grad_()
        results = []
        for call in (made, compiled):
            out = call(x, causal=True)
            results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *made.parameters()])])
        for ours, plain in zip(*results, strict=True):
            assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_the_readmes_example() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    names: dict[str, Any] = {}
    exec(readme.partition("<!-- multihead -->\n```python\n")[2].partition("```")[0], names)
    assert names["output"].shape == (1, 33, 512) and names["weights"].shape == (1, 8, 33, 33)
    pieces = torch.cat([names["first"], names["following"]], dim=1)
    assert_close(pieces, names["output"], rtol=1e-4, atol=1e-5)
    x = names["tokens"]
    assert_close(names["layer"](x), names["trained"](x, x, x, need_weights=False)[0], rtol=1e-4, atol=1e-5)


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"embed_dim": 0}, ValueError, "embed_dim=0: expected an integer of at least 1"),
        ({"heads": 2.0}, ValueError, r"heads=2\.0: expected an integer"),
        ({"heads": 3}, ValueError, "embed_dim=8 does not divide among heads=3: pass head_dim"),
        ({"kv_heads": 3}, ValueError, "kv_heads=3: expected a divisor of heads=4"),
        ({"kv_heads": 0}, ValueError, "kv_heads=0: expected an integer of at least 1"),
        ({"head_dim": 0}, ValueError, "head_dim=0: expected"),
        ({"value_dim": -1}, ValueError, "value_dim=-1: expected"),
        ({"key_dim": (3, 0)}, ValueError, "key_dim=0: expected"),
        ({"key_dim": (3, 4, 5)}, ValueError, r"key_dim=\(3, 4, 5\): expected one width, or"),
        ({"dropout": "0.1"}, ValueError, r"dropout=0\.1: expected a probability"),
        ({"dropout": True}, ValueError, "dropout=True: expected a probability"),
        ({"dropout": 1.0}, ValueError, r"dropout=1\.0: expected a probability"),
        ({"kernel": [mk.Dot()] * 3}, ValueError, "kernel: a list of 3, expected one for each of 4 heads"),
        ({"kernel": mk.Dot}, TypeError, "kernel: expected a MatchKernel .* add parentheses"),
        ({"kernel": [mk.Dot(), None, None, None]}, TypeError, "kernel: expected a MatchKernel or a list of them"),
        ({"kernel": mk.Softmax()}, TypeError, "kernel: expected a MatchKernel"),
        ({"normalizer": mk.Softmax}, TypeError, "normalizer: expected a Normalizer.* add parentheses"),
        ({"normalizer": [mk.Softmax()] * 4}, TypeError, "normalizer: expected a Normalizer"),
        ({"normalizer": "softmax"}, TypeError, "normalizer: expected a Normalizer"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mk.MultiHeadAttention(**{"embed_dim": 8, "heads": 4} | settings)


X, Y, Z = torch.zeros(2, 5, 8), torch.zeros(2, 7, 6), torch.zeros(2, 7, 3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((X[0, 0], Y, Z), ValueError, r"query has shape \(8,\): expected \(batch, tokens, 8\)"),
        ((Y, Y, Z), ValueError, r"query has shape \(2, 7, 6\): expected \(batch, tokens, 8\)"),
        ((X, X, Z), ValueError, r"key has shape \(2, 5, 8\) \(the query, .*\): expected \(batch, tokens, 6\)"),
        ((X,), ValueError, r"key has shape \(2, 5, 8\) \(the query, .*\): expected \(batch, tokens, 6\)"),
        ((X, Y), ValueError, r"value has shape \(2, 7, 6\).*: expected \(batch, tokens, 3\)"),
        ((X, None, Z), ValueError, "value: expected a key to go with it"),
        ((X, Y, Z[:, :4]), ValueError, r"key \(2, 7, 6\) and value \(2, 4, 3\): expected as many values as keys"),
        ((X, Y, Z.expand(3, 2, 7, 3)[:, :1].expand(3, 4, 7, 3)), ValueError, "expected the same batch"),
        ((X.double(), Y, Z), TypeError, r"query has dtype torch.float64: expected the layer's, torch.float32"),
        ((X, Y, Z.half()), TypeError, r"value has dtype torch.float16: expected the layer's"),
        ((X, [1, 2], Z), TypeError, "key: expected a tensor, got list"),
        (("x", Y, Z), TypeError, "query: expected a tensor, got str"),
    ],
)
def test_tokens_that_do_not_fit(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mk.MultiHeadAttention(8, 2, key_dim=(6, 3))(*given)


def test_masks_that_do_not_fit() -> None:
    made = mk.MultiHeadAttention(8, 2)
    with pytest.raises(TypeError, match="mask: expected a tensor, got list"):
        made(X, mask=[True])
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\), which does not broadcast"):
        made(X, mask=torch.ones(5, 4).bool())
    with pytest.raises(TypeError, match=r"mask has dtype torch\.int64"):
        made(X, mask=torch.ones(5, 5).long())
    with pytest.raises(ValueError, match=r"does not broadcast to the scores' \(2, 2, 5, 5\)"):
        mk.MultiHeadAttention(8, 2, kernel=[mk.Dot(), mk.Cosine()])(X, mask=torch.ones(2, 3, 5, 5).bool())
