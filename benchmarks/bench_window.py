"""Windows of 128 keys against local-attention, compiled FlexAttention and a dense mask; writes results/window.json.

b · h = 8, d = 64, float32, causal. `python benchmarks/bench_window.py --repeats 0.3` for a quick look. Each query sees
itself and the 128 keys before it: 129, because that is what local-attention's exact window of 128 is.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from typing import Any

import peaks
import peers
import targets
import torch
from bench_kernels import Group, rows_of, time_slope
from harness import one_thread, store
from targets import Line
from ways import Build, Inputs, Way

import matchkernel as mk

BEFORE = 128
OURS = "matchkernel"
PROMISED = 4096
LENGTHS = tuple(2**i for i in range(9, 16))
LONG = 131072
WINDOW = (BEFORE, 0)


def ours(inputs: Inputs) -> Way:
    return Way(
        lambda: mk.attend(inputs.q, inputs.k, inputs.v, causal=True, window=WINDOW, engine="sparse"), inputs.leaves
    )


def dense_mask(inputs: Inputs) -> Way:
    """The fused kernel with an n × m mask, which is what a window was before there were blocks."""
    return Way(
        lambda: mk.attend(inputs.q, inputs.k, inputs.v, causal=True, window=WINDOW, engine="fused"), inputs.leaves
    )


def local_attention(inputs: Inputs) -> Way:
    """lucidrains' module, without its rotary positions."""
    attention = peers.local_attention().LocalAttention(
        BEFORE, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False
    )
    return Way(lambda: attention(*inputs.leaves), inputs.leaves)


def flex(inputs: Inputs) -> Way:
    """Compiled, with its block mask made beforehand. On a CPU it has no backward."""
    peers.compiler()
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = inputs.q.shape[-2]
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j <= BEFORE), None, None, n, n, device=str(inputs.q.device)
    )
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call() -> torch.Tensor:
        given = inputs.leaves if torch.is_grad_enabled() else [x.detach() for x in inputs.leaves]
        out: torch.Tensor = compiled(*given, block_mask=mask)
        return out

    return Way(call, inputs.leaves)


def beside() -> dict[str, Build]:
    return {OURS: ours, "local-attention": local_attention, "FlexAttention": flex}


def with_a_mask() -> dict[str, Build]:
    return {OURS: ours, "fused, n × m mask": dense_mask}


GROUPS = [
    Group("window", beside, {4096: 7, 16384: 5}, causal=True),
    Group("window and mask", with_a_mask, {512: 15, 1024: 11, 4096: 3}, causal=True),
]
LINES = [
    Line("window ÷ local-attention, forward", 0.35, 0.20, "window", OURS, False, PROMISED, ("local-attention",)),
    Line("window ÷ local-attention, with backward", 0.45, 0.20, "window", OURS, True, PROMISED, ("local-attention",)),
    Line("window ÷ compiled FlexAttention, forward", 1.0, 0.6, "window", OURS, False, PROMISED, ("FlexAttention",)),
]


def peak_of(n: int) -> float:
    """MiB of one step with backward, in this process."""
    for length in (512, n):
        inputs = Inputs.draw(length, True)
        way = ours(inputs)
        torch.autograd.grad(way.call(), way.leaves, inputs.upstream)
    return peaks.held(lambda: torch.autograd.grad(way.call(), way.leaves, inputs.upstream))


def memory() -> dict[str, Any]:
    """The exponent of the peak in n, forward and backward, each length in a fresh process."""
    held = {n: float(peaks.in_a_fresh_process(__file__, "--peak", str(n)).stdout.split()[-1]) for n in LENGTHS[1:]}
    fitted = peaks.slope(list(held), list(held.values()))
    return {"of": "memory", "backward": True, "mib": held, "slope": round(fitted, 3), "must": 1.1, "aim": 1.05}


def long_run() -> dict[str, Any]:
    """131,072 tokens, 8 heads, forward, on every core: that it runs, how long and how much it holds."""
    inputs = Inputs.draw(LONG, True)
    way = ours(inputs)
    torch.set_num_threads(os.cpu_count() or 1)
    with torch.no_grad():
        way.call()
        start, used = time.perf_counter(), time.process_time()
        mib = peaks.held(way.call)
        wall, used = time.perf_counter() - start, time.process_time() - used
    return {"n": LONG, "heads": 8, "threads": torch.get_num_threads(), "seconds": round(wall, 2),
            "cpu_seconds": round(used, 2), "mib": round(mib, 1)}  # fmt: skip


def installed() -> dict[str, dict[str, str]]:
    try:
        peers.local_attention()
        found = {"version": version("local-attention")}
    except peers.Missing as missing:
        found = {"reason": str(missing)}
    return {"local-attention": found, "FlexAttention": {"version": torch.__version__}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=float, default=1.0, help="multiply the rounds, e.g. 0.3 for a quick look")
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="these groups; printed and not stored")
    parser.add_argument("--peak", type=int, metavar="N", help="print one step's peak in this process, in MiB")
    parser.add_argument("--long", action="store_true", help="print the run of 131,072 tokens in this process")
    arguments = parser.parse_args()
    if arguments.long:
        print(long_run())
        return
    one_thread()
    if arguments.peak:
        print(peak_of(arguments.peak))
        return
    rows = rows_of([group for group in GROUPS if not arguments.only or group.what in arguments.only], arguments.repeats)
    judged = targets.judge(rows, LINES)
    print(targets.table(judged))
    if arguments.only:
        return
    slopes = [*time_slope(ours, OURS, LENGTHS), memory()]
    for found in slopes:
        print(f"slope of {found['of']}{', with backward' if found['backward'] else ''}: {found['slope']}")
    long = long_run()
    print(long)
    torch.set_num_threads(1)
    print(store("window", rows, __doc__ or "", peers=installed(), targets=judged, slopes=slopes, long=long))


if __name__ == "__main__":
    main()
