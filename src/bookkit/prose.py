"""Does every computed number in a chapter's prose stand in one of its outputs, with the rounding as written?

Checked: decimals, percentages, powers of ten as code writes them (3e-5), and whole numbers above `SMALL`. A number
passes when an output of the chapter rounds to it, or when it stands in the chapter's code, where a reader sees that it
was chosen and not computed. One of two digits or fewer would match some output by chance, so that its output has to be
among the `REACH` cells before or after, unless the chapter sums up what it saw. After "about", "over" and their like
an output within ten per cent is enough.
Of inline mathematics, decimals are checked ("$1/n = 0.0156$").
Not checked: displayed equations, code, references, years, the numbers of chapters, equations, exercises, layers and
heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bookkit.notebook import Cell, Notebook, text

REACH = 8  # code cells before and after
SMALL = 12  # a count up to twelve is structure ("two keys", "12 heads"), and would match some output anyway

# "chapters 3, 4 and 5": a word and the numbers that name one of its kind
_NAMED = r"\b(?:{0})[\s~]+\(?(?:{1})\)?(?:(?:,|–|-|\s+to|\s+and|,\s+and)\s*\(?(?:{1})\)?)*"
_HIDDEN = [
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL),  # fenced code
        (r"<!--.*?-->", re.DOTALL),
        (r"\$\$.*?\$\$(\s*\([\w-]+\))?", re.DOTALL),
        (r"\{[\w:-]+\}`[^`]*`", 0),  # roles: {eq}`…`, {cite:p}`…`
        (r"`[^`\n]+`", 0),
        (r"\]\([^)]*\)", 0),  # a link's target
        (r"^:::+.*$|^:[\w-]+:.*$|^\([\w-]+\)=\s*$", re.MULTILINE),  # directives, options, labels
        (r"https?://\S+", 0),
        (r"^\s*\d+[.)]\s", re.MULTILINE),  # the number of a list's item
        (r"\bC\d\d\b", 0),
        (r"Reading time:?\*?:?\s*(about\s+)?\d+(\s*[–-]\s*\d+)?\s+minutes", re.IGNORECASE),
        (
            _NAMED.format(
                r"chapters?|sections?|parts?|equations?|exercises?|solutions?(?: of)?|figures?|tables?|version|python"
                r"|torch",
                r"\d+(?:\.\d+)*",
            ),
            re.IGNORECASE,
        ),
        (
            _NAMED.format(
                r"layers?|heads?|rows?|columns?|tokens?|keys?|query|queries|positions?|steps?|seeds?|pages?",
                r"\d+(?!\.?\d)",
            ),
            re.IGNORECASE,
        ),
    )
]
_MATHS = re.compile(r"(?<!\\)\$[^$]+?(?<!\\)\$", re.DOTALL)
_DECIMAL = re.compile(r"(?<![\w.])[−-]?\s?\d+\.\d+")
_NUMBER = re.compile(
    r"(?<![\w.,/^_-])(?P<sign>[−-]\s?)?(?P<digits>\d{1,3}(?:[,’\u00a0\u2009\u202f]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"(?P<power>e[+−-]?\d+)?(?:st|nd|rd|th)?(?P<percent>\s?%|\s+per\s?cent)?(?![\w])(?!\.\d)(?!-[A-Za-z])"
)
_OUTPUT = re.compile(r"[−-]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?(?:e[+-]?\d+)?|[−-]?\.\d+(?:e[+-]?\d+)?")
_LOOSELY = re.compile(
    r"(about|roughly|nearly|almost|around|some|more than|less than|fewer than|over|under|above|below|at least|at most|"
    r"up to|well|close to|beyond|within|≈|~|<|>|≤|≥)\s*(a\s|the\s)?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Number:
    """A number as prose writes it: the sentence around it, its value, and how it may be matched."""

    written: str
    context: str
    cell: int
    value: float
    tolerance: float
    percent: bool
    loosely: bool


def numbers(markdown: str, cell: int = 0) -> Iterator[Number]:
    """Yield the numbers in a markdown cell that may have been computed."""
    visible = markdown
    for pattern in _HIDDEN:
        visible = pattern.sub(lambda match: " " * len(match[0]), visible)
    visible = _MATHS.sub(_decimals_alone, visible)
    for match in _NUMBER.finditer(visible):
        digits = re.sub(r"[,’\u00a0\u2009\u202f]", "", match["digits"])
        power = int((match["power"] or "e0")[1:].replace("−", "-"))
        decimals = len(digits.partition(".")[2])
        value = float(digits) * 10.0**power
        whole = not (decimals or power or match["percent"])
        if whole and (value <= SMALL or (1900 <= value <= 2100 and "," not in match["digits"])):
            continue
        start, end = max(match.start() - 50, 0), match.end() + 30
        yield Number(
            written=match[0].strip(),
            context=" ".join(markdown[start:end].split()),
            cell=cell,
            value=-value if match["sign"] else value,
            tolerance=0.5 * 10.0 ** (power - decimals) * (1 + 1e-6),
            percent=bool(match["percent"]),
            loosely=bool(_LOOSELY.search(visible[: match.start()])),
        )


def _decimals_alone(maths: re.Match[str]) -> str:
    kept = [" "] * len(maths[0])
    for match in _DECIMAL.finditer(maths[0]):
        kept[match.start() : match.end()] = match[0]
    return "".join(kept)


def stated(output: str) -> set[float]:
    """Return the numbers that a text holds, as floats."""
    plain = re.sub(r"(?<=\d)_(?=\d)", "", output)  # 20_000 in code
    return {float(match[0].replace("−", "-").replace(",", "")) for match in _OUTPUT.finditer(plain)}


def matches(number: Number, known: Iterable[float]) -> bool:
    """Return whether a known number rounds to the written one; a percentage may have been printed as a share.

    A number written without a sign may stand for a negative one ("falls by 0.3"); one written with a minus may not
    stand for a positive one.
    """
    scales = (1.0, 100.0) if number.percent else (1.0,)
    tolerance = max(number.tolerance, 0.1 * abs(number.value)) if number.loosely else number.tolerance
    return any(
        abs((scale * value if number.value < 0 else abs(scale * value)) - number.value) <= tolerance
        for value in known
        for scale in scales
    )


def unsupported(notebook: Notebook, allowed: Iterable[str] = ()) -> list[Number]:
    """Return the numbers in the notebook's prose that neither an output nor the code holds, in reading order.

    `allowed` lists numbers as written ("0.37") that are right without an output.
    """
    cells = notebook["cells"]
    shown = {index: _shown(cell) for index, cell in enumerate(cells) if cell["cell_type"] == "code"}
    everywhere = set().union(*shown.values())
    passed = set(allowed)
    found = []
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        before = [number for number in shown if number < index][-REACH:]
        after = [number for number in shown if number > index][:REACH]
        nearby = set().union(*(shown[number] for number in before + after))
        summing_up = "## What we saw" in text(cell["source"])
        for number in numbers(text(cell["source"]), index):
            known = everywhere if summing_up or _significant(number) > 2 else nearby
            if number.written not in passed and not matches(number, known):
                found.append(number)
    return found


def _significant(number: Number) -> int:
    """Return the count of significant digits written; zeros that only place the point do not count."""
    digits = re.sub(r"[^\d.]", "", re.sub(r"e.*", "", number.written))
    return len(digits.replace(".", "").strip("0") if "." not in digits else digits.replace(".", "").lstrip("0"))


def _shown(cell: Cell) -> set[float]:
    """Return the numbers in a cell's code and in what it shows."""
    known = stated(text(cell["source"]))
    for output in cell["outputs"]:
        known |= stated(text(output.get("text", "")))
        for kind, content in output.get("data", {}).items():
            if kind in {"text/plain", "text/latex", "text/markdown"}:
                known |= stated(text(content))
    return known
