"""Feature maps that kernels ship, and linear attention that takes their features as they are."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("kernel", "setting"),
    [
        (Doubled(), {}),
        (mk.DPFPFeatures(), {}),
        (mk.EluFeatures(), {"causal": True}),
        (mk.EluFeatures(), {"mask": torch.arange(40) < 30}),
        (mk.EluFeatures(), {"normalizer": mk.SinkSoftmax(0.5)}),
    ],
    ids=["own query features", "no map", "causal", "mask", "sink"],
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
