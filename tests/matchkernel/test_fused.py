"""The fused engine: that it really runs fused, through either of torch's doors, with derivatives of every order."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _torch_private

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor
Call = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What reaches torch's private operator; it still runs."""
    seen: list[Call] = []
    forward = _torch_private.forward

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(_torch_private, "forward", noted)
    return seen


def _case(name: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    def f(*shape: int) -> Tensor:
        return draw(*shape, seed=len(shape) + sum(shape), dtype=torch.float32)

    plain = (f(2, 3, 32, 16), f(2, 3, 32, 16), f(2, 3, 32, 16))
    cases: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
        "four dimensions": (plain, {}),
        "two dimensions": ((f(32, 16), f(40, 16), f(40, 16)), {}),
        "three dimensions": ((f(3, 32, 16), f(3, 40, 16), f(3, 40, 16)), {}),
        "five dimensions": ((f(2, 2, 3, 32, 16), f(2, 2, 3, 40, 16), f(2, 2, 3, 40, 16)), {}),
        "narrow values": ((f(2, 3, 32, 16), f(2, 3, 32, 16), f(2, 3, 32, 8)), {}),
        "wide values": ((f(2, 3, 32, 16), f(2, 3, 32, 16), f(2, 3, 32, 24)), {}),
        "grouped heads": ((f(2, 6, 32, 16), f(2, 2, 32, 16), f(2, 2, 32, 16)), {}),
        "one key head": ((f(2, 6, 32, 16), f(2, 1, 32, 16), f(2, 1, 32, 16)), {}),
        "one batch of keys": ((f(2, 3, 32, 16), f(3, 32, 16), f(1, 3, 32, 16)), {}),
        "columns before rows": (tuple(x.mT.contiguous().mT for x in plain), {}),
        "every second column": (tuple(f(2, 3, 32, 32)[..., ::2] for _ in range(3)), {}),
        "heads after tokens": (tuple(f(2, 32, 3, 16).transpose(1, 2) for _ in range(3)), {}),
        "causal": (plain, {"causal": True}),
        "causal, a past": ((f(2, 3, 8, 16), *plain[1:]), {"causal": True}),
        "causal, one query": ((f(2, 3, 1, 16), *plain[1:]), {"causal": True}),
        "causal, too many queries": ((f(2, 3, 40, 16), *plain[1:]), {"causal": True}),
        "a window": (plain, {"causal": True, "window": 5}),
        "key padding": (plain, {"mask": torch.arange(32) < 20, "causal": True}),
        "a bool mask": (plain, {"mask": f(2, 1, 32, 32) > -1}),
        "a float mask": (plain, {"mask": f(32, 32)}),
        "the sink": (plain, {"normalizer": mk.SinkSoftmax()}),
        "length scaling": (plain, {"normalizer": mk.ScalableSoftmax(), "causal": True}),
        "a sum": (plain, {"kernel": mk.Dot() + mk.Cosine()}),
        "a matrix": (plain, {"kernel": mk.Bilinear(16, rank=4, generator=torch.Generator().manual_seed(0))}),
        "a negative factor": (plain, {"kernel": -0.3 * mk.Dot(), "causal": True}),
        "a factor per head": (plain, {"kernel": torch.tensor([0.1, -0.2, 0.3]) * mk.Dot()}),
        "alibi": (plain, {"kernel": mk.ScaledDot() + mk.ALiBi(3), "causal": True}),
        "alibi, a past": ((f(2, 3, 8, 16), *plain[1:]), {"kernel": mk.ScaledDot() + mk.ALiBi(3), "causal": True}),
        "alibi, grouped heads": (
            (f(2, 6, 32, 16), f(2, 2, 32, 16), f(2, 2, 32, 16)),
            {"kernel": mk.ScaledDot() + mk.ALiBi(6), "causal": True},
        ),
        "rotary": (plain, {"kernel": mk.Rotary(16), "causal": True}),
        "bfloat16": (tuple(x.bfloat16() for x in plain), {}),
        "float16": (tuple(x.half() for x in plain), {}),
    }
    return cases[name]


