"""Mistakes that attention code has made before, ours or others'; each test is named after its trap."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _torch_private
from matchkernel.masks import from_documents

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor
ENGINES = ["reference", "fused"]


def test_trap_unequal_widths_fall_out_of_the_fused_kernel() -> None:
    """torch would run its n² kernel; what we hand over is padded, and is given torch's answer."""
    q, k, v = inputs(2, 3, n=16, m=16, d=16, width=8)
    assert _torch_private.chosen_backend(q, k, v, None, False) == 0
    assert _torch_private.chosen_backend(q, k, pad(v, (0, 8)), None, False) > 0
    assert_close(mk.attend(q, k, v, engine="fused"), sdpa(q, k, v))


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_the_default_scale_under_another_width(engine: str) -> None:
    """The scale is 1/√d of the query as given: not of the width that padding or a sum of kernels makes."""
    q, k, v = inputs(n=5, m=7, d=4, width=16)
    assert_close(mk.attend(q, k, v, engine=engine), by_loop(q, k, v))
    cosine = torch.nn.functional.cosine_similarity(q[:, None], k[None], dim=-1)
    for kernel, scores in (
        (mk.Dot() + mk.Cosine(), q @ k.mT + cosine),
        (mk.ScaledDot() + mk.Cosine(), q @ k.mT / 2 + cosine),
        (mk.Dot(), q @ k.mT),
    ):
        assert_close(mk.attend(q, k, v, kernel, engine=engine), scores.softmax(-1) @ v)


