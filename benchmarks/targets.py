"""What the library is held to, line by line, judged from measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness import Row

Case = tuple[float, float, float, Row]
"""A ratio with its quartiles, and the row it comes from."""


@dataclass(frozen=True)
class Line:
    """The worst of some rows may not exceed `must`; `aim` is what would be good."""

    line: str
    must: float
    aim: float
    what: str
    way: str
    backward: bool
    from_length: int = 0
    peers: tuple[str, ...] = ()
    """Given, `way` is the baseline of its group, and the fastest of these is what it is compared with."""

    def cases(self, rows: Sequence[Row]) -> list[Case]:
        place = [
            row
            for row in rows
            if (row["what"], row["backward"]) == (self.what, self.backward)
            and row["n"] >= self.from_length
            and row["ms"] is not None
        ]
        if not self.peers:
            return [(row["ratio"], row["low"], row["high"], row) for row in place if row["way"] == self.way]
        found = []
        for n in {row["n"] for row in place}:
            beside = [row for row in place if row["n"] == n and row["way"] in self.peers]
            if beside:
                best = min(beside, key=lambda row: row["ratio"])
                found.append((1 / best["ratio"], 1 / best["high"], 1 / best["low"], best))
        return found


def _both(
    line: str, must: tuple[float, float], aim: tuple[float, float], what: str, way: str, **more: object
) -> list[Line]:
    """One line forward, one with backward."""
    return [
        Line(
            f"{line}, {'with backward' if backward else 'forward'}",
            must[backward],
            aim[backward],
            what,
            way,
            backward,
            **more,
        )  # type: ignore[arg-type]
        for backward in (False, True)
    ]


ADDITIVE_PEERS = ("KeOps", "KeOps, identity", "naive", "naive, compiled", "d2l")
LINES: list[Line] = [
    *(
        line
        for what, way in (("dot", "Gaussian"), ("dot", "Cosine"), ("dot", "Bilinear"), ("dot, causal", "ScaledDot + ALiBi"))
        for line in _both(f"{way} ÷ fused dot", (1.20, 1.20), (1.08, 1.08), what, way, from_length=2048)
    ),
    *_both("Additive ÷ best peer", (1 / 10, 1 / 12), (1 / 20, 1 / 25), "additive", "matchkernel", peers=ADDITIVE_PEERS),
    *_both("Additive ÷ fused dot", (2.2, 2.2), (1.3, 1.3), "pointwise", "Additive"),
    Line(
        "Additive without a compiler ÷ d2l, forward", 1 / 10, 1 / 20,
        "additive, no compiler", "matchkernel", False, peers=("d2l",),
    ),
    *_both("Laplacian ÷ best of KeOps and cdist", (1 / 3, 1 / 2.5), (1 / 6, 1 / 6), "laplacian", "matchkernel", peers=("KeOps", "cdist")),
    *(
        line
        for way in ("RationalQuadratic", "Softcap", "Cauchy, own", "Quadratic, own")
        for line in _both(f"{way} ÷ fused dot", (1.25, 1.5), (1.05, 1.05), "pointwise", way, from_length=2048)
    ),
    *(
        line
        for name in ("Cauchy", "Quadratic", "PseudoHuber")
        for line in _both(f"a reader's {name} ÷ the same, dense", (1 / 2.5, 1 / 2.5), (1 / 10, 1 / 10), f"own: {name}", "matchkernel", peers=("dense",))
    ),
]  # fmt: skip


def judge(rows: Sequence[Row], lines: Iterable[Line] = LINES) -> list[Row]:
    """One row per line: the worst case, where it was met, and how it stands."""
    judged: list[Row] = []
    for line in lines:
        verdict: Row = {
            "line": line.line, "what": line.what, "way": line.way, "backward": line.backward,
            "must": round(line.must, 4), "aim": round(line.aim, 4), "measured": None, "met": "not measured",
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


def beside(line: Line, row: Row) -> str:
    name: str = row["way"] if line.peers else row["baseline"]
    return name


def standing(measured: float, must: float, aim: float) -> str:
    return "aim" if measured <= aim else "must" if measured <= must else "missed"


def table(judged: Sequence[Row]) -> str:
    """For people: the targets, the misses marked."""
    lines = []
    for row in judged:
        got = "not measured" if row["measured"] is None else f"{row['measured']:.3f}  {row['met']}"
        lines.append(f"{row['line']:56} must {row['must']:.3f}  aim {row['aim']:.3f}  {got}")
    return "\n".join(lines)
