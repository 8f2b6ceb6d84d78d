"""Train the small readers of chapter 10 at length 32 and test them at 32, 64 and 128: task × kind of place × seed.

    python experiments/position_sweep.py

writes chapters/data/10-position-sweep.json. The model, the tasks and the training are the chapter's own cells, those
tagged `sweep`, so that what the page shows is what was run. One thread; about five minutes of CPU time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bookkit.notebook import code_cells, read, tags, text
from bookkit.paths import ROOT

CHAPTER = ROOT / "chapters/10-position.ipynb"
STORED = ROOT / "chapters/data/10-position-sweep.json"
SEEDS = 8


def chapter_code(path: Path = CHAPTER) -> dict[str, Any]:
    """What the chapter's cells tagged `sweep` define."""
    cells = [text(cell["source"]) for cell in code_cells(read(path)) if "sweep" in tags(cell)]
    names: dict[str, Any] = {}
    for source in cells:
        exec(compile(source, path.name, "exec"), names)
    return names


def accuracies(chapter: dict[str, Any], task: str, place: str, seed: int) -> list[float]:
    """One reader trained on short texts: its share of right answers at each length."""
    reader = chapter["fit"](task, place, seed)
    return [round(chapter["grade"](reader, task, length), 4) for length in chapter["LENGTHS"]]


def main() -> None:
    """Run everything and store it."""
    torch.set_num_threads(1)
    chapter = chapter_code()
    found = {
        task: {place: [accuracies(chapter, task, place, seed) for seed in range(SEEDS)] for place in chapter["PLACES"]}
        for task in chapter["SYMBOLS"]
    }
    stored = {
        "made_by": "experiments/position_sweep.py",
        "torch": torch.__version__.partition("+")[0],
        "lengths": list(chapter["LENGTHS"]),
        "accuracy": found,
    }
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(stored, indent=1).replace("\n     ", " ").replace("\n    ]", " ]") + "\n")


if __name__ == "__main__":
    main()