@pytest.mark.parametrize("width", [4, 8])
def test_trap_a_query_term_adds_a_coordinate_and_no_scale(width: int) -> None:
    """A term that the sink sees makes the encoding one wider; a scale that depends on the width must not follow."""

    class Shifted(mk.ScaledDot):
        def query_term(self, q: Tensor, position: Tensor) -> Tensor:
            return q.sum(-1)

    q, k, v = inputs(n=5, m=7, d=4, width=width)
    scores = q @ k.mT / 2 + q.sum(-1, keepdim=True)
    for factor in (1.0, -2.0):
        total = (factor * scores).exp()
        truth = total / (1 + total.sum(-1, keepdim=True)) @ v
        for engine in ENGINES:
            ours = mk.attend(q, k, v, factor * Shifted(), normalizer=mk.SinkSoftmax(), engine=engine)
            assert_close(ours, truth)
            plain = mk.attend(q, k, v, factor * Shifted(), engine=engine)
            assert_close(plain, (factor * scores).softmax(-1) @ v)
        assert_close(mk.scores(q, k, factor * Shifted()), factor * scores)


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_the_query_terms_of_a_sum_are_all_seen(engine: str) -> None:
    class Shifted(mk.Dot):
        def query_term(self, q: Tensor, position: Tensor) -> Tensor:
            return q.sum(-1)

    class Squared(mk.ScaledDot):
        def query_term(self, q: Tensor, position: Tensor) -> Tensor:
            return -q.square().sum(-1)

    q, k, v = inputs(n=5, m=7, d=4, width=3)
    for kernel, dots in ((Shifted() + Squared(), 1.5), (Shifted() + mk.ScaledDot() + (Squared() + mk.Dot()), 3.0)):
        weight = (dots * (q @ k.mT) + (q - q.square()).sum(-1, keepdim=True)).exp()
        ours = mk.attend(q, k, v, kernel, normalizer=mk.SinkSoftmax(), engine=engine)
        assert_close(ours, weight / (1 + weight.sum(-1, keepdim=True)) @ v)


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_nan_in_a_query_that_sees_nothing(engine: str) -> None:
    """More queries than keys under causal order: the first see nothing, and nobody may see them."""
    q, k, v = inputs(2, n=6, m=2)
    q[:, :4] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for setting in ({}, {"mask": torch.tensor([True, True])}):
        out = mk.attend(*leaves, causal=True, engine=engine, **setting)
        assert torch.equal(out[:, :4], torch.zeros(2, 4, 3, dtype=torch.float64))
        grads = torch.autograd.grad(out.sin().sum(), leaves)
        assert all(bool(g.isfinite().all()) for g in grads)
        assert torch.equal(grads[0][:, :4], torch.zeros(2, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("keys", [1, 2, 3, 15, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_trap_a_nan_in_a_query_is_not_swallowed(engine: str, causal: bool, keys: int) -> None:
    """With fewer keys than a register has lanes, torch takes a row of NaN scores for one that sees nothing: zeros."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        q, k, v = (x.to(dtype) for x in inputs(4, n=keys, m=keys))
        q[2, -1, 1] = math.nan
        k[3, 0, 1] = math.nan
        raw = sdpa(*(pad(x, (0, 4 - x.shape[-1]))[None] for x in (q, k, v)))
        assert keys > 1 or not bool(raw[0, 2, -1].isnan().any())
        for leaves in ((q, k, v), [x.clone().requires_grad_() for x in (q, k, v)]):
            out = mk.attend(*leaves, causal=causal, engine=engine)
            assert bool(out[2, -1].isnan().all()) and bool(out[3].isnan().all())
            assert bool(out[:2].isfinite().all()) and bool(out[2, :-1].isfinite().all())
            masked = mk.attend(*leaves, causal=causal, engine=engine, mask=torch.arange(keys) > 0)
            assert bool(masked[3].isfinite().all()) and bool(masked[2, -1].isnan().all()) is (keys > 1)


def test_trap_no_double_backward_and_no_forward_mode() -> None:
    """torch's fused kernel has neither."""
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, n=4, m=4, d=4, width=4))
    out, _ = _torch_private.forward(q, k, v, None, False, 0.5)
    (slope,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not implemented|does not require grad"):
        torch.autograd.grad(slope.sum(), q)
    ours = mk.attend(q, k, v, engine="fused")
    (slope,) = torch.autograd.grad(ours.sin().sum(), q, create_graph=True)
    bend = torch.autograd.grad(slope.sin().sum(), q)[0]
    dense = torch.autograd.grad(mk.attend(q, k, v, engine="reference").sin().sum(), q, create_graph=True)[0]
    assert_close(bend, torch.autograd.grad(dense.sin().sum(), q)[0])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"dropout": 0.1}, "dropout leaves torch's fused kernel"),
        ({"mask": torch.zeros(4, 4, requires_grad=True)}, "a mask that needs a gradient leaves torch's fused kernel"),
    ],
)
def test_trap_what_leaves_the_fused_path_is_told(setting: dict[str, Any], why: str) -> None:
    q, k, v = inputs(2, 3, n=4, m=4)
    told = mk.explain(q, k, v, **setting)
    assert told.engine == "reference" and why in told.reason
    with pytest.raises(ValueError, match=why):
        mk.attend(q, k, v, engine="fused", **setting)


