"""Running a notebook: stored when all is well, told apart when it is not, twice the same bytes."""

import os
import re
import sys

import pytest

from bookkit.execute import CellFailed, main, run
from bookkit.notebook import normalise, output_text, read, write
from tests.bookkit.make import code, markdown, notebook


def unrun(*sources):
    return notebook(markdown("# T"), *(code(source, count=None) for source in sources))


@pytest.fixture
def saved(tmp_path):
    def save(*sources):
        path = tmp_path / "t.ipynb"
        write(normalise(unrun(*sources)), path)
        return path

    return save


def words(cell):
    return "".join(output_text(output) for output in cell["outputs"])


def test_outputs_are_stored_and_a_second_run_leaves_the_bytes(saved, capfd):
    path = saved("print('a'); print('b')", "{*'hello'}, hash('x')", "import torch\ntorch.rand(3, 3).sum() > 0")
    assert main([str(path)]) == 0
    first = path.read_bytes()
    assert "t.ipynb [2/3]" in capfd.readouterr().out
    cells = read(path)["cells"]
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2, 3]
    assert words(cells[1]) == "a\nb\n" and words(cells[3]) == "tensor(True)"
    assert main([str(path)]) == 0
    assert "unchanged" in capfd.readouterr().out
    assert path.read_bytes() == first


def test_a_failing_cell_is_named_and_the_file_left_alone(saved, capfd):
    path = saved("x = 1", "assert x == 2, 'x is not two'", "x")
    before = path.read_bytes()
    assert main([str(path)]) == 1
    told = capfd.readouterr().err
    assert "t.ipynb: code cell 2 failed with AssertionError" in told
    assert "assert x == 2" in told and "x is not two" in told and "\x1b" not in told
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_is_said_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.ipynb")])
    assert "no such notebook" in capsys.readouterr().err


def test_the_kernel_is_this_interpreter_in_the_pinned_environment(tmp_path):
    noted = run(
        unrun(
            "import os, sys; print(sys.executable, os.getcwd())",
            "import torch; print(torch.get_num_threads(), os.environ['PYTHONHASHSEED'])",
            "import matplotlib.pyplot as plt; print(plt.get_backend())",
            "import bookkit, matchkernel",
            "1;",
        ),
        tmp_path / "t.ipynb",
    )
    said = [words(cell) for cell in noted["cells"][1:]]
    assert said[0].split() == [sys.executable, str(tmp_path)]
    assert said[1] == "1 0\n" and "inline" in said[2] and said[3] == said[4] == ""


def test_a_failure_says_which_error(tmp_path):
    with pytest.raises(CellFailed) as caught:
        run(unrun("1 / 0"), tmp_path / "t.ipynb")
    assert caught.value.ename == "ZeroDivisionError" and caught.value.number == 1


def test_a_dead_kernel_is_told_from_an_error(tmp_path):
    with pytest.raises(CellFailed, match="DeadKernel"):
        run(unrun("import os; os._exit(1)"), tmp_path / "t.ipynb")


def test_no_kernel_is_left_behind(tmp_path):
    noted = run(unrun("import os; print(os.getpid())"), tmp_path / "t.ipynb")
    pid = re.search(r"\d+", words(noted["cells"][1]))[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
