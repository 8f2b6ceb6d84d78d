"""The same calls on every device that this machine has; on a machine without a GPU that is the CPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.masks import from_lengths

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "pair": {"window": (2, 1)},
    "bool mask": {"mask": draw(2, 1, 5, 7) > -0.5},
    "float mask": {"mask": draw(3, 5, 7)},
    "key mask, causal": {"mask": torch.arange(7) != 2, "causal": True},
    "nothing permitted": {"mask": torch.zeros(5, 7, dtype=torch.bool)},
}
NORMALIZERS: dict[str, Any] = {
    "softmax": lambda: mk.Softmax(0.7),
    "temperature per head": lambda: mk.Softmax(torch.tensor([0.5, 1.0, 2.0])),
    "sink": lambda: mk.SinkSoftmax(torch.nn.Parameter(torch.tensor([0.1, 0.2, -0.3]))),
    "scalable": lambda: mk.ScalableSoftmax(0.6),
}
KERNELS: dict[str, Any] = {
    "scaled dot": mk.ScaledDot,
    "cosine": lambda: mk.Cosine(torch.nn.Parameter(torch.tensor([0.3, 0.6, 0.9]))),
    "bilinear": lambda: mk.Bilinear(4, generator=torch.Generator().manual_seed(0)),
    "sum": lambda: mk.Dot() + 0.5 * mk.Cosine(),
}


def _run(device: str, kernel: str, normalizer: str, setting: str, dtype: torch.dtype, engine: str) -> list[Tensor]:
    leaves = [x.to(device).requires_grad_() for x in inputs(2, 3, dtype=dtype)]
    call = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in SETTINGS[setting].items()}
    match = KERNELS[kernel]().to(device)
    weigh = NORMALIZERS[normalizer]().to(device)
    out = mk.attend(*leaves, match, normalizer=weigh, engine=engine, **call)
    assert out.device.type == device and out.dtype == dtype
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out.sin().sum(), leaves))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_every_device_agrees_with_the_reference_in_float64(device: str, normalizer: str, setting: str) -> None:
    for kernel in KERNELS:
        truth = _run("cpu", kernel, normalizer, setting, torch.float64, "reference")
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
            for ours, expected in zip(_run(device, kernel, normalizer, setting, dtype, "auto"), truth, strict=True):
                assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_positions_and_tables_stay_on_the_device(device: str) -> None:
    q, k, v = (x.to(device) for x in inputs(2, 3))
    lengths = from_lengths(torch.tensor([7, 4], device=device), 7)
    out = mk.attend(q, k, v, mask=lengths, causal=True, query_position=torch.arange(5, device=device) + 2)
    assert out.device.type == mk.weights(q, k, mask=lengths).device.type == device
    assert mk.explain(q, k, v, mask=lengths).engine == "fused"
    assert_close(out, mk.attend(q, k, v, mask=lengths, causal=True))


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_on_every_device(device: str) -> None:
    leaves = tuple(x.to(device).requires_grad_() for x in inputs(2, n=3, m=4))
    assert torch.autograd.gradgradcheck(lambda *x: mk.attend(*x, causal=True), leaves)
