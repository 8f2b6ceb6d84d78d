"""The sparse engine: windows in blocks against the reference with the same mask, and no table held."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _torch_private, _windows
from matchkernel.engines._window_function import attend_within
from matchkernel.engines._windows import Band
from matchkernel.masks import Visibility, check_window

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs
from peak import measurable, peaks

Tensor = torch.Tensor
Setting = dict[str, Any]


def _mask(engine: mk.Sparse, n: int, m: int, setting: Setting) -> Tensor:
    """Who meets whom, pair by pair, as the documentation words it; with the call's own mask."""
    window, causal, r = setting["window"], setting.get("causal", False), engine.dilation
    left, right = window if isinstance(window, tuple) else (window - 1, window - 1)
    table = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            behind = (m - n + i) - j
            near = behind % r == 0 and -right <= behind // r <= left
            table[i, j] = (near or j < engine.sinks) and not (causal and behind < 0)
    mask = setting.get("mask")
    if mask is None:
        return table
    return table & mask if mask.dtype == torch.bool else torch.where(table, mask, -torch.inf)


def _hold(
    leaves: tuple[Tensor, ...], setting: Setting, engine: mk.Sparse | None = None, tolerance: float = 1e-9
) -> None:
    """Value and gradients against the reference in float64 with the mask written out."""
    engine = mk.Sparse() if engine is None else engine
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    n, m = q.shape[-2], k.shape[-2]
    rest = {name: x for name, x in setting.items() if name not in ("window", "causal", "mask", "kernel")}
    kernel = setting.get("kernel", mk.ScaledDot())
    out = mk.attend(q, k, v, engine=engine, **setting)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = mk.attend(*wide, kernel, mask=_mask(engine, n, m, setting), engine="reference", **rest)
    assert out.dtype == q.dtype
    assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
    down = draw(*out.shape, seed=9)
    ours = torch.autograd.grad(out, (q, k, v), down.to(out.dtype))
    for mine, theirs in zip(ours, torch.autograd.grad(truth, wide, down), strict=True):
        assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * (1.0 + float(theirs.abs().max())))


WINDOWS: list[Setting] = [
    {"window": 1},
    {"window": 1, "causal": True},
    {"window": 5, "causal": True},
    {"window": 40},
    {"window": (7, 0)},
    {"window": (0, 3)},
    {"window": (2, 90)},
    {"window": (70, 3), "causal": True},
    {"window": 500, "causal": True},
]
LENGTHS = [(1, 1), (5, 5), (32, 32), (33, 33), (200, 200), (3, 150), (1, 90), (130, 60), (129, 200)]


@pytest.mark.parametrize("setting", WINDOWS, ids=str)
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_windows_are_the_reference_with_their_mask(n: int, m: int, setting: Setting) -> None:
    _hold(inputs(2, n=n, m=m), setting)


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(
    st.integers(1, 150), st.integers(1, 150), st.integers(0, 70), st.integers(0, 70), st.booleans(),
    st.sampled_from([1, 1, 2, 3, 70]), st.sampled_from([0, 0, 1, 4, 80]), st.integers(0, 3),
)  # fmt: skip
def test_any_window_any_dilation_any_sinks(
    n: int, m: int, left: int, right: int, causal: bool, dilation: int, sinks: int, masked: int
) -> None:
    setting: Setting = {"window": (left, right), "causal": causal}
    if masked == 1:
        setting["mask"] = draw(2, 1, m, seed=5) > -0.5
    elif masked == 2:
        setting |= {"mask": draw(m, seed=5), "normalizer": mk.ScalableSoftmax(0.5)}
    elif masked == 3:
        setting |= {"mask": draw(1, m, seed=5) > 1.0, "normalizer": mk.SinkSoftmax(0.3)}
    _hold(inputs(2, n=n, m=m), setting, mk.Sparse(dilation, sinks))


def test_windows_pair_by_pair() -> None:
    """Without the reference: in plain Python."""
    q, k, v = inputs(n=40, m=50)
    for window, causal, left, right in ((6, True, 5, 0), (6, False, 5, 5), ((3, 9), False, 3, 9)):
        out = mk.attend(q, k, v, window=window, causal=causal, engine="sparse")
        expected = by_loop(q, k, v, allowed=lambda i, j, a=left, b=right: -a <= j - (10 + i) <= b)  # type: ignore[misc]
        assert_close(out, expected)


