"""The stored sweep of chapter 10: complete, and what its cells give when they are run again."""

import json

import pytest

from experiments import position_sweep

STORED = json.loads(position_sweep.STORED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chapter():
    return position_sweep.chapter_code()


def test_it_covers_what_the_chapter_names(chapter):
    assert STORED["lengths"] == list(chapter["LENGTHS"])
    assert list(STORED["accuracy"]) == list(chapter["SYMBOLS"])
    for kinds in STORED["accuracy"].values():
        assert list(kinds) == list(chapter["PLACES"])
        for rows in kinds.values():
            assert len(rows) == position_sweep.SEEDS
            assert all(len(row) == len(STORED["lengths"]) and 0 <= min(row) <= max(row) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("task", "place", "seed"), [("back", "T5", 1), ("recall", "learned", 2), ("latest", "ALiBi", 3)]
)
def test_a_sample_comes_out_again(chapter, task, place, seed):
    """At the length of training to 0.03; beyond it another processor's last digits grow, and 0.15 are allowed."""
    again = position_sweep.accuracies(chapter, task, place, seed)
    stored = STORED["accuracy"][task][place][seed]
    assert again[0] == pytest.approx(stored[0], abs=0.03)
    assert again[1:] == pytest.approx(stored[1:], abs=0.15)
