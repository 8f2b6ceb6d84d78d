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
Ways = Mapping[str, Callable[[], object]]


def measure(ways: Ways, *, baseline: str, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time for each way, and its ratio to the baseline.

    Every round runs each way once, in an order that turns from round to round, so that a busy minute and a warm cache
    fall on all of them alike. The ratio is the median of the rounds' own ratios; `low` and `high` are its quartiles.
    CPU time of this process, not the clock's: others may use the machine.
    """
    names = list(ways)
    for name in names:
        ways[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                start = time.process_time()
                ways[name]()
                times[name].append(1e3 * (time.process_time() - start))
    finally:
        gc.enable()
    result = {}
    for name in names:
        ratios = [ours / base for ours, base in zip(times[name], times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = {
            "ms": round(statistics.median(times[name]), 3),
            "ratio": round(middle, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "repeats": repeats,
        }
    return result


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "time": "CPU time of one process, in ms; others may have used the machine",
    }


def store(name: str, rows: list[dict[str, Any]], about: str) -> Path:
    """Write rows and machine to results/NAME.json, and return where that is."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"about": about, "machine": machine(), "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    )
    return path
