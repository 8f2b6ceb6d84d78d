"""The tiles as torch.compile builds them: the same numbers, one warning where it cannot, none where no compiler is."""

import shutil
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _compiled, tiled

Tensor = torch.Tensor
# torch's own compiler, imported on first use, is written this way.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No build of another test, and none left."""
    monkeypatch.setattr(_compiled, "_built", {})
    monkeypatch.setattr(_compiled, "_failures", {})
    _compiled.missing.cache_clear()
    yield
    _compiled.missing.cache_clear()


def _step(kernel: mk.MatchKernel, n: int, engine: object, causal: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    leaves = [torch.randn(1, 2, n, 8, generator=generator).requires_grad_() for _ in range(3)]
    out = mk.attend(*leaves, kernel, engine=engine, causal=causal)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [*leaves, *kernel.parameters()])]


@pytest.mark.skipif(_compiled.missing() is not None, reason="no C++ compiler")
def test_built_tiles_give_the_same_numbers_at_two_lengths_in_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = mk.Additive(8, 6, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for n in (40, 56):
            built = _step(kernel, n, mk.Tiled(queries=16, keys=64, compile=True), causal=False)
            for ours, truth in zip(built, _step(kernel, n, "reference", causal=False), strict=True):
                assert_close(ours, truth, rtol=1e-4, atol=2e-5)


class Untraceable(mk.MatchKernel):
    """A match that looks at a number, which no tracer can follow."""

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT if float(q.detach().sum()) < 1e9 else -(q @ k.mT)


@pytest.mark.skipif(_compiled.missing() is not None, reason="no C++ compiler")
def test_what_cannot_be_built_says_so_once_and_runs_as_it_stands() -> None:
    engine = mk.Tiled(queries=16, keys=16, compile=True)
    with pytest.warns(UserWarning, match="could not build the tiles of Untraceable"):
        first = _step(Untraceable(), 24, engine, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = _step(Untraceable(), 24, engine, causal=True)
    for one, two, truth in zip(first, again, _step(Untraceable(), 24, "reference", causal=True), strict=True):
        assert torch.equal(one, two)
        assert_close(one, truth, rtol=1e-4, atol=1e-5)


def test_without_a_compiler_the_tiles_run_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    _compiled.missing.cache_clear()
    monkeypatch.setattr(tiled, "ENOUGH", 1)
    q = torch.randn(2, 400, 8, generator=torch.Generator().manual_seed(0))
    explained = mk.explain(q, q, q, mk.Laplacian())
    assert explained.engine == "tiled" and not explained.compiled
    assert "no C++ compiler was found" in explained.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = mk.attend(q, q, q, mk.Laplacian())
    assert_close(out, mk.attend(q, q, q, mk.Laplacian(), engine="reference"), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        mk.Tiled(compile=True)


def test_only_work_that_pays_for_it_is_built() -> None:
    few, many = torch.zeros(4, 512, 8), torch.zeros(4, 1024, 8)
    there = _compiled.missing() is None
    assert mk.explain(few, few, few, mk.Laplacian()).compiled is False
    assert mk.explain(many, many, many, mk.Laplacian()).compiled is there
    assert mk.explain(many, many, many, mk.Laplacian(), engine=mk.Tiled(compile=False)).compiled is False
    # Whole rows are not built: there is nothing in them that a compiler would fuse.
    assert mk.explain(many, many, many, mk.Laplacian(), normalizer=mk.Sparsemax()).compiled is False
