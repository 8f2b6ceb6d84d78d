"""The most that this machine's arithmetic and memory can do, and where each kernel stands below it.

Source: Williams, Waterman and Patterson, Roofline, CACM 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import ways
from harness import Row, clock
from torch.nn.functional import scaled_dot_product_attention

import matchkernel as mk

Tensor = torch.Tensor


def measure(device: str = "cpu") -> dict[str, Any]:
    """Peak rates of one thread (or one GPU).

    matmul_gflops: the fastest of three sizes of square float32 product. copy_gbs: bytes read and written a second,
    tensors far larger than any cache. ridge: operations a byte above which arithmetic is the limit. elements: thousands
    of millions of numbers a second through one torch operation, on a tensor that stays in cache.
    """
    gflops = max(_matmul(size, device) for size in (512, 1024, 2048))
    gbs = _copy(device)
    return {
        **({"bfloat16": in_bfloat16(device)} if device.startswith("cuda") else {}),
        "matmul_gflops": round(gflops, 1),
        "copy_gbs": round(gbs, 2),
        "ridge": round(gflops / gbs, 1),
        "elements": {name: round(rate, 3) for name, rate in _elements(device).items()},
    }


def place(rows: Sequence[Row], peaks: dict[str, Any]) -> dict[str, Any]:
    """The forward rows of the bench, placed under the machine's peaks."""
    gflops, gbs = peaks["matmul_gflops"], peaks["copy_gbs"]
    return peaks | {"rows": [_place(row, gflops, gbs) for row in rows if _counted(row)]}


def _least(call: Callable[[], object], device: str, repeats: int = 15) -> float:
    """The shortest of some times: what the machine can do when nobody disturbs it."""
    take = clock(device)
    call()
    return min(take(call) for _ in range(repeats))


def _matmul(size: int, device: str) -> float:
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2e-6 * size**3 / _least(lambda: torch.mm(a, b, out=out), device)


def _copy(device: str) -> float:
    source = torch.zeros(2**26, device=device)
    target = torch.ones_like(source)
    return 2e-6 * source.numel() * 4 / _least(lambda: target.copy_(source), device)


def _elements(device: str) -> dict[str, float]:
    size = 2**14 if device == "cpu" else 2**26
    x, y = (torch.rand(size, device=device) + 0.5 for _ in range(2))
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "multiply and add": lambda: torch.addcmul(x, x, y, out=out),
        "division": lambda: torch.div(x, y, out=out),
        "exp": lambda: torch.exp(x, out=out),
        "tanh": lambda: torch.tanh(x, out=out),
    }
    times = 500 if device == "cpu" else 20

    def often(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                call()

        return run

    return {name: 1e-6 * size * times / _least(often(call), device) for name, call in calls.items()}


def in_bfloat16(device: str, n: int = 8192) -> dict[str, Any]:
    """What a GPU is built for: TFLOP/s of its own matrix product, of torch's fused attention, and of the library's."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    found = {"matmul_tflops": 2e-9 * n**3 / _least(lambda: torch.mm(a, b, out=out), device)}
    q, k, v = (x.detach().to(torch.bfloat16) for x in ways.Inputs.draw(n, device=device).leaves)
    calls: dict[str, Callable[[], Tensor]] = {
        "fused dot": lambda: scaled_dot_product_attention(q, k, v),
        "ScaledDot": lambda: mk.attend(q, k, v),
        "Gaussian": lambda: mk.attend(q, k, v, mk.Gaussian(ways.SIGMA)),
    }
    for name, call in calls.items():
        found[f"{name}_tflops"] = 4e-9 * HEADS * n * n * D / _least(call, device)
    return {"n": n, **{name: round(rate, 2) for name, rate in found.items()}}


# ---- what a kernel's work is ----------------------------------------------------------------------------------------

HEADS = ways.BATCH * ways.HEADS
D = ways.WIDTH
PAIR = {
    "fused dot": 2 * D, "dense dot": 2 * D, "ScaledDot": 2 * D, "Cosine": 2 * D, "Bilinear": 2 * D,
    "Gaussian": 2 * (D + 1),
    "Additive": 4 * D, "naive": 4 * D,
    "Laplacian": 3 * D,
    "RationalQuadratic": 2 * D + 5,
}  # fmt: skip
"""Operations to score one pair, of the formula and not of how somebody computes it. Additive: an addition, a tanh
(counted as one), a product and an addition per hidden unit. Laplacian: a difference, its size, an addition."""
PASSES = {"dense dot": (0, 4), "naive": (4, 4)}
"""How often a way that holds tables reads or writes n · m · d numbers, and n · m."""


def _counted(row: Row) -> bool:
    if row["ms"] is None or row["backward"] or row["causal"]:
        return False
    return row["way"] in PAIR and (
        row["what"] in ("dot", "pointwise") or (row["what"], row["way"]) == ("additive", "naive")
    )


def _place(row: Row, gflops: float, gbs: float) -> Row:
    n, way = row["n"], row["way"]
    pairs = HEADS * n * n
    flops = pairs * (PAIR[way] + 2 * D)
    wide, flat = PASSES.get(way, (0, 0))
    held = 4 * HEADS * n * D * 4 + 4 * pairs * (wide * D + flat)
    intensity = flops / held
    return {
        "what": row["what"], "way": "Additive, naive" if way == "naive" else way, "n": n,
        "flops": flops, "bytes": held, "intensity": round(intensity, 3), "ms": row["ms"],
        "gflops": round(1e-6 * flops / row["ms"], 2), "bound_gflops": round(min(gflops, intensity * gbs), 1),
    }  # fmt: skip
