"""The product and the copy that a compiler takes as they stand."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from matchkernel import _opaque
from matchkernel._opaque import products, settled

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw

Tensor = torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_products_are_the_matrix_product(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for i, j, c in itertools.product((0, 1, 5), (0, 1, 18), (0, 1, 7)):
        a, b = draw(heads[0], i, c, dtype=dtype), draw(heads[1], j, c, seed=1, dtype=dtype)
        truth = (a.double() @ b.double().mT).to(dtype)
        for x, y in itertools.product((a, a.mT.contiguous().mT), (b, b.mT.contiguous().mT)):
            got = products(x, y)
            assert got.shape == (max(heads), i, j) and got.dtype == dtype
            assert_close(got, truth)
        # Slices of something larger, and one row that stands for all.
        assert_close(products(torch.cat([a, a], -1)[..., c:], torch.cat([b, b], -2)[:, j:]), truth)
        row = draw(heads[0], 1, c, dtype=dtype).expand(-1, i, -1)
        assert_close(products(row, b), (row.double() @ b.double().mT).to(dtype))


def test_one_head_of_float32_goes_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        assert _opaque._linear is None
        return
    calls: list[torch.Size] = []
    real = _opaque._linear
    monkeypatch.setattr(_opaque, "_linear", lambda a, *rest: calls.append(a.shape) or real(a, *rest))
    for dtype, heads in ((torch.float32, 1), (torch.float64, 1), (torch.float32, 2)):
        a, b = draw(heads, 5, 7, dtype=dtype), draw(heads, 4, 7, dtype=dtype)
        assert_close(products(a, b), a @ b.mT)
    assert calls == [torch.Size([5, 7])]
    monkeypatch.setattr(_opaque, "_linear", None)
    a, b = draw(1, 5, 7, dtype=torch.float32), draw(1, 4, 7, dtype=torch.float32)
    assert_close(products(a, b), a @ b.mT)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_a_compiler_is_told_the_same_shape(heads: tuple[int, int]) -> None:
    a, b = draw(heads[0], 5, 7, dtype=torch.float32), draw(heads[1], 4, 7, dtype=torch.float32)
    real, meta = products(a, b), products(a.to("meta"), b.to("meta"))
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


def test_settled_is_a_contiguous_copy() -> None:
    for x in (draw(2, 3, 4), draw(2, 3, 4).mT, draw(1, 3, 1).expand(2, 3, 4), draw(2, 0, 4)):
        got = settled(x)
        assert torch.equal(got, x) and got.is_contiguous()
        assert got.numel() == 0 or got.data_ptr() != x.data_ptr()
        meta = settled(x.to("meta"))
        assert (meta.shape, meta.dtype, meta.stride()) == (got.shape, got.dtype, got.stride())
