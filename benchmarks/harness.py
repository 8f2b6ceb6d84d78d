"""Times several ways of doing the same work: one process, one thread, taken in turns, medians with their spread."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
Tensor = torch.Tensor
Ways = Mapping[str, Callable[[], object]]
Row = dict[str, Any]
Clock = Callable[[Callable[[], object]], float]
"""Runs a call and says how many milliseconds it took."""


def cpu_time(call: Callable[[], object]) -> float:
    """CPU time of this process, not the clock's: others may use the machine."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def gpu_time(call: Callable[[], object]) -> float:
    """Time between two events on the GPU's own stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def clock(device: str) -> Clock:
    return gpu_time if device.startswith("cuda") else cpu_time


def measure(
    ways: Ways, *, baseline: str, repeats: int, clock: Clock = cpu_time, warm: bool = False
) -> dict[str, dict[str, float]]:
    """Milliseconds for each way, and its ratio to the baseline; each runs once untimed before, unless it is `warm`.

    Every round runs each way once, in an order that turns from round to round, so that a busy minute and a warm cache
    fall on all of them alike. The ratio is the median of the rounds' own ratios; `low` and `high` are its quartiles.
    """
    names = list(ways)
    for name in () if warm else names:
        ways[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                times[name].append(clock(ways[name]))
    finally:
        gc.enable()
    result = {}
    for name in names:
        ratios = [ours / base for ours, base in zip(times[name], times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        result[name] = {
            "ms": round(statistics.median(times[name]), 3),
            "ratio": round(middle, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "repeats": repeats,
        }
    return result


def step(call: Callable[[], Tensor], leaves: list[Tensor], upstream: Tensor, backward: bool) -> Callable[[], object]:
    """The call alone without a graph, or the call and its gradients."""
    if backward:
        return lambda: torch.autograd.grad(call(), leaves, upstream)

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return forward


def one_thread() -> None:
    """OMP_NUM_THREADS is read when torch loads, and by compiled code that torch's own setting does not reach."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("set OMP_NUM_THREADS=1 before this starts; `make bench` does")
    torch.set_num_threads(1)


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers were taken on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    found = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "time": "CPU time of one process, in ms; others may have used the machine",
    }
    if device.startswith("cuda"):
        found |= {"gpu": chip(device), "time": "time between two events on the GPU's stream, in ms"}
    return found


def chip(device: str) -> str:
    return torch.cuda.get_device_name(device)


def store(name: str, rows: list[Row], about: str, *, device: str = "cpu", **sections: Any) -> Path:
    """Write rows, machine and what else was measured to results/NAME.json, and return where that is."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stored = {"about": about, "machine": machine(device), **sections, "rows": rows}
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    return path
