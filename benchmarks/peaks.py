"""The most memory that one step holds, and how fast a measured quantity grows with the length."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

MIB = 1024.0
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc keeps freed tensors below a size that it raises as it goes, so that a peak counts what is no longer held, and
another amount from run to run: up to a third more. With a fixed size each freed tensor goes back to the system."""


def status(name: str) -> float:
    """MiB, as the system counts this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / MIB
    raise RuntimeError(f"/proc/self/status has no {name}")


def held(step: Callable[[], object], device: str = "cpu") -> float:
    """MiB that a step holds at most, beside what was there before it; what it returns counts.

    Run the step's like before: what is built or kept on the first call is no part of what a step holds.
    """
    if device.startswith("cuda"):
        return _held_on_gpu(step)
    # What warming up freed stays with the process until it is asked for; the step would use it unseen.
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = step()
    found = status("VmHWM") - before
    del result
    return found


def _held_on_gpu(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    del result
    return found / MIB**2


def in_a_fresh_process(
    script: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script with these arguments in a process of its own, which gives freed memory back."""
    call = [sys.executable, script, *arguments]
    return subprocess.run(call, capture_output=True, text=True, env=os.environ | GIVE_BACK | (environment or {}))


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Least squares of log value on log length."""
    x, y = [math.log(length) for length in lengths], [math.log(value) for value in values]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - centre_x) ** 2 for a in x)
