"""The two lists of exceptions that chapters may have, read and checked."""

import tomllib
from pathlib import Path

from bookkit.notebook import Notebook, code_cells, text

HERE = Path(__file__).parent


def uncompared(chapter: int, notebook: Notebook) -> set[str]:
    """Return the ids of the chapter's cells that `uncompared.toml` names."""
    found = set()
    for entry in _entries("uncompared.toml", "cell", {"chapter", "find", "reason"}):
        if entry["chapter"] == chapter:
            cells = [cell["id"] for cell in code_cells(notebook) if entry["find"] in text(cell["source"])]
            assert len(cells) == 1, f"uncompared.toml: {entry['find']!r} stands in {len(cells)} cells, not in one"
            found.add(cells[0])
    return found


def allowed(chapter: int) -> dict[str, str]:
    """Return the numbers that `prose_allow.toml` allows in the chapter, each with its reason."""
    entries = _entries("prose_allow.toml", "number", {"chapter", "written", "reason"})
    return {entry["written"]: entry["reason"] for entry in entries if entry["chapter"] == chapter}


def _entries(name: str, kind: str, keys: set[str]) -> list[dict]:
    entries = tomllib.loads((HERE / name).read_text(encoding="utf-8")).get(kind, [])
    for entry in entries:
        assert set(entry) == keys, f"{name}: an entry has {sorted(keys)}; this one is {entry}"
        assert len(entry["reason"].split()) >= 3, f"{name}: {entry} gives no reason"
    return entries