def test_trap_five_dimensions_leave_torchs_fused_path_and_not_ours() -> None:
    q, k, v = inputs(2, 2, 3, n=8, m=8, d=4, width=4)
    assert mk.explain(q, k, v).engine == "fused"
    assert_close(mk.attend(q, k, v, engine="fused"), sdpa(q, k, v))


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_the_log_sum_exp_of_an_empty_row(engine: str) -> None:
    """−inf − (−inf) is NaN: where two parts merge, and where a sink weighs a row that sees nothing."""
    q, k, v = inputs(2, n=4, m=4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    for normalizer in (mk.Softmax(), mk.SinkSoftmax(-2.0), mk.ScalableSoftmax()):
        for causal in (False, True):
            for given in (mask, torch.where(mask, 0.0, -math.inf)):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                out = mk.attend(*leaves, mask=given, causal=causal, normalizer=normalizer, engine=engine)
                assert torch.equal(out[:, 1], torch.zeros(2, 3, dtype=torch.float64))
                grads = torch.autograd.grad(out.sin().sum(), leaves)
                assert all(bool(g.isfinite().all()) for g in grads)
                assert torch.equal(grads[0][:, 1], torch.zeros(2, 4, dtype=torch.float64))


def test_trap_a_window_one_key_too_wide() -> None:
    q, k, _ = inputs(n=9, m=9)
    for w in (1, 2, 4):
        assert int((mk.weights(q, k, causal=True, window=w)[8] > 0).sum()) == w
        assert int((mk.weights(q, k, window=w)[4] > 0).sum()) == 2 * w - 1


@pytest.mark.parametrize("factor", [-0.5, 0.0])
@pytest.mark.parametrize("n", [1, 3, 6, 9])
def test_trap_a_negative_or_zero_scale_under_causal_order(factor: float, n: int) -> None:
    """torch multiplies the −inf of its causal order by the scale: the future comes in as +inf, or NaN as 0 · inf."""
    q, k, v = inputs(2, 3, n=n, m=6, d=4, width=4)
    if n == 6:
        assert bool(sdpa(q, k, v, is_causal=True, scale=factor).isnan().any())
    for kernel, setting in ((factor * mk.Dot(), {}), (mk.Dot(), {"kernel_tensor": True})):
        kernel = kernel if not setting else torch.tensor(factor, dtype=torch.float64) * kernel
        ours = mk.attend(q, k, v, kernel, causal=True, engine="fused")
        for b in range(2):
            for h in range(3):
                truth = by_loop(
                    q[b, h], k[b, h], v[b, h], lambda x, y: factor * sum(a * c for a, c in zip(x, y, strict=True)),
                    allowed=lambda i, j: j <= i + 6 - n,
                )  # fmt: skip
                assert_close(ours[b, h], truth)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_trap_nan_under_a_mask(bad: float, dtype: torch.dtype, engine: str) -> None:
    """Weight 0 times NaN is NaN: torch lets padding into the output."""
    q, k, v = inputs(2, 3, n=4, m=6, d=4, width=4, dtype=dtype)
    keep = torch.arange(6) < 4
    poisoned = k.clone(), v.clone()
    poisoned[0][..., 4:, :], poisoned[1][..., 4:, :] = bad, bad
    assert bool(sdpa(q, *poisoned, attn_mask=keep.expand(4, 6)).isnan().any())
    for mask in (keep, torch.where(keep, 0.0, -math.inf)):
        leaves = [x.clone().requires_grad_() for x in (q, *poisoned)]
        ours = mk.attend(*leaves, mask=mask, engine=engine)
        clean = mk.attend(q, k[..., :4, :], v[..., :4, :], engine=engine)
        eps = torch.finfo(dtype).eps
        assert_close(ours, clean, rtol=2 * eps, atol=2 * eps)
        for grad in torch.autograd.grad(ours.sum(), leaves):
            assert bool(grad.isfinite().all())


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_nan_in_the_future(engine: str) -> None:
    """Packed documents: a NaN in one stays in it; and the last key of a causal pass spoils only the last query."""
    q, k, v = inputs(2, n=6, m=6)
    documents = from_documents(torch.tensor([0, 0, 0, 1, 1, 1]))
    k[:, 5], v[:, 5] = math.nan, math.nan
    # Some query of document 1 sees that key, so the table holds NaN there; document 0 must not.
    out = mk.attend(q, k, v, mask=documents, engine="reference")
    assert bool(out[:, 3:].isnan().all())
    hidden = documents & (torch.arange(6) != 5)
    ours = mk.attend(q, k, v, mask=hidden, engine=engine)
    for b in range(2):
        assert_close(ours[b], by_loop(q[b], k[b], v[b], allowed=lambda i, j: bool(hidden[i, j])))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trap_half_precision(dtype: torch.dtype, engine: str) -> None:
    """A thousand equal weights of 1/1000: a running sum in bfloat16 stops at 256."""
    q, k = (torch.zeros(1, n, 8, dtype=dtype) for n in (1, 1000))
    v = torch.ones(1, 1000, 8, dtype=dtype)
    assert_close(mk.attend(q, k, v, engine=engine), torch.ones(1, 1, 8, dtype=dtype), rtol=0.0, atol=0.0)
    sink = mk.attend(q, k, v, normalizer=mk.SinkSoftmax(math.log(1000.0)), engine=engine)
    assert_close(sink, torch.full((1, 1, 8), 0.5, dtype=dtype), rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [mk.ScaledDot(), mk.Cosine(0.1), mk.Dot() + mk.Cosine(), mk.Gaussian(2.0)], ids=repr)
def test_trap_half_precision_costs_its_rounding_and_no_more(
    kernel: mk.MatchKernel, dtype: torch.dtype, engine: str
) -> None:
    q, k, v = inputs(2, 3, n=40, m=50, d=16, width=16, dtype=dtype)
    truth = mk.attend(q.double(), k.double(), v.double(), kernel, engine="reference")
    low = kernel(q, k)
    plain = ((low - low.amax(-1, keepdim=True)).softmax(-1) @ v).double()
    ours = mk.attend(q, k, v, kernel, engine=engine).double()
    budget = (plain - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
    assert (ours - truth).abs().max() <= 1.5 * budget


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [mk.ScaledDot(), mk.Cosine(0.1), mk.Dot() + mk.Cosine(), mk.Gaussian(2.0)], ids=repr)
def test_trap_half_precision_in_the_reference_is_rounded_once(kernel: mk.MatchKernel, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, n=40, m=50, d=16, width=16, dtype=dtype)
    truth = mk.attend(q.double(), k.double(), v.double(), kernel, engine="reference")
    ours = mk.attend(q, k, v, kernel, engine="reference")
    # Half a step of rounding, and a hair for the float32 arithmetic before it.
    step = torch.finfo(dtype).eps * truth.abs().clamp_min(torch.finfo(dtype).tiny)
    assert bool(((ours.double() - truth).abs() <= 0.5 * step + 1e-5).all())
    assert_close(mk.weights(q, k, kernel).double(), mk.weights(q.double(), k.double(), kernel), rtol=6e-3, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_scores_far_apart(engine: str) -> None:
    """exp(−104) is a denormal float32 and exp(−1000) is 0: neither NaN nor a row without weight."""
    q = torch.tensor([[1.0]])
    for bottom in (-104.0, -1000.0, -3e38):
        k = torch.tensor([[bottom], [0.0]])
        v = torch.tensor([[5.0], [7.0]])
        assert mk.attend(q, k, v, mk.Dot(), engine=engine).item() == 7.0
        # And a row in which all scores are low is a row like any other.
        both = mk.attend(q, torch.tensor([[bottom], [bottom]]), v, mk.Dot(), engine=engine)
        assert both.item() == 6.0


@pytest.mark.parametrize("engine", ENGINES)
def test_trap_uninitialised_memory(engine: str) -> None:
    """torch.empty filled with NaN: what is not written must not be read."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for n, m in ((5, 7), (7, 5), (6, 6)):
            leaves = [x.requires_grad_() for x in inputs(2, 3, n=n, m=m)]
            for causal in (False, True):
                out = mk.attend(*leaves, causal=causal, normalizer=mk.SinkSoftmax(), engine=engine)
                for x in (out, *torch.autograd.grad(out.sum(), leaves)):
                    assert bool(x.isfinite().all())
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_trap_a_gradient_without_rows() -> None:
    """The gradient of a sum is one number, expanded: torch's fused backward reads it as if it were a table."""
    leaves = [x.requires_grad_() for x in inputs(2, 3, n=6, m=6)]
    results = [
        torch.autograd.grad(mk.attend(*leaves, engine=engine).sum(), leaves) for engine in ("fused", "reference")
    ]
    for ours, truth in zip(*results, strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("kernel", [mk.Cosine(), mk.ScaledDot(), mk.Dot() + mk.Cosine(), mk.Gaussian(0.5)], ids=repr)
@pytest.mark.parametrize("engine", ENGINES)
def test_trap_the_gradient_at_equal_points_and_at_zero(kernel: mk.MatchKernel, engine: str) -> None:
    for value in (torch.zeros(2, 4, 4, dtype=torch.float64), draw(2, 4, 4)):
        q, k = value.clone().requires_grad_(), value.clone().requires_grad_()
        out = mk.attend(q, k, draw(2, 4, 3, seed=4), kernel, engine=engine)
        slopes = torch.autograd.grad(out.sin().sum(), (q, k), create_graph=True)
        bends = torch.autograd.grad(sum(g.sin().sum() for g in slopes), (q, k))
        assert all(bool(x.isfinite().all()) for x in (*slopes, *bends))
