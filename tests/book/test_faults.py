"""Planted faults are tried among the chapters' cells, by `make notebooks`: here, that each is, and how it is judged."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bookkit import faults
from bookkit.comparison import NotCaught, PlantedFault
from bookkit.execute import execute
from bookkit.notebook import read, write
from bookkit.paths import ROOT, chapters
from tests.bookkit.make import code, notebook, stream

CHAPTERS = chapters()
FAULTS = {number: faults.load(number) for number in CHAPTERS}


@pytest.mark.parametrize("number", CHAPTERS, ids=lambda number: f"{number:02}")
def test_each_stands_once_and_before_a_cell_of_its_claim(number):
    notebook = read(CHAPTERS[number])
    trials = [faults.plant(fault, notebook) for fault in FAULTS[number]]
    assert all(set(trial.catching) <= set(trial.numbers) for trial in trials)


def test_each_is_a_test_among_its_chapters_cells():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--nbval", "--nbval-current-env", "chapters"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(FAULTS.values())
    for number, path in CHAPTERS.items():
        assert done.stdout.count(f"chapters/{path.name}::Fault ") == len(FAULTS[number])


CELLS = (
    code("x, y = 1, 2\nseen = []", count=None),
    code("z = x + y", count=None),
    code("assert y == 2", count=None),
    code("assert z == 3\nassert not seen", tags=("claim-C02",), count=None),
    code("print(z)", stream("3\n"), count=None),
)
PLANTED = {
    "a wrong sum": ("z = x + y", "z = x - y", None),
    "a change that would reach the next": ("z = x + y", "z = x + y; seen.append(1)", None),
    "a change that did not reach this": ("z = x + y", "z = x + y + len(seen)", "Nothing catches"),
    "a name that is not there": ("z = x + y", "z = x + nowhere", "No assertion catches"),
    "the wrong cell": ("x, y = 1, 2", "x, y = 2, 1", "Caught too early"),
    "its own cell": ("assert z == 3", "assert z == 4", None),
    "its own cell, and no assertion": ("assert z == 3", "assert z == z.three", "No assertion catches"),
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """A tiny chapter with faults of every fate, as `make notebooks` tries them: what pytest prints."""
    root = tmp_path_factory.mktemp("book")
    (root / "chapters").mkdir()
    (root / "tests/book/faults").mkdir(parents=True)
    write(notebook(*CELLS), root / "chapters/01-tiny.ipynb")
    execute(root / "chapters/01-tiny.ipynb")
    (root / "tests/book/faults/01.toml").write_text(
        "\n".join(
            f'[[fault]]\nclaim = "C02"\nfind = "{find}"\nreplace = "{replace}"' for find, replace, _ in PLANTED.values()
        )
    )
    options = ["--nbval", "--nbval-current-env", "-p", "bookkit.comparison", "-rA", "--color=no"]
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *options]
    done = subprocess.run([*command, root / "chapters"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("count, name", list(enumerate(PLANTED, start=1)), ids=PLANTED)
def test_what_becomes_of_a_fault(count, name, tried):
    (outcome,) = re.findall(rf"^(PASSED|FAILED) .*::Fault {count} for C02: ", tried, re.MULTILINE)
    said = PLANTED[name][2]
    assert outcome == ("FAILED" if said else "PASSED")
    if said:
        sections = dict(re.findall(r"^_+ 01-tiny.ipynb: Fault (\d) .*? _+\n(.*?)(?=^_{5}|^={5})", tried, re.M | re.S))
        section = sections[str(count)]
        assert section.startswith(said) and f"+ {PLANTED[name][1]}" in section and ".py" not in section


def test_the_cells_themselves_pass_beside_them(tried):
    assert re.findall(r"^(PASSED|FAILED) .*::Cell (\d)$", tried, re.MULTILINE) == [("PASSED", str(n)) for n in range(5)]


@pytest.mark.parametrize("run, alive", [(0, True), (3, True), (2, False)])
def test_a_fault_is_not_tried_unless_the_cells_before_it_have_run(run, alive):
    kernel = SimpleNamespace(cells_run=run, is_alive=lambda: alive)
    trial = faults.Trial(faults.Fault(1, "C02", "x", "y"), (3,), ("y",), (3,))
    with pytest.raises(NotCaught, match="the 2 cells before it have to run first"):
        PlantedFault.runtest(SimpleNamespace(parent=SimpleNamespace(kernel=kernel), trial=trial))
