"""The additive score by exponentials: where it is taken, and how close it comes to tanh in float64."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import Tiled
from matchkernel.kernels.additive_tiles import ExponentialForm, lift

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan


def _tokens(*values: float, dtype: torch.dtype, hidden: int = 4) -> Tensor:
    """One token for each value, all channels near it, (1, 1, tokens, hidden)."""
    near = 1.0 + 0.01 * draw(len(values), hidden, seed=3)
    return (torch.tensor(values, dtype=torch.float64)[:, None] * near)[None, None].to(dtype)


def _truth(a: Tensor, v: Tensor, b: Tensor, grad: Tensor) -> list[Tensor]:
    """Σ_c v_c tanh(a_ic + b_jc) and its gradients, in float64."""
    leaves = [x.detach().double().clone().requires_grad_() for x in (a, v, b)]
    table = (torch.tanh(leaves[0].unsqueeze(-2) + leaves[2].unsqueeze(-3)) * leaves[1].unsqueeze(-2)).sum(-1)
    return [table.detach(), *torch.autograd.grad(table, leaves, grad.double())]


def _ours(a: Tensor, v: Tensor, b: Tensor, grad: Tensor) -> tuple[list[Tensor], ExponentialForm]:
    own = lift(a, v, b)
    assert own is not None and isinstance(own.form, ExponentialForm)
    (x, weight), y = own.query, own.key
    assert isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(y, Tensor)
    query, key = (x[0], weight[0]), y[0]
    (of_a, of_v), of_b = own.form.pull(query, key, grad[0])
    return [own.form.scores(query, key)[None], of_a[None], of_v[None], of_b[None]], own.form


RANGES: dict[str, tuple[tuple[float, ...], tuple[float, ...], bool]] = {
    "plain": ((-2.0, 0.3, 1.0), (-1.0, 0.0, 0.4, 2.0), True),
    "tiny": ((1e-20, -1e-30), (1e-25, 0.0, -1e-20), True),
    "far apart and of opposite sign": ((50.0, 49.0), (-50.0, -49.0, -51.0), True),
    "not quite opposite": ((60.0, 57.0), (-55.0, -54.0), True),
    "saturated both ways": ((300.0, -300.0, 1e30, -1e30), (0.5, -0.5), True),
    "infinite queries": ((INF, -INF, 0.1), (0.5, -0.5), True),
    # float32 holds e^88: two sums of up to 20 fit in one product, of 22 not.
    "the last that is paired": ((-9.9, 9.9), (-9.9, 9.9), True),
    "the first that is not": ((-11.0, 11.0), (-11.0, 11.0), False),
    "keys as wide as they may be": ((-30.0, 0.0, 30.0), (-32.0, -1.0, 32.0), False),
}


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RANGES)
def test_exponentials_are_tanh(
    name: str, dtype: torch.dtype, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    queries, keys, paired = RANGES[name]
    for hidden in (4, 5):
        a, b = _tokens(*queries, dtype=dtype, hidden=hidden), _tokens(*keys, dtype=dtype, hidden=hidden)
        v = draw(1, 1, 1, hidden, dtype=dtype).expand_as(a)
        grad = draw(1, 1, len(queries), len(keys), seed=5, dtype=dtype)
        ours, form = _ours(a, v, b, grad)
        assert form.paired == ((paired or dtype == torch.float64) and hidden == 4)
        finite = a[a.isfinite() & (a.abs() < 1e3)].abs().max()
        # a, b and their sum are known to a digit of the largest, and so is the argument of tanh.
        allowed = (8.0 + 4.0 * float(torch.maximum(finite, b.abs().max()))) * torch.finfo(dtype).eps
        for got, want in zip(ours, _truth(a, v, b, grad), strict=True):
            assert got.dtype == dtype
            assert float((got.double() - want).abs().max()) <= allowed * float(1.0 + v.double().abs().sum())


def test_where_saturation_is_cut_off() -> None:
    """A query cut off for keys that lie far apart: for the furthest of them tanh has only just arrived at 1."""
    for dtype in (torch.float32, torch.float64):
        a, b = _tokens(40.0, dtype=dtype), _tokens(-10.0, 10.0, dtype=dtype)
        v, grad = torch.ones_like(a), torch.ones(1, 1, 1, 2, dtype=dtype)
        (scores, of_a, _, of_b), _ = _ours(a, v, b, grad)
        eps = torch.finfo(dtype).eps
        assert float((scores - 4.0).abs().max()) <= 4 * eps
        assert float(of_a.abs().max()) <= 4 * eps and float(of_b.abs().max()) <= 4 * eps


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"), [(torch.float32, 33.5, 36.0), (torch.float64, 330.0, 345.0)]
)
def test_keys_too_far_apart_take_the_direct_form(dtype: torch.dtype, within: float, beyond: float) -> None:
    a = torch.zeros(1, 1, 1, 2, dtype=dtype)
    for reach, taken in ((within, True), (beyond, False)):
        for b in (torch.tensor([[reach, 0.0], [-reach, 0.0]]), torch.tensor([[2 * reach, 1.0], [0.0, 1.0]])):
            assert (lift(a, a, b[None, None].to(dtype)) is not None) == taken
    for odd in (NAN, INF, -INF):
        b = torch.zeros(1, 1, 3, 2, dtype=dtype)
        b[0, 0, 1, 1] = odd
        assert lift(a, a, b) is None


def _identity(hidden: int, dtype: torch.dtype) -> mk.Additive:
    """Its projections are the inputs themselves."""
    kernel = mk.Additive(hidden, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        kernel.query_weight.copy_(torch.eye(hidden))
        kernel.key_weight.copy_(torch.eye(hidden))
    return kernel


def _attend(q: Tensor, k: Tensor, v: Tensor, kernel: mk.Additive, engine: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = mk.attend(*leaves, kernel, engine=engine)
    return [out.detach(), *torch.autograd.grad(out.sum(), [*leaves, *kernel.parameters()])]


@pytest.mark.parametrize("spread", [1.0, 10.0, 60.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_over_any_range(spread: float, dtype: torch.dtype) -> None:
    """Through the engine, in whichever form: forward and backward, against tanh in float64."""
    q, k, v = draw(2, 5, 4, dtype=dtype), draw(2, 9, 4, seed=1, dtype=dtype), draw(2, 9, 3, seed=2, dtype=dtype)
    k = spread * k
    kernel = _identity(4, dtype)
    own = kernel.tiles(*(x if isinstance(x, tuple) else x[None] for x in _encoded(kernel, q, k)))
    assert (own is None) == ((spread >= 60.0 and dtype == torch.float32) or spread == 1e3)
    ours = _attend(q, k, v, kernel, Tiled(3, 4, compile=False))
    truth = _attend(q.double(), k.double(), v.double(), _identity(4, dtype).double(), "reference")
    for got, want in zip(ours, truth, strict=True):
        scale = 1.0 + float(want.abs().max())
        assert float((got.double() - want).abs().max()) <= 200 * (1 + spread / 5) * torch.finfo(dtype).eps * scale


def _encoded(kernel: mk.Additive, q: Tensor, k: Tensor) -> tuple[Any, Any]:
    (a, v), b = kernel.encode(q, k, torch.arange(5), torch.arange(9))
    return (a[None], v[None]), b


def test_nan_in_a_query_stays_in_its_row() -> None:
    q, k, v = draw(1, 5, 4), draw(1, 9, 4, seed=1), draw(1, 9, 3, seed=2)
    kernel = _identity(4, torch.float64)
    clean = mk.attend(q, k, v, kernel, engine="reference")
    q[0, 2, 1] = NAN
    out = mk.attend(q, k, v, kernel, engine=Tiled(3, 4, compile=False))
    assert bool(out[0, 2].isnan().all())
    rest = [0, 1, 3, 4]
    assert_close(out[0, rest], clean[0, rest])