def _inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    def f(*shape: int) -> Tensor:
        return draw(*shape, seed=sum(shape))

    shapes = {
        "two dimensions": (f(90, 6), f(100, 6), f(100, 4)),
        "five dimensions": (f(2, 2, 3, 90, 6), f(2, 2, 3, 100, 6), f(2, 2, 3, 100, 6)),
        "narrow values": (f(2, 90, 6), f(2, 100, 6), f(2, 100, 3)),
        "wide values": (f(2, 90, 6), f(2, 100, 6), f(2, 100, 9)),
        "grouped heads": (f(2, 6, 90, 6), f(2, 2, 100, 6), f(2, 2, 100, 5)),
        "one key head": (f(2, 4, 90, 6), f(2, 1, 100, 6), f(2, 1, 100, 5)),
        "one batch of keys": (f(2, 3, 90, 6), f(3, 100, 6), f(1, 3, 100, 6)),
        "columns before rows": tuple(f(2, 100, 6).mT.contiguous().mT for _ in range(3)),
        "every second column": tuple(f(2, 100, 12)[..., ::2] for _ in range(3)),
        "heads after tokens": tuple(f(2, 100, 3, 6).transpose(1, 2) for _ in range(3)),
    }
    return shapes[name]


LAYOUTS = ["two dimensions", "five dimensions", "narrow values", "wide values", "grouped heads", "one key head",
           "one batch of keys", "columns before rows", "every second column", "heads after tokens"]  # fmt: skip


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few calls, and in calls of one head and two blocks."""
    if small:
        monkeypatch.setattr(_windows, "ENOUGH", 1)
        monkeypatch.setattr(_windows, "MOST", 2 * 32 * 6 * 8)
    leaves = _inputs(name)
    m = leaves[1].shape[-2]
    _hold(leaves, {"window": 9, "causal": True, "normalizer": mk.SinkSoftmax(0.2)})
    _hold(leaves, {"window": (4, 7), "mask": draw(m, seed=3) > -1.0}, mk.Sparse(dilation=2, sinks=3))


def test_many_blocks_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than a call takes: two at a time, and one that is left."""
    monkeypatch.setattr(_windows, "MOST", 2 * 32 * 4 * 8)
    leaves = inputs(2, n=300, m=300)
    _hold(leaves, {"window": 9, "causal": True, "mask": draw(2, 1, 300, seed=3) > -1.0})
    _hold(leaves, {"window": (3, 40)}, mk.Sparse(dilation=2))


KERNELS: list[mk.MatchKernel] = [
    mk.Dot(), mk.Cosine(0.4), mk.Gaussian(1.3), mk.ScaledDot() + mk.ALiBi(2), mk.Rotary(4), -0.3 * mk.Dot(),
    torch.tensor([0.4, -0.5]) * mk.Dot(), mk.Bilinear(4, generator=torch.Generator().manual_seed(0)),
]  # fmt: skip
NORMALIZERS = [
    mk.Softmax(0.7), mk.Softmax(torch.tensor([0.5, 2.0])), mk.SinkSoftmax(torch.tensor([0.3, -1.0])),
    mk.ScalableSoftmax(0.6),
]  # fmt: skip


@pytest.mark.parametrize("engine", [mk.Sparse(), mk.Sparse(3, 2)], ids=repr)
@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_kernels_and_normalisers(number: int, engine: mk.Sparse) -> None:
    kernel = KERNELS[number].double()
    for step in (0, 1):
        normalizer = NORMALIZERS[(number + step) % len(NORMALIZERS)].double()
        mask = None if step else draw(2, 1, 1, 70, seed=8) > -1.0
        setting: Setting = {"window": 6, "causal": True, "kernel": kernel, "normalizer": normalizer, "mask": mask}
        _hold(inputs(2, 2, n=70, m=70), setting, engine)


class Placed(mk.DotKernel):
    """A score that depends on where query and key are, and not on their distance alone."""

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        return q * (0.1 * position).cos().unsqueeze(-1)

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        return k * (0.3 * position).sin().unsqueeze(-1)


@pytest.mark.parametrize("engine", [mk.Sparse(), mk.Sparse(3), mk.Sparse(sinks=2)], ids=repr)
def test_kernels_see_the_positions_of_the_call(engine: mk.Sparse) -> None:
    """Keys before every window are left out before anything is computed; nobody's position changes by it."""
    for n in (1, 5, 80):
        _hold(
            inputs(2, n=n, m=80),
            {"window": 4, "causal": True, "kernel": Placed(), "mask": draw(80, seed=3) > -1.0},
            engine,
        )


