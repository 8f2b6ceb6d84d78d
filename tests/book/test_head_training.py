"""The stored runs of chapter 11's small models: complete, made by the chapter's own cells, a sample made again."""

import copy
import json
import subprocess
import sys

import pytest
from scipy.stats import t

from bookkit.notebook import read, text
from bookkit.paths import ROOT
from experiments import head_training

TASKS = {"one name": 1, "two places": 2, "place and name": 2, "two names": 2}
COUNTS = ("1", "2", "4", "8", "16")
SEEDS = 6
TIMES = 31


@pytest.fixture(scope="module")
def store():
    return json.loads(head_training.STORE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made():
    return head_training.names(head_training.sources(head_training.chapter()))


def test_it_was_made_by_the_cells_that_the_chapter_shows(store):
    assert store["cells"] == head_training.fingerprint(head_training.sources(head_training.chapter()))


def test_every_task_was_tuned_and_run_with_every_number_of_heads(store):
    assert tuple(store["tuning"]) == tuple(store["fresh"]) == tuple(TASKS)
    for task, relations in TASKS.items():
        assert tuple(store["tuning"][task]) == tuple(store["fresh"][task]) == COUNTS
        for count, runs in store["fresh"][task].items():
            tried = store["tuning"][task][count]
            assert len(tried) == 3 and all(len(accuracies) == 2 for accuracies in tried.values())
            assert sum(tried[runs["rate"]]) == max(map(sum, tried.values()))
            assert len(runs["accuracy"]) == len(runs["on_source"]) == SEEDS
            assert all(len(right) == relations for right in runs["accuracy"])
            assert all(len(heads) == int(count) for heads in runs["on_source"])
            assert all(len(head) == relations for heads in runs["on_source"] for head in heads)


def test_what_is_stored_are_shares(store):
    settings = [*(runs for kinds in store["fresh"].values() for runs in kinds.values()), *store["patient"].values()]
    accuracies = [share for runs in settings for right in runs["accuracy"] for share in right]
    weights = [share for runs in settings for heads in runs["on_source"] for head in heads for share in head]
    assert all(0 <= share <= 1 for share in accuracies + weights)


def test_every_copier_was_watched_all_the_way(store):
    assert set(store["course"]) == {"1", "4"}
    for count, runs in store["course"].items():
        assert len(runs) == SEEDS and all(len(watched) == TIMES for watched in runs)
        for first, later, previous, induction in (seen for watched in runs for seen in watched):
            assert first > 0 and later > 0 and len(previous) == len(induction) == int(count)
            assert all(0 <= weight <= 1 for weight in previous + induction)


def test_a_sample_made_again_agrees(made, store):
    assert head_training.disagreements(made, store) == []
    assert head_training.strayed(made, store) == []


def test_an_accuracy_that_was_changed_is_noticed(made, store):
    changed = copy.deepcopy(store)
    changed["fresh"]["one name"]["1"]["accuracy"][0][0] -= 0.06
    (told,) = head_training.disagreements(made, changed, sample=[("one name", "1")])
    assert "one name, 1 heads" in told


def test_a_store_made_by_other_cells_is_noticed(store, tmp_path):
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(store | {"cells": "0" * 16}))
    command = [sys.executable, ROOT / "experiments" / "head_training.py", "--check", "--store", changed]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "other cells" in result.stdout, result.stdout + result.stderr


def test_the_quantile_that_the_chapter_writes_is_students():
    written = "2.571 * each.std()"
    assert any(written in text(cell["source"]) for cell in read(head_training.chapter())["cells"])
    assert abs(t.ppf(0.975, df=SEEDS - 1) - 2.571) < 5e-4
