"""Where the peers are, and why one of them does not run."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv" / "peers"
"""`make bench-peers` installs them here, beside what the book pins and never in its way."""

PACKAGES = {"KeOps": "pykeops", "d2l": "d2l", "x-transformers": "x-transformers"}
"""The peers' names in the tables, and on the package index."""


class Missing(Exception):
    """A peer that cannot be run here, with the reason."""


@cache
def prepare() -> None:
    """Last on the path, so that a peer's copy of a package never stands before the book's own."""
    sys.path.append(str(FOLDER))
    # KeOps starts `python -m pybind11` to find headers, and compiles without these flags 3 to 6 times slower code.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)]))
    os.environ["CXXFLAGS"] = "-march=native -ffast-math"
    os.environ.setdefault("KEOPS_CACHE_FOLDER", str(ROOT / "_build" / "keops"))
    Path(os.environ["KEOPS_CACHE_FOLDER"]).mkdir(parents=True, exist_ok=True)


def compiler() -> None:
    """Raises Missing where no C++ compiler is found."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise Missing("no C++ compiler on this machine")


def _load(module: str) -> ModuleType:
    prepare()
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a peer's import raises is the reason that the table shows
        raise Missing(reason(error)) from error


def reason(error: BaseException) -> str:
    """An error in one line, for the table: the one inside, where torch.compile wraps another."""
    text = str(error).strip()
    inside = re.search(r"raised exception (\w+\(.*\))", text)
    first = text.splitlines()[0] if text else ""
    return (inside[1] if inside else f"{type(error).__name__}: {first}")[:300]


@cache
def keops() -> ModuleType:
    """KeOps for torch: reductions over all pairs from a formula, compiled."""
    compiler()
    return _load("pykeops.torch")


@cache
def d2l() -> ModuleType:
    """Dive into Deep Learning's package, with AdditiveAttention as its book prints it."""
    _declare_torchvision()
    return _load("d2l.torch")


@cache
def x_transformers() -> ModuleType:
    """x-transformers' attention proper, which scores by distance or with a soft cap."""
    return _load("x_transformers.attend")


@cache
def fast_transformers() -> ModuleType:
    """fast-transformers' causal product, a C++ extension."""
    return _load("fast_transformers.causal_product")


@cache
def performer() -> ModuleType:
    """performer-pytorch's linear attention and its FAVOR+."""
    return _load("performer_pytorch.performer_pytorch")


@cache
def flash_linear_attention() -> ModuleType:
    """flash-linear-attention, whose package imports triton and needs a GPU."""
    return _load("fla.ops")


@cache
def local_attention() -> ModuleType:
    """lucidrains' attention in windows."""
    return _load("local_attention")


LINEAR = {
    "fast-transformers": ("pytorch-fast-transformers", fast_transformers),
    "performer-pytorch": ("performer-pytorch", performer),
    "flash-linear-attention": ("flash-linear-attention", flash_linear_attention),
}


def linear_peers() -> dict[str, dict[str, str]]:
    """The peers of linear attention: versions, or why one cannot be imported."""
    found: dict[str, dict[str, str]] = {}
    for name, (package, load) in LINEAR.items():
        try:
            load()
        except Missing as missing:
            found[name] = {"reason": str(missing)}
        else:
            found[name] = {"version": version(package)}
    return found


_DECLARED: list[Any] = []


def _declare_torchvision() -> None:
    """d2l imports torchvision, whose wheel is built for CUDA and brings no operators to a CPU build of torch.

    Its import only needs to know their signatures; nothing that is timed calls them.
    """
    if torch.version.cuda is None and not _DECLARED:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


def installed() -> dict[str, dict[str, str]]:
    """For each peer its version, or the reason why it cannot be imported."""
    found: dict[str, dict[str, str]] = {}
    for name, load in {"KeOps": keops, "d2l": d2l, "x-transformers": x_transformers}.items():
        try:
            load()
        except Missing as missing:
            found[name] = {"reason": str(missing)}
        else:
            found[name] = {"version": version(PACKAGES[name])}
    found["torch.compile, FlexAttention, cdist"] = {"version": torch.__version__}
    return found
