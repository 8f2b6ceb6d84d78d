"""Peak memory of one step in a fresh process: O(n) where an engine streams, for every mask that promises it."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
import matchkernel as mk

class Own(mk.MatchKernel):
    def match(self, q, k):
        return q @ k.mT / (1.0 + q.abs().sum(-1, keepdim=True))

torch.set_num_threads(1)

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) / 1024

def step(n):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for _ in range(3))
    v = v[..., : {width}].contiguous()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.arange(n) < n - 5
    setting = dict({setting})
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    out = mk.attend(*leaves, **setting)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    return status("VmHWM") - before

for n in (64, 128):
    step(n)
print(step({n}))
"""
TABLE = 2 * 4096 * 4096 * 4 / 2**20
"""MiB of one n × m table of float32 for 2 heads: 128. One tensor of n tokens has 2."""


def _peak(setting: str, n: int = 4096, width: int = 64) -> float:
    script = SCRIPT.format(setting=setting, n=n, width=width)
    # Freed memory goes back at once: what the allocator keeps for later is not what a step holds.
    given_back = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | given_back
    )
    return float(done.stdout)


@pytest.mark.parametrize(
    ("setting", "width", "limit"),
    [
        # The output, its gradient and three more: 10 MiB, and what the operator works in.
        ("", 64, 20),
        ("causal=True, mask=mask, normalizer=mk.ScalableSoftmax()", 64, 32),
        # Encodings, padding and the column that carries the log-sum-exp's gradient are copies, but of n rows.
        ("causal=True, normalizer=mk.SinkSoftmax(0.2), kernel=mk.Cosine(0.3)", 32, 64),
    ],
)
def test_a_step_forms_no_table(setting: str, width: int, limit: float) -> None:
    assert _peak(setting, width=width) < limit <= TABLE / 2


def test_the_measure_sees_a_table_where_there_is_one() -> None:
    assert _peak("engine='reference'", n=2048) > TABLE / 4 * 2


@pytest.mark.parametrize(
    "setting",
    [
        "kernel=mk.Additive(64, 2)",
        "kernel=Own(), causal=True, mask=mask",
        "kernel=mk.Gaussian(8.0), normalizer=mk.Sparsemax()",
    ],
)
def test_tiles_hold_no_table(setting: str) -> None:
    """Twice as many tokens, twice the memory, and what a tile takes: far below a table."""
    short, long = (_peak(f"engine=mk.Tiled(compile=False), {setting}", n=n, width=8) for n in (2048, 4096))
    assert long / short <= 2.3
    assert long < TABLE / 2, "the reference takes several"
