"""Feature maps that kernels ship, and linear attention that takes their features as they are."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _linear_plain, linear

Tensor = torch.Tensor
FAVOR = mk.FavorFeatures(5, 12, generator=torch.Generator().manual_seed(5)).double()
KERNELS = {"elu": mk.EluFeatures(), "favor": FAVOR}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that came to features as they are, whether they were in range."""
    calls: list[bool] = []
    real = _linear_plain.run

    def run(*given: Any) -> Any:
        found = real(*given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(_linear_plain, "run", run)
    return calls


def tensors(n: int, m: int, heads: int = 4, keys: int = 2) -> list[Tensor]:
    shapes = ((heads, n, 5), (keys, m, 5), (keys, m, 3))
    return [draw(2, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def found_by(inputs: list[Tensor], kernel: mk.MatchKernel, engine: str, **setting: Any) -> list[Tensor]:
    out = mk.attend(*inputs, kernel, engine=engine, **setting)
    return [out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=9).to(out))]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_a_map_gives_the_weight_of_the_features(kernel: mk.FeatureKernel, scale: float) -> None:
    q, k = scale * draw(6, 5, seed=1), scale * draw(9, 5, seed=2)
    mapping = kernel.feature_map(torch.float64)
    assert mapping is not None
    whole = []
    for x in (q, k):
        found = mapping.features(x)
        assert found is not None
        whole.append(found.values * (1.0 if found.log_scale is None else found.log_scale.exp()))
    assert_close(whole[0] @ whole[1].mT, kernel.kappa(q, k), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_map_pulls_as_differentiation_does(kernel: mk.FeatureKernel) -> None:
    x = torch.cat([draw(6, 5, seed=1), torch.zeros(1, 5, dtype=torch.float64)]).requires_grad_()
    mapping = kernel.feature_map(torch.float64)
    assert mapping is not None
    other = draw(4, 5, seed=2)
    table = kernel.kappa(other, x)
    upstream = draw(*table.shape, seed=3)
    (exact,) = torch.autograd.grad(table, x, upstream)
    here, there = mapping.features(x.detach()), mapping.features(other)
    assert here is not None and there is not None
    scale, of_other = (torch.ones(()) if m.log_scale is None else m.log_scale.exp() for m in (here, there))
    grad = (upstream.mT @ (there.values * of_other)) * scale
    into = torch.full_like(exact, torch.nan)
    mapping.pull(x.detach(), here.values, grad, into)
    assert_close(into, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 300), (300, 1), (257, 700), (512, 256)])
def test_equals_the_table(
    kernel: mk.FeatureKernel, keys: int, n: int, m: int, ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_linear_plain, "FEATURES", 1)  # several spans, of 256 tokens
    inputs = tensors(n, m, keys=keys)
    for one, two in zip(found_by(inputs, kernel, "linear"), found_by(inputs, kernel, "reference"), strict=True):
        assert_close(one, two, rtol=1e-11, atol=1e-13)
    assert ran == [True]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_second_derivatives_are_those_of_the_table(kernel: mk.FeatureKernel, ran: list[bool]) -> None:
    inputs = tensors(5, 7)
    found = []
    for engine in ("linear", "reference"):
        out = mk.attend(*inputs, kernel, engine=engine)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert ran == [True]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("change", ["long keys", "long query", "low query", "low keys"])
def test_tokens_out_of_range_are_measured_one_by_one(kernel: mk.FeatureKernel, change: str, ran: list[bool]) -> None:
    """A feature of e^23 and more, and a row whose sum is next to nothing: neither may cost a digit."""
    q, k, v = (x.detach().clone() for x in tensors(40, 50))
    if "long" in change:
        # Far above 0: far below it the reference's own scores, of that size, have lost the digits.
        long = (k if "keys" in change else q)[:, :, 3]
        long.abs_().mul_(1e12 if kernel is KERNELS["elu"] else 40.0)
    else:
        (k if "keys" in change else q)[:, :, 3 if "query" in change else slice(None)] = -60.0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for one, two in zip(found_by(inputs, kernel, "linear"), found_by(inputs, kernel, "reference"), strict=True):
        assert_close(one, two, rtol=1e-9, atol=1e-13)
    assert ran == [False]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("where", [3, 100, 299])
