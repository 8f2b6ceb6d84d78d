"""What every chapter has to look like, whatever it says: run, quiet, short, described, and in one shape.

Each check takes a notebook and returns what is wrong in sentences; `problems` runs them all.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Collection
from typing import Any

from bookkit.notebook import Cell, Notebook, code_cells, output_text, tags, text

LONGEST_CELL = 20  # non-blank lines; a cell that draws, tagged hide-input, may be longer
MEDIAN_CELL = 6
SHORTEST_ALT = 40  # characters that say what is seen
EXERCISES = 4

_OBJECTIVES = re.compile(r"^(:::+|```+)\{admonition\} What you will be able to do", re.MULTILINE)
_SECTIONS = ("## What we saw", "## Exercises", "## Sources", "## What comes next")
_BANNED = (
    "in this section", "in this chapter, we will", "we will explore", "it is important to note", "it is worth noting",
    "it should be noted", "let's", "let’s", "let us", "dive in", "dive deep", "deep dive", "delve", "needless to say",
    "as we all know", "simply put", "in conclusion", "game-changing", "powerful tool", "leverage", "seamless",
    "cutting-edge", "state-of-the-art", "unlock", "a testament to", "plays a crucial role",
)  # fmt: skip
_TIMING = re.compile(r"\btime\.time\b|perf_counter|process_time|\bmonotonic\b|%time|\btimeit\b|^\s*import time\b", re.M)
_NETWORK = re.compile(
    r"https?://|\burllib\b|\brequests\.|\bsocket\b|\bhf_hub|from_pretrained|^\s*[!%]\s*(pip|wget|curl)", re.M
)
_GLOBAL_SEED = re.compile(r"(torch|np\.random|numpy\.random|random)\.(manual_)?seed\(")
_SILENCED = re.compile(r"filterwarnings|simplefilter|catch_warnings|logging\.disable")
_PASSING = re.compile(r"\b0x[0-9a-f]{6,}|/tmp/|/home/|/root/|ipykernel_\d+|cuda:?\d*'")
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u274c]")
_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli", "poisson"}
_RANDOM_IN_PLACE = {
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "cauchy_",
    "log_normal_",
    "geometric_",
}


def problems(notebook: Notebook, uncompared: Collection[str] = ()) -> list[str]:
    """Return all that is wrong with a chapter; `uncompared` holds the ids of cells whose outputs may be ignored."""
    return [
        *run_once(notebook),
        *outputs(notebook),
        *lengths(notebook),
        *figures(notebook),
        *comparison(notebook, uncompared),
        *code(notebook),
        *shape(notebook),
        *exercises(notebook),
        *words(notebook),
    ]


def run_once(notebook: Notebook) -> list[str]:
    """Every code cell has been run, once, in order."""
    counts = [cell.get("execution_count") for cell in code_cells(notebook)]
    if counts == list(range(1, len(counts) + 1)):
        return []
    unrun = [number for number, count in enumerate(counts, start=1) if count is None]
    return [f"code cells {unrun} are not run" if unrun else f"counts are not 1…{len(counts)}: {counts}"]


def outputs(notebook: Notebook) -> list[str]:
    """No error, nothing on stderr, nothing that another run or machine would print differently."""
    wrong = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                wrong.append(f"cell {number} ended in {output['ename']}: {output['evalue']}")
            if output.get("name") == "stderr":
                wrong.append(f"cell {number} wrote to stderr: {text(output['text'])[:100]!r}")
            if found := _PASSING.search(output_text(output)):
                wrong.append(f"cell {number} shows {found[0]!r}, which is not the same twice or elsewhere")
            if any(kind.startswith("application/") for kind in output.get("data", {})):
                wrong.append(f"cell {number} shows a widget, which needs a running kernel")
    return wrong


def lengths(notebook: Notebook) -> list[str]:
    """No cell is longer than a reader takes in at once; half are much shorter."""
    shown = [
        (number, sum(bool(line.strip()) for line in text(cell["source"]).splitlines()))
        for number, cell in enumerate(code_cells(notebook), start=1)
        if "hide-input" not in tags(cell)
    ]
    wrong = [
        f"cell {number} has {length} lines (at most {LONGEST_CELL})"
        for number, length in shown
        if length > LONGEST_CELL
    ]
    wrong += [f"cell {number} is empty" for number, length in shown if not length]
    if shown and (median := statistics.median(length for _, length in shown)) > MEDIAN_CELL:
        wrong.append(f"the median cell has {median:g} lines (at most {MEDIAN_CELL})")
    return wrong


def figures(notebook: Notebook) -> list[str]:
    """Each figure stands alone in its cell and has a description of its own that says what is seen."""
    wrong, seen = [], set()
    for number, cell in enumerate(code_cells(notebook), start=1):
        pictures = sum(any(k.startswith("image/") for k in output.get("data", {})) for output in cell["outputs"])
        alt = alt_text(cell)
        if pictures > 1:
            wrong.append(f"cell {number} shows {pictures} pictures under one description: one to a cell")
        if pictures and not alt:
            wrong.append(f"cell {number} shows a picture without mystnb.image.alt")
        elif pictures and (len(alt) < SHORTEST_ALT or re.search(r"\.(png|svg|jpe?g)\b", alt)):
            wrong.append(f"cell {number}: the description {alt!r} does not say what is seen")
        if alt and alt in seen:
            wrong.append(f"cell {number}: another figure has the same description")
        seen.add(alt)
    return wrong


def alt_text(cell: Cell) -> str:
    """Return the description that the cell gives its figure, empty when it gives none."""
    image: dict[str, Any] = cell["metadata"].get("mystnb", {}).get("image", {})
    return str(image.get("alt", "")).strip()


def comparison(notebook: Notebook, uncompared: Collection[str]) -> list[str]:
    """Every output is compared, but for the cells that are listed with a reason."""
    wrong = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        ignored = "nbval-ignore-output" in tags(cell)
        if ignored and cell["id"] not in uncompared:
            wrong.append(f"cell {number} is not compared, and tests/book/uncompared.toml does not say why")
        if not ignored and cell["id"] in uncompared:
            wrong.append(f"cell {number} is listed in tests/book/uncompared.toml and is compared all the same")
        if {"nbval-skip", "raises-exception"} & set(tags(cell)) or "NBVAL_" in text(cell["source"]):
            wrong.append(f"cell {number} asks not to be tested")
    return wrong


def code(notebook: Notebook) -> list[str]:
    """No timing, no network, no hidden warning, no global seed, no random number without its generator."""
    wrong = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        source = text(cell["source"])
        for pattern, what in (
            (_TIMING, "takes a time"),
            (_NETWORK, "reaches for the network"),
            (_SILENCED, "hides a warning"),
            (_GLOBAL_SEED, "seeds all random numbers at once; pass a generator"),
        ):
            if found := pattern.search(source):
                wrong.append(f"cell {number} {what}: {found[0].strip()!r}")
        wrong += [f"cell {number} calls {name} without a generator" for name in _unseeded(source)]
    first = text(code_cells(notebook)[0]["source"]) if code_cells(notebook) else ""
    everything = "\n".join(text(cell["source"]) for cell in code_cells(notebook))
    if re.search(r"\bdevice\b", everything) and not re.search(r'^device = "cpu"', first, re.MULTILINE):
        wrong.append('the first code cell does not choose the device: device = "cpu"')
    return wrong


def _unseeded(source: str) -> list[str]:
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    found = []
    for node in ast.walk(ast.parse(plain)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        given = {keyword.arg for keyword in node.keywords}
        if ((of_torch and name in _RANDOM) or name in _RANDOM_IN_PLACE) and not given & {"generator", None}:
            found.append(name)
        if of_torch and name in {"rand_like", "randn_like", "randint_like"} and "generator" not in given:
            found.append(name)
    return found


def shape(notebook: Notebook) -> list[str]:
    """Title and objectives at the top; at the end the closing sections, in their order."""
    top = text(notebook["cells"][0]["source"]) if notebook["cells"] else ""
    wrong = []
    if not re.match(r"# \S", top):
        wrong.append("the first cell does not begin with '# Title'")
    if not _OBJECTIVES.search(_markdown(notebook)[:3000]):
        wrong.append("no admonition 'What you will be able to do' at the top")
    if "reading time" not in _markdown(notebook)[:4000].lower():
        wrong.append("no reading time at the top")
    lines = _markdown(notebook).splitlines()
    places = [lines.index(section) if section in lines else -1 for section in _SECTIONS]
    wrong += [f"no section '{section}'" for section, place in zip(_SECTIONS, places, strict=True) if place < 0]
    if -1 not in places and places != sorted(places):
        wrong.append("the closing sections are not in the order " + ", ".join(_SECTIONS))
    return wrong


def exercises(notebook: Notebook) -> list[str]:
    """At least four exercises, each followed by a collapsed solution that was run and shows something."""
    wrong, asked, current = [], 0, ""
    solved: dict[str, bool] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            for heading in re.findall(r"^#{2,3} .*$", text(cell["source"]), re.MULTILINE):
                current = heading[4:] if heading.startswith("### Exercise ") else ""
                if current:
                    asked += 1
                    solved.setdefault(current, False)
        elif cell["cell_type"] == "code" and current and "hide-cell" in tags(cell) and cell["outputs"]:
            solved[current] = True
    if asked < EXERCISES:
        wrong.append(f"{asked} exercises (at least {EXERCISES})")
    return wrong + [
        f"{name} has no collapsed solution with an output (tag hide-cell)" for name, ok in solved.items() if not ok
    ]


def words(notebook: Notebook) -> list[str]:
    """No filler, no emoji, no bare align: its anchor is drawn at random, so that no two builds are alike."""
    return prose_problems(_markdown(notebook))


def prose_problems(markdown: str) -> list[str]:
    """Return what is wrong with a page's words."""
    low = markdown.lower()
    wrong = [f"says {phrase!r}" for phrase in _BANNED if re.search(rf"\b{re.escape(phrase)}\b", low)]
    wrong += [f"an emoji: {found}" for found in _EMOJI.findall(markdown)]
    wrong += [
        f"a bare \\begin{{{name}}}: write $$ \\begin{{aligned}} … $$ (label)"
        for name in re.findall(r"\\begin\{(align\*?|equation\*?|gather\*?)\}", markdown)
    ]
    return wrong


def _markdown(notebook: Notebook) -> str:
    return "\n\n".join(text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
