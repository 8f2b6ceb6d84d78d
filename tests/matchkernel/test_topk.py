"""TopK: the keys that a sort in plain Python chooses, and then what the reference computes among them."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import topk

sys.path.insert(0, str(Path(__file__).parent))
import kernels_under_test
from oracle import draw, inputs
from peak import measurable, peaks
from test_blocks import gradients

Tensor = torch.Tensor
N, M = 13, 17
KERNELS = kernels_under_test.make()

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "key mask": {"mask": draw(2, 1, 1, M, seed=7) > -0.5, "causal": True},
    "mask per head": {"mask": draw(3, N, M, seed=8) > 0.5},
    "float mask": {"mask": torch.where(draw(2, 1, N, M, seed=9) > 1.0, -math.inf, draw(N, M, seed=10))},
    "own positions": {"causal": True, "query_position": torch.arange(N).flip(0) * 2, "key_position": torch.arange(M)},
}


def chosen(q: Tensor, k: Tensor, by: mk.MatchKernel, count: int, setting: dict[str, Any]) -> Tensor:
    """(…, n, m) bool: each row's `count` highest scores that are not −∞, of equal ones the earlier, row by row."""
    scores = mk.scores(q, k, by, **setting)
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for row, marks in zip(scores.reshape(-1, scores.shape[-1]), mask.view(-1, scores.shape[-1]), strict=True):
        order = sorted(range(len(row)), key=lambda j: (-row[j].item(), j))
        for j in order[:count]:
            marks[j] = row[j] > -math.inf
    return mask


