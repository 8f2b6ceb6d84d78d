"""Try cells in a copy of a running kernel, which keeps nothing of them.

The kernel forks. The copy has all that the cells before have made, runs the cells through the same shell, says how it
went, and ends; the kernel, which waited, goes on as if nothing had been. So a fault planted late in a chapter costs
the cells from its place on, not the whole chapter again. Memory is shared until one side writes to it.

A copy has one thread. The kernel's others only carry messages, which a copy never sends. But a pool of threads that
computes would be missing in the copy, which waits for it for ever; so a kernel that has one is refused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.utils.capture import capture_output

_ANSWER = 60  # seconds within which a kernel answers that has nothing to run


@dataclass(frozen=True)
class Outcome:
    """How cells went: the index of the one that failed, the name of its error, and its traceback in plain text.

    `failed` is None when all went well. `ename` is "Timeout" for a cell that ran too long, "DeadKernel" for one that
    took the copy down.
    """

    failed: int | None
    ename: str = ""
    detail: str = ""


def attempt(client: Any, cells: Sequence[str], limit: int) -> Outcome:
    """Run cells in a copy of the kernel behind `client`, at most `limit` seconds each, and return how it went.

    `client` is a blocking client of a kernel that is idle. Raises RuntimeError, in the kernel's words, when the
    kernel refuses.
    """
    with tempfile.TemporaryDirectory(prefix="branch-") as folder:
        order, answer = Path(folder, "cells.json"), Path(folder, "outcome.json")
        order.write_text(json.dumps(list(cells)), encoding="utf-8")
        call = f"attempt_here({str(order)!r}, {str(answer)!r}, {limit})"
        status = int(_ask(client, call, timeout=limit * len(cells) + _ANSWER))
        said = answer.read_text(encoding="utf-8") if answer.exists() else ""
    told = Outcome(**json.loads(said.splitlines()[-1])) if said else Outcome(0)
    if status == 0:
        return told
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return Outcome(told.failed, "Timeout", f"It ran for more than {limit} s.")
    return Outcome(told.failed, "DeadKernel", f"The kernel died (status {status}): often too little memory.")


def _ask(client: Any, call: str, timeout: float = _ANSWER) -> str:
    """Let the kernel evaluate a call of this module, between cells and out of their names, and return its result."""
    expression = f"__import__('bookkit.branch', fromlist=['']).{call}"
    asked = client.execute("", silent=True, store_history=False, user_expressions={"it": expression})
    while (reply := client.get_shell_msg(timeout=timeout))["parent_header"].get("msg_id") != asked:
        pass
    given = reply["content"]["user_expressions"]["it"]
    if given["status"] != "ok":
        raise RuntimeError(f"{given['ename']}: {given['evalue']}")
    return str(given["data"]["text/plain"])


# ---- in the kernel ----------------------------------------------------------------------------------------------


def pool() -> list[str]:
    """Return the names of this process's threads that neither Python started nor its messages need.

    A system without /proc does not name them, and none is returned.
    """
    ours = {thread.native_id for thread in threading.enumerate()}
    named = {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")}
    return sorted(name for number, name in named.items() if number not in ours and not name.startswith("ZMQbg/"))


def attempt_here(order: str, answer: str, limit: int) -> int:
    """Run the cells of the file `order` in a copy of this process; return the copy's status as os.waitpid gives it.

    The copy appends a line to the file `answer` as each cell begins and when all is over. Raises RuntimeError when
    the process computes with more than one thread.
    """
    cells: list[str] = json.loads(Path(order).read_text(encoding="utf-8"))
    if threads := pool():
        raise RuntimeError(
            f"{len(threads)} threads compute beside Python's own ({', '.join(threads)}), and a copy would lack them: "
            "let the cells before use one thread"
        )
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status
    try:
        _run(cells, answer, limit)
        os._exit(0)
    finally:
        os._exit(1)  # never back into the kernel's loop, whose sockets are the parent's


def _run(cells: list[str], answer: str, limit: int) -> None:
    shell: Any = get_ipython()
    shell.displayhook.session.send = lambda *_, **__: None  # the sockets are the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even where Python cannot listen
    with capture_output(), open(answer, "w", encoding="utf-8") as said:
        for index, source in enumerate(cells):
            print(json.dumps({"failed": index}), file=said, flush=True)
            signal.alarm(limit)
            result = shell.run_cell(source, store_history=True)
            signal.alarm(0)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                lines = getattr(shell, "_last_traceback", None) or [str(error)]
                detail = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))
                failed = {"failed": index, "ename": type(error).__name__, "detail": detail}
                print(json.dumps(failed), file=said, flush=True)
                return
        print(json.dumps({"failed": None}), file=said, flush=True)
