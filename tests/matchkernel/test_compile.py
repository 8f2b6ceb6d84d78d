"""torch.compile(fullgraph=True): one graph, the same numbers, the same gradients, for two lengths in a row."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor
# torch's own compiler, imported on first use, is written this way.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def _kernel(name: str) -> mk.MatchKernel:
    return {
        "scaled dot": mk.ScaledDot,
        "cosine": lambda: mk.Cosine(torch.nn.Parameter(torch.tensor([0.4, 0.9]))),
        "bilinear": lambda: mk.Bilinear(8, rank=4, generator=torch.Generator().manual_seed(0)),
    }[name]()


SETTINGS: dict[str, dict[str, Any]] = {
    "scaled dot": {"causal": True},
    "cosine": {"mask": torch.tensor([[[[True]], [[True]]]])},
    "bilinear": {"causal": True, "window": 6},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_one_graph_with_the_same_numbers_and_gradients(name: str) -> None:
    torch._dynamo.reset()
    kernel = _kernel(name)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        setting = {key: value for key, value in SETTINGS[name].items() if key != "mask"}
        return mk.attend(q, k, v, kernel, mask=mask, **setting)

    compiled = torch.compile(attend, fullgraph=True)
    for n, m in ((16, 16), (24, 24)):
        mask = None
        if "mask" in SETTINGS[name]:
            mask = draw(2, 2, n, m, seed=n) > -0.8
        results = []
        for call in (attend, compiled):
            leaves = [x.requires_grad_() for x in inputs(2, 2, n=n, m=m, d=8, width=8, dtype=torch.float32)]
            out = call(*leaves, mask)
            results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), [*leaves, *kernel.parameters()])])
        for ours, plain in zip(*results, strict=True):
            assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_compiled_module_with_every_normaliser() -> None:
    """The sink has no fused call to go to inside a graph, and is computed densely: the numbers stay."""
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sink, self.long = mk.SinkSoftmax(torch.nn.Parameter(torch.tensor(0.3))), mk.ScalableSoftmax(0.7)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first = mk.attend(q, k, v, mk.Cosine(0.5), normalizer=self.sink, causal=True)
            return mk.attend(first, k, v, normalizer=self.long, causal=True)

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True)
    leaves = [x.requires_grad_() for x in inputs(2, 2, n=12, m=12, d=8, width=8, dtype=torch.float32)]
    results = []
    for call in (layer, compiled):
        out = call(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), [*leaves, *layer.parameters()])])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain, rtol=1e-4, atol=1e-5)
