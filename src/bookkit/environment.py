"""The one environment in which stored outputs are made and compared.

A number printed by a chapter must come out the same on the next machine. Three things move last digits: the number of
threads (sums split differently), the instruction set (a wider vector adds in another order), and settings a reader
keeps in a home folder. All three are fixed here, for `bookkit.execute` and for the comparison in `tests/book` alike.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from IPython.core.profiledir import ProfileDir

from bookkit.paths import ROOT

# One thread: with two, sums over many elements differ in their last bits, and two notebooks at a time starve each
# other of their cores.
_THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

# AVX2 is the widest instruction set that every x86 machine of the last ten years has. Without the pin torch, MKL,
# oneDNN, numpy and faiss pick AVX-512 where they find it, and one result in six differs in its last bits.
_X86 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "FAISS_SIMD_LEVEL": "AVX2",
}

_QUIET = {
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",  # a progress bar prints a rate, which is never the same twice
    "HF_HUB_OFFLINE": "1",  # a chapter never fetches anything
    "COLUMNS": "80",
    "TZ": "UTC",
}

# Each of these would change what a chapter prints or draws. MPLBACKEND=agg in particular takes every figure away: the
# kernel chooses its inline backend only where none is named.
_UNSET = ("MPLBACKEND", "MATPLOTLIBRC", "PYTHONSTARTUP", "PYTHONWARNINGS", "PYTHONOPTIMIZE", "FORCE_COLOR")


def pinned(environ: Mapping[str, str], machine: str | None = None) -> dict[str, str]:
    """Return a copy of `environ` with everything fixed that stored outputs depend on.

    `machine` is the processor's name as `platform.machine()` gives it (the default); the instruction set is pinned on
    x86 only, where the settings exist. Settings of IPython and matplotlib are read from `_build`, not from the home
    folder, so that a reader's own style does not change a picture.
    """
    machine = platform.machine() if machine is None else machine
    fixed = {name: value for name, value in environ.items() if name not in _UNSET}
    fixed.update(_THREADS)
    fixed.update(_QUIET)
    if machine.lower() in {"x86_64", "amd64"}:
        fixed.update(_X86)
    fixed["IPYTHONDIR"] = str(ROOT / "_build" / "ipython")
    fixed["MPLCONFIGDIR"] = str(ROOT / "_build" / "matplotlib")
    source = str(ROOT / "src")
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != source]
    fixed["PYTHONPATH"] = os.pathsep.join([source, *paths])
    return fixed


def prepare() -> None:
    """Make the folders that `pinned` names, and matplotlib's list of fonts, before any kernel needs them.

    Making the list takes seconds, and matplotlib says so on stderr, which would land in the first chapter to draw.
    IPython's history goes to memory: kernels that share a file of it wait for each other.
    """
    environment = pinned(os.environ)
    fonts = Path(_folder(environment["MPLCONFIGDIR"]))
    profile = ProfileDir.create_profile_dir_by_name(_folder(environment["IPYTHONDIR"]), "default")
    settings = 'c = get_config()  # noqa: F821\nc.HistoryManager.hist_file = ":memory:"\n'
    (Path(profile.location) / "ipython_kernel_config.py").write_text(settings)
    if not list(fonts.glob("fontlist-*.json")):
        subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True, env=environment)


def pin() -> None:
    """Fix this process's own environment, and so its children's, as `pinned` says. Do it before torch loads."""
    fixed = pinned(os.environ)
    os.environ.clear()
    os.environ.update(fixed)


def _folder(path: str) -> str:
    Path(path).mkdir(parents=True, exist_ok=True)
    return path
