"""Where the book's files lie, and which chapter a file is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CHAPTER = re.compile(r"(\d\d)-[a-z0-9-]+\.ipynb")


def chapters(root: Path = ROOT) -> dict[int, Path]:
    """Return the book's chapters, number to notebook, in order; draft.ipynb and the like are none yet and owe nothing.

    Raises ValueError when a notebook's name is not NN-name.ipynb or two notebooks have one number.
    """
    found: dict[int, Path] = {}
    for path in sorted((root / "chapters").glob("*.ipynb")):
        if path.name.startswith("draft"):
            continue
        match = _CHAPTER.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path.name}: a chapter is named NN-name.ipynb, lower case, words joined by dashes")
        number = int(match[1])
        if number in found:
            raise ValueError(f"{path.name} and {found[number].name} are both chapter {number}")
        found[number] = path
    return found
