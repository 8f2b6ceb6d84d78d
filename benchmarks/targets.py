"""What the library is held to, line by line, judged from measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness import Row

Case = tuple[float, float, float, Row]
"""A ratio with its quartiles, and the row it comes from."""


Promise = tuple[float | None, float | None]
"""Forward, and with backward."""


@dataclass(frozen=True)
class Line:
    """The worst of some rows may not exceed `must`; `aim` is what would be good. None where nothing is promised."""

    line: str
    must: float | None
    aim: float | None
    what: str
    way: str
    backward: bool
    from_length: int = 0
    peers: tuple[str, ...] = ()
    """Given, the fastest of these is what `way` is compared with; else the baseline of its group."""

    def cases(self, rows: Sequence[Row]) -> list[Case]:
        """This way's ratio to the fastest of the peers, or to the baseline of its group, at each length."""
        place = [
            row
            for row in rows
            if (row["what"], row["backward"]) == (self.what, self.backward)
            and row["n"] >= self.from_length
            and row["ms"] is not None
        ]
        found: list[Case] = []
        for ours in place:
            if ours["way"] != self.way:
                continue
            if not self.peers:
                found.append((ours["ratio"], ours["low"], ours["high"], ours))
                continue
            beside = [row for row in place if row["n"] == ours["n"] and row["way"] in self.peers]
            if beside:
                best = min(beside, key=lambda row: row["ratio"])
                ratio, low, high = (
                    ours[a] / best[b] for a, b in (("ratio", "ratio"), ("low", "high"), ("high", "low"))
                )
                found.append((ratio, low, high, best))
        return found


def _both(line: str, must: Promise, aim: Promise, what: str, way: str, **more: object) -> list[Line]:
    """One line forward, one with backward."""
    return [
        Line(  # type: ignore[arg-type]
            f"{line}, {'with backward' if backward else 'forward'}",
            must[backward],
            aim[backward],
            what,
            way,
            backward,
            **more,
        )
        for backward in (False, True)
    ]


PEERS = ("KeOps", "KeOps, identity", "naive", "naive, compiled", "d2l")
DISTANCE_PEERS = ("KeOps", "cdist")
FACTORS = ("KeOps, our factors", "compiled, our factors")
NEAR_DOT = (("dot", "Gaussian"), ("dot", "Cosine"), ("dot", "Bilinear"), ("dot, causal", "ScaledDot + ALiBi"))
PRODUCTS = (
    ("pointwise", "RationalQuadratic"), ("pointwise", "Softcap"),
    ("own", "Cauchy, ProductKernel"), ("own", "Quadratic, ProductKernel"),
)  # fmt: skip
OWN = ("Cauchy", "Quadratic", "PseudoHuber")
OURS = "matchkernel"

LINES: list[Line] = []
for _what, _way in NEAR_DOT:
    LINES += _both(f"{_way} ÷ fused dot", (1.20, 1.20), (1.08, 1.08), _what, _way, from_length=2048)
LINES += _both("Additive ÷ best peer", (1 / 10, 1 / 12), (1 / 20, 1 / 25), "additive", OURS, peers=PEERS)
LINES += _both("Additive ÷ fused dot", (2.2, 2.2), (1.3, 1.3), "pointwise", "Additive")
LINES += _both(
    "Additive without a compiler ÷ d2l",
    (1 / 10, None),
    (1 / 20, None),
    "additive",
    f"{OURS}, no compiler",
    peers=("d2l",),
)
LINES += _both(
    "Laplacian ÷ best of KeOps and cdist", (1 / 3, 1 / 2.5), (1 / 6, 1 / 6), "laplacian", OURS, peers=DISTANCE_PEERS
)
for _what, _way in PRODUCTS:
    LINES += _both(f"{_way} ÷ fused dot", (1.25, 1.5), (1.05, 1.05), _what, _way, from_length=2048)
for _way in OWN:
    LINES += _both(
        f"a reader's {_way} ÷ the same, dense",
        (1 / 2.5, 1 / 2.5),
        (1 / 10, 1 / 10),
        f"own: {_way}",
        OURS,
        peers=("dense",),
    )
for _way in ("Cauchy", "Quadratic"):
    LINES += _both(
        f"a reader's {_way} as ProductKernel ÷ the same, dense",
        (1 / 2.5, 1 / 2.5),
        (1 / 10, 1 / 10),
        f"own: {_way}",
        f"{OURS}, ProductKernel",
        peers=("dense",),
    )
# Not promised, but what an honest table shows: peers that were handed the library's own trick, and the best of all.
for _peer in PEERS:
    LINES += _both(f"Additive ÷ {_peer}", (None, None), (None, None), "additive", OURS, peers=(_peer,))
LINES += _both("Additive ÷ peers given its factors", (None, None), (None, None), "additive", OURS, peers=FACTORS)
LINES += _both("Laplacian ÷ compiled naive", (None, None), (None, None), "laplacian", OURS, peers=("naive, compiled",))
for _way in ("Cauchy, match", "Quadratic, match"):
    LINES += _both(f"{_way} ÷ fused dot", (None, None), (None, None), "own", _way, from_length=2048)
LINES += _both("Laplacian ÷ fused dot", (None, None), (None, None), "pointwise", "Laplacian")

RING_LINES: list[Line] = [
    Line("ring, a rank of two ÷ one process, not causal", 0.56, 0.50, "ring", "ring", True),
    Line("ring, a rank of two ÷ one process, causal, dealt", 0.60, 0.50, "ring, causal", "ring, dealt", True),
    Line("ring, a rank of two ÷ one process, causal, contiguous", None, None, "ring, causal", "ring, contiguous", True),
]


def judge(rows: Sequence[Row], lines: Iterable[Line] = LINES) -> list[Row]:
    """One row per line: the worst case, where it was met, and how it stands."""
    judged: list[Row] = []
    for line in lines:
        verdict: Row = {
            "line": line.line, "what": line.what, "way": line.way, "backward": line.backward,
            "must": _rounded(line.must), "aim": _rounded(line.aim), "measured": None, "met": "not measured",
        }  # fmt: skip
        cases = line.cases(rows)
        if cases:
            measured, low, high, row = max(cases, key=lambda case: case[0])
            verdict |= {
                "measured": round(measured, 4), "low": round(low, 4), "high": round(high, 4),
                "met": standing(measured, line.must, line.aim), "where": {"n": row["n"], "beside": beside(line, row)},
            }  # fmt: skip
        judged.append(verdict)
    return judged


def _rounded(bound: float | None) -> float | None:
    return None if bound is None else round(bound, 4)


def beside(line: Line, row: Row) -> str:
    name: str = row["way"] if line.peers else row["baseline"]
    return name


def standing(measured: float, must: float | None, aim: float | None) -> str:
    if must is None or aim is None:
        return "told"
    return "aim" if measured <= aim else "must" if measured <= must else "missed"


def table(judged: Sequence[Row]) -> str:
    """For people: the lines, each with how it stands."""
    lines = []
    for row in judged:
        bounds = "" if row["must"] is None else f"must {row['must']:7.3f}  aim {row['aim']:7.3f}"
        got = "" if row["measured"] is None else f"{row['measured']:7.3f}"
        lines.append(f"{row['line']:52} {bounds:28} {got:8} {row['met']}")
    return "\n".join(lines)
