"""A pytest plugin: `pytest --nbval` as stored outputs need it, in their environment, pictures compared too.

Just before a cell runs, each fault planted in it is tried in a copy of the kernel, as a test of its own.

The project's conftest loads it. Loading it pins the environment of the process at once, before torch is imported by a
test and before workers are started, which inherit it.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile

from bookkit import branch, environment, faults
from bookkit.execute import CELL_TIMEOUT
from bookkit.kernel import settings
from bookkit.notebook import read
from bookkit.pictures import compare

environment.pin()
_words_agree = IPyNbCell.compare_outputs
_cells = IPyNbFile.collect


def pytest_configure(config: pytest.Config) -> None:
    """Mend nbval where it sees something else than a reader does, and start its kernels as `bookkit.execute` does."""
    if not config.option.nbval:
        return
    if not hasattr(config, "workerinput"):
        environment.prepare()
    IPyNbFile.collect = _collect
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


class NotCaught(Exception):
    """A planted fault that its claim's cells let pass, or that something else stopped."""


class PlantedFault(pytest.Item):
    """A fault, tried in a copy of the notebook's kernel: the cells of its claim are to catch it, by an assertion."""

    def __init__(self, *, trial: faults.Trial, **given: Any) -> None:
        super().__init__(**given)
        self.trial = trial

    def runtest(self) -> None:
        """Raise NotCaught when the fault is not caught, or cells that come before it have not run."""
        kernel: Any = self.parent.kernel  # type: ignore[union-attr]
        before = self.trial.numbers[0] - 1
        if getattr(kernel, "cells_run", 0) != before or not kernel.is_alive():
            raise NotCaught(f"Not tried: the {before} cells before it have to run first, without a failure.")
        if said := self.trial.verdict(branch.attempt(kernel.kc, self.trial.sources, CELL_TIMEOUT)):
            raise NotCaught(said)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show what went wrong in the chapter; the way through this file tells nothing."""
        return str(excinfo.value) if excinfo.errisinstance(NotCaught) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Name the fault in a report's heading."""
        return self.path, None, f"{self.path.name}: {self.name}"


def _collect(self: Any) -> Iterator[pytest.Item]:
    """Yield the notebook's cells as nbval does, and before each the faults that are planted in it."""
    chapter = re.match(r"(\d\d)-", self.path.name)
    planted = faults.load(int(chapter[1]), self.path.parents[1]) if chapter else []
    notebook = read(self.path)
    trials = [faults.plant(fault, notebook) for fault in planted]
    for cell in _cells(self):
        for count, trial in enumerate(trials, start=1):
            if trial.numbers[0] == cell.cell_num + 1:
                line = trial.fault.find.strip().splitlines()[0][:40]
                name = f"Fault {count} for {trial.fault.claim}: {line}"
                yield PlantedFault.from_parent(self, name=name, trial=trial)
        yield cell


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
    self.cells_run = getattr(self, "cells_run", 0) + 1
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def _start_new_kernel(startup_timeout: float = 60, kernel_name: str = "", **arguments: Any) -> tuple[Any, Any]:
    """Start the kernel of `bookkit.kernel`; return its manager and its client once it answers."""
    manager = KernelManager(**settings(_sockets()))
    manager.start_kernel(**arguments)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=startup_timeout)
    return manager, client
