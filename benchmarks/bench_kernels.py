"""Every match kernel against its best peer and against the dot product; writes results/kernels.json.

b · h = 8, d = 64, float32. README.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peaks
import peers
import roofline
import targets
import torch
import ways
from harness import RESULTS, Row, chip, clock, machine, measure, one_thread, step, store
from ways import Build, Inputs, Way

import matchkernel as mk

Tensor = torch.Tensor


@dataclass(frozen=True)
class Group:
    """Ways that are timed in turns. Those in `same` compute one function, and are compared before they are timed."""

    what: str
    ways: Callable[[], dict[str, Build]]
    lengths: dict[int, int]
    """n, and how many rounds."""
    baseline: str = "matchkernel"
    same: bool = True
    causal: bool = False


def near_dot() -> dict[str, Build]:
    kernels = {
        "ScaledDot": mk.ScaledDot(),
        "Gaussian": mk.Gaussian(ways.SIGMA),
        "Cosine": mk.Cosine(0.1),
        "Bilinear": ways.bilinear(),
    }
    found = {"fused dot": ways.fused_dot, "dense dot": ways.dense_dot}
    return found | {name: _ours(kernel) for name, kernel in kernels.items()}


def near_dot_causal() -> dict[str, Build]:
    kernels = {
        "ScaledDot": mk.ScaledDot(),
        "ScaledDot + ALiBi": mk.ScaledDot() + mk.ALiBi(heads=ways.HEADS),
        "Gaussian": mk.Gaussian(ways.SIGMA),
    }
    return {"fused dot": ways.fused_dot} | {name: _ours(kernel) for name, kernel in kernels.items()}


def pointwise() -> dict[str, Build]:
    kernels = {
        "Additive": ways.additive().kernel,
        "Laplacian": ways.laplacian().kernel,
        "RationalQuadratic": ways.rational_quadratic().kernel,
        "Softcap": ways.softcap().kernel,
    }
    return {"fused dot": ways.fused_dot} | {name: _ours(kernel) for name, kernel in kernels.items()}


def products() -> dict[str, Build]:
    kernels = {
        "Cauchy, ProductKernel": ways.CauchyProduct(),
        "Quadratic, ProductKernel": ways.QuadraticProduct(),
        "Cauchy, match": ways.Cauchy(),
        "Quadratic, match": ways.Quadratic(),
    }
    return {"fused dot": ways.fused_dot} | {name: _ours(kernel) for name, kernel in kernels.items()}


def _ours(kernel: mk.MatchKernel) -> Build:
    return lambda inputs: ways.ours(inputs, kernel)


def long() -> dict[str, Build]:
    return {"fused dot": ways.fused_dot, "Additive": _ours(ways.additive().kernel)}


GROUPS = [
    Group("dot", near_dot, {2048: 11, 4096: 5}, "fused dot", same=False),
    Group("dot, causal", near_dot_causal, {2048: 15, 4096: 7}, "fused dot", same=False, causal=True),
    Group("pointwise", pointwise, {1024: 15, 2048: 7, 4096: 3}, "fused dot", same=False),
    Group("pointwise", long, {8192: 3}, "fused dot", same=False),
    Group("own", products, {1024: 15, 2048: 7, 4096: 3}, "fused dot", same=False),
    Group("additive", lambda: ways.additive().ways(), {1024: 3}),
    Group("laplacian", lambda: ways.laplacian().ways(), {1024: 3}),
    Group("rational quadratic", lambda: ways.rational_quadratic().ways(), {1024: 5}),
    Group("gaussian", lambda: ways.gaussian().ways(), {1024: 5}),
    Group("softcap", lambda: ways.softcap().ways(), {1024: 5}),
    Group("own: Cauchy", lambda: ways.own(ways.Cauchy(), ways.CauchyProduct()), {2048: 5}),
    Group("own: Quadratic", lambda: ways.own(ways.Quadratic(), ways.QuadraticProduct()), {2048: 5}),
    Group("own: PseudoHuber", lambda: ways.own(ways.PseudoHuber()), {512: 5}),
]


def compare(group: Group, n: int, repeats: int, backward: bool, device: str) -> list[Row]:
    """The group's rows at one length: measured, or with the reason why a peer could not be."""
    place = {"what": group.what, "n": n, "causal": group.causal, "backward": backward}
    inputs = Inputs.draw(n, group.causal, device)
    calls: dict[str, Callable[[], object]] = {}
    missing: list[Row] = []
    expected: list[Tensor] | None = None
    for name, build in group.ways().items():
        try:
            way = build(inputs)
            got = values(way, inputs, backward)
        except Exception as error:  # a peer may fail in any way: the table shows how; the library itself may not
            if name == group.baseline or not is_peer(group, name):
                raise
            why = str(error) if isinstance(error, peers.Missing) else peers.reason(error)
            missing.append({**place, "way": name, "baseline": group.baseline, "ms": None, "reason": why})
            continue
        if group.same and name != "fused dot":
            expected = got if expected is None else agree(name, got, expected)
        calls[name] = step(way.call, way.leaves, inputs.upstream, backward)
        del got
    gc.collect()
    measured = measure(calls, baseline=group.baseline, repeats=repeats, clock=clock(device), warm=True)
    return [{**place, "way": name, "baseline": group.baseline, **row} for name, row in measured.items()] + missing


