"""attend() against torch's own scaled_dot_product_attention on the same tensors; writes results/fused.json.

b · h = 8, d = 64, float32. Ratios above 1 are slower than torch. `dense` is torch's own call where it falls out of its
fused kernel, for scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import measure, step, store
from torch.nn.functional import scaled_dot_product_attention as sdpa

import matchkernel as mk

Tensor = torch.Tensor
BATCH, HEADS, WIDTH = 2, 4, 64
LENGTHS = {1024: 31, 2048: 13, 4096: 5}
"""n, and how many rounds."""


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).requires_grad_()


def compare(n: int, repeats: int, causal: bool, backward: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (draw(generator, BATCH, HEADS, n, WIDTH) for _ in range(3))
    narrow = draw(generator, BATCH, HEADS, n, WIDTH // 2)
    bilinear = mk.Bilinear(WIDTH, generator=torch.Generator().manual_seed(0))
    sink = mk.SinkSoftmax()
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "torch": (lambda: sdpa(q, k, v, is_causal=causal), [q, k, v]),
        "ScaledDot": (lambda: mk.attend(q, k, v, causal=causal), [q, k, v]),
        "Cosine": (lambda: mk.attend(q, k, v, mk.Cosine(0.1), causal=causal), [q, k, v]),
        "Bilinear": (lambda: mk.attend(q, k, v, bilinear, causal=causal), [q, k, v, bilinear.weight]),
        "SinkSoftmax": (lambda: mk.attend(q, k, v, normalizer=sink, causal=causal), [q, k, v]),
        "d_v = 32": (lambda: mk.attend(q, k, narrow, causal=causal), [q, k, narrow]),
    }
    if n == min(LENGTHS):
        calls["d_v = 32, torch (dense)"] = (lambda: sdpa(q, k, narrow, is_causal=causal), [q, k, narrow])
    ones = torch.ones_like(q)
    ways = {
        name: step(call, leaves, ones[..., : WIDTH // 2].contiguous() if "d_v" in name else ones, backward)
        for name, (call, leaves) in calls.items()
    }
    measured = measure(ways, baseline="torch", repeats=repeats)
    return [{"n": n, "causal": causal, "backward": backward, "way": name, **row} for name, row in measured.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=float, default=1.0, help="multiply the rounds, e.g. 0.3 for a quick look")
    share = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for n, repeats in LENGTHS.items():
        for causal in (False, True):
            for backward in (False, True):
                print(f"n = {n}{', causal' if causal else ''}{', with backward' if backward else ''}")
                new = compare(n, max(3, round(repeats * share)), causal, backward)
                for row in new:
                    ratio = f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
                    print(f"  {row['way']:24} {row['ms']:9.1f} ms  {ratio}", flush=True)
                rows += new
    print(store("fused", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
