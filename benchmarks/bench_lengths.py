"""Time and memory of attention as the text grows, full and by every remedy; writes results/lengths.json.

Heads of width 64, float32, n = 2⁹ … 2¹⁵: eight of them, fewer for the longest texts. README.md says what the rows mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peaks
import roofline
import targets
import torch
import ways
from harness import RESULTS, Row, chip, clock, machine, measure, one_thread, step, store
from torch.nn.functional import logsigmoid
from ways import Build, Inputs, Way

import matchkernel as mk

Tensor = torch.Tensor
ROUNDS = {512: 7, 1024: 5, 2048: 5, 4096: 3, 8192: 3, 16384: 3, 32768: 2}
"""Each length, and how many times every method is timed there."""
HEADS = {4096: 4, 8192: 2, 16384: 1, 32768: 1}
"""Eight heads, but here: full attention would take a minute a step at 2¹⁵. Slopes are those of the time of a head."""
FOR_MEMORY = (512, 2048, 8192, 32768)
WARM = 2048
"""Up to here each call runs once untimed before; a longer one has run at a shorter length."""
LONG = 131072
FULL, BOTH_SIDES = "full, fused", "full, fused, both sides"
FEATURES, WINDOW, KEPT, LANDMARKS, RANK, BLOCK, BUCKET = 256, 128, 64, 64, 128, 64, 64


@dataclass(frozen=True)
class Method:
    """One way to attend; it is timed in turns with all that look the same way, up to `longest` tokens."""

    build: Build
    causal: bool = True
    longest: int = 16384
    longest_held: int = max(FOR_MEMORY)

    @property
    def against(self) -> str:
        return FULL if self.causal else BOTH_SIDES


def attending(kernel: Callable[[Inputs], mk.MatchKernel], engine: Any = "auto", **options: Any) -> Build:
    """The library's call; an engine that depends on the inputs is given as a function of them."""

    def build(inputs: Inputs) -> Way:
        q, k, v = inputs.leaves
        of, by = kernel(inputs), engine(inputs) if callable(engine) else engine
        of.to(q.device)
        parameters = [*of.parameters(), *(by.to(q.device).parameters() if isinstance(by, torch.nn.Module) else ())]
        return Way(lambda: mk.attend(q, k, v, of, causal=inputs.causal, engine=by, **options), [q, k, v, *parameters])

    return build


def carried(update: Callable[[Inputs], tuple[Any, list[Tensor]]], normalized: bool) -> Build:
    """A state that is handed from token to token, with elu + 1 features, or unit keys where old values are erased."""

    def build(inputs: Inputs) -> Way:
        q, k, v = inputs.leaves
        how, learned = update(inputs)

        def call() -> Tensor:
            if normalized:
                return mk.linear_attention(q, k, v, mk.EluFeatures(), how)[0]
            return mk.linear_attention(q, torch.nn.functional.normalize(k, dim=-1), v, None, how)[0]

        return Way(call, [q, k, v, *learned])

    return build


def gated_delta(inputs: Inputs) -> tuple[Any, list[Tensor]]:
    x, y = _draw(inputs, 2, *inputs.k.shape[:-1])
    return mk.GatedDeltaRule(logsigmoid(x + 4).detach(), torch.sigmoid(y).detach()), []


def gates(inputs: Inputs) -> tuple[Any, list[Tensor]]:
    return mk.Gates(logsigmoid(_draw(inputs, *inputs.k.shape) + 4).detach()), []