def is_peer(group: Group, name: str) -> bool:
    return group.same and not name.startswith("matchkernel")


def values(way: Way, inputs: Inputs, backward: bool) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    if not backward:
        with torch.no_grad():
            return [way.call()]
    out = way.call()
    return [out.detach(), *torch.autograd.grad(out, way.leaves, inputs.upstream)[:3]]


def agree(name: str, got: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    """Ways that are compared in time compute the same numbers."""
    for mine, theirs in zip(got, expected, strict=True):
        worst = float((mine - theirs).abs().max() / theirs.abs().max())
        if not worst < 1e-3:
            raise AssertionError(f"{name} computes something else: relative difference {worst:.2g}")
    return expected


def show(rows: list[Row]) -> None:
    for row in rows:
        if row["ms"] is None:
            print(f"  {row['way']:26} {row['reason']}")
        else:
            ratio = f"{row['ratio']:8.3f} ({row['low']:.3f}–{row['high']:.3f})"
            print(f"  {row['way']:26} {row['ms']:10.1f} ms {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=float, default=1.0, help="multiply the rounds, e.g. 0.3 for a quick look")
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="these groups; printed, and stored with --renew")
    parser.add_argument("--renew", action="store_true", help="replace the stored rows of the groups in --only")
    parser.add_argument("--device", default="cpu", help="cuda for a GPU")
    arguments = parser.parse_args()
    device: str = arguments.device
    one_thread()
    # A GPU multiplies float32 matrices in float32, as the CPU does, not in a shorter format.
    torch.backends.cuda.matmul.allow_tf32 = False
    name = "kernels" if device == "cpu" else "kernels-" + chip(device).replace(" ", "-")
    chosen = [group for group in GROUPS if not arguments.only or group.what in arguments.only]
    stored = same_machine(name, device) if arguments.renew else {"rows": [], "roofline": None}
    kept = [row for row in stored["rows"] if row["what"] not in {group.what for group in chosen}]
    rows = rows_of(chosen, arguments.repeats, device)
    if arguments.only and not arguments.renew:
        return
    order = [group.what for group in GROUPS]
    rows = sorted(kept + rows, key=lambda row: order.index(row["what"]))
    judged = targets.judge(rows)
    roof = roofline.place(rows, stored["roofline"] or roofline.measure(device))
    print(targets.table(judged))
    gpu = "measured" if device != "cpu" else "not measured: python benchmarks/bench_kernels.py --device cuda does it"
    sections = {"gpu": gpu, "peers": peers.installed(), "targets": judged, "roofline": roof}
    print(store(name, rows, __doc__ or "", device=device, **sections))


def rows_of(groups: list[Group], repeats: float, device: str = "cpu") -> list[Row]:
    """Every group at each of its lengths, forward and with backward, printed as it goes."""
    rows: list[Row] = []
    for group in groups:
        for n, rounds in group.lengths.items():
            for backward in (False, True):
                print(f"{group.what}, n = {n}{', with backward' if backward else ''}", flush=True)
                new = compare(group, n, max(3, round(rounds * repeats)), backward, device)
                show(new)
                rows += new
    return rows


def time_slope(build: Build, way: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """The exponent of the time of a causal way in n, forward and with backward."""
    found = []
    for backward in (False, True):
        times: dict[int, float] = {}
        for n in lengths:
            inputs = Inputs.draw(n, True)
            made = build(inputs)
            call = step(made.call, made.leaves, inputs.upstream, backward)
            times[n] = measure({way: call}, baseline=way, repeats=5 if n < 8192 else 3, clock=clock("cpu"))[way]["ms"]
        fitted = round(peaks.slope(list(times), list(times.values())), 3)
        found.append({"of": "time", "backward": backward, "ms": times, "slope": fitted, "must": 1.1, "aim": 1.05})
    return found


def same_machine(name: str, device: str) -> dict[str, Any]:
    """What is stored, if it was taken on this machine with this torch."""
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    for key in ("cpu", "torch", "threads", "gpu"):
        then, now = stored["machine"].get(key), machine(device).get(key)
        if then != now:
            raise SystemExit(
                f"the stored rows were taken with {key} = {then}, this is {now}: measure all of them again"
            )
    return stored


if __name__ == "__main__":
    main()
