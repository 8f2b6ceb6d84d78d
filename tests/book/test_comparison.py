"""`pytest --nbval` as `make test` calls it: an honest notebook passes, a changed number or a moved curve does not."""

import re
import subprocess
import sys

import pytest

from bookkit.execute import execute
from bookkit.notebook import read, write
from bookkit.paths import ROOT
from tests.bookkit.make import code, notebook

NUMBER = "sum(range(4)) / 4"
CURVE = "from matplotlib import pyplot as plt\nplt.plot([0, 1, 4, 9])\nplt.plot([9, 4, 1, 0]);"


def change(notebook, name):
    number, curve = notebook["cells"][1:]
    if name == "number":
        number["outputs"][0]["data"]["text/plain"] = "1.5001"
    if name == "curve":
        curve["source"] = curve["source"].replace("[9, 4, 1, 0]", "[9, 4, 1.1, 0]")
    if name == "gone":
        curve["source"] = "1;"
    if name == "error":
        number["source"] = "assert 1 == 2"
    return notebook


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run nbval once over one honest notebook and its four changed copies; return what it prints."""
    folder = tmp_path_factory.mktemp("stored")
    honest = folder / "honest.ipynb"
    write(notebook(code("x = 1", count=None), code(NUMBER, count=None), code(CURVE, count=None)), honest)
    execute(honest)
    for name in ("number", "curve", "gone", "error"):
        write(change(read(honest), name), folder / f"{name}.ipynb")
    options = ["--nbval", "--nbval-current-env", "-p", "bookkit.comparison", "-rA", "--color=no"]
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *options, folder]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def outcomes(results, name):
    found = re.findall(rf"^(PASSED|FAILED|ERROR) .*\b{name}\.ipynb::Cell (\d)", results, re.MULTILINE)
    return [outcome for outcome, _ in sorted(found, key=lambda pair: pair[1])]


def test_an_honest_notebook_passes(results):
    assert outcomes(results, "honest") == ["PASSED", "PASSED", "PASSED"]


def test_a_changed_number_fails(results):
    assert outcomes(results, "number") == ["PASSED", "FAILED", "PASSED"]


def test_a_curve_that_moved_fails(results):
    assert outcomes(results, "curve") == ["PASSED", "PASSED", "FAILED"]
    assert re.search(r"differs from the stored one in \d+ pixels", results)


def test_a_figure_that_is_gone_fails(results):
    assert outcomes(results, "gone") == ["PASSED", "PASSED", "FAILED"]


def test_an_error_fails(results):
    assert outcomes(results, "error") == ["PASSED", "FAILED", "PASSED"]
