"""A ring of two processes beside one process that does all the work; writes results/ring.json.

1 · 8 heads · 4096 tokens, d = 64, float32, one thread each, gloo on this machine. `ratio` is the CPU time of the busier
rank, its share of the sending included, divided by that of a process that does all the work, in the same round. Two
such processes run side by side, as the two ranks do, so that both find the caches and the cores as busy; `one process,
the other idle` is for comparison. `sent` are the bytes that one rank sends in a step, counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import cpu_time, one_thread, step, store
from targets import RING_LINES, judge, table

import matchkernel as mk
from matchkernel.distributed import deal, positions

Tensor = torch.Tensor
WORLD, HEADS, LENGTH, WIDTH = 2, 8, 4096, 64
IDLE = "one process, the other idle"
MESSAGES = (4096, 8192, 16384)
"""Lengths at which the bytes of one forward pass are counted."""


def draw(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, n, WIDTH, generator=generator).requires_grad_() for _ in range(3)]


def contiguous(x: Tensor, rank: int) -> Tensor:
    return x.chunk(WORLD, -2)[rank]


def ways(rank: int, ring: mk.Ring) -> dict[str, dict[str, Callable[[], object]]]:
    """For each group what one process does alone, and what this rank does."""
    whole = draw(LENGTH)
    own, dealt = ([cut(x).detach().requires_grad_() for x in whole] for cut in (
        lambda x: contiguous(x, rank), lambda x: deal(x, rank, WORLD)
    ))  # fmt: skip
    place = positions(LENGTH, rank, WORLD)
    places = {"query_position": place, "key_position": place}

    def call(inputs: list[Tensor], **more: Any) -> Callable[[], object]:
        return step(lambda: mk.attend(*inputs, **more), inputs, torch.ones_like(inputs[2]), True)

    return {
        "ring": {
            "one process": call(whole),
            IDLE: call(whole),
            "ring": call(own, engine=ring),
        },
        "ring, causal": {
            "one process": call(whole, causal=True),
            IDLE: call(whole, causal=True),
            "ring, dealt": call(dealt, causal=True, engine=ring, **places),
            "ring, contiguous": call(own, causal=True, engine=ring),
        },
    }


def work(rank: int, folder: str, repeats: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    ring = mk.Ring(timeout=600)
    rows = [row for what, group in ways(rank, ring).items() for row in timed(what, group, rank, ring, repeats)]
    messages = [one for n in MESSAGES for one in counted(rank, n)]
    if rank == 0:
        for row in rows:
            spread = f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
            print(f"{row['what']:14} {row['way']:30} {row['ms']:9.1f} ms  {spread}  {row['sent']} bytes")
        judged = judge(rows, RING_LINES)
        print(table(judged))
        print(store("ring", rows, __doc__ or "", world=WORLD, messages=messages, targets=judged))
    dist.destroy_process_group()


def timed(
    what: str, group: dict[str, Callable[[], object]], rank: int, ring: mk.Ring, repeats: int
) -> list[dict[str, Any]]:
    """Rows of one group: each way once a round, the slower of the two processes counting; one round untimed."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {way: [] for way in group}
    sent: dict[str, int] = {}
    for turn in range(-1, repeats):
        names = list(group)
        shift = turn % len(names)
        for way in names[shift:] + names[:shift]:
            dist.barrier()
            before, mine = ring.sent, 0.0
            if way != IDLE or rank == 0:
                mine = cpu_time(group[way])
            sent[way] = ring.sent - before
            both = [torch.zeros(1, dtype=torch.float64) for _ in range(WORLD)]
            dist.all_gather(both, torch.tensor([mine], dtype=torch.float64))
            if turn >= 0:
                times[way].append(max(float(x) for x in both))
    return summed(what, times, sent, repeats)


def summed(what: str, times: dict[str, list[float]], sent: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for way, took in times.items():
        ratios = [ours / base for ours, base in zip(took, times["one process"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows.append({
            "what": what, "n": LENGTH, "causal": "causal" in what, "backward": True, "way": way,
            "baseline": "one process", "ms": round(statistics.median(took), 3), "ratio": round(middle, 4),
            "low": round(low, 4), "high": round(high, 4), "repeats": repeats, "sent": sent[way],
        })  # fmt: skip
    return rows


def counted(rank: int, n: int) -> list[dict[str, Any]]:
    """Bytes that a rank sends in one forward pass: the ring's keys and values, and a feature kernel's state."""
    found = []
    for way, kernel in (("keys and values", None), ("state", mk.EluFeatures())):
        ring = mk.Ring(timeout=600)
        with torch.no_grad():
            mk.attend(*(contiguous(x, rank) for x in draw(n)), kernel, engine=ring)
        found.append({"n": n, "way": way, "sent": ring.sent})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    repeats = parser.parse_args().repeats
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder)), repeats), WORLD)


if __name__ == "__main__":
    main()
