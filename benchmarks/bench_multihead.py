"""MultiHeadAttention against torch.nn.MultiheadAttention with the same weights; writes results/multihead.json.

Batch 2, embed_dim 512, 8 heads, float32, self-attention. Ratios above 1 are slower than torch. torch's own
`need_weights=False` is on: without it torch forms the n × m table. `torch, eval` is its fast path for inference.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import measure, one_thread, step, store
from torch import Tensor, nn

import matchkernel as mk

BATCH, WIDTH, HEADS = 2, 512, 8
LENGTHS = {1: 401, 64: 101, 1024: 21}
"""n, and how many rounds; n = 1 is what a call costs before it computes anything."""


def compare(n: int, repeats: int, backward: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, n, WIDTH, generator=generator).requires_grad_()
    ours = mk.MultiHeadAttention(WIDTH, HEADS, generator=generator)
    theirs = ours.to_torch()
    at_rest = ours.to_torch().eval()
    mixed = mk.MultiHeadAttention(WIDTH, HEADS, kernel=[mk.ScaledDot(), mk.Cosine(0.1)] * (HEADS // 2))
    ones = torch.ones_like(x)

    def of_torch(module: nn.MultiheadAttention) -> Tensor:
        return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    ways = {
        "torch": step(lambda: of_torch(theirs), [x, *theirs.parameters()], ones, backward),
        "MultiHeadAttention": step(lambda: ours(x), [x, *ours.parameters()], ones, backward),
        "MultiHeadAttention, two kernels in turn": step(lambda: mixed(x), [x, *mixed.parameters()], ones, backward),
    }
    if not backward:
        ways["torch, eval"] = step(lambda: of_torch(at_rest), [x], ones, backward)
    measured = measure(ways, baseline="torch", repeats=repeats)
    return [{"n": n, "backward": backward, "way": name, **row} for name, row in measured.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=float, default=1.0, help="multiply the rounds, e.g. 0.3 for a quick look")
    share = parser.parse_args().repeats
    one_thread()
    rows: list[dict[str, Any]] = []
    for n, repeats in LENGTHS.items():
        for backward in (False, True):
            print(f"n = {n}{', with backward' if backward else ''}")
            new = compare(n, max(3, round(repeats * share)), backward)
            for row in new:
                ratio = f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
                print(f"  {row['way']:44} {row['ms']:9.3f} ms  {ratio}", flush=True)
            rows += new
    print(store("multihead", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
