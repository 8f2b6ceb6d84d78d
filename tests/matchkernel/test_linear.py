"""The linear engine: what the table gives, without the table."""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw
from peak import measurable, peaks
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _linear_function

Tensor = torch.Tensor
INF = float("inf")


class Scaled(mk.FeatureKernel):
    """Features of either sign or not, and a log scale that the last coordinate sets, as large as it likes."""

    def __init__(self, signed: bool = False) -> None:
        super().__init__()
        self.signed = signed
        self.positive = not signed

    def features(self, x: Tensor, position: Tensor) -> mk.Features:
        values = x[..., :-1] if self.signed else x[..., :-1].square() + 0.1
        return mk.Features(values, x[..., -1])


def kernels() -> dict[str, mk.MatchKernel]:
    generator = torch.Generator().manual_seed(5)
    hedgehog = mk.HedgehogFeatures(5, heads=4).double()
    for parameter in hedgehog.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    width = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64))
    return {
        "elu": mk.EluFeatures(),
        "favor": mk.FavorFeatures(5, 12, generator=generator).double(),
        "hedgehog for each head": hedgehog,
        "one hedgehog": mk.HedgehogFeatures(5).double(),
        "signed, learned": mk.FourierFeatures(5, 8, width, generator=generator).double(),
        "may be 0": mk.DPFPFeatures(2),
        "positions": mk.CosFeatures(400),
        "scaled": Scaled(),
    }


KERNELS = kernels()


