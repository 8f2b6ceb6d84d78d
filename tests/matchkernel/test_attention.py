"""attend, weights and scores: shapes, broadcasting, precision of parameters, threads."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor
ENGINES = ["reference", "fused"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (1,), (2, 2, 1, 2)])
def test_every_leading_shape_is_a_loop(lead: tuple[int, ...], engine: str) -> None:
    q, k, v = inputs(*lead)
    out = mk.attend(q, k, v, engine=engine)
    assert out.shape == (*lead, 5, 3)
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, out))
    for a, b, c, d in zip(*flat, strict=True):
        assert_close(d, by_loop(a, b, c))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("query", "key", "value", "batch"),
    [
        ((2, 3), (3,), (3,), (2, 3)),
        ((3,), (2, 3), (2, 3), (2, 3)),
        ((), (2, 3), (2, 3), (2, 3)),
        ((2, 3), (), (), (2, 3)),
        ((2, 3), (2, 1), (2, 1), (2, 3)),
        ((2, 3), (2, 1), (1, 3), (2, 3)),
        ((2, 3), (2, 3), (), (2, 3)),
        ((4, 1, 3), (2, 1), (2, 1), (4, 2, 3)),
    ],
)
def test_leading_shapes_broadcast(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], batch: tuple[int, ...], engine: str
) -> None:
    q, k, v = draw(*query, 5, 4, seed=1), draw(*key, 7, 4, seed=2), draw(*value, 7, 3, seed=3)
    out = mk.attend(q, k, v, engine=engine)
    assert out.shape == (*batch, 5, 3)
    scores = q.expand(*batch, 5, 4) @ k.expand(*batch, 7, 4).mT / 2
    assert_close(out, scores.softmax(-1) @ v.expand(*batch, 7, 3))
    assert_close(mk.weights(q, k).expand(*batch, 5, 7), scores.softmax(-1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("causal", [False, True])
def test_query_head_h_uses_key_head_h_over_group(causal: bool, engine: str) -> None:
    q, k, v = draw(2, 6, 5, 4, seed=1), draw(2, 2, 5, 4, seed=2), draw(2, 2, 5, 3, seed=3)
    out = mk.attend(q, k, v, causal=causal, engine=engine)
    for b in range(2):
        for h in range(6):
            truth = by_loop(q[b, h], k[b, h // 3], v[b, h // 3], allowed=lambda i, j: j <= i or not causal)
            assert_close(out[b, h], truth)
    assert_close(mk.weights(q, k) @ v.repeat_interleave(3, 1), mk.attend(q, k, v, engine=engine))
    assert_close(mk.attend(q[0], k[0], v[0], causal=causal, engine=engine), out[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_shared_heads_add_up(engine: str) -> None:
    q, k, v = draw(1, 6, 5, 4, seed=1), draw(1, 2, 5, 4, seed=2), draw(1, 2, 5, 3, seed=3)
    shared = [x.clone().requires_grad_() for x in (q, k, v)]
    mk.attend(*shared, engine=engine).sin().sum().backward()
    own = [q.clone().requires_grad_(), *(x.repeat_interleave(3, 1).requires_grad_() for x in (k, v))]
    mk.attend(*own, engine="reference").sin().sum().backward()
    assert_close(shared[0].grad, own[0].grad)
    for ours, theirs in zip(shared[1:], own[1:], strict=True):
        assert_close(ours.grad, theirs.grad.reshape(1, 2, 3, 5, -1).sum(2))


def test_scores_are_before_the_normaliser_and_weights_after() -> None:
    q, k, v = inputs(2)
    mask = draw(5, 7, seed=6)
    scores = mk.scores(q, k, mask=mask, causal=True)
    forbidden = torch.arange(7) > torch.arange(5)[:, None] + 2
    assert bool((scores[:, forbidden] == float("-inf")).all())
    assert_close(scores[:, ~forbidden], (q @ k.mT / 2 + mask)[:, ~forbidden])
    weights = mk.weights(q, k, mask=mask, causal=True)
    assert_close(weights, scores.softmax(-1))
    assert_close(weights.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert_close(weights @ v, mk.attend(q, k, v, mask=mask, causal=True))


def test_tables_of_broadcast_heads_have_the_full_shape() -> None:
    q, k = draw(2, 6, 5, 4, seed=1), draw(2, 2, 7, 4, seed=2)
    assert mk.weights(q, k).shape == mk.scores(q, k).shape == (2, 6, 5, 7)
    position = mk.scores(q, k, mask=torch.zeros(2, 6, 5, 7, dtype=torch.bool))
    assert position.shape == (2, 6, 5, 7) and bool((position == float("-inf")).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_output_has_the_inputs_type(dtype: torch.dtype, engine: str) -> None:
    q, k, v = inputs(2, 3, dtype=dtype)
    assert mk.attend(q, k, v, engine=engine).dtype == dtype
    assert mk.weights(q, k).dtype == dtype


def _kernels_with_parameters(dtype: torch.dtype) -> list[mk.MatchKernel]:
    def learned(*values: float) -> nn.Parameter:
        return nn.Parameter(torch.tensor(values, dtype=dtype))

    return [
        mk.Bilinear(4, generator=torch.Generator().manual_seed(0)).to(dtype),
        mk.Bilinear(4, rank=2, generator=torch.Generator().manual_seed(0)).to(dtype),
        mk.Cosine(learned(0.3, 0.7, 1.1)),
        learned(0.5, -0.7, 1.1) * mk.ScaledDot(),
        mk.Bilinear(4, generator=torch.Generator().manual_seed(0)).to(dtype) + mk.Dot(),
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize(("held", "given"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_parameters_of_another_type(held: torch.dtype, given: torch.dtype, which: int, engine: str) -> None:
    """A float64 parameter on float32 inputs, and the reverse: outputs follow inputs, gradients parameters."""
    kernel = _kernels_with_parameters(held)[which]
    q, k, v = inputs(2, 3, dtype=given)
    out = mk.attend(q, k, v, kernel, engine=engine)
    out.sin().sum().backward()
    assert out.dtype == given
    same = _kernels_with_parameters(torch.float64)[which]
    truth = mk.attend(q.double(), k.double(), v.double(), same, engine="reference")
    truth.sin().sum().backward()
    assert_close(out, truth.to(given), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(kernel.parameters(), same.parameters(), strict=True):
        assert ours.grad is not None and ours.grad.dtype == held
        assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_wider_parameter_is_not_narrowed_first(rank: int | None) -> None:
    """10⁸ and −10⁸ + 1 cancel to 1 in float64; float32 has no 10⁸ − 1, and would say 0."""
    kernel = mk.Bilinear(2, 1, rank).double()
    matrix = torch.tensor([[1e8], [-1e8 + 1]], dtype=torch.float64)
    with torch.no_grad():
        if rank is None:
            kernel.weight.copy_(matrix)
        else:
            kernel.query_weight.copy_(matrix)
            kernel.key_weight.fill_(1.0)
    assert mk.scores(torch.ones(1, 2), torch.ones(1, 1), kernel).item() == 1.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalizers_of_another_type(dtype: torch.dtype, engine: str) -> None:
    q, k, v = inputs(2, 3, dtype=dtype)
    value = nn.Parameter(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    for normalizer in (mk.Softmax(value), mk.SinkSoftmax(value), mk.ScalableSoftmax(value)):
        out = mk.attend(q, k, v, normalizer=normalizer, engine=engine)
        assert out.dtype == dtype
        truth = mk.attend(q.double(), k.double(), v.double(), normalizer=normalizer, engine="reference")
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
        (grad,) = torch.autograd.grad(out.sum(), value)
        assert grad.dtype == torch.float64 and bool(grad.isfinite().all())


def test_two_threads_at_once_get_what_each_gets_alone() -> None:
    calls: list[dict[str, Any]] = [
        {"causal": True},
        {"kernel": mk.Cosine(0.5), "normalizer": mk.SinkSoftmax(0.1)},
    ]
    given = [inputs(2, 3, n=40, m=40, width=4), inputs(2, 3, n=30, m=50)]

    def run(which: int) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given[which]]
        out = mk.attend(*leaves, **calls[which])
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

    alone = [run(0), run(1)]
    start = threading.Barrier(2)

    def many(which: int) -> list[list[Tensor]]:
        start.wait()
        return [run(which) for _ in range(25)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(many, (0, 1)))
    for which in (0, 1):
        for results in together[which]:
            for ours, truth in zip(results, alone[which], strict=True):
                assert torch.equal(ours, truth)


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    """Identity values show the weights themselves: each is 0 or α / (1 − p)."""
    q, k, _ = inputs(n=5, m=7)
    alpha = mk.weights(q, k)
    torch.manual_seed(0)
    draws = torch.stack([mk.attend(q, k, torch.eye(7, dtype=torch.float64), dropout=0.25) for _ in range(2000)])
    dropped = draws == 0
    assert_close(draws[~dropped], (alpha / 0.75).expand_as(draws)[~dropped])
    # Each of 35 shares of 2000 draws, with a standard deviation of √(.25 · .75 / 2000) = 0.0097.
    assert_close(dropped.double().mean(0), torch.full((5, 7), 0.25, dtype=torch.float64), rtol=0.0, atol=0.05)


def test_the_default_names_say_what_they_are() -> None:
    q, k, v = inputs(2)
    assert torch.equal(mk.attend(q, k, v), mk.attend(q, k, v, mk.ScaledDot(), normalizer=mk.Softmax()))
    assert torch.equal(mk.attend(q, k, v), mk.attend(q, k, v, engine="fused"))


def test_positions_reach_the_encoders_and_nothing_else_without_an_order() -> None:
    class Ahead(mk.DotKernel):
        def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
            return torch.stack([position.double(), torch.ones_like(position).double()], -1).expand(*q.shape[:-1], 2)

        def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
            return torch.stack([torch.ones_like(position).double(), -position.double()], -1).expand(*k.shape[:-1], 2)

    q, k, v = inputs(2, n=3, m=5)
    difference = torch.arange(2, 5)[:, None] - torch.arange(5)
    assert_close(mk.scores(q, k, Ahead()), difference.double().expand(2, 3, 5))
    at = torch.tensor([[7, 1, 4], [0, 0, 9]])
    for engine in ENGINES:
        out = mk.attend(q, k, v, Ahead(), query_position=at, engine=engine)
        scores = at[..., None] - torch.arange(5.0, dtype=torch.float64)
        assert_close(out, scores.softmax(-1) @ v)
    assert torch.equal(mk.attend(q, k, v), mk.attend(q, k, v, query_position=at))
