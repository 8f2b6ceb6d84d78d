"""Peak memory of one forward and backward beside its inputs, each in a fresh process; writes results/memory.json.

(1, 4, n, 64), float32. The inputs are q, k, v, the kernel's parameters and the gradient that reaches the output; the
output and the gradients of the inputs count, and make 4 MiB of every 1,024 tokens. Freed memory is handed back.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import peaks
import targets
import torch
import ways
from harness import RESULTS, Row, one_thread, store

import matchkernel as mk

LENGTHS = (1024, 2048, 4096, 8192)
DENSE = (512, 1024)
"""Lengths for the ways that hold n × n, or n × n × d, numbers."""


def kernels() -> dict[str, Callable[[], mk.MatchKernel]]:
    return {
        "ScaledDot": mk.ScaledDot,
        "Gaussian": lambda: mk.Gaussian(ways.SIGMA),
        "Bilinear": ways.bilinear,
        "Cosine": lambda: mk.Cosine(0.1),
        "ScaledDot + ALiBi": lambda: mk.ScaledDot() + mk.ALiBi(heads=ways.HEADS),
        "Additive": lambda: ways.additive().kernel,
        "Laplacian": lambda: ways.laplacian().kernel,
        "RationalQuadratic": lambda: ways.rational_quadratic().kernel,
        "Softcap": lambda: ways.softcap().kernel,
        "Cauchy, own": ways.Cauchy,
        "PseudoHuber, own": ways.PseudoHuber,
    }


def beside() -> dict[str, ways.Build]:
    """What the peers hold for the same work."""
    found: dict[str, ways.Build] = {"fused dot, fused dot": ways.fused_dot}
    for what, subject in (("Additive", ways.additive()), ("Laplacian", ways.laplacian())):
        found |= {
            f"{what}, {way}": build for way, build in subject.ways().items() if way not in ("matchkernel", "fused dot")
        }
    return found


def peak(build: ways.Build, n: int, causal: bool) -> float:
    """MiB that one step holds at most, beside what was there before it."""
    for length in (256, n):
        # Twice, the second time at full length: whatever is compiled is compiled before the step that counts.
        _step(build, length, causal)
    inputs = ways.Inputs.draw(n, causal, batch=1)
    way = build(inputs)
    return peaks.held(lambda: torch.autograd.grad(way.call(), way.leaves, inputs.upstream))


def _step(build: ways.Build, n: int, causal: bool) -> None:
    inputs = ways.Inputs.draw(n, causal, batch=1)
    way = build(inputs)
    torch.autograd.grad(way.call(), way.leaves, inputs.upstream)


def run(what: str, way: str, n: int) -> None:
    """In the fresh process: print the peak."""
    one_thread()
    if way == "matchkernel":
        kernel = kernels()[what]()
        print(peak(lambda inputs: ways.ours(inputs, kernel), n, causal="ALiBi" in what))
    else:
        print(peak(beside()[f"{what}, {way}"], n, causal=False))


def fresh(what: str, way: str, n: int) -> Row:
    done = peaks.in_a_fresh_process(__file__, "--one", what, way, str(n))
    place: Row = {"what": what, "way": way, "n": n, "causal": "ALiBi" in what}
    if done.returncode:
        if way == "matchkernel":
            raise RuntimeError(f"{what} at n = {n}:\n{done.stderr}")
        lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        return place | {"mib": None, "reason": lines[-1][:300]}
    mib = float(done.stdout.split()[-1])
    return place | {"mib": round(mib, 2), "mib_per_1024": round(mib * 1024 / n, 2)}


def slope(rows: list[Row]) -> float:
    """Least squares of log mib on log n."""
    return peaks.slope([row["n"] for row in rows], [row["mib"] for row in rows])


def judge(rows: list[Row], slopes: list[Row]) -> list[Row]:
    """Worst of all kernels: MiB per 1,024 tokens, and how fast they grow."""
    judged = []
    for line, key, cases, must, aim in (
        ("peak MiB per 1,024 tokens, any kernel", "mib_per_1024", rows, 10.0, 5.0),
        ("slope of the peak over n, any kernel", "slope", slopes, 1.05, 1.0),
    ):
        ours = [row for row in cases if row["way"] == "matchkernel"]
        verdict: Row = {"line": line, "must": must, "aim": aim, "measured": None, "met": "not measured"}
        if ours:
            worst = max(ours, key=lambda row: row[key])
            measured = worst[key]
            verdict |= {"measured": measured, "met": targets.standing(measured, must, aim)}
            verdict["where"] = {name: worst[name] for name in ("what", "n") if name in worst}
        judged.append(verdict)
    for what in dict.fromkeys(row["what"] for row in rows if row["way"] == "matchkernel"):
        worst = max((row for row in rows if (row["what"], row["way"]) == (what, "matchkernel")), key=_per_token)
        judged.append(
            {"line": f"peak MiB per 1,024 tokens, {what}", "must": None, "aim": None, "measured": _per_token(worst)}
            | {"met": "told", "where": {"n": worst["n"]}}
        )
    return judged


def _per_token(row: Row) -> float:
    value: float = row["mib_per_1024"]
    return value


def kept(renewed: list[str], section: str) -> list[Row]:
    """The stored rows of the other kernels."""
    stored = json.loads((RESULTS / "memory.json").read_text())
    return [row for row in stored[section] if row["what"] not in renewed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "WAY", "N"), help="print one peak of this process, in MiB")
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="these kernels; printed, and stored with --renew")
    parser.add_argument("--renew", action="store_true", help="replace the stored rows of the kernels in --only")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="leave longer sequences out")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    arguments = parser.parse_args()
    if arguments.one:
        what, way, n = arguments.one
        run(what, way, int(n))
        return
    one_thread()
    cases: list[tuple[str, str, tuple[int, ...]]] = [(what, "matchkernel", LENGTHS) for what in kernels()]
    for name in beside():
        what, way = name.split(", ", 1)
        dense = way in ("naive", "d2l", "cdist") or "compiled" in way
        cases.append((what, way, DENSE if dense else LENGTHS[:2]))
    rows: list[Row] = []
    slopes: list[Row] = []
    for what, way, lengths in cases:
        if (arguments.only and what not in arguments.only) or (arguments.ours and way != "matchkernel"):
            continue
        new = [fresh(what, way, n) for n in lengths if n <= arguments.longest]
        found = [row for row in new if row["mib"] is not None]
        for row in new:
            told = (
                row["reason"] if row["mib"] is None else f"{row['mib']:9.1f} MiB {row['mib_per_1024']:8.2f} per 1,024"
            )
            print(f"  {what:20} {way:18} n = {row['n']:6} {told}", flush=True)
        if len(found) > 1:
            fitted = slope(found)
            slopes.append({"what": what, "way": way, "slope": round(fitted, 3), "lengths": [row["n"] for row in found]})
            print(f"  {what:20} {way:18} slope {fitted:.3f}", flush=True)
        rows += new
    if (arguments.only and not arguments.renew) or arguments.ours or arguments.longest < max(LENGTHS):
        return
    if arguments.renew:
        rows, slopes = kept(arguments.only, "rows") + rows, kept(arguments.only, "slopes") + slopes
    judged = judge(rows, slopes)
    print(targets.table(judged))
    print(store("memory", rows, __doc__ or "", slopes=slopes, targets=judged))


if __name__ == "__main__":
    main()