def _draw(inputs: Inputs, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(inputs.q.device)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def dot(_: Inputs) -> mk.MatchKernel:
    return mk.ScaledDot()


def elu(_: Inputs) -> mk.MatchKernel:
    return mk.EluFeatures()


def favor(_: Inputs) -> mk.MatchKernel:
    return mk.FavorFeatures(ways.WIDTH, FEATURES, generator=_seed())


def tokens(inputs: Inputs) -> int:
    return inputs.q.shape[-2]


def draw(n: int, causal: bool, device: str = "cpu", heads: int = 8) -> Inputs:
    """(2, 4, n, 64) as everywhere, or (1, heads, n, 64)."""
    whole = Inputs.draw(n, causal, device)
    if heads == ways.BATCH * ways.HEADS:
        return whole
    q, k, v = (x.detach()[:1, :heads].clone().requires_grad_() for x in whole.leaves)
    return Inputs(q, k, v, whole.upstream[:1, :heads].clone(), causal)


METHODS = {
    FULL: Method(attending(dot, "fused"), longest=32768, longest_held=8192),
    "full, dense": Method(attending(dot, "reference"), longest=4096, longest_held=2048),
    "full, tiled": Method(attending(dot, "tiled"), longest=8192, longest_held=8192),
    f"window {WINDOW}": Method(attending(dot, "sparse", window=WINDOW), longest=32768),
    "linear, elu + 1": Method(attending(elu, "linear"), longest=32768),
    f"linear, FAVOR+ {FEATURES}": Method(attending(favor, "linear")),
    "state, decay": Method(carried(lambda _: (mk.Decay(0.98), []), normalized=True)),
    "state, gates": Method(carried(gates, normalized=True)),
    "state, gated delta rule": Method(carried(gated_delta, normalized=False)),
    f"top {KEPT}": Method(attending(dot, mk.TopK(KEPT)), longest=4096, longest_held=8192),
    f"LSH, buckets of {BUCKET}": Method(
        attending(dot, lambda inputs: mk.LSH(tokens(inputs) // BUCKET, generator=_seed()))
    ),
    BOTH_SIDES: Method(attending(dot, "fused"), causal=False, longest_held=8192),
    "linear, elu + 1, both sides": Method(attending(elu, "linear"), causal=False),
    f"Nyström {LANDMARKS}": Method(attending(dot, mk.Nystrom(LANDMARKS)), causal=False),
    f"Linformer {RANK}": Method(
        attending(dot, lambda inputs: mk.Linformer(tokens(inputs), RANK, generator=_seed())), causal=False
    ),
    f"BigBird, blocks of {BLOCK}": Method(
        attending(dot, lambda inputs: mk.Blocks(mk.BlockPattern.bigbird(tokens(inputs), BLOCK, generator=_seed()))),
        causal=False,
    ),
}
LINES = ("linear, elu + 1", f"window {WINDOW}")
"""The methods that promise to grow with the length."""
EXACT = {FULL, "full, dense", "full, tiled", BOTH_SIDES}


# ---- time -----------------------------------------------------------------------------------------------------------


def time_at(n: int, names: Sequence[str], rounds: int, backward: bool, device: str) -> list[Row]:
    """Every method that reaches this length, in turns, beside the full attention that looks the same way."""
    found: list[Row] = []
    heads = HEADS.get(n, ways.BATCH * ways.HEADS)
    for causal in (True, False):
        inputs = draw(n, causal, device, heads)
        against = FULL if causal else BOTH_SIDES
        taken = [name for name in names if METHODS[name].causal == causal and METHODS[name].longest >= n]
        if not taken:
            continue
        calls: dict[str, Callable[[], object]] = {}
        for name in taken:
            way = METHODS[name].build(inputs)
            calls[name] = step(way.call, way.leaves, inputs.upstream, backward)
        # Where full attention is too long to be timed, a method stands beside itself: its time is kept, no ratio.
        baseline = against if against in calls else taken[0]
        rows = measure(calls, baseline=baseline, repeats=rounds, clock=clock(device), warm=n > WARM)
        for name, row in rows.items():
            if baseline != against:
                row = {"ms": row["ms"], "ratio": None, "low": None, "high": None, "repeats": row["repeats"]}
            place = {"method": name, "n": n, "heads": heads, "causal": causal, "backward": backward}
            found.append(place | {"against": against, "ms_per_head": round(row["ms"] / heads, 4), **row})
        del calls
        gc.collect()
    return found


def check(names: Sequence[str]) -> None:
    """What claims to be the same function is, before it is timed."""
    for causal in (True, False):
        inputs = Inputs.draw(512, causal)
        with torch.no_grad():
            expected = METHODS["full, dense"].build(inputs).call()
            for name in names:
                if name in EXACT and METHODS[name].causal == causal:
                    torch.testing.assert_close(METHODS[name].build(inputs).call(), expected, rtol=1e-4, atol=1e-5)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_here(name: str, longest: int, device: str) -> list[Row]:
    """In a fresh process: MiB that one call holds at most beside its inputs, forward and with backward."""
    method, found = METHODS[name], []
    for n in (256, *FOR_MEMORY):
        if n > min(method.longest_held, longest):
            continue
        inputs = Inputs.draw(n, method.causal, device)
        way = method.build(inputs)
        for backward in (False, True):
            call = step(way.call, way.leaves, inputs.upstream, backward)
            if n == 256:
                call()
                continue
            mib = peaks.held(call, device)
            found.append({"method": name, "n": n, "backward": backward, "mib": round(mib, 2)})
    return found


def memory_of(name: str, longest: int, device: str) -> list[Row]:
    done = peaks.in_a_fresh_process(__file__, "--memory-of", name, "--longest", str(longest), "--device", device)
    if done.returncode:
        raise RuntimeError(f"{name}:\n{done.stderr}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


# ---- a very long text -----------------------------------------------------------------------------------------------


def long_one(name: str) -> Row:
    """One forward of 131,072 tokens on two cores: the clock's time, the processor's, and the peak."""
    torch.set_num_threads(2)
    for length in (512, 4096):
        inputs = Inputs.draw(length, METHODS[name].causal)
        way = METHODS[name].build(inputs)
        step(way.call, way.leaves, inputs.upstream, backward=False)()
    inputs = Inputs.draw(LONG, METHODS[name].causal)
    way = METHODS[name].build(inputs)
    call = step(way.call, way.leaves, inputs.upstream, backward=False)
    wall, cpu = time.perf_counter(), time.process_time()
    mib = peaks.held(call)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "method": name, "n": LONG, "heads": ways.BATCH * ways.HEADS, "threads": 2, "backward": False,
        "seconds": round(wall, 2), "cpu_seconds": round(cpu, 2), "mib": round(mib, 1),
    }  # fmt: skip


def long_of(name: str) -> list[Row]:
    if name not in LINES:
        return []
    # Threads that wait in a loop are counted as work, and on a shared machine keep the others from theirs.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    done = peaks.in_a_fresh_process(__file__, "--long-one", name, environment=threads)
    if done.returncode:
        raise RuntimeError(f"{name} at n = {LONG}:\n{done.stderr}")
    return [json.loads(done.stdout.splitlines()[-1])]


# ---- what follows from the rows -------------------------------------------------------------------------------------


def slopes(rows: Sequence[Row], what: str) -> list[Row]:
    """How fast a quantity grows, over all measured lengths and over the last step from one to the next."""
    found = []
    for name in METHODS:
        for backward in (False, True):
            mine = sorted((r["n"], r[what]) for r in rows if (r["method"], r["backward"]) == (name, backward))
            if len(mine) > 1:
                lengths, values = zip(*mine, strict=True)
                found.append({
                    "method": name, "backward": backward, "of": what, "lengths": list(lengths),
                    "slope": round(peaks.slope(lengths, values), 3),
                    "last": round(peaks.slope(lengths[-2:], values[-2:]), 3),
                })  # fmt: skip
    return found


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The length from which on the ratio stays below 1, or None where it is not below at the longest.

    Between two measured lengths by a straight line in log–log; the shortest length where it is below from the start.
    """
    if ratios[-1] >= 1.0:
        return None
    above = [index for index, ratio in enumerate(ratios) if ratio >= 1.0]
    if not above:
        return float(lengths[0])
    last = above[-1]
    (x0, x1), (y0, y1) = ([math.log(value) for value in pair[last : last + 2]] for pair in (lengths, ratios))
    return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """From which length each method takes less time than full attention, fused, that looks the same way."""
    found = []
    for name, method in METHODS.items():
        for backward in (False, True):
            mine = sorted(
                (r["n"], r["ratio"])
                for r in rows
                if (r["method"], r["backward"]) == (name, backward) and r["ratio"] is not None
            )
            if name == method.against or not mine:
                continue
            lengths, ratios = zip(*mine, strict=True)
            at = crossover(lengths, ratios)
            found.append({
                "method": name, "backward": backward, "against": method.against,
                "from": None if at is None else round(at), "at_once": at is not None and ratios[0] < 1.0,
                "lengths": list(lengths), "ratio_at_longest": ratios[-1],
            })  # fmt: skip
    return found


def judge(growth: Sequence[Row]) -> list[Row]:
    """The promised slopes, and those of full attention, forward and with backward."""
    promised = [(name, of, 1.1, 1.05) for name in LINES for of in ("ms_per_head", "mib")]
    told = [
        (FULL, "ms_per_head", None, None),
        ("full, dense", "ms_per_head", None, None),
        ("full, dense", "mib", None, None),
    ]
    judged = []
    for name, of, must, aim in [*promised, (FULL, "mib", 1.1, 1.0), *told]:
        for row in growth:
            if (row["method"], row["of"]) == (name, of):
                quantity = "time" if of == "ms_per_head" else "memory"
                how = "with backward" if row["backward"] else "forward"
                judged.append({
                    "line": f"slope of {quantity}, {name}, {how}", "must": must, "aim": aim,
                    "measured": row["slope"], "met": targets.standing(row["slope"], must, aim),
                })  # fmt: skip
    return judged


SECTIONS = ("rows", "memory", "long")


def save(section: str, new: Sequence[Row], methods: Sequence[str], device: str) -> list[Row]:
    """Put new rows in the place of these methods' old ones, and judge what is stored now."""
    name = "lengths" if device == "cpu" else "lengths-" + chip(device).replace(" ", "-")
    path = RESULTS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    if stored and (then := stored["machine"]["cpu"]) != (now := machine(device)["cpu"]):
        sys.exit(f"the stored rows were taken on {then}, this is {now}: measure all of them again")
    found: dict[str, list[Row]] = {key: stored.get(key, []) for key in SECTIONS}
    found[section] = [row for row in found[section] if row["method"] not in methods] + list(new)
    order = {method: index for index, method in enumerate(METHODS)}
    found[section].sort(key=lambda row: (row["n"], row["backward"], order[row["method"]]))
    rows, memory = found.pop("rows"), found["memory"]
    growth = slopes(rows, "ms_per_head") + slopes(memory, "mib")
    judged = judge(growth)
    # What the core can do at best, on the machine and under the load of these rows.
    roof = stored.get("roofline") or roofline.measure(device)
    sections = {"slopes": growth, "crossovers": crossovers(rows), "targets": judged, "roofline": roof, **found}
    store(name, rows, __doc__ or "", device=device, **sections)
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of", metavar="METHOD", help="print the peaks of this process")
    parser.add_argument("--long-one", metavar="METHOD", help=f"print one row of n = {LONG}")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these, beside full attention; written nowhere")
    parser.add_argument("--renew", action="store_true", help="store the methods in --only among the others")
    parser.add_argument("--parts", nargs="+", choices=("time", "memory", "long"), default=("time", "memory", "long"))
    parser.add_argument("--rounds", type=int, default=max(ROUNDS.values()), help="time each call this often at most")
    parser.add_argument("--longest", type=int, default=max(ROUNDS), help="leave longer texts out")
    parser.add_argument("--device", default="cpu", help="cuda for a GPU")
    arguments = parser.parse_args()
    device: str = arguments.device
    if arguments.long_one:
        print(json.dumps(long_one(arguments.long_one)))
        return
    one_thread()
    if arguments.memory_of:
        print(json.dumps(memory_here(arguments.memory_of, arguments.longest, device)))
        return
    chosen = arguments.only or list(METHODS)
    if unknown := set(chosen) - set(METHODS):
        sys.exit(f"no such method: {sorted(unknown)}; there are {list(METHODS)}")
    keep = arguments.longest == max(ROUNDS) and (arguments.renew or not arguments.only)
    judged: list[Row] = []
    if "time" in arguments.parts:
        rows = time_all(chosen, arguments.longest, arguments.rounds, device)
        if keep:
            judged = save("rows", [row for row in rows if row["method"] in chosen], chosen, device)
    for name in chosen:
        if "memory" in arguments.parts:
            held = memory_of(name, arguments.longest, device)
            told = ", ".join(f"{row['n']} {row['mib']:.1f}" for row in held if row["backward"])
            print(f"  {name:28} MiB with backward: {told}", flush=True)
            if keep:
                judged = save("memory", held, [name], device)
        if "long" in arguments.parts and keep and device == "cpu":
            judged = save("long", long_of(name), [name], device)
    print(targets.table(judged))


def time_all(chosen: Sequence[str], longest: int, most: int, device: str) -> list[Row]:
    timed = [name for name in METHODS if name in chosen or name in {METHODS[c].against for c in chosen}]
    check(timed)
    rows: list[Row] = []
    for n, rounds in ROUNDS.items():
        # Full attention alone is timed where it is asked for, and not as what others would stand beside.
        here = [name for name in timed if n <= METHODS[name].longest]
        needed = {METHODS[name].against for name in here if name in chosen}
        here = [name for name in here if name in chosen or name in needed]
        for backward in (False, True):
            if here and n <= longest:
                new = time_at(n, here, max(2, min(rounds, most)), backward, device)
                rows += new
                show(n, backward, new)
    return rows


def show(n: int, backward: bool, rows: Sequence[Row]) -> None:
    print(f"n = {n}{', with backward' if backward else ''}", flush=True)
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.3f} ({row['low']:.3f}–{row['high']:.3f})"
        print(f"  {row['method']:28} {row['ms']:10.1f} ms {ratio}", flush=True)


if __name__ == "__main__":
    main()
