"""Run chapters and store their outputs: `python -m bookkit.execute chapters/03-*.ipynb`.

Each notebook runs from its first cell to its last in a fresh kernel of the current interpreter, in its own folder, in
the environment of `bookkit.environment`. It is written, normalised, only when every cell ran; a failing cell leaves the
file as it was, says which cell and why, and makes the command exit with 1. An unchanged chapter keeps its bytes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from bookkit.environment import pinned, prepare
from bookkit.kernel import settings
from bookkit.notebook import Notebook, code_cells, normalise, read, text, write

Report = Callable[[str], None]
CELL_TIMEOUT = 120  # seconds; a whole chapter is to take less than a minute


class CellFailed(Exception):
    """A cell of a notebook raised, ran too long, or took its kernel down.

    `number` counts code cells from 1, as Jupyter does; `ename` is the error's class name ("AssertionError").
    """

    def __init__(self, path: Path, number: int, source: str, ename: str, detail: str) -> None:
        super().__init__(f"{path.name}: code cell {number} failed with {ename}")
        self.path, self.number, self.source, self.ename, self.detail = path, number, source, ename, detail

    def __str__(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.source.splitlines())
        return f"{self.path}: code cell {self.number} failed with {self.ename}\n{lines}\n\n{self.detail}"


def run(
    notebook: Notebook,
    path: Path,
    *,
    report: Report | None = None,
) -> Notebook:
    """Run the code cells of `notebook` in order, in place, and return it; nothing is written.

    `path` says in whose folder the kernel runs and names the notebook in errors. `report` receives one line for each
    cell that ran.

    Raises CellFailed when a cell raises, runs longer than `CELL_TIMEOUT` seconds, or takes the kernel down.
    """
    node = nbformat.from_dict(notebook)
    total = len(code_cells(node))
    number = 0
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets, open(os.devnull, "w") as silence:
        client = NotebookClient(
            node,
            km=AsyncKernelManager(**settings(sockets)),
            timeout=CELL_TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            allow_errors=False,
            resources={"metadata": {"path": str(path.resolve().parent)}},
        )
        with client.setup_kernel(cleanup_kc=True, env=pinned(os.environ), stderr=silence):
            for index, cell in enumerate(node["cells"]):
                if cell["cell_type"] != "code" or not text(cell["source"]).strip():
                    continue
                number += 1
                started = time.monotonic()
                cell["outputs"] = []
                try:
                    client.execute_cell(cell, index, execution_count=number, store_history=True)
                except CellExecutionError as error:
                    detail = _plain(error.traceback) or f"{error.ename}: {error.evalue}"
                    raise CellFailed(path, number, text(cell["source"]), error.ename, detail) from None
                except CellTimeoutError as error:
                    message = f"It ran for more than {CELL_TIMEOUT} s."
                    raise CellFailed(path, number, text(cell["source"]), "Timeout", message) from error
                except DeadKernelError as error:
                    message = "The kernel died: often too little memory."
                    raise CellFailed(path, number, text(cell["source"]), "DeadKernel", message) from error
                if report:
                    first = text(cell["source"]).strip().splitlines()[0][:70]
                    report(f"  {path.name} [{number}/{total}] {time.monotonic() - started:5.1f} s  {first}")
    result: Notebook = node
    return result


def execute(path: Path, *, report: Report | None = None) -> bool:
    """Run the notebook at `path`, store its normalised outputs, and return whether its bytes changed."""
    notebook = normalise(run(read(path), path, report=report))
    return write(notebook, path)


def _plain(traceback: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", traceback)
    return plain[max(plain.find("-" * 60), 0) :].strip()  # nbclient repeats the source before the rule


def _execute_one(path: Path) -> tuple[Path, bool | None, str, float]:
    started = time.monotonic()
    try:
        changed: bool | None = execute(path, report=lambda line: print(line, flush=True))
        message = ""
    except CellFailed as error:
        changed, message = None, str(error)
    return path, changed, message, time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each notebook named on the command line, `--jobs` at a time, and return 1 if any cell failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bookkit.execute", description="Run chapters, store their outputs.")
    parser.add_argument("notebooks", nargs="+", type=Path, help="chapters/NN-name.ipynb")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="notebooks at a time (default 1)")
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.notebooks if not path.is_file()]
    if missing:
        parser.error(f"no such notebook: {', '.join(missing)}")
    prepare()
    failures = 0
    with ProcessPoolExecutor(max_workers=min(options.jobs, len(options.notebooks))) as pool:
        for done in as_completed([pool.submit(_execute_one, path) for path in options.notebooks]):
            path, changed, message, seconds = done.result()
            if changed is None:
                failures += 1
                print(f"\nFAILED {message}\n", file=sys.stderr, flush=True)
            else:
                print(f"{path}: {'outputs stored' if changed else 'unchanged'} ({seconds:.1f} s)", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