def test_what_no_window_reaches_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when tokens are decoded one by one beside a long cache."""
    widths: list[int] = []
    encode = mk.ScaledDot.encode

    def noted(self: mk.ScaledDot, q: Tensor, k: Tensor, *rest: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        widths.append(k.shape[-2])
        return encode(self, q, k, *rest, **more)

    monkeypatch.setattr(mk.ScaledDot, "encode", noted)
    q, k, v = inputs(2, n=1, m=500)
    mk.attend(q, k, v, window=7, causal=True)
    mk.attend(q, k, v, window=7, causal=True, engine=mk.Sparse(dilation=5))
    assert widths == [7, 31]


def test_parameters_of_kernel_and_normaliser_learn() -> None:
    grads = {}
    for name, place in (("sparse", {"window": 4, "causal": True}), ("reference", {"window": 4, "causal": True})):
        kernel = mk.ScaledDot() + mk.ALiBi(slopes=torch.nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64)))
        sink = mk.SinkSoftmax(torch.nn.Parameter(torch.tensor([0.2, -0.6], dtype=torch.float64)))
        out = mk.attend(*inputs(2, n=50, m=50), kernel, normalizer=sink, engine=name, **place)
        grads[name] = torch.autograd.grad(out.sin().sum(), [*kernel.parameters(), *sink.parameters()])
    assert_close(grads["sparse"], grads["reference"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_halves(dtype: torch.dtype, tolerance: float) -> None:
    leaves = inputs(2, n=150, m=150, d=16, width=16, dtype=dtype)
    for engine in (mk.Sparse(), mk.Sparse(dilation=2, sinks=3)):
        _hold(leaves, {"window": 20, "causal": True}, engine, tolerance)


def test_the_mask_is_what_the_engine_sees() -> None:
    for engine in (mk.Sparse(), mk.Sparse(dilation=3), mk.Sparse(sinks=2), mk.Sparse(2, 5)):
        for n, m in ((12, 12), (4, 12), (15, 9)):
            for setting in ({"window": 3, "causal": True}, {"window": 3}, {"window": (0, 2)}):
                assert torch.equal(engine.mask(n, m, **setting), _mask(engine, n, m, setting))
    assert mk.Sparse().mask(20, 20, 4, True).sum(-1).tolist() == [1, 2, 3, *[4] * 17]
    assert mk.Sparse(dilation=3).mask(20, 20, 4, True)[19].nonzero().flatten().tolist() == [10, 13, 16, 19]
    assert mk.Sparse(sinks=2).mask(20, 20, 4, True)[19].nonzero().flatten().tolist() == [0, 1, 16, 17, 18, 19]
    assert mk.Sparse(sinks=2).mask(20, 20, 4, True)[2].nonzero().flatten().tolist() == [0, 1, 2]


# What no query may see, and what sees nothing.


@pytest.mark.parametrize("engine", [mk.Sparse(), mk.Sparse(dilation=3), mk.Sparse(sinks=2), mk.Sparse(2, 2)], ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_a_key_that_nobody_sees(engine: mk.Sparse, causal: bool) -> None:
    q, k, v = inputs(2, n=5, m=90)
    hidden = draw(90, seed=4) > 0.8
    setting: Setting = {"window": 4, "causal": causal, "mask": ~hidden}
    unseen = ~(engine.mask(5, 90, 4, causal) & ~hidden).any(0)
    assert hidden.any() and unseen.sum() > hidden.sum()
    k[:, unseen], v[:, unseen] = torch.nan, torch.inf
    _hold((q, torch.where(unseen[:, None], 0.0, k), torch.where(unseen[:, None], 0.0, v)), setting, engine)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = mk.attend(*leaves, engine=engine, **setting)
    clean = mk.attend(q, k.nan_to_num(0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0), engine=engine, **setting)
    assert_close(out, clean)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in grads)
    assert bool((grads[1][:, unseen] == 0).all())
    # And one that is seen does.
    seen = int((~unseen).nonzero()[-1])
    v.data[:, seen] = torch.nan
    assert bool(mk.attend(q, k, v, engine=engine, **setting).isnan().any())


@pytest.mark.parametrize("engine", [mk.Sparse(), mk.Sparse(dilation=2), mk.Sparse(sinks=1), mk.Sparse(2, 2)], ids=repr)
@pytest.mark.parametrize("normalizer", [mk.Softmax(), mk.SinkSoftmax(-1.0)], ids=repr)
def test_a_query_that_sees_nothing_gets_zeros(engine: mk.Sparse, normalizer: mk.Normalizer) -> None:
    """Queries before every key, and a run of hidden keys longer than the window."""
    leaves = [x.requires_grad_() for x in inputs(2, n=80, m=60)]
    mask = torch.ones(60, dtype=torch.bool)
    mask[:2], mask[25:45] = False, False
    setting: Setting = {"window": 3, "causal": True, "mask": mask}
    out = mk.attend(*leaves, engine=engine, normalizer=normalizer, **setting)
    blind = ~_mask(engine, 80, 60, setting).any(-1)
    assert blind[:20].all() and blind[50:60].all() and not blind[70:].any()
    assert bool((out[:, blind] == 0).all()) and bool((out[:, ~blind] != 0).any(-1).all())
    grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    assert bool((grads[0][:, blind] == 0).all())
    again = torch.autograd.grad(sum(x.sin().sum() for x in grads), leaves)
    assert all(bool(x.isfinite().all()) for x in again)


def test_the_future_and_the_far_past_change_nothing() -> None:
    q, k, v = inputs(2, n=150, m=150)
    for engine, reach in ((mk.Sparse(), 9), (mk.Sparse(dilation=4), 36)):
        before = mk.attend(q, k, v, window=10, causal=True, engine=engine)
        k2, v2 = k.clone(), v.clone()
        k2[:, 100:] += 1.0
        v2[:, 100:] -= 1.0
        after = mk.attend(q, k2, v2, window=10, causal=True, engine=engine)
        assert torch.equal(before[:, :100], after[:, :100]) and not torch.equal(before[:, 100], after[:, 100])
        k2, v2 = k.clone(), v.clone()
        k2[:, 50] += 1.0
        v2[:, 50] -= 1.0
        changed = (mk.attend(q, k2, v2, window=10, causal=True, engine=engine) != before).any(-1).all(0)
        assert changed.nonzero().flatten().tolist() == list(range(50, 51 + reach, engine.dilation))


# Derivatives of every order, transforms, compiled graphs.

DERIVED: list[tuple[mk.Sparse, int, int, Setting]] = [
    (mk.Sparse(), 5, 5, {"window": 3, "causal": True}),
    (mk.Sparse(), 34, 36, {"window": 2, "normalizer": mk.SinkSoftmax(0.2)}),
    (mk.Sparse(2, 1), 6, 7, {"window": 2}),
    (mk.Sparse(3, 2), 6, 5, {"window": 2, "causal": True, "normalizer": mk.SinkSoftmax(0.1)}),
]


def _few(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, n, 2, seed=1), draw(1, m, 2, seed=2), draw(1, m, 3, seed=3)


@pytest.mark.parametrize(("engine", "n", "m", "setting"), DERIVED, ids=str)
def test_second_derivatives(engine: mk.Sparse, n: int, m: int, setting: Setting) -> None:
    leaves = tuple(x.requires_grad_() for x in _few(n, m))

    def run(*x: Tensor) -> Tensor:
        return mk.attend(*x, engine=engine, **setting)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    once = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
    twice = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
    assert_close(once, tuple(x.detach() for x in twice))

    def tied(x: Tensor) -> Tensor:
        return mk.attend(x, 2.0 * x[:1], x[1:], engine=engine, **setting)

    assert torch.autograd.gradgradcheck(tied, (draw(2, n, 2, seed=4).requires_grad_(),), fast_mode=True)


def test_second_derivatives_where_keys_are_made_of_the_queries() -> None:
    """The gradient of q is not to include what comes to it through k."""

    def tied(q: Tensor) -> Tensor:
        return attend_within(q, 2.0 * q, q.sin(), None, Band(4, 4, 2, 0), 0.7)[0]

    q = draw(1, 1, 4, 2, seed=4).requires_grad_()
    once = torch.autograd.grad(tied(q).sin().sum(), q)[0]
    twice = torch.autograd.grad(tied(q).sin().sum(), q, create_graph=True)[0]
    assert_close(twice.detach(), once)
    assert torch.autograd.gradgradcheck(tied, (q,))


@pytest.mark.parametrize(("engine", "n", "m", "setting"), DERIVED, ids=str)
def test_transforms(engine: mk.Sparse, n: int, m: int, setting: Setting) -> None:
    q, k, v = _few(n, m)
    rest = {name: x for name, x in setting.items() if name == "normalizer"}
    mask = engine.mask(n, m, setting["window"], setting.get("causal", False))

    def run(*x: Tensor) -> Tensor:
        return mk.attend(*x, engine=engine, **setting)

    def truth(*x: Tensor) -> Tensor:
        return mk.attend(*x, mask=mask, engine="reference", **rest)

    many = [torch.stack([x, -x, 2.0 * x]) for x in (q, k, v)]
    assert_close(torch.func.vmap(run)(*many), torch.stack([truth(*x) for x in zip(*many, strict=True)]))
    some = torch.func.vmap(run, in_dims=(None, 0, 0))(q, *many[1:])
    assert_close(some, torch.stack([truth(q, *x) for x in zip(*many[1:], strict=True)]))
    tangents = tuple(draw(*x.shape, seed=6) for x in (q, k, v))
    assert_close(torch.func.jvp(run, (q, k, v), tangents)[1], torch.func.jvp(truth, (q, k, v), tangents)[1])
    if n < 10:
        ours, theirs = (torch.func.hessian(lambda x, f=f: f(x, k, v).sin().sum())(q) for f in (run, truth))
        assert_close(ours, theirs)


@pytest.mark.parametrize("engine", [mk.Sparse(), mk.Sparse(dilation=2)], ids=repr)
def test_compiles_to_one_graph(engine: mk.Sparse) -> None:
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return mk.attend(q, k, v, window=5, causal=True, mask=mask, normalizer=mk.ScalableSoftmax(0.4), engine=engine)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for n in (40, 71) if engine.exact else (40,):
        leaves = [x.requires_grad_() for x in inputs(2, n=n, m=n)]
        mask = draw(n, seed=5) > -1.0
        results = []
        for function in (run, compiled):
            out = function(*leaves, mask)
            results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
        assert_close(results[0], results[1])


def test_the_public_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's private operators are not used: blocks through its public call, or a refusal with the reason."""
    monkeypatch.setattr(_torch_private, "available", lambda device: False)
    for n, m in ((90, 90), (20, 90), (90, 20)):
        _hold(inputs(2, n=n, m=m), {"window": 7, "mask": draw(m, seed=1) > -1.0}, mk.Sparse(dilation=2))
    q, k, v = inputs(2, n=40, m=40)
    with pytest.raises(ValueError, match="SinkSoftmax needs each row's log-sum-exp"):
        mk.attend(q, k, v, window=3, normalizer=mk.SinkSoftmax(), engine="sparse")
    with pytest.raises(ValueError, match="the first keys are merged by the log-sum-exp"):
        mk.attend(q, k, v, window=3, engine=mk.Sparse(sinks=1))


