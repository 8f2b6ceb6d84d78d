"""Blocks: what the reference computes with the pattern as a mask, in memory that does not hold the table."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel._validate import build_problem
from matchkernel.engines import _flex, _gathered_fused, blocks

sys.path.insert(0, str(Path(__file__).parent))
import kernels_under_test
from oracle import draw, inputs
from peak import measurable, peaks

Tensor = torch.Tensor
N, BLOCK = 29, 4
SIZE = math.ceil(N / BLOCK)
KERNELS = kernels_under_test.make()

TABLES: dict[str, Tensor] = {
    # Rows of many lengths, one of them empty, and a column that nobody meets.
    "scattered": draw(SIZE, SIZE, seed=5) > 0.3,
    "bigbird": mk.BlockPattern.bigbird(
        N, BLOCK, generator=torch.Generator().manual_seed(0), global_blocks=1, random=1
    ).table,
    "causal": mk.BlockPattern.causal(N, BLOCK).table,
    "per head": draw(3, SIZE, SIZE, seed=6) > 0.5,
}
TABLES["scattered"][2] = False
TABLES["scattered"][:, 5] = False
TABLES["per head"][1, 3] = False

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 6},
    "two-sided window": {"window": (5, 2)},
    "key mask": {"mask": draw(2, 1, 1, N, seed=7) > -0.5, "causal": True},
    "mask per head": {"mask": draw(3, N, N, seed=8) > -0.5},
    "float mask": {"mask": torch.where(draw(2, 1, N, N, seed=9) > 1.0, -math.inf, draw(N, N, seed=10))},
    "own positions": {"causal": True, "query_position": torch.arange(N).flip(0) * 2, "key_position": torch.arange(N)},
    "positions of each": {"causal": True, "key_position": torch.stack([torch.arange(N), 3 + torch.arange(N)])[:, None]},
}
NORMALIZERS: dict[str, Any] = {
    "softmax": lambda: mk.Softmax(torch.tensor([0.5, 1.0, 2.0])),
    "sink": lambda: mk.SinkSoftmax(torch.nn.Parameter(torch.tensor([0.1, 0.2, -0.3]).double())),
    "scalable": lambda: mk.ScalableSoftmax(torch.nn.Parameter(torch.tensor(0.6).double())),
    "sigmoid": mk.Sigmoid,
    "sparsemax": mk.Sparsemax,
}


def _with(mask: Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    """The setting, with the pattern in its mask."""
    own = setting.get("mask")
    if own is None:
        both = mask
    elif own.dtype == torch.bool:
        both = own & mask
    else:
        both = torch.where(mask, own, -math.inf)
    return {**setting, "mask": both}


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = draw(*out.shape, seed=11).to(out.dtype)
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(leaves, torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True), strict=True)
    ]


# Each table with each setting and each normaliser, and not every three of them together.
NAMES = list(NORMALIZERS)
CASES = [
    (table, setting, NAMES[(i + 2 * j + more) % len(NAMES)])
    for i, table in enumerate(TABLES)
    for j, setting in enumerate(SETTINGS)
    for more in (0, 1)
]


@pytest.mark.parametrize(("table", "setting", "normalizer"), CASES)
def test_it_is_the_reference_with_the_pattern_as_a_mask(table: str, setting: str, normalizer: str) -> None:
    pattern = mk.BlockPattern(TABLES[table], BLOCK)
    norm = NORMALIZERS[normalizer]()
    given, same = SETTINGS[setting], _with(pattern.mask(N), SETTINGS[setting])
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, n=N, m=N, d=4, width=3))
    leaves = [q, k, v, *norm.parameters()]
    out = mk.attend(q, k, v, normalizer=norm, engine=mk.Blocks(pattern), **given)
    expected = mk.attend(q, k, v, normalizer=norm, engine="reference", **same)
    assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_any_kernel(name: str) -> None:
    kernel = KERNELS[name].double()
    pattern = mk.BlockPattern(TABLES["scattered"], BLOCK)
    q, k, v = (x.requires_grad_() for x in inputs(2, 2, n=N, m=N, d=6, width=3))
    leaves = [q, k, v, *(x for x in kernel.parameters() if x.requires_grad)]
    expected = mk.attend(q, k, v, kernel, causal=True, mask=pattern.mask(N), engine="reference")
    out = mk.attend(q, k, v, kernel, causal=True, engine=mk.Blocks(pattern))
    assert_close(out, expected, rtol=1e-8, atol=1e-9)
    for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("normalizer", [mk.Sigmoid(), mk.SinkSoftmax(0.3), mk.Softmax(0.6)])
@pytest.mark.parametrize("kernel", [mk.Gaussian(1.5), mk.Softcap(mk.Gaussian(1.5), 2.0)])
def test_a_term_of_the_query_alone_stays_where_it_is_seen(kernel: mk.MatchKernel, normalizer: mk.Normalizer) -> None:
    pattern = mk.BlockPattern(TABLES["scattered"], BLOCK)
    q, k, v = inputs(2, 3, n=N, m=N)
    expected = mk.attend(q, k, v, kernel, normalizer=normalizer, mask=pattern.mask(N), engine="reference")
    assert_close(mk.attend(q, k, v, kernel, normalizer=normalizer, engine=mk.Blocks(pattern)), expected)
    everything = mk.attend(q, k, v, kernel, normalizer=normalizer, engine="reference")
    assert_close(mk.attend(q, k, v, kernel, normalizer=normalizer, engine=mk.TopK(N)), everything)


@pytest.mark.parametrize(("n", "m"), [(5, 18), (18, 5), (1, 1), (8, 8), (4, 9)])
@pytest.mark.parametrize("kernel", [mk.ScaledDot, lambda: mk.Laplacian(1.5)])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_other_lengths(n: int, m: int, kernel: Any, block: int) -> None:
    table = draw(math.ceil(n / block), math.ceil(m / block), seed=12) > -0.4
    pattern = mk.BlockPattern(table, block)
    q, k, v = inputs(2, n=n, m=m)
    for causal in (False, True):
        out = mk.attend(q, k, v, kernel(), causal=causal, engine=mk.Blocks(pattern))
        expected = mk.attend(q, k, v, kernel(), causal=causal, mask=pattern.mask(n, m), engine="reference")
        assert_close(out, expected)


def test_grouped_heads_missing_and_broadcast_dimensions() -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    for query, key in (((), ()), ((6,), (3,)), ((2, 6), (2, 2)), ((2, 1, 3), (4, 1)), ((3,), ())):
        q = draw(*query, N, 4, seed=1).requires_grad_()
        k, v = (draw(*key, N, width, seed=width).requires_grad_() for width in (4, 3))
        for kernel in (mk.ScaledDot(), mk.Laplacian(1.5)):
            out = mk.attend(q, k, v, kernel, causal=True, engine=mk.Blocks(pattern))
            expected = mk.attend(q, k, v, kernel, causal=True, mask=pattern.mask(N), engine="reference")
            assert_close(out, expected)
            for found, wanted in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
                assert_close(found, wanted)


@pytest.mark.parametrize("kernel", [mk.ScaledDot, lambda: mk.Laplacian(1.5)])
@pytest.mark.parametrize("normalizer", [mk.Softmax, lambda: mk.SinkSoftmax(0.5)])
def test_derivatives_of_both_orders(kernel: Any, normalizer: Any) -> None:
    pattern = mk.BlockPattern(torch.tensor([[True, False, True], [False] * 3, [True, True, False]]), 2)
    q, k, v = (x.requires_grad_() for x in inputs(n=5, m=5, d=2, width=1))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return mk.attend(q, k, v, kernel(), normalizer=normalizer(), causal=True, engine=mk.Blocks(pattern))

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_a_learned_mask_gets_its_gradient() -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    q, k, v = inputs(2, 3, n=N, m=N)
    mask = draw(3, N, 1, seed=4).expand(3, N, N).clone().requires_grad_()
    out = mk.attend(q, k, v, mask=mask, causal=True, engine=mk.Blocks(pattern))
    expected = mk.attend(q, k, v, mask=torch.where(pattern.mask(N), mask, -math.inf), causal=True, engine="reference")
    assert_close(out, expected)
    assert_close(gradients(out, [mask])[0], gradients(expected, [mask])[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", [mk.ScaledDot, lambda: mk.Laplacian(1.5)])
def test_narrow_types(dtype: torch.dtype, kernel: Any) -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, n=N, m=N, dtype=dtype))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = mk.attend(q, k, v, kernel(), causal=True, engine=mk.Blocks(pattern))
    exact = mk.attend(*wide, kernel(), causal=True, mask=pattern.mask(N), engine="reference")
    assert out.dtype == dtype
    budget = 8 * torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() <= budget * exact.abs().max()
    for found, wanted in zip(gradients(out, [q, k, v]), gradients(exact, wide), strict=True):
        assert (found.double() - wanted).abs().max() <= 4 * budget * wanted.abs().max()


@pytest.mark.parametrize("kernel", [mk.ScaledDot, lambda: mk.Laplacian(1.5)])
def test_what_nobody_sees_may_be_nan(kernel: Any) -> None:
    """A key outside the pattern, one that causal order hides within it, and a query without keys."""
    pattern = mk.BlockPattern(torch.tensor([[True, True, False], [True, False, False], [False] * 3]), 3)
    q, k, v = inputs(2, n=9, m=9)
    seen = (pattern.mask(9) & torch.ones(9, 9, dtype=torch.bool).tril()).any(0)
    assert seen.tolist() == [True] * 3 + [False] * 6
    poisoned = [torch.where(seen[:, None], x, math.nan).requires_grad_() for x in (k, v)]
    blind = q.clone()
    blind[:, 6:] = math.nan
    blind.requires_grad_()
    out = mk.attend(blind, *poisoned, kernel(), causal=True, engine=mk.Blocks(pattern))
    expected = mk.attend(q, k, v, kernel(), causal=True, mask=pattern.mask(9), engine="reference")
    assert_close(out, expected)
    assert (out[:, 6:] == 0).all()
    shares = gradients(out, [blind, *poisoned])
    assert all(bool(x.isfinite().all()) for x in shares)
    assert (shares[1][:, 3:] == 0).all() and (shares[0][:, 6:] == 0).all()


def test_an_empty_pattern_gives_zeros() -> None:
    pattern = mk.BlockPattern(torch.zeros(2, 2, dtype=torch.bool), 4)
    q, k, v = (x.requires_grad_() for x in inputs(2, n=8, m=8))
    for kernel in (mk.ScaledDot(), mk.Laplacian(1.5)):
        out = mk.attend(q, k, v, kernel, engine=mk.Blocks(pattern))
        assert (out == 0).all()
        assert all((x == 0).all() for x in gradients(out, [q, k, v]))


def test_small_budgets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = mk.BlockPattern(TABLES["per head"], BLOCK)
    q, k, v = inputs(2, 3, n=N, m=N)
    expected = mk.attend(q, k, v, engine=mk.Blocks(pattern))
    monkeypatch.setattr(blocks, "PAIRS", 1)
    assert_close(mk.attend(q, k, v, engine=mk.Blocks(pattern)), expected)


def test_inputs_are_not_written_to_and_need_not_be_contiguous() -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    q, k, v = (x.mT.contiguous().mT for x in inputs(2, 3, n=N, m=N))
    copies = [x.clone() for x in (q, k, v)]
    out = mk.attend(q, k, v, engine=mk.Blocks(pattern))
    assert_close(out, mk.attend(*copies, mask=pattern.mask(N), engine="reference"))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


def test_the_inner_products_go_through_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    problem = build_problem(
        *inputs(2, n=N, m=N), mk.ScaledDot(), mask=None, causal=True, window=None, normalizer=None,
        query_position=None, key_position=None,
    )  # fmt: skip
    assert _gathered_fused.takes(problem)
    monkeypatch.setattr(blocks, "attend_gathered", None)
    mk.attend(*inputs(2, n=N, m=N), mk.Gaussian(2.0), engine=mk.Blocks(pattern))
    mk.attend(*inputs(2, n=N, m=N), mk.ALiBi(2), causal=True, engine=mk.Blocks(pattern))
    with pytest.raises(TypeError):
        mk.attend(*inputs(2, n=N, m=N), mk.Laplacian(1.0), engine=mk.Blocks(pattern))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("setting", ["plain", "causal", "window", "two-sided window", "own positions"])
@pytest.mark.parametrize("table", ["bigbird", "per head"])
def test_what_flex_attention_is_given_is_the_pattern(table: str, setting: str) -> None:
    """The path of CUDA, with the arithmetic that torch has for any device; its backward exists on CUDA alone."""
    pattern = mk.BlockPattern(TABLES[table] | torch.eye(SIZE, dtype=torch.bool), BLOCK)
    q, k, v = inputs(2, 3, n=N, m=N, d=16, width=16, dtype=torch.float32)
    given = {"window": None, "causal": False, "query_position": None, "key_position": None, **SETTINGS[setting]}
    problem = build_problem(q, k, v, mk.Gaussian(3.0), mask=None, normalizer=mk.Softmax(0.7), **given)
    engine = mk.Blocks(pattern)
    assert _flex.fits(problem) and not _flex.takes(problem, 128)
    plan = blocks.Plan.of(problem, BLOCK, engine._chunks(problem))
    visible, _ = plan.census()
    out = _flex.attend(problem, plan, pattern.table, visible, q, k, v)
    expected = mk.attend(
        q, k, v, mk.Gaussian(3.0), normalizer=mk.Softmax(0.7), engine="reference",
        **_with(pattern.mask(N), SETTINGS[setting]),
    )  # fmt: skip
    sees = (visible > 0).expand(2, 3, N)
    assert_close(out[sees], expected[sees], rtol=1e-4, atol=1e-5)


def test_flex_attention_takes_no_masks_no_sinks_and_no_other_kernels() -> None:
    def fits(kernel: Any = None, normalizer: Any = None, mask: Any = None) -> bool:
        return _flex.fits(
            build_problem(
                *inputs(2, n=N, m=N),
                kernel,
                mask=mask,
                causal=True,
                window=None,
                normalizer=normalizer,
                query_position=None,
                key_position=None,
            )
        )

    assert fits() and fits(mk.ALiBi(2))
    assert not fits(mk.Laplacian(1.0))
    assert not fits(normalizer=mk.SinkSoftmax())
    assert not fits(normalizer=mk.Sparsemax())
    assert not fits(mask=torch.ones(N, dtype=torch.bool))


def test_what_is_refused() -> None:
    pattern = mk.BlockPattern(TABLES["bigbird"], BLOCK)
    q, k, v = inputs(2, n=N, m=N)
    engine, three = mk.Blocks(pattern), mk.BlockPattern(TABLES["per head"], BLOCK)
    cases: list[tuple[str, Any]] = [
        ("does not fit 28 queries", lambda: mk.attend(q[:, 1:-4], k, v, engine=mk.Blocks(pattern))),
        ("dropout", lambda: mk.attend(q, k, v, dropout=0.5, engine=engine)),
        ("is signed", lambda: mk.attend(q, k, v, mk.FourierFeatures(4, 6, 1.0) + mk.Dot(), engine=engine)),
        ("nothing to compute", lambda: mk.attend(q, k, v[..., :0], engine=engine)),
        ("for 3 heads, and there are 2", lambda: mk.attend(q, k, v, engine=mk.Blocks(three))),
        ("function transforms", lambda: torch.func.vmap(lambda x: mk.attend(x, k[0], v[0], engine=engine))(q)),
    ]  # fmt: skip
    for said, call in cases[1:]:
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(ValueError, match="does not fit 24 queries and 29 keys, which make 6 × 8 blocks of 4"):
        cases[0][1]()
    with pytest.raises(TypeError, match="expected a BlockPattern"):
        mk.Blocks(TABLES["bigbird"])  # type: ignore[arg-type]


def test_explain_says_that_pairs_are_left_out() -> None:
    pattern = mk.BlockPattern.window(64, 16, 1)
    q = draw(2, 64, 8)
    explanation = mk.explain(q, q, q, causal=True, engine=mk.Blocks(pattern))
    assert explanation.engine == "blocks" and not explanation.exact
    assert "exact for the pairs of its pattern, 0.438 of all; others are not seen" in str(explanation)
    assert "approximate" in str(explanation)
    assert explanation.flops == 7 * 16 * 16 * 2 * (2 * 8 + 2 * 8)


@measurable
@pytest.mark.parametrize("kernel", ["None", "mk.Laplacian(1.0)"])
def test_memory_grows_with_the_length_and_not_with_its_square(kernel: str) -> None:
    engine = "mk.Blocks(mk.BlockPattern.bigbird(n, 64, generator=generator, random=1))"
    short, long = peaks(f"engine={engine}, kernel={kernel}, causal=True", 1024, 4096, heads=4, width=32)
    assert math.log(long / short) / math.log(4) <= 1.1
