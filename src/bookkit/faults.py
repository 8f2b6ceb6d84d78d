"""Planted faults: what a claim's cell must catch. Read from `tests/book/faults/NN.toml`, planted in a copy."""

from __future__ import annotations

import ast
import copy
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from bookkit.branch import Outcome
from bookkit.notebook import Notebook, code_cells, tags, text
from bookkit.paths import ROOT


@dataclass(frozen=True)
class Fault:
    """A change of `find`, which stands once in the chapter's code, to `replace`, that `claim`'s cell must catch.

    A claim that several cells assert is caught when any of them raises AssertionError and nothing fails before it.
    """

    chapter: int
    claim: str
    find: str
    replace: str


@dataclass(frozen=True)
class Trial:
    """A planted fault: the cells to run, from its place to the last that can catch it, with the fault in the first.

    `numbers` and `catching` count the chapter's code cells from 1, as Jupyter does.
    """

    fault: Fault
    numbers: tuple[int, ...]
    sources: tuple[str, ...]
    catching: tuple[int, ...]

    def verdict(self, outcome: Outcome) -> str:
        """Return why the fault does not count as caught, in words with the error that came instead; "" if it does."""
        planted = f"planted in cell {self.numbers[0]}:\n    - {self.fault.find}\n    + {self.fault.replace}\n"
        claim = f"{self.fault.claim}, asserted in {', '.join(f'cell {number}' for number in self.catching)}"
        if outcome.failed is None:
            return f"Nothing catches the fault {planted}No cell fails, up to the last of {claim}."
        number, source = self.numbers[outcome.failed], self.sources[outcome.failed]
        failed = f"cell {number} fails with {outcome.ename}:\n\n{source}\n\n{outcome.detail}"
        if outcome.ename != "AssertionError":
            return f"No assertion catches the fault {planted}{failed}"
        if number not in self.catching:
            return f"Caught too early, not by {claim}: the fault {planted}{failed}"
        return ""


def load(chapter: int, root: Path = ROOT) -> list[Fault]:
    """Return the faults of a chapter, none when it has no file.

    Raises ValueError, naming the file, when an entry is not claim, find and replace, or changes nothing.
    """
    path = root / "tests" / "book" / "faults" / f"{chapter:02}.toml"
    if not path.exists():
        return []
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("fault", [])
    for entry in entries:
        if set(entry) != {"claim", "find", "replace"} or entry["find"] == entry["replace"]:
            raise ValueError(f"{path.name}: a fault is claim, find and a replace that differs; this one is {entry}")
    return [Fault(chapter, **entry) for entry in entries]


def plant(fault: Fault, notebook: Notebook) -> Trial:
    """Return what to run to see the fault caught; the notebook is left as it is.

    Raises ValueError when `find` does not stand exactly once in the code, or no cell of the claim comes at or after it.
    """
    planted = copy.deepcopy(notebook)
    cells = code_cells(planted)
    places = [index for index, cell in enumerate(cells) for _ in range(text(cell["source"]).count(fault.find))]
    if len(places) != 1:
        raise ValueError(f"chapter {fault.chapter}: {fault.find!r} stands {len(places)} times in the code, not once")
    (place,) = places
    cells[place]["source"] = text(cells[place]["source"]).replace(fault.find, fault.replace)
    catching = [at for at in range(place, len(cells)) if f"claim-{fault.claim}" in tags(cells[at])]
    if not catching:
        raise ValueError(f"chapter {fault.chapter}: no cell tagged claim-{fault.claim} runs after {fault.find!r}")
    passed_over = idle(planted, cells[place]["id"])
    run = [at for at in range(place, catching[-1] + 1) if cells[at]["id"] not in passed_over]
    return Trial(
        fault=fault,
        numbers=tuple(at + 1 for at in run),
        sources=tuple(text(cells[at]["source"]) for at in run),
        catching=tuple(at + 1 for at in catching),
    )


def idle(notebook: Notebook, place: str) -> set[str]:
    """Return the ids of cells that need not run to catch a fault: drawings and solutions that nothing depends on.

    A cell that is tagged hide-input or hide-cell is idle when it is not `place`, the id of the cell with the fault,
    holds no claim, draws no random numbers (later cells would draw others), and gives no name that another mentions.
    """
    cells = code_cells(notebook)
    found: set[str] = set()
    for cell in cells:
        source = text(cell["source"])
        hidden = {"hide-input", "hide-cell"} & set(tags(cell))
        if not hidden or cell["id"] == place or any(tag.startswith("claim-") for tag in tags(cell)):
            continue
        if re.search(r"\bgenerator\b", source):
            continue
        others = "\n".join(text(other["source"]) for other in cells if other["id"] not in found | {cell["id"]})
        if not any(re.search(rf"\b{re.escape(name)}\b", others) for name in _given(source)):
            found.add(cell["id"])
    return found


def _given(source: str) -> set[str]:
    """Return the names that a cell gives or changes: assigned, defined, imported, or written into."""
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    names: set[str] = set()
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.update(child.id for child in ast.walk(node.value) if isinstance(child, ast.Name))
    return names
