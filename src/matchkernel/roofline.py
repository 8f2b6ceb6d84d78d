"""How fast this machine multiplies matrices and moves memory, and what that leaves for a piece of work at best."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZE, NUMBERS = 768, 2**24
"""A square product large enough to reach a core's best, and a copy that no cache holds."""


@dataclass(frozen=True)
class Roofline:
    """The least time that work can take: its operations at the machine's best, or its traffic, whichever is longer.

    seconds, `bound` "compute" or "memory", and the two speeds that were measured, in operations and bytes per second.
    A guess from below: work that is not a matrix product runs slower, and so does work that reads memory twice.
    Source: Williams, Waterman & Patterson 2009.
    """

    seconds: float
    bound: str
    flops_per_second: float
    bytes_per_second: float

    def __str__(self) -> str:
        return (
            f"at least {1e3 * self.seconds:.3g} ms, bound by {self.bound}, where matrix products reach "
            f"{self.flops_per_second / 1e9:.0f} GFLOP/s and memory {self.bytes_per_second / 1e9:.0f} GB/s"
        )


def roofline(flops: int, traffic: int, device: torch.device) -> Roofline:
    """The guess for `flops` operations and `traffic` bytes on `device`; the first call measures it, in about 0.1 s."""
    compute, memory = _speeds(device.type, torch.get_num_threads())
    times = {"compute": flops / compute, "memory": traffic / memory}
    bound = max(times, key=lambda name: times[name])
    return Roofline(times[bound], bound, compute, memory)


@functools.cache
def _speeds(device: str, threads: int) -> tuple[float, float]:
    """Operations and bytes per second, in float32; `threads` only tells one measurement from another."""
    a, b = (torch.ones(SIZE, SIZE, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source, target = torch.ones(NUMBERS, device=device), torch.empty(NUMBERS, device=device)
    with torch.no_grad():
        compute = 2 * SIZE**3 / _fastest(lambda: torch.mm(a, b, out=product), device)
        memory = 2 * source.numel() * source.element_size() / _fastest(lambda: target.copy_(source), device)
    return compute, memory


def _fastest(work: Callable[[], object], device: str, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
