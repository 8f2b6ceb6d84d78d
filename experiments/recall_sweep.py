"""Chapter 6's reader with every kernel, rate and seed: python experiments/recall_sweep.py, about six minutes.

It executes the chapter's own cells, those tagged `sweep`, and writes every accuracy to chapters/data/06-recall.json:
  tuning  {setting: {kernel: {rate: [a curve per seed]}}}, all rates, the seeds in TUNING
  fresh   the same, for the rates that were best on those, the seeds in FRESH
A curve holds the accuracy at step 0 and after every EVERY steps. `cells` is a fingerprint of the code that ran.
With --check nothing is written: a run of each kernel is made again, and the exit status says whether it agrees.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapter's own environment

import torch  # noqa: E402

from bookkit.notebook import code_cells, read, tags, text  # noqa: E402
from bookkit.paths import ROOT  # noqa: E402

CHAPTER = ROOT / "chapters" / "06-why-the-dot-product-won.ipynb"
STORE = ROOT / "chapters" / "data" / "06-recall.json"
MARGIN = 0.03
"""How far another processor's last digits may move an accuracy."""
Names = dict[str, Any]
Runs = dict[str, list[list[float]]]


def sources(chapter: Path = CHAPTER) -> list[str]:
    """The cells that define the experiment, in order."""
    found = [text(cell["source"]) for cell in code_cells(read(chapter)) if "sweep" in tags(cell)]
    if not found:
        raise ValueError(f"{chapter.name} has no cell tagged sweep")
    return found


def fingerprint(cells: list[str]) -> str:
    """Changes with the code, and not with its comments, its line breaks or how it is cut into cells."""
    plain = "\n".join(ast.unparse(statement) for cell in cells for statement in ast.parse(cell).body)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def names(cells: list[str]) -> Names:
    """What the cells define, run one after the other."""
    torch.set_num_threads(1)
    defined: Names = {"__name__": "chapter_06"}
    for cell in cells:
        exec(compile(cell, CHAPTER.name, "exec"), defined)
    return defined


def rates_of_interest(chapter: Names, setting: str, kernel: str, runs: Runs) -> list[str]:
    """The best rate after all steps, and the best after as many as the kernel can afford; often they are one."""
    _, width = chapter["settings"][setting]
    read_at = (chapter["STEPS"], chapter["affordable"](kernel, width))
    return sorted({chapter["best_rate"](runs, steps) for steps in read_at})


def sweep(chapter: Names, setting: str, kernel: str) -> tuple[Runs, Runs]:
    """Every curve of the tuning seeds, and those of the fresh seeds at the rates chosen."""

    def curves(rate: str, seeds: range) -> list[list[float]]:
        return [[round(a, 4) for a in chapter["learn"](setting, kernel, float(rate), seed)] for seed in seeds]

    tried = {str(rate): curves(str(rate), chapter["TUNING"]) for rate in chapter["RATES"]}
    chosen = rates_of_interest(chapter, setting, kernel, tried)
    return tried, {rate: curves(rate, chapter["FRESH"]) for rate in chosen}


def measure(chapter: Names, kernels: list[str], store: Names) -> None:
    """Runs of these kernels in every setting, put into `store`."""
    for setting in chapter["settings"]:
        for kernel in kernels:
            tried, found = sweep(chapter, setting, kernel)
            store["tuning"].setdefault(setting, {})[kernel] = tried
            store["fresh"].setdefault(setting, {})[kernel] = found
            ends = {rate: round(sum(curve[-1] for curve in runs) / len(runs), 3) for rate, runs in found.items()}
            print(setting, kernel, ends, flush=True)


def disagreements(chapter: Names, kernels: list[str], store: Names) -> list[str]:
    """One run of each kernel again, its setting in turn; what differs from the store by more than MARGIN."""
    settings, wrong = list(chapter["settings"]), []
    for turn, kernel in enumerate(kernels):
        setting = settings[turn % len(settings)]
        rate, runs = next(iter(store["fresh"][setting][kernel].items()))
        again = chapter["learn"](setting, kernel, float(rate), chapter["FRESH"][0])
        apart = max(abs(a - b) for a, b in zip(again, runs[0], strict=True))
        if not apart <= MARGIN:
            wrong.append(f"{setting}, {kernel}, rate {rate}: the curve is {apart:.3f} off the stored one")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chapter", type=Path, default=CHAPTER, help="another notebook, such as a draft")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--only", metavar="KERNEL", help="run this kernel alone and keep the rest of the store")
    parser.add_argument("--check", action="store_true", help="compare a sample with the store and write nothing")
    given = parser.parse_args()
    cells = sources(given.chapter)
    store: Names = {"about": (__doc__ or "").splitlines()[0], "cells": fingerprint(cells), "tuning": {}, "fresh": {}}
    if given.only or given.check:
        store = json.loads(given.store.read_text())
        if store["cells"] != fingerprint(cells):
            print(f"{given.store.name} comes from other cells than {given.chapter.name} has: run everything again")
            return 1
    chapter = names(cells)
    kernels = [given.only] if given.only else list(chapter["makers"])
    if given.check:
        wrong = disagreements(chapter, kernels, store)
        print("\n".join(wrong) or f"{len(kernels)} runs agree with {given.store.name}")
        return int(bool(wrong))
    measure(chapter, kernels, store)
    given.store.parent.mkdir(exist_ok=True)
    given.store.write_text(written(store | {"torch": torch.__version__}) + "\n")
    return 0


def written(tree: Any, levels: int = 3, indent: str = "") -> str:
    """JSON with a line for each kernel, so that a change of the store can be read as one."""
    if not isinstance(tree, dict) or not levels:
        return json.dumps(tree)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(name)}: {written(branch, levels - 1, inner)}" for name, branch in tree.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}"


if __name__ == "__main__":
    sys.exit(main())
