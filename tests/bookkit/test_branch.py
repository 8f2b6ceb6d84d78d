"""A copy of a kernel runs cells as the kernel would, says how they went, and leaves no trace."""

import textwrap

import pytest

from bookkit import branch, comparison
from bookkit.branch import Outcome


@pytest.fixture(scope="module")
def kernel():
    manager, client = comparison._start_new_kernel(60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture
def run(kernel):
    def cell(source):
        """Run a cell in the kernel itself, which is to go well."""
        asked = kernel.execute(textwrap.dedent(source), store_history=True)
        while (reply := kernel.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != asked:
            pass
        assert reply["content"]["status"] == "ok", reply["content"]

    return cell


@pytest.fixture
def attempt(kernel):
    return lambda *cells, limit=60: branch.attempt(kernel, [textwrap.dedent(cell) for cell in cells], limit)


def test_a_copy_has_what_the_cells_before_have_made(run, attempt):
    run("import torch\nx = torch.arange(3)")
    assert attempt("y = x.sum()", "assert y == 3") == Outcome(None)
    outcome = attempt("y = x.sum()", "assert y == 4, f'{y} is not 4'", "z = 1")
    assert (outcome.failed, outcome.ename) == (1, "AssertionError")
    assert "assert y == 4" in outcome.detail and "3 is not 4" in outcome.detail and "\x1b" not in outcome.detail


def test_a_copys_changes_reach_neither_the_kernel_nor_the_next_copy(run, attempt):
    run(
        """
        import os, warnings
        import torch
        generator = torch.Generator().manual_seed(0)
        x, here, cells_before = torch.zeros(2), os.getcwd(), len(In)
        was = generator.get_state()
        """
    )
    change = """
        import torch, math
        x.add_(1); math.pi = 3; torch.set_default_dtype(torch.float64); os.chdir("/"); new = 1
        torch.rand(1); torch.rand(1, generator=generator); warnings.simplefilter("error"); del was
        """
    sound = """
        import math
        assert x.sum() == 0 and math.pi > 3.1 and torch.get_default_dtype() == torch.float32
        assert os.getcwd() == here and "new" not in globals() and torch.equal(generator.get_state(), was)
        assert ("error", None, Warning, None, 0) not in warnings.filters
        """
    assert attempt(change, "assert x.sum() == 2") == Outcome(None)
    assert attempt(sound) == Outcome(None)
    run(sound)
    run("assert len(In) == cells_before + 2, In")


def test_a_copy_runs_cells_as_a_kernel_does(run, attempt):
    run("from matplotlib import pyplot as plt\nfrom IPython.display import display\n41 + 1")
    cells = (
        "assert _ == 42\n'inline' in plt.get_backend()",
        "assert _ is True\nplt.plot([0, 1])\nplt.show()",
        "assert not plt.get_fignums()\nplt.plot([1, 0]);",
        "assert not plt.get_fignums()  # the cell before drew it and closed it at its end\ndisplay({1: 2})",
        "%%capture said\nprint(1)\ndisplay(2)",
        "assert said.stdout == '1\\n' and len(said.outputs) == 1\n%precision 3\n3.14159",
        "assert get_ipython().display_formatter.formatters['text/plain'].float_precision == '3'",
        "import warnings; warnings.warn('heard')",
        "import sys; print(1, file=sys.stderr); sys.stdout.flush()",
        "import torch\nw = torch.ones(8, 8, requires_grad=True); (w @ w).sum().backward(); assert w.grad.sum() == 1024",
        "class Odd:\n    def __repr__(self): raise ValueError('cannot be shown')\nOdd()",  # told, and no failure
    )
    assert attempt(*cells) == Outcome(None)


@pytest.mark.parametrize(
    "cell, ename", [("nowhere", "NameError"), ("x = = 1", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")]
)
def test_an_error_is_told_by_its_name(cell, ename, attempt):
    outcome = attempt("x = 1", cell)
    assert (outcome.failed, outcome.ename) == (1, ename) and ename in outcome.detail


def test_a_copy_that_dies_or_hangs_is_told(attempt):
    died = attempt("x = 1", "import os; os._exit(7)")
    assert (died.failed, died.ename) == (1, "DeadKernel")
    killed = attempt("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.failed, killed.ename) == (0, "DeadKernel")
    for forever in (
        "import time; time.sleep(99)",
        "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    ):
        hung = attempt("x = 1", forever, limit=1)
        assert hung == Outcome(1, "Timeout", "It ran for more than 1 s.")
    assert attempt("x = 1") == Outcome(None)


def test_one_copy_at_a_time_and_none_left(run, attempt):
    run("import os, psutil")
    assert attempt("assert os.getppid()") == Outcome(None)
    run("assert psutil.Process().children() == []")


def test_a_pool_of_threads_is_refused(kernel):
    manager, client = comparison._start_new_kernel(60)
    try:
        asked = client.execute("import torch; torch.set_num_threads(2); x = torch.rand(999, 999); x @ x; x.exp();")
        while client.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != asked:
            pass
        with pytest.raises(RuntimeError, match="compute beside Python's own"):
            branch.attempt(client, ["1"], 60)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