def _within(mask: Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    own = setting.get("mask")
    floating = own is not None and own.dtype != torch.bool
    return {**setting, "mask": torch.where(mask, own, -math.inf) if floating and own is not None else mask}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("count", [1, 4, M])
@pytest.mark.parametrize("by", [None, mk.Gaussian(1.5)])
def test_it_is_the_reference_among_the_chosen(count: int, setting: str, by: mk.MatchKernel | None) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 3, n=N, m=M))
    given = SETTINGS[setting]
    mask = chosen(q, k, by or mk.ScaledDot(), count, given)
    if count == M and by is None:
        everything = mk.attend(q, k, v, engine="reference", **given)
        assert_close(mk.attend(q, k, v, engine="reference", **_within(mask, given)), everything)
    out = mk.attend(q, k, v, engine=mk.TopK(count, by), **given)
    expected = mk.attend(q, k, v, engine="reference", **_within(mask, given))
    assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for found, wanted in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "normalizer",
    [
        mk.Softmax(torch.tensor([0.5, 1.0, 2.0])),
        mk.SinkSoftmax(0.4),
        mk.ScalableSoftmax(0.7),
        mk.Sigmoid(),
        mk.Sparsemax(),
    ],
)
def test_any_normaliser(normalizer: mk.Normalizer) -> None:
    """Scalable softmax and sigmoid count the keys that are chosen."""
    q, k, v = inputs(2, 3, n=N, m=M)
    mask = chosen(q, k, mk.ScaledDot(), 4, {"causal": True})
    out = mk.attend(q, k, v, normalizer=normalizer, causal=True, engine=mk.TopK(4))
    assert_close(out, mk.attend(q, k, v, normalizer=normalizer, mask=mask, engine="reference"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_any_kernel_chooses_and_is_chosen_for(name: str) -> None:
    kernel = KERNELS[name].double()
    q, k, v = (x.requires_grad_() for x in inputs(2, 2, n=9, m=9, d=6, width=3))
    leaves = [q, k, v, *(x for x in kernel.parameters() if x.requires_grad)]
    for by in (None, mk.Dot()):
        ranks = kernel if by is None else by
        if by is None and topk.why_no_score(kernel):
            with pytest.raises(ValueError, match="is signed"):
                mk.attend(q, k, v, kernel, engine=mk.TopK(3))
            continue
        mask = chosen(q, k, ranks, 3, {"causal": True})
        expected = mk.attend(q, k, v, kernel, mask=mask, causal=True, engine="reference")
        out = mk.attend(q, k, v, kernel, causal=True, engine=mk.TopK(3, by))
        assert_close(out, expected, rtol=1e-8, atol=1e-9)
        for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
            assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_of_equal_scores_the_earlier_key_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through every size of tile: what was kept of earlier tiles comes in the order of the scores."""
    score = torch.tensor([[2.0, 1.0, 1.0, 3.0, 1.0, 0.0, 1.0, 2.0, 3.0, 1.0]])
    q, k, v = torch.ones(1, 1), score.mT, torch.eye(10)
    expected = {1: [3], 2: [3, 8], 3: [0, 3, 8], 4: [0, 3, 7, 8], 5: [0, 1, 3, 7, 8], 7: [0, 1, 2, 3, 4, 7, 8]}
    for tile in (1, 2, 3, 4, 7, 10):
        monkeypatch.setattr(topk, "TILE", tile)
        for count, keys in expected.items():
            out = mk.attend(q, k, v, mk.Dot(), engine=mk.TopK(count))
            assert (out[0] > 0).nonzero().flatten().tolist() == keys


@pytest.mark.parametrize("tile", [1, 3, 5])
@pytest.mark.parametrize("budget", [1, 200])
def test_small_tiles_and_budgets_change_nothing(tile: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 3, n=N, m=M)
    for setting in SETTINGS.values():
        expected = mk.attend(q, k, v, engine=mk.TopK(4), **setting)
        with monkeypatch.context() as patched:
            patched.setattr(topk, "TILE", tile)
            patched.setattr(topk, "SCORES", budget)
            patched.setattr(topk, "NUMBERS", budget)
            assert_close(mk.attend(q, k, v, engine=mk.TopK(4), **setting), expected)


def test_derivatives_of_both_orders() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(n=4, m=5, d=2, width=1))
    for kernel in (mk.ScaledDot(), mk.Laplacian(1.0)):

        def run(q: Tensor, k: Tensor, v: Tensor, kernel: mk.MatchKernel = kernel) -> Any:
            return mk.attend(q, k, v, kernel, causal=True, engine=mk.TopK(2))

        assert torch.autograd.gradcheck(run, (q, k, v))
        assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_gradients_reach_the_kernel_the_normaliser_and_the_mask_but_not_the_chooser() -> None:
    q, k, v = inputs(2, 3, n=N, m=M)
    kernel, by = mk.Additive(4, 3).double(), mk.Additive(4, 2).double()
    normalizer = mk.SinkSoftmax(torch.nn.Parameter(torch.tensor(0.3).double()))
    mask = draw(N, M, seed=3).requires_grad_()
    leaves = [*kernel.parameters(), *normalizer.parameters(), mask]
    out = mk.attend(q, k, v, kernel, normalizer=normalizer, mask=mask, engine=mk.TopK(4, by))
    best = chosen(q, k, by, 4, {"mask": mask.detach()})
    expected = mk.attend(
        q, k, v, kernel, normalizer=normalizer, mask=torch.where(best, mask, -math.inf), engine="reference"
    )
    assert_close(out, expected)
    for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(found, wanted)
    assert torch.autograd.grad(out.sum(), list(by.parameters()), allow_unused=True) == (None,) * 3


def test_grouped_heads_missing_and_broadcast_dimensions() -> None:
    for query, key in (((), ()), ((6,), (3,)), ((2, 6), (2, 2)), ((2, 1, 3), (4, 1)), ((3,), ())):
        q, k, v = draw(*query, N, 4, seed=1), draw(*key, M, 4, seed=2), draw(*key, M, 3, seed=3)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = chosen(q, k, mk.ScaledDot(), 4, {"causal": True})
        out = mk.attend(q, k, v, causal=True, engine=mk.TopK(4))
        expected = mk.attend(q, k, v, mask=mask, engine="reference")
        assert_close(out, expected)
        for found, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
            assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, n=N, m=M, dtype=dtype)
    wide = [x.double() for x in (q, k, v)]
    mask = chosen(q.float(), k.float(), mk.ScaledDot(), 4, {"causal": True})
    out = mk.attend(q, k, v, causal=True, engine=mk.TopK(4))
    assert out.dtype == dtype
    expected = mk.attend(*wide, mask=mask, engine="reference")
    assert (out.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()


def test_what_nobody_chooses_may_be_nan_in_its_value() -> None:
    q, k, v = inputs(2, n=N, m=N)
    # Of keys that are NaN the score is too, so they must be forbidden; a value may also be of a key that is not chosen.
    permitted = torch.arange(N) != 4
    taken = chosen(q, k, mk.ScaledDot(), 2, {"causal": True, "mask": permitted}).any(-2)
    assert not taken.all() and (taken.sum() > 2)
    k = torch.where(permitted[:, None], k, math.nan).requires_grad_()
    poisoned = torch.where(taken[..., None], v, math.nan).requires_grad_()
    out = mk.attend(q, k, poisoned, causal=True, mask=permitted, engine=mk.TopK(2))
    clean = mk.attend(q, torch.where(permitted[:, None], k, 0.0), v, causal=True, mask=permitted, engine=mk.TopK(2))
    assert_close(out, clean)
    assert all(bool(x.isfinite().all()) for x in gradients(out, [k, poisoned]))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, n=N, m=M))
    mask = torch.ones(N, M, dtype=torch.bool)
    mask[3] = False
    out = mk.attend(q, k, v, mask=mask, engine=mk.TopK(4))
    assert (out[:, 3] == 0).all() and (out[:, 4] != 0).all()
    assert (gradients(out, [q])[0][:, 3] == 0).all()


def test_the_future_changes_nothing() -> None:
    q, k, v = inputs(2, n=N, m=N)
    out = mk.attend(q, k, v, causal=True, engine=mk.TopK(3, by=mk.Gaussian(1.0)))
    k[:, 8:], v[:, 8:] = 10.0, 10.0
    later = mk.attend(q, k, v, causal=True, engine=mk.TopK(3, by=mk.Gaussian(1.0)))
    assert torch.equal(out[:, :8], later[:, :8]) and not torch.equal(out[:, 8:], later[:, 8:])


def test_what_is_refused() -> None:
    q, k, v = inputs(2, n=N, m=M)
    with pytest.raises(ValueError, match=r"TopK\(k=0\): expected an integer of at least 1"):
        mk.TopK(0)
    with pytest.raises(ValueError, match="k=True"):
        mk.TopK(True)
    with pytest.raises(TypeError, match="it is a class, so add parentheses"):
        mk.TopK(3, mk.Dot)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keys are ranked by scores"):
        mk.attend(q, k, v, engine=mk.TopK(3, by=mk.FourierFeatures(4, 6, 1.0)))
    with pytest.raises(ValueError, match="dropout"):
        mk.attend(q, k, v, dropout=0.1, engine=mk.TopK(3))
    with pytest.raises(ValueError, match="nothing to compute"):
        mk.attend(q[:, :0], k, v, engine=mk.TopK(3))
    with pytest.raises(ValueError, match="function transforms"):
        torch.func.vmap(lambda x: mk.attend(x, k[0], v[0], engine=mk.TopK(3)))(q)


def test_explain_says_what_is_seen() -> None:
    q, k, v = inputs(2, n=N, m=M)
    explanation = mk.explain(q, k, v, mk.Dot(), engine=mk.TopK(5, by=mk.Cosine()))
    assert explanation.engine == "topk" and not explanation.exact and "approximate" in str(explanation)
    assert "exact for the 5 keys of each query that Cosine" in str(explanation)
    assert explanation.flops == 2 * N * (M * 2 * 4 + 5 * (2 * 4 + 2 * 3))


@measurable
def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    short, long = peaks("causal=True, engine=mk.TopK(32)", 1024, 4096, heads=4, width=32)
    assert math.log(long / short) / math.log(4) <= 1.1