CASES = [
    "four dimensions", "two dimensions", "three dimensions", "five dimensions", "narrow values", "wide values",
    "grouped heads", "one key head", "one batch of keys", "columns before rows", "every second column",
    "heads after tokens", "causal", "causal, a past", "causal, one query", "causal, too many queries", "a window",
    "key padding", "a bool mask", "a float mask", "the sink", "length scaling", "a sum", "a matrix",
    "a negative factor", "a factor per head", "alibi", "alibi, a past", "alibi, grouped heads", "rotary",
    "bfloat16", "float16",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_torch_calls_it_fused(name: str, calls: list[Call]) -> None:
    """Ours went to the private operator; torch's public call, given the same tensors, would choose a fused kernel."""
    (q, k, v), setting = _case(name)
    assert mk.explain(q, k, v, **setting).engine == "fused"
    out = mk.attend(q, k, v, **setting)
    assert len(calls) == (2 if name.endswith("a past") else 1)
    for q4, k4, v4, bias, causal, scale in calls:
        assert q4.dim() == k4.dim() == v4.dim() == 4 and (bias is None or bias.dim() == 4)
        assert q4.stride(-1) == k4.stride(-1) == v4.stride(-1) == 1
        assert q4.shape[-1] == k4.shape[-1] == v4.shape[-1] and scale > 0
        assert _torch_private.chosen_backend(q4, k4, v4, bias, causal) > 0
    kernel = setting.get("kernel", mk.ScaledDot())
    wide = {**setting, "kernel": kernel.double(), "engine": "reference"}
    truth = mk.attend(q.double(), k.double(), v.double(), **wide).to(q.dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[q.dtype]
    assert_close(out, truth, rtol=tolerance, atol=tolerance)


def test_the_choice_would_tell_if_it_were_dense() -> None:
    q, v = draw(2, 3, 32, 16), draw(2, 3, 32, 8)
    assert _torch_private.chosen_backend(q, q, v, None, False) == 0
    assert _torch_private.chosen_backend(q, q, q, None, False) > 0


def test_nothing_is_copied_that_fits(calls: list[Call]) -> None:
    (q, k, v), _ = _case("four dimensions")
    mk.attend(q, k, v)
    for given, handed in zip((q, k, v), calls[0][:3], strict=True):
        assert handed.data_ptr() == given.data_ptr()
    calls.clear()
    mk.attend(*_case("grouped heads")[0])
    assert calls[0][1].shape[1] == 2, "key heads are shared, not repeated"


def test_a_key_mask_stays_one_row(calls: list[Call]) -> None:
    (q, k, v), setting = _case("key padding")
    mk.attend(q, k, v, **setting)
    bias, causal = calls[0][3], calls[0][4]
    assert bias is not None and bias.shape[-2] == 1 and causal
    calls.clear()
    (q, k, v), setting = _case("causal, a past")
    mk.attend(q, k, v, **setting)
    assert [(call[3], call[4]) for call in calls] == [(None, False), (None, True)]


# Kernels that are an inner product where no key is later than its query.


ORDERED: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "mask": torch.arange(32) % 5 > 0},
    {"causal": True, "window": 4},
    {"window": (6, 0)},
    {"causal": True, "normalizer": mk.SinkSoftmax(0.3)},
    {"causal": True, "normalizer": mk.ScalableSoftmax(0.4)},
    {"causal": True, "query_position": torch.arange(40, 72), "key_position": torch.arange(32) + 30},
]


