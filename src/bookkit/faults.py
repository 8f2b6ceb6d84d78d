"""Planted faults: what a claim's cell must catch. Read from `tests/book/faults/NN.toml`, planted in a copy."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import dataclass
from pathlib import Path

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


def plant(fault: Fault, notebook: Notebook) -> tuple[Notebook, list[str]]:
    """Return a copy of the notebook with the fault in it, and the ids of the claim's cells that can catch it.

    Raises ValueError when `find` does not stand exactly once in the code, or no cell of the claim comes at or after it.
    """
    planted = copy.deepcopy(notebook)
    cells = code_cells(planted)
    places = [index for index, cell in enumerate(cells) for _ in range(text(cell["source"]).count(fault.find))]
    if len(places) != 1:
        raise ValueError(f"chapter {fault.chapter}: {fault.find!r} stands {len(places)} times in the code, not once")
    cell = cells[places[0]]
    cell["source"] = text(cell["source"]).replace(fault.find, fault.replace)
    catching = [cell["id"] for cell in cells[places[0] :] if f"claim-{fault.claim}" in tags(cell)]
    if not catching:
        raise ValueError(f"chapter {fault.chapter}: no cell tagged claim-{fault.claim} runs after {fault.find!r}")
    return planted, catching