def tensors(n: int, m: int, *, heads: int = 4, keys: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((heads, n, 5), (keys, m, 5), (keys, m, 3))
    return [draw(2, *shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def both(inputs: list[Tensor], kernel: mk.MatchKernel, engine: Any, **setting: Any) -> list[list[Tensor]]:
    """Output and gradients of the engine and of the reference."""
    learned = [*inputs, *kernel.parameters(), *setting.get("normalizer", mk.Softmax()).parameters()]
    mask = setting.get("mask")
    learned += [mask] if mask is not None and mask.requires_grad else []
    found = []
    for one in (engine, "reference"):
        out = mk.attend(*inputs, kernel, engine=one, **setting)
        grads = torch.autograd.grad(out, learned, draw(*out.shape, seed=9).to(out), allow_unused=True)
        found.append([out, *(torch.zeros_like(x) if g is None else g for x, g in zip(learned, grads, strict=True))])
    return found


def settings(m: int, which: int) -> dict[str, Any]:
    sink = mk.SinkSoftmax(nn.Parameter(torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64)))
    bias = draw(2, 1, 1, m, seed=12)
    bias[..., : min(3, m - 1)] = -INF
    return (
        {},
        {"causal": True},
        {"causal": True, "normalizer": sink, "mask": draw(m, seed=11) < 0.5},
        {"normalizer": sink, "mask": bias.requires_grad_()},
        {"causal": True, "mask": bias.requires_grad_()},
        {"mask": draw(1, 4, 1, m, seed=11) < 0.5},
    )[which]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("which", range(6))
def test_values_and_gradients_are_the_tables(kernel: str, which: int) -> None:
    """Segments of three chunks and a rest, grouped heads, past keys, and rows that see nothing."""
    for n, m in ((41, 50), (50, 41)):
        ours, theirs = both(tensors(n, m), KERNELS[kernel], mk.Linear(chunk=4), **settings(m, which))
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129])
def test_lengths_around_a_chunk(n: int) -> None:
    for causal in (False, True):
        ours, theirs = both(tensors(n, n), mk.EluFeatures(), "linear", causal=causal)
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that go from one segment to the next, whatever the size of either."""
    monkeypatch.setattr("matchkernel.engines.linear.TOKENS", 32)
    for n, m in ((67, 67), (30, 67), (67, 30)):
        for causal in (False, True):
            ours, theirs = both(tensors(n, m), Scaled(), mk.Linear(chunk=8), causal=causal)
            for a, b in zip(ours, theirs, strict=True):
                assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "lead",
    [
        ((2, 1), (1, 3), (2, 3)),
        ((), (), ()),
        ((3,), (1,), (1,)),
        ((1, 2), (3, 1), (1, 1)),
        ((1, 3), (2, 3), (2, 3)),  # each alone in having one entry for all
        ((2, 1), (2, 3), (2, 3)),
        ((2, 3), (1, 3), (2, 3)),
        ((2, 3), (2, 3), (1, 3)),
        ((2, 3), (2, 3), (2, 1)),
        ((2, 3), (2, 3), (3,)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_leading_dimensions_broadcast(lead: tuple[tuple[int, ...], ...], causal: bool) -> None:
    inputs = [
        draw(*x, 9, width, seed=i).requires_grad_() for i, (x, width) in enumerate(zip(lead, (5, 5, 3), strict=True))
    ]
    ours, theirs = both(inputs, mk.EluFeatures(), mk.Linear(chunk=4), causal=causal)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype, causal: bool) -> None:
    inputs = [x.detach() for x in tensors(300, 300, dtype=dtype)]
    out = mk.attend(*inputs, mk.EluFeatures(), causal=causal, engine="linear")
    truth = mk.attend(*(x.double() for x in inputs), mk.EluFeatures(), causal=causal, engine="reference")
    assert out.dtype == dtype
    error = (out.double() - truth).abs().max()
    assert error <= max(2e-6, 0.6 * torch.finfo(dtype).eps * float(truth.abs().max()))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_log_scales_of_a_thousand_neither_overflow_nor_vanish(signed: bool, causal: bool) -> None:
    """Rising, falling and mixed, each in both types."""
    for order in (1.0, -1.0, 0.0):
        inputs = tensors(70, 70, dtype=torch.float32)
        with torch.no_grad():
            for x in inputs[:2]:
                line = torch.linspace(-1e3, 1e3, 70) * order
                x[..., -1] = line if order else 1e3 * draw(70, seed=4, dtype=torch.float32).clamp(-1, 1)
        ours, _ = both(inputs, Scaled(signed), mk.Linear(chunk=8), causal=causal)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth = both(wide, Scaled(signed), mk.Linear(chunk=8), causal=causal)[1]
        # A difference of two numbers near 1000 has an error of 6e-5 in float32, and the gradient of a signed row more.
        assert_close(ours[0].double(), truth[0], rtol=2e-2 if signed else 1e-3, atol=1e-3)
        assert all(bool(x.isfinite().all()) for x in ours)


@pytest.mark.parametrize("kernel", [mk.EluFeatures(), Scaled(), Scaled(True)], ids=["elu", "scaled", "signed"])
@pytest.mark.parametrize("size", [1.0, 50.0, 300.0])
def test_a_later_key_changes_no_earlier_row(kernel: mk.MatchKernel, size: float) -> None:
    """However large it is: neither the values nor the gradients."""
    q, k, v = (x.detach() for x in tensors(40, 40))
    for place in (5, 17, 39):
        later = k.clone()
        later[..., place:, :] += size
        results = []
        for keys in (k, later):
            leaves = [x.clone().requires_grad_() for x in (q, keys, v)]
            out = mk.attend(*leaves, kernel, causal=True, engine=mk.Linear(chunk=16))[..., :place, :]
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", [80.0, 95.0, 101.0, 200.0])
def test_what_is_lost_in_a_coarse_unit_is_found(size: float) -> None:
    """Within one segment a key e^200 times as heavy as those before it, which earlier rows must not feel.

    Nor one that leaves them a few bits: the least float is e^−103, and below e^−87 they have fewer and fewer.
    """
    q, k, v = (x.detach() for x in tensors(20, 20, dtype=torch.float32))
    k[..., 10:, -1] += size
    out = mk.attend(q, k, v, Scaled(), causal=True, engine="linear")
    assert_close(out, mk.attend(q, k, v, Scaled(), causal=True, engine="reference"), rtol=1e-4, atol=1e-5)
    assert float(out[..., :10, :].abs().min()) > 0.0


def test_positive_products_that_leave_the_range_weigh_by_scale() -> None:
    """As scores do: κ = e^−10000 times its scale, so that the rows stay averages."""

    class Apart(mk.FeatureKernel):
        positive = True

        def query_features(self, q: Tensor, position: Tensor) -> mk.Features:
            return mk.Features(q.new_tensor([1.0, 0.0]).expand(*q.shape[:-1], 2), q[..., 0])

        def key_features(self, k: Tensor, position: Tensor) -> mk.Features:
            return mk.Features(k.new_tensor([0.0, 1.0]).expand(*k.shape[:-1], 2), k[..., 0])

    ours, theirs = both(tensors(9, 9), Apart(), "linear", causal=True)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_hidden_tokens_hold_what_they_like() -> None:
    q, k, v = (x.detach() for x in tensors(12, 12))
    seen = torch.arange(12) % 3 > 0
    plain = mk.attend(q, k, v, mk.EluFeatures(), mask=seen, causal=True, engine="linear")
    for x in (k, v):
        x[..., ~seen, :] = math.nan
    assert_close(mk.attend(q, k, v, mk.EluFeatures(), mask=seen, causal=True, engine="linear"), plain)
    assert float(plain[..., 0, :].abs().max()) == 0.0  # the first row sees the first key alone, which is hidden


@pytest.mark.parametrize("name", ["elu", "favor", "one hedgehog", "signed, learned"])
@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_of_both_orders(name: str, causal: bool) -> None:
    kernel, sink = KERNELS[name], nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
    q, k, v = (x[:1].detach().requires_grad_() for x in tensors(5, 6))
    bias = draw(6, seed=8).requires_grad_()
    learned = list(kernel.parameters())

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
        normalizer = mk.SinkSoftmax(sink)
        return mk.attend(q, k, v, kernel, mask=bias, causal=causal, normalizer=normalizer, engine=mk.Linear(chunk=2))

    inputs = (q, k, v, bias, *learned, sink)
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_one_tensor_may_be_all_three() -> None:
    x = draw(1, 2, 30, 5).requires_grad_()
    grads = []
    for engine in ("linear", "reference"):
        out = mk.attend(x, x, x, mk.EluFeatures(), causal=True, engine=engine)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grads += [first, *torch.autograd.grad(first.square().sum(), x)]
    assert_close(grads[:2], grads[2:])


def test_a_redrawn_projection_is_not_used_for_an_older_forward() -> None:
    kernel = mk.FavorFeatures(5, 12, generator=torch.Generator().manual_seed(0))
    inputs = tensors(9, 9, dtype=torch.float32)
    out = mk.attend(*inputs, kernel, causal=True, engine="linear")
    kernel.redraw(torch.Generator().manual_seed(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_tensor_that_is_no_parameter_keeps_its_gradient() -> None:
    slope = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    class Hidden(mk.FeatureKernel):
        positive = True

        def features(self, x: Tensor, position: Tensor) -> Tensor:
            return (slope * x).exp()

    inputs = tensors(9, 9)
    grads = []
    for engine in (mk.Linear(chunk=4), "reference"):
        out = mk.attend(*inputs, Hidden(), causal=True, engine=engine)
        grads += torch.autograd.grad(out.square().sum(), slope)
    assert_close(grads[0], grads[1])


REFUSALS: dict[str, tuple[mk.MatchKernel, dict[str, Any]]] = {
    "is not a FeatureKernel": (mk.ScaledDot(), {}),
    "not proportional": (mk.EluFeatures(), {"normalizer": mk.Softmax(0.5)}),
    "a window": (mk.EluFeatures(), {"window": 3}),
    "a row per query": (mk.EluFeatures(), {"mask": torch.ones(6, 6, dtype=torch.bool)}),
    "positions of one's own": (mk.EluFeatures(), {"causal": True, "key_position": torch.arange(6)}),
    "dropout": (mk.EluFeatures(), {"dropout": 0.5}),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_it_refuses_it_explains(why: str) -> None:
    kernel, setting = REFUSALS[why]
    q, k, v = (x.detach() for x in tensors(6, 6))
    with pytest.raises(ValueError, match=f"engine='linear' cannot run this call: .*{why}"):
        mk.attend(q, k, v, kernel, engine="linear", **setting)


def test_auto_takes_it_where_it_pays() -> None:
    def chosen(n: int, m: int, kernel: mk.MatchKernel, **setting: Any) -> str:
        q, k = torch.randn(1, 1, n, 16), torch.randn(1, 1, m, 16)
        return mk.explain(q, k, k, kernel, **setting).engine

    assert chosen(2048, 2048, mk.EluFeatures(), causal=True) == "linear"
    assert chosen(2048, 2048, mk.DPFPFeatures(), normalizer=mk.SinkSoftmax()) == "linear"
    assert chosen(64, 64, mk.EluFeatures(), causal=True) == "reference"
    assert chosen(1, 100_000, mk.TaylorFeatures()) == "tiled"  # one query: its row costs less than the sums
    assert chosen(2048, 2048, mk.ScaledDot()) == "fused"
    assert "linear" not in str(mk.explain(*(torch.randn(1, 1, 9, 4) for _ in range(3))))


def test_its_cost_grows_with_n() -> None:
    x = [torch.empty(1, 8, n, 64) for n in (2048, 4096)]
    small, large = (mk.explain(y, y, y, mk.EluFeatures(), causal=True) for y in x)
    assert large.exact and large.flops is not None and small.flops is not None
    assert large.flops == 2 * small.flops and large.peak_bytes <= 2 * small.peak_bytes
    # State and readings, 2 · 2 · f · (d_v + 1), and squares of 64, 2 · 64 · (f + d_v + 1), for each token and head.
    assert small.flops == 8 * 2048 * (4 * 64 * 65 + 2 * 64 * (64 + 65))


def test_one_chunk_is_at_least_one_token() -> None:
    for chunk in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="expected an integer of at least 1"):
            mk.Linear(chunk=chunk)  # type: ignore[arg-type]


@measurable
def test_no_table_is_formed_forward_or_backward() -> None:
    """Output, its gradient, three more and the states: some 7 tensors of 4 MiB; a table would have 512."""
    (held,) = peaks("kernel=mk.EluFeatures(), causal=True, engine='linear'", 8192)
    assert held < 64


def test_the_fast_way_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact way is for what the fast one cannot do; ordinary calls must not need it."""

    def never(*_: Any) -> Tensor:
        raise AssertionError("everything at once")

    monkeypatch.setattr("matchkernel.engines.linear._exactly", never)
    assert _linear_function.LOST < 1e-20
    # A key that is hidden has no least scale, and a row that goes to the sink is not lost.
    ordinary: list[dict[str, Any]] = [{}, {"mask": torch.arange(30) % 3 > 0}, {"normalizer": mk.SinkSoftmax(1000.0)}]
    for name in ("elu", "favor", "hedgehog for each head", "signed, learned", "positions"):
        for causal, setting in itertools.product((False, True), ordinary):
            out = mk.attend(*tensors(30, 30), KERNELS[name], causal=causal, engine="linear", **setting)
            out.sum().backward()
