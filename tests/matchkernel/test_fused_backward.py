"""The fused first derivative, taken a few heads at a time: the same bits as in one call, and the reference's values."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _fused_backward

KERNELS: dict[str, mk.MatchKernel] = {
    "as wide as v": mk.ScaledDot(),
    "wider than v": mk.Gaussian(3.0),
    "each head its own": mk.ScaledDot() + mk.ALiBi(heads=6),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "log-sum-exp": {"causal": True, "normalizer": mk.SinkSoftmax(torch.linspace(-1.0, 1.0, 6, dtype=torch.float64))},
    "a mask for all": {"mask": torch.rand(9, 9, generator=torch.Generator().manual_seed(3)) < 0.7},
    "a mask for each head": {"mask": torch.rand(1, 6, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.7},
    "a mask for each text": {"mask": torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.7},
}


def gradients(
    kernel: mk.MatchKernel, setting: dict[str, Any], engine: str, key_heads: int, width: int
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 9, 4), (2, key_heads, 9, 4), (2, key_heads, 9, width), (2, 6, 9, width)
    q, k, v, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(mk.attend(*leaves, kernel, engine=engine, **setting), leaves, upstream)


@pytest.mark.parametrize("width", [3, 4, 7])
@pytest.mark.parametrize("key_heads", [6, 3])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_head_at_a_time(
    kernel: mk.MatchKernel, setting: dict[str, Any], key_heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel is KERNELS["each head its own"]:
        setting = {**setting, "causal": True}
    at_once = gradients(kernel, setting, "fused", key_heads, width)
    monkeypatch.setattr(_fused_backward, "ENOUGH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    calls: list[torch.Size] = []
    operator = _fused_backward.at_once

    def noted(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(grad.shape)
        return operator(grad, *rest)

    monkeypatch.setattr(_fused_backward, "at_once", noted)
    in_turn = gradients(kernel, setting, "fused", key_heads, width)
    assert calls == [(1, 6 // key_heads, 9, width)] * (2 * key_heads)
    for one, other, truth in zip(
        in_turn, at_once, gradients(kernel, setting, "reference", key_heads, width), strict=True
    ):
        assert torch.equal(one, other)
        assert_close(one, truth)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(("batch", "heads"), list(product((1, 2, 5, 8), (1, 4, 6, 12))))
def test_every_head_once_and_no_thread_idle(
    batch: int, heads: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fused_backward, "ENOUGH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    met = torch.zeros(batch, heads)
    rounds = 0
    for at in _fused_backward._portions(torch.empty(batch, heads, 2, 2)):
        met[at] += 1
        rounds += -(-met[at].numel() // threads)
    assert torch.equal(met, torch.ones_like(met))
    assert rounds == -(-met.numel() // threads)


@pytest.mark.parametrize("kernel", [mk.ScaledDot(), mk.Gaussian()], ids=repr)
def test_the_output_is_not_a_view_of_what_was_padded(kernel: mk.MatchKernel) -> None:
    """Forward mode asks for it, and a caller holds no columns that nobody reads."""
    q, k, v = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(3))
    assert mk.attend(q, k, v, kernel, engine="fused").untyped_storage().nbytes() == 2 * 5 * 4 * 4
