"""The most memory that one step of attention holds, measured in a fresh process, where nothing else has been freed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

measurable = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory"
)

SCRIPT = """
import torch
import matchkernel as mk
torch.set_num_threads(1)

class Own(mk.MatchKernel):
    def match(self, q, k):
        return q @ k.mT / (1.0 + q.abs().sum(-1, keepdim=True))

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) / 1024

def step(n):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, {heads}, n, {width}, generator=generator) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v[..., : {value_width}].contiguous())]
    setting = dict({setting})
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    with torch.set_grad_enabled({gradients}):
        out = mk.attend(*leaves, **setting)
    if {gradients}:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return status("VmHWM") - before

for n in (256, 512):
    step(n)
print(*(step(n) for n in {lengths}))
"""


def peaks(
    setting: str,
    *lengths: int,
    heads: int = 2,
    width: int = 64,
    value_width: int | None = None,
    gradients: bool = True,
) -> tuple[float, ...]:
    """MiB that `attend` and, if wanted, its gradients hold at most, beside their inputs, for each length in turn.

    `setting` is what stands behind q, k, v in the call; it may use the length n, a `generator` and the kernel `Own()`.
    """
    shape = {"heads": heads, "width": width, "value_width": value_width or width}
    script = SCRIPT.format(setting=setting, lengths=lengths, gradients=gradients, **shape)
    # Freed memory goes back at once: what the allocator keeps for later is not what a step holds.
    given_back = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | given_back
    )
    return tuple(map(float, done.stdout.split()))
