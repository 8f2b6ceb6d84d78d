"""The book's rows of figures from outside hold, and the tests that they name are run by `make test`."""

import subprocess
import sys

from bookkit import oracles
from bookkit.paths import ROOT


def test_figures_from_outside_hold_together():
    assert oracles.load()
    found = oracles.problems()
    assert not found, "\n".join(found)


def test_the_page_shows_both_figures_of_every_row():
    page = oracles.page()
    for row in oracles.load():
        for line in (*row.setup, *row.theirs, *row.ours):
            assert line in page.replace("\u00a0", " ")
        assert row.cell in page and row.test.rpartition("::")[2] in page


def test_the_tests_that_rows_name_are_collected():
    named = sorted({row.test for row in oracles.load() if row.test})
    assert named
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("[")[0] for line in done.stdout.splitlines()}
    assert set(named) <= collected, f"not run by `make test`: {sorted(set(named) - collected)}"
