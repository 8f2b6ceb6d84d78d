"""Chapter 11's small models with one head and with many: python experiments/head_training.py, about seven minutes.

It executes the chapter's own cells, those tagged `sweep`, and writes chapters/data/11-training.json:
  tuning   {task: {heads: {rate: [accuracy per seed]}}}, all rates, the seeds in TUNING
  fresh    {task: {heads: {"rate", "accuracy", "on_source"}}} at the rate that was best on those, the seeds in FRESH:
           accuracy [seed][relation], on_source [seed][head][relation], the weight on the token that is asked for
  patient  {task: {"accuracy", "on_source"}}, one head on the last two tasks, PATIENCE times as many steps
  course   {heads: [seed][time]}: first-copy loss, later-copy loss, previous [head], induction [head]
`cells` is a fingerprint of the code that ran. With --check nothing is written: a sample of the runs is made again,
and the exit status says whether it agrees.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapter's own environment

import torch  # noqa: E402

from bookkit.notebook import code_cells, read, tags, text  # noqa: E402
from bookkit.paths import ROOT  # noqa: E402

STORE = ROOT / "chapters" / "data" / "11-training.json"
MARGIN = 0.05
"""How far another processor's last digits may move an accuracy."""
STRAY = 0.15
"""The same for a copier's losses and weights, before and after training; on the way the loss falls too steeply."""
SAMPLE = (("one name", "4"), ("two places", "1"), ("place and name", "4"), ("two names", "4"))
Names = dict[str, Any]


def chapter() -> Path:
    """The notebook of chapter 11."""
    return next((ROOT / "chapters").glob("11-*.ipynb"))


def sources(path: Path) -> list[str]:
    """The cells that define the experiment, in order."""
    found = [text(cell["source"]) for cell in code_cells(read(path)) if "sweep" in tags(cell)]
    if not found:
        raise ValueError(f"{path.name} has no cell tagged sweep")
    return found


def fingerprint(cells: list[str]) -> str:
    """Changes with the code, and not with its imports, its comments, its line breaks or how it is cut into cells."""
    statements = [statement for cell in cells for statement in ast.parse(cell).body]
    plain = "\n".join(ast.unparse(s) for s in statements if not isinstance(s, ast.Import | ast.ImportFrom))
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def names(cells: list[str]) -> Names:
    """What the cells define, run one after the other."""
    torch.set_num_threads(1)
    defined: Names = {"__name__": "chapter_11"}
    for cell in cells:
        exec(compile(cell, "chapter 11", "exec"), defined)
    return defined


def run(made: Names, task: str, count: int, rate: float, seed: int, patience: int = 1) -> tuple[Any, Any]:
    """One model trained: its accuracies, and the weight of each head on each relation's source, to four decimals."""
    block = made["fit"](task, count, rate, seed, made["STEPS"] * patience)
    right, on_source = made["grade"](block, task)
    return [round(a, 4) for a in right], [[round(w, 4) for w in head] for head in on_source]


def course(made: Names, count: int, seed: int) -> list[Any]:
    """One copier watched while it learns, to four decimals."""
    return json.loads(json.dumps(made["course"](count, seed)), parse_float=lambda digits: round(float(digits), 4))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tune(made: Names, task: str, count: int) -> dict[str, list[float]]:
    """The accuracy of every rate and tuning seed."""
    return {
        str(rate): [round(mean(run(made, task, count, rate, seed)[0]), 4) for seed in made["TUNING"]]
        for rate in made["RATES"]
    }


def together(runs: list[tuple[Any, Any]]) -> Names:
    return {"accuracy": [right for right, _ in runs], "on_source": [weight for _, weight in runs]}


def measure(made: Names) -> Names:
    """Everything that is stored."""
    store: Names = {"tuning": {}, "fresh": {}, "patient": {}, "course": {}}
    for task in made["TASKS"]:
        store["tuning"][task], store["fresh"][task] = {}, {}
        for count in made["COUNTS"]:
            tried = tune(made, task, count)
            best = max(tried, key=lambda rate: mean(tried[rate]))
            runs = [run(made, task, count, float(best), seed) for seed in made["FRESH"]]
            store["tuning"][task][str(count)] = tried
            store["fresh"][task][str(count)] = {"rate": best} | together(runs)
            print(task, count, best, [round(mean(right), 3) for right, _ in runs], flush=True)
    for task in list(made["TASKS"])[2:]:
        runs = [run(made, task, 1, made["PATIENT_RATE"], seed, made["PATIENCE"]) for seed in made["PATIENT"]]
        store["patient"][task] = together(runs)
        print(task, "one head, patient", [right for right, _ in runs], flush=True)
    for count in made["COPIERS"]:
        store["course"][str(count)] = [course(made, count, seed) for seed in made["FRESH"]]
        print("copier", count, [watched[-1][1] for watched in store["course"][str(count)]], flush=True)
    return store


def disagreements(made: Names, store: Names, sample: Sequence[tuple[str, str]] = SAMPLE) -> list[str]:
    """The first fresh run of each setting in `sample` again; what differs from the store by more than MARGIN."""
    wrong = []
    for task, count in sample:
        kept = store["fresh"][task][count]
        right, _ = run(made, task, int(count), float(kept["rate"]), made["FRESH"][0])
        apart = max(abs(a - b) for a, b in zip(right, kept["accuracy"][0], strict=True))
        if not apart <= MARGIN:
            wrong.append(f"{task}, {count} heads: accuracy is {apart:.3f} off the stored one")
    return wrong


def strayed(made: Names, store: Names) -> list[str]:
    """One copier again; how far it begins or ends from the stored one, when that is more than STRAY."""
    count = made["COPIERS"][0]
    again, kept = course(made, count, made["FRESH"][0]), store["course"][str(count)][0]
    apart = max(abs(a - b) for at in (0, -1) for a, b in zip(flat(again[at]), flat(kept[at]), strict=True))
    return [] if apart <= STRAY else [f"copier, {count} heads: {apart:.3f} off the stored one"]


def flat(seen: list[Any]) -> list[float]:
    """The two losses and every head's two weights in one list."""
    return [*seen[:2], *seen[2], *seen[3]]


def written(tree: Any, levels: int = 3, indent: str = "") -> str:
    """JSON with a line for each setting, so that a change of the store can be read as one."""
    if not isinstance(tree, dict) or not levels:
        return json.dumps(tree)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(name)}: {written(branch, levels - 1, inner)}" for name, branch in tree.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chapter", type=Path, help="another notebook, such as a draft")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--check", action="store_true", help="compare a sample with the store and write nothing")
    given = parser.parse_args()
    cells = sources(given.chapter or chapter())
    if not given.check:
        about = {"about": (__doc__ or "").splitlines()[0], "torch": torch.__version__, "cells": fingerprint(cells)}
        found = measure(names(cells))
        given.store.parent.mkdir(exist_ok=True)
        given.store.write_text(written(about | found) + "\n")
        return 0
    store = json.loads(given.store.read_text())
    if store["cells"] != fingerprint(cells):
        print(f"{given.store.name} comes from other cells than the chapter has: run everything again")
        return 1
    made = names(cells)
    wrong = disagreements(made, store) + strayed(made, store)
    print("\n".join(wrong) or f"{len(SAMPLE) + 1} runs agree with {given.store.name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