@pytest.mark.parametrize("setting", ORDERED, ids=", ".join)
@pytest.mark.parametrize(
    "kernel",
    [
        mk.ALiBi(3),
        mk.ScaledDot() + mk.ALiBi(3),
        mk.ALiBi(3) + (mk.Gaussian(2.0) + 0.5 * mk.ALiBi(slopes=0.2)),
        torch.tensor([0.4, -0.5, 0.6]) * (mk.Dot() + mk.ALiBi(3)),
        -1.0 * mk.ALiBi(slopes=0.02),
    ],
    ids=repr,
)
def test_alibi_is_fused_where_no_key_is_later(
    kernel: mk.MatchKernel, setting: dict[str, Any], calls: list[Call]
) -> None:
    q, k, v = _case("four dimensions")[0]
    q, k, v = q[..., :32, :], k[..., :32, :], v[..., :32, :]
    told = mk.explain(q, k, v, kernel, **setting)
    assert told.engine == "fused" and "where no key is later than its query" in told.reason
    assert told.flops is not None
    out = mk.attend(q, k, v, kernel, **setting)
    assert len(calls) == 1 and _torch_private.chosen_backend(*calls[0][:5]) > 0
    truth = mk.attend(q.double(), k.double(), v.double(), kernel, engine="reference", **setting)
    assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", [{}, {"window": 4}, {"window": (6, 1)}, {"mask": torch.ones(32, 32).tril() > 0}])
def test_alibi_is_not_fused_where_a_key_may_be_later(setting: dict[str, Any]) -> None:
    q, k, v = _case("four dimensions")[0]
    q, k, v = q[..., :32, :], k[..., :32, :], v[..., :32, :]
    kernel = mk.ScaledDot() + mk.ALiBi(3)
    assert mk.explain(q, k, v, kernel, **setting).engine != "fused"
    with pytest.raises(ValueError, match="not a DotKernel"):
        mk.attend(q, k, v, kernel, engine="fused", **setting)


def test_other_kernels_are_themselves_under_causal_order() -> None:
    for kernel in (
        mk.Dot(),
        mk.Dot() + mk.Gaussian(),
        0.5 * mk.Cosine(),
        mk.RelativeBias(2),
        mk.Dot() + mk.RelativeBias(2),
    ):
        assert kernel.under_causal_order() is kernel


# Both doors. Devices without the private operators go through torch's public call.


@pytest.fixture(params=["private", "public"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "public":
        monkeypatch.setattr(_torch_private, "available", lambda device: False)

        def closed(*_: object) -> None:
            raise AssertionError("the private operator was called")

        monkeypatch.setattr(_torch_private, "forward", closed)
        monkeypatch.setattr(_torch_private, "backward", closed)
    return str(request.param)


@pytest.mark.parametrize("name", [name for name in CASES if name != "the sink" and "float16" not in name])
def test_values_and_gradients_through_either_door(name: str, door: str) -> None:
    given, setting = _case(name)
    leaves = [x.detach().double().requires_grad_() for x in given]
    kernel = setting.get("kernel", mk.ScaledDot()).double()
    results = {}
    for engine in ("fused", "reference"):
        out = mk.attend(*leaves, **{**setting, "kernel": kernel, "engine": engine})
        results[engine] = [out, *torch.autograd.grad(out.sin().sum(), [*leaves, *kernel.parameters()])]
    for ours, truth in zip(results["fused"], results["reference"], strict=True):
        assert_close(ours, truth, rtol=1e-8, atol=1e-9)


def test_slopes_learn_through_the_fused_kernel(door: str) -> None:
    """The column of the query is scaled by the slope; gradients through torch's own backward and the dense one."""
    grads = {}
    for engine in ("fused", "reference"):
        slopes = nn.Parameter(torch.tensor([0.3, 0.71], dtype=torch.float64))
        leaves = [x.requires_grad_() for x in inputs(2, n=5, m=5)]
        out = mk.attend(*leaves, mk.ScaledDot() + mk.ALiBi(slopes=slopes), causal=True, engine=engine)
        first = torch.autograd.grad(out.sin().sum(), [*leaves, slopes], create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), [*leaves, slopes])
        grads[engine] = [*first, *second]
    for ours, truth in zip(grads["fused"], grads["reference"], strict=True):
        assert_close(ours, truth)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "mask": torch.tensor([True, False, True, True])},
    {"mask": torch.tensor([[0.3], [-1.0], [2.0]])},
    {"normalizer": mk.Softmax(nn.Parameter(torch.tensor(0.7, dtype=torch.float64)))},
    {"normalizer": mk.ScalableSoftmax(0.6), "causal": True},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda x: ", ".join(x) or "plain")