# What is refused, what is chosen, what it costs.


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({}, "there is no window"),
        ({"causal": True}, "there is no window"),
        ({"window": (3, None)}, "the window has no limit on one side"),
        ({"window": (None, 3), "causal": True}, "the window has no limit on one side"),
        ({"window": 3, "kernel": mk.Laplacian(1.0)}, "is not a DotKernel"),
        ({"window": 3, "kernel": mk.ALiBi(2)}, "is not a DotKernel"),
        ({"window": 3, "normalizer": mk.Sparsemax()}, "Sparsemax is not a softmax"),
        ({"window": 3, "dropout": 0.1}, "dropout"),
        ({"window": 3, "mask": torch.ones(5, 7, dtype=torch.bool)}, "a row per query"),
        ({"window": 3, "mask": torch.zeros(7, requires_grad=True)}, "a mask that needs a gradient"),
        ({"window": 3, "key_position": torch.arange(7) + 1}, "positions of one's own"),
    ],
)
def test_refusals(setting: Setting, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mk.attend(*inputs(2), engine="sparse", **setting)


@pytest.mark.parametrize("empty", [{"n": 0}, {"m": 0}, {"d": 0}, {"width": 0}])
def test_nothing_to_compute_is_refused(empty: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="there is nothing to compute"):
        mk.attend(*inputs(2, **empty), window=3, engine=mk.Sparse())


@pytest.mark.parametrize("wrong", [{"dilation": 0}, {"dilation": 2.0}, {"sinks": -1}, {"sinks": True}])
def test_arguments(wrong: Setting) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mk.Sparse(**wrong)


def test_a_mask_needs_a_limited_window() -> None:
    for window in (None, (3, None)):
        with pytest.raises(ValueError, match="window"):
            mk.Sparse().mask(4, 4, window)


def test_auto_takes_short_windows_over_many_keys() -> None:
    q, k, v = inputs(n=1024, m=1024)
    told = mk.explain(q, k, v, window=64, causal=True)
    assert told.engine == "sparse" and told.exact and "blocks of 32 queries meet the 95 keys" in told.reason
    for setting, why in (
        ({"window": 900}, "its blocks would compute"),
        ({"window": (5, None)}, "the window has no limit on one side"),
    ):
        told = mk.explain(q, k, v, **setting)
        assert told.engine == "fused" and f"not sparse ({why}" in told.reason
    assert "sparse" not in mk.explain(q, k, v, causal=True).reason
    told = mk.explain(q[:100], k[:100], v[:100], window=5)
    assert told.engine == "fused" and "not sparse (the whole table of a head has only 10000 scores)" in told.reason
    assert mk.explain(q[:1], k[:300], v[:300], window=5).engine == "sparse"
    told = mk.explain(q, k, v, mk.Laplacian(1.0), window=5)
    assert told.engine == "tiled" and "not sparse (Laplacian(bandwidth=1) is not a DotKernel" in told.reason
    told = mk.explain(q, k, v, window=64, engine=mk.Sparse(dilation=2))
    assert not told.exact and "dilation 2" in told.reason and str(told).count("approximate") == 1


def test_scores_are_counted_by_hand() -> None:
    """Blocks of 32 of 100 queries, w = 4: 32 × 32, then two blocks of 32 × 35, and 4 queries that meet 7 keys."""
    assert Band(100, 100, 3, 0).block == 32
    assert Band(100, 100, 3, 0).scores() == 32 * 32 + 2 * 32 * 35 + 4 * 7
    q, k, v = inputs(6, n=100, m=100)
    told = mk.explain(q, k, v, window=4, causal=True, engine="sparse")
    assert told.flops == 6 * (32 * 32 + 2 * 32 * 35 + 4 * 7) * (2 * 4 + 2 * 3)


def test_counts_of_a_window_with_hidden_keys_form_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are those of the table."""
    for n, m in ((9, 12), (12, 9), (1, 12)):
        for window, causal in ((3, False), ((4, 1), False), (5, True), ((2, None), False)):
            for mask in (None, draw(2, 1, m, seed=3) > 0.0):
                made = Visibility(
                    n, m, mask, causal, check_window(window), torch.arange(m - n, m), torch.arange(m), aligned=True
                )
                table = made.allowed.expand(2, n, m)
                with monkeypatch.context() as patch:
                    patch.setattr(Visibility, "allowed", property(lambda self: pytest.fail("a table was formed")))
                    place = Visibility(
                        n, m, mask, causal, made.window, made.query_position, made.key_position, aligned=True
                    )
                    visible, sees, seen = place.visible, place.query_sees, place.key_seen
                assert torch.equal(visible.expand(2, n, 1), table.sum(-1, keepdim=True))
                if sees is not None:
                    assert torch.equal(sees.expand(2, n), table.any(-1))
                seen = torch.ones(m, dtype=torch.bool) if seen is None else seen
                assert torch.equal(seen.expand(2, m), table.any(-2))


@measurable
@pytest.mark.parametrize(
    "setting",
    [
        "causal=True, window=128",
        "window=(60, 70), mask=torch.arange(n) % 7 > 0, normalizer=mk.ScalableSoftmax(), engine='sparse'",
        "causal=True, window=32, engine=mk.Sparse(dilation=4, sinks=4), mask=torch.arange(n) % 7 > 0",
    ],
)
def test_memory_grows_with_the_tokens(setting: str) -> None:
    """Up to 2¹⁵ tokens, where a table of booleans alone would be 1 GiB, and one of float32 for two heads 8."""
    lengths = (2**12, 2**15)
    short, long = peaks(setting, *lengths)
    assert math.log(long / short) / math.log(lengths[1] / lengths[0]) <= 1.1
    assert long < 400
