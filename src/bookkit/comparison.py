"""A pytest plugin: `pytest --nbval` as stored outputs need it, in their environment, pictures compared too.

The project's conftest loads it. Loading it pins the environment of the process at once, before torch is imported by a
test and before workers are started, which inherit it.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

from bookkit import environment
from bookkit.kernel import settings
from bookkit.pictures import compare

environment.pin()
_words_agree = IPyNbCell.compare_outputs


def pytest_configure(config: pytest.Config) -> None:
    """Mend nbval where it sees something else than a reader does, and start its kernels as `bookkit.execute` does."""
    if not config.option.nbval:
        return
    if not hasattr(config, "workerinput"):
        environment.prepare()
    IPyNbCell.compare_outputs = _compare_outputs
    RunningKernel.execute_cell_input = _execute_cell_input
    nbval.kernel.start_new_kernel = _start_new_kernel


def pytest_unconfigure() -> None:
    """Remove the kernels' sockets."""
    if _sockets.cache_info().currsize:
        shutil.rmtree(_sockets(), ignore_errors=True)


@functools.cache
def _sockets() -> str:
    return tempfile.mkdtemp(prefix="kernel-")


def _compare_outputs(self: Any, test: Any, ref: Any, skip_compare: Any = None) -> bool:
    """Compare words as nbval does, then each picture, which it skips, with the stored one of the same place."""
    if not _words_agree(self, test, ref, skip_compare):
        return False
    stored, fresh = (
        [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        for outputs in (ref, test)
    )
    if len(stored) != len(fresh):
        problems = [f"{len(stored)} pictures are stored, {len(fresh)} were drawn"]
    else:
        problems = [problem for pair in zip(stored, fresh, strict=True) if (problem := compare(*pair))]
    self.comparison_traceback += problems
    return not problems


def _execute_cell_input(self: Any, cell_input: str, allow_stdin: bool | None = None) -> Any:
    """Run a cell as Jupyter does, with history: without it a closing semicolon would not silence the last value."""
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def _start_new_kernel(startup_timeout: float = 60, kernel_name: str = "", **arguments: Any) -> tuple[Any, Any]:
    """Start the kernel of `bookkit.kernel`; return its manager and its client once it answers."""
    manager = KernelManager(**settings(_sockets()))
    manager.start_kernel(**arguments)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=startup_timeout)
    return manager, client