@pytest.mark.parametrize("grouped", [False, True])
def test_second_derivatives_through_either_door(setting: dict[str, Any], grouped: bool, door: str) -> None:
    q, k, v = inputs(2, n=3, m=4)
    if grouped:
        k, v = k[:1], v[:1]
    leaves = tuple(x.requires_grad_() for x in (q, k, v))

    def run(*x: Tensor) -> Tensor:
        return mk.attend(*x, engine="fused", **setting)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_with_the_sink(causal: bool) -> None:
    """The only caller of the log-sum-exp's own gradient."""
    leaves = tuple(x.requires_grad_() for x in inputs(2, n=4, m=4))
    sink = mk.SinkSoftmax(nn.Parameter(torch.tensor([0.2, -0.6], dtype=torch.float64)))

    def run(*x: Tensor) -> Tensor:
        return mk.attend(*x, normalizer=sink, causal=causal, engine="fused")

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("setting", [*SETTINGS, {"normalizer": mk.SinkSoftmax(0.4), "causal": True}], ids=", ".join)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_gradient_that_is_to_be_differentiated_is_the_same_gradient(setting: dict[str, Any], grouped: bool) -> None:
    """It is computed densely then, and gradgradcheck would hold the dense formulas against themselves."""
    q, k, v = inputs(4, n=3, m=4)
    if grouped:
        k, v = k[:2], v[:2]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    once, twice, truth = (
        torch.autograd.grad(mk.attend(*leaves, engine=engine, **setting).sin().sum(), leaves, create_graph=again)
        for engine, again in (("fused", False), ("fused", True), ("reference", False))
    )
    for a, b, c in zip(once, twice, truth, strict=True):
        assert_close(a, c)
        assert_close(b, c)