@pytest.mark.parametrize("setting", ["", "mask", "sink"])
def test_a_segment_out_of_range_among_others(
    kernel: mk.FeatureKernel, where: int, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In causal order, sums in units of 1 and sums in a unit of their own meet, either of them first."""
    monkeypatch.setattr(linear, "TOKENS", 256)  # 64 of each head
    q, k, v = (x.detach().clone() for x in tensors(300, 310))
    k[:, :, where].abs_().mul_(1e11 if kernel is KERNELS["elu"] else 30.0)
    q[:, :, 200].abs_().mul_(1e11 if kernel is KERNELS["elu"] else 30.0)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    settings: dict[str, dict[str, Any]] = {
        "": {},
        "mask": {"mask": torch.where(torch.arange(310) % 7 == 2, -torch.inf, draw(310, seed=4))},
        "sink": {"normalizer": mk.SinkSoftmax(0.5)},
    }
    found = [found_by(inputs, kernel, engine, causal=True, **settings[setting]) for engine in ("linear", "reference")]
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=1e-9, atol=1e-12 * max(1.0, two.abs().max().item()))


def test_what_is_not_a_number_stays_in_its_row(ran: list[bool]) -> None:
    q, k, v = (x.detach().clone() for x in tensors(40, 50))
    q[1, 2, 7, 0] = torch.nan
    out = mk.attend(q, k, v, mk.EluFeatures(), engine="linear")
    bad = out.isnan().any(-1)
    assert bad[1, 2, 7] and bad.sum() == 1 and ran == [False]


class Doubled(mk.EluFeatures):
    def query_features(self, q: Tensor, position: Tensor) -> mk.Features:
        return self.features(2.0 * q, position)


class OtherKeys(mk.EluFeatures):
    def key_features(self, k: Tensor, position: Tensor) -> mk.Features:
        return self.features(2.0 * k, position)


class OtherDirections(mk.FavorFeatures):
    def features(self, x: Tensor, position: Tensor) -> mk.Features:
        return super().features(-x.flip(-1), position)


@pytest.mark.parametrize(
    ("kernel", "setting"),
    [
        (Doubled(), {}),
        (OtherKeys(), {}),
        (OtherKeys(), {"causal": True}),
        (OtherDirections(5, 12).double(), {}),
        (OtherDirections(5, 12).double(), {"causal": True}),
        (mk.DPFPFeatures(), {}),
        (mk.EluFeatures(), {"causal": True}),
        (mk.EluFeatures(), {"mask": torch.arange(40) < 30}),
        (mk.EluFeatures(), {"normalizer": mk.SinkSoftmax(0.5)}),
    ],
    ids=[
        "own query features",
        "own key features",
        "own key features, causal",
        "own features",
        "own features, causal",
        "no map",
        "causal",
        "mask",
        "sink",
    ],
)
def test_other_problems_do_not_come_here(kernel: mk.MatchKernel, setting: dict[str, Any], ran: list[bool]) -> None:
    inputs = tensors(40, 40)
    found = [found_by(inputs, kernel, engine, **setting) for engine in ("linear", "reference")]
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=1e-11, atol=1e-13)
    assert not ran


def test_a_projection_wider_than_the_sums_is_not_rounded() -> None:
    assert FAVOR.feature_map(torch.float32) is None and FAVOR.feature_map(torch.float64) is not None


def test_layout_and_dtype_of_the_inputs_make_no_difference(ran: list[bool]) -> None:
    q, k, v = (x.detach().float() for x in tensors(300, 400, keys=4))
    plain = mk.attend(q, k, v, mk.EluFeatures(), engine="linear")
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_close(mk.attend(*turned, mk.EluFeatures(), engine="linear"), plain, rtol=0.0, atol=0.0)
    half = [x.bfloat16() for x in (q, k, v)]
    exact = mk.attend(*(x.double() for x in half), mk.EluFeatures(), engine="reference")
    out = mk.attend(*half, mk.EluFeatures(), engine="linear")
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)
    assert ran == [True] * 3


class Learned(mk.FavorFeatures):
    """Directions that are learned."""

    def __init__(self, dim: int, features: int) -> None:
        super().__init__(dim, features, generator=torch.Generator().manual_seed(5))
        drawn = self.projection
        del self.projection
        self.projection = nn.Parameter(drawn)


class Beside(mk.EluFeatures):
    """A parameter that the map does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("kernel", [Learned(5, 12).double(), Beside()], ids=["of the map", "beside it"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_parameter_keeps_its_gradient(kernel: mk.FeatureKernel, causal: bool) -> None:
    inputs = tensors(40, 50)
    found = []
    for engine in ("linear", "reference"):
        out = mk.attend(*inputs, kernel, causal=causal, engine=engine)
        wanted = [*kernel.parameters(), *inputs]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True, materialize_grads=True)])
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e20, -1e28, 1e35])
def test_large_values_beside_large_features_do_not_overflow(
    kernel: mk.FeatureKernel, causal: bool, size: float
) -> None:
    """In float32: features of 2^32 and values of their size are more than a float holds."""
    large = 1e9 if kernel is KERNELS["elu"] else 5.0
    q, k, v = (x.detach() for x in tensors(40, 50))
    exact = [q.abs() * large, k.abs() * large, v.abs() * size]
    narrow = mk.FavorFeatures(5, 12, generator=torch.Generator().manual_seed(5)) if kernel is FAVOR else kernel
    inputs = [x.float().requires_grad_() for x in exact]
    found = found_by(inputs, narrow, "linear", causal=causal)
    truth = found_by([x.detach().double().requires_grad_() for x in inputs], narrow, "reference", causal=causal)
    assert found[0].isfinite().all()
    assert_close(found[0].double() / size, truth[0] / size, rtol=1e-4, atol=1e-5)
    assert_close(found[3].double(), truth[3], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_map_is_of_the_dtype_of_sums(learned: bool, causal: bool) -> None:
    """Which a normaliser's own parameter may widen."""
    kernel = mk.FavorFeatures(5, 12)
    logit = draw(4, seed=7).requires_grad_(learned)
    inputs = [x.detach().float().requires_grad_() for x in tensors(40, 50)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    setting = {"causal": causal, "normalizer": mk.SinkSoftmax(nn.Parameter(logit) if learned else logit)}
    found = [found_by(x, kernel, e, **setting) for x, e in ((inputs, "linear"), (wide, "reference"))]
    for one, two in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert_close(one.double(), two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [mk.EluFeatures(), mk.FavorFeatures(5, 12)], ids=repr)
def test_gradients_of_halves_are_rounded_once(kernel: mk.FeatureKernel, causal: bool) -> None:
    """Those of a key that several heads read, too: their sum, and not its terms."""
    narrow = [x.detach().bfloat16().requires_grad_() for x in tensors(40, 50, heads=6, keys=1)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    grads = []
    for inputs in (narrow, wide):
        out = mk.attend(*inputs, kernel, causal=causal, engine="linear")
        grads.append(torch.autograd.grad(out, inputs, draw(*out.shape, seed=9).bfloat16().to(out)))
    for one, two in zip(*grads, strict=True):
        assert one.dtype == torch.bfloat16
        assert_close(one, two.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("create", [False, True])
def test_a_redrawn_projection_is_not_used_for_an_older_output(create: bool, ran: list[bool]) -> None:
    kernel = mk.FavorFeatures(5, 12)
    inputs = [x.detach().float().requires_grad_() for x in tensors(40, 50)]
    out = mk.attend(*inputs, kernel, engine="linear")
    kernel.redraw()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs, create_graph=create)
    assert ran == [True]


@pytest.mark.parametrize("kind", [mk.FavorFeatures, mk.HyperbolicFeatures])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("create", [False, True])
def test_a_projection_put_in_the_place_of_another_is_not_either(kind: Any, causal: bool, create: bool) -> None:
    kernel = kind(5, 12).double()
    inputs, found = tensors(40, 50), []
    for engine in ("reference", "linear"):
        out = mk.attend(*inputs, kernel, causal=causal, engine=engine)
        old, kernel.projection = kernel.projection, draw(*kernel.projection.shape, seed=8)
        found.append(torch.autograd.grad(out.square().sum(), inputs, create_graph=create))
        kernel.projection = old
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kernel", [mk.EluFeatures(), mk.FavorFeatures(5, 12), mk.DPFPFeatures()], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("create", [False, True])
def test_autocast_narrows_no_sum(kernel: mk.FeatureKernel, causal: bool, create: bool) -> None:
    """Neither where the output is computed nor where its gradients are."""
    inputs = [x.detach().float().requires_grad_() for x in tensors(40, 50)]

    def found() -> list[Tensor]:
        out = mk.attend(*inputs, kernel, causal=causal, engine="linear")
        return [out, *torch.autograd.grad(out.square().sum(), inputs, create_graph=create)]

    plain = found()
    with torch.autocast("cpu", torch.bfloat16):
        cast = found()
    for one, two in zip(cast, plain, strict=True):
        assert_close(one, two, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kernel", [*KERNELS.values(), mk.DPFPFeatures()], ids=[*KERNELS, "dpfp"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_output_that_nobody_holds_is_freed_at_once(kernel: mk.FeatureKernel, causal: bool) -> None:
    """With all that its derivative would have needed, and not when somebody looks for circles."""
    gc.collect()
    gc.disable()
    try:
        node = mk.attend(*tensors(40, 50), kernel, causal=causal, engine="linear").grad_fn
        while "Linear" not in type(node).__name__:
            assert node is not None
            node = node.next_functions[0][0]
        gone = weakref.ref(node)
        del node
        assert gone() is None
    finally:
        gc.enable()
