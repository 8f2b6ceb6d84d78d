"""The kernel that runs chapters: the running interpreter, reached through a socket file."""

from __future__ import annotations

import uuid
from typing import Any

import ipykernel.kernelspec
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager


class ThisInterpreter(KernelSpecManager):
    """Kernel specs that know only the running interpreter, whatever kernels a reader has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the running interpreter's spec, by whatever name it is asked for."""
        spec = ipykernel.kernelspec.get_kernel_dict()
        return KernelSpec(resource_dir=ipykernel.kernelspec.RESOURCES, **spec)


def settings(folder: str) -> dict[str, Any]:
    """Return the arguments of a kernel manager, blocking or not, for one kernel whose sockets lie in `folder`.

    Two processes that start kernels at the same moment can pick the same free TCP port, and one kernel dies: socket
    files cannot collide. Give a folder with a short name, as `tempfile` makes them: a path holds 107 bytes at most.
    """
    return {
        "kernel_name": "python3",
        "kernel_spec_manager": ThisInterpreter(),
        "transport": "ipc",
        "ip": f"{folder}/{uuid.uuid4().hex[:8]}",
    }