def test_a_third_derivative() -> None:
    q, k, v = inputs(n=2, m=3)
    q.requires_grad_()
    third = []
    for engine in ("fused", "reference"):
        slope = torch.autograd.grad(mk.attend(q, k, v, engine=engine).sin().sum(), q, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sin().sum(), q, create_graph=True)[0]
        third.append(torch.autograd.grad(bend.sin().sum(), q)[0])
    assert_close(third[0], third[1])
    assert bool((third[0] != 0).any())


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "no leaf"])
def test_without_a_graph_the_operator_is_called_directly(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an autograd Function was made")

    leaves = inputs(2)
    with_graph = mk.attend(*(x.clone().requires_grad_() for x in leaves)).detach()
    monkeypatch.setattr("matchkernel.engines.fused.FusedAttention.apply", never)
    if mode == "no leaf":
        assert torch.equal(mk.attend(*leaves), with_graph)
    else:
        with getattr(torch, mode)():
            assert torch.equal(mk.attend(*(x.clone().requires_grad_() for x in leaves)), with_graph)


def test_forward_mode_with_dual_numbers() -> None:
    """No tensor requires a gradient here, and no transform of torch.func is at work."""
    q, k, v = inputs(2)
    tangent = draw(*q.shape, seed=7)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        slope = torch.autograd.forward_ad.unpack_dual(mk.attend(dual, k, v, engine="fused")).tangent
    truth = torch.func.jvp(lambda x: mk.attend(x, k, v, engine="reference"), (q,), (tangent,))[1]
    assert_close(slope, truth)


@pytest.mark.parametrize("setting", [{"causal": True}, {"window": 3, "causal": True}], ids=", ".join)
def test_the_public_door_is_never_given_a_mask_and_an_order(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernels for other devices refuse the two together, and align the order to the start."""
    monkeypatch.setattr(_torch_private, "available", lambda device: False)
    public = torch.nn.functional.scaled_dot_product_attention
    handed: list[dict[str, Any]] = []

    def noted(*tensors: Tensor, **how: Any) -> Tensor:
        handed.append(how)
        return public(*tensors, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for n, m in ((6, 6), (4, 6), (6, 4), (1, 6)):
        for mask in (None, torch.ones(m, dtype=torch.bool), torch.ones(n, m)):
            q, k, v = inputs(2, n=n, m=m)
            assert_close(
                mk.attend(q, k, v, mask=mask, engine="fused", **setting),
                mk.attend(q, k, v, mask=mask, engine="reference", **setting),
            )
    assert len(handed) == 12
    assert not any(how["is_causal"] and how["attn_mask"] is not None for how in handed)
    assert all(how["scale"] == 0.5 for how in handed)


def test_two_backwards_of_one_graph(door: str) -> None:
    leaves = [x.requires_grad_() for x in inputs(2)]
    out = mk.attend(*leaves, engine="fused")
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_the_public_door_has_no_log_sum_exp_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "available", lambda device: False)
    q, k, v = inputs(2)
    told = mk.explain(q, k, v, normalizer=mk.SinkSoftmax())
    assert told.engine == "reference" and "log-sum-exp" in told.reason
    with pytest.raises(ValueError, match="SinkSoftmax needs each row's log-sum-exp"):
        mk.attend(q, k, v, normalizer=mk.SinkSoftmax(), engine="fused")
    for h in range(2):
        assert_close(mk.attend(q, k, v, normalizer=mk.SinkSoftmax())[h], by_loop(q[h], k[h], v[h], sink=0.0))


@pytest.mark.parametrize("normalizer", [mk.Softmax(0.8), mk.SinkSoftmax(0.4), mk.ScalableSoftmax()], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_mode_is_the_references(normalizer: mk.Normalizer, causal: bool) -> None:
    point, tangent = inputs(2, n=5, m=7), tuple(draw(*x.shape, seed=11) for x in inputs(2, n=5, m=7))
    slopes = [
        torch.func.jvp(
            lambda *x, engine=engine: mk.attend(*x, normalizer=normalizer, causal=causal, engine=engine), point, tangent
        )[1]
        for engine in ("fused", "reference")
    ]
    assert_close(slopes[0], slopes[1])


def test_forward_mode_with_grouped_heads_and_one_tangent() -> None:
    q, k, v = draw(4, 5, 3, seed=1), draw(2, 5, 3, seed=2), draw(2, 5, 3, seed=3)
    for at in range(3):
        slopes = []
        for engine in ("fused", "reference"):

            def run(x: Tensor, at: int = at, engine: str = engine) -> Tensor:
                given = [q, k, v]
                given[at] = x
                return mk.attend(*given, engine=engine)

            x = (q, k, v)[at]
            slopes.append(torch.func.jvp(run, (x,), (draw(*x.shape, seed=7),))[1])
        assert_close(slopes[0], slopes[1])


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, 0, None)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...]) -> None:
    moved = [
        x if dim is None else torch.stack([x, 2 * x, -x], dim) for x, dim in zip(inputs(2, 3), in_dims, strict=True)
    ]
    out = torch.func.vmap(lambda q, k, v: mk.attend(q, k, v, causal=True, engine="fused"), in_dims=in_dims)(*moved)
    for i in range(3):
        alone = [x if dim is None else x.select(dim, i) for x, dim in zip(moved, in_dims, strict=True)]
        assert_close(out[i], mk.attend(*alone, causal=True))


def test_gradients_of_each_sample() -> None:
    q, k, v = inputs(4, 2)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mk.attend(q, k, v).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    assert_close(each, torch.func.grad(loss)(q, k, v))
    hessian = torch.func.hessian(lambda x: loss(x, k[0, 0], v[0, 0]))(q[0, 0, :2])
    truth = torch.func.hessian(
        lambda x: mk.attend(x, k[0, 0], v[0, 0], engine="reference").sin().sum()
    )(q[0, 0, :2])  # fmt: skip
    assert_close(hessian, truth)
