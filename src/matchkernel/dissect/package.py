"""Find a model's files inside an installed package, and make sure they are the expected ones."""

import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


class ModelMissingError(ModuleNotFoundError):
    """A package that a model needs is not installed; the message says how to install it."""


class ModelFileError(RuntimeError):
    """A model's file is absent or is not byte for byte the one its loader was written for."""


def import_reader(module: str, install: str) -> ModuleType:
    """Import a library that reads model files, such as ``safetensors.torch``; only the loaders need them.

    Args:
        module: the module to import.
        install: the shell command that installs all that the model is read with, for the error message.

    Raises:
        ModelMissingError: the library is not installed.
    """
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise ModelMissingError(
            f"opening this model needs the package {top!r}, which is not installed: run  {install}", name=top
        )
    return importlib.import_module(module)


def find_files(package: str, install: str, sha256: Mapping[str, str]) -> dict[str, Path]:
    """Locate the files of an installed package and check each one's hash.

    Args:
        package: import name of the package; it is located, not imported.
        install: the shell command that installs it, for the error message.
        sha256: expected hash of each needed file, keyed by its path inside the package.

    Returns:
        The path on disk of each file, under the same keys.

    Raises:
        ModelMissingError: the package is not installed.
        ModelFileError: a file is absent, or its hash differs.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelMissingError(f"the package {package!r} is not installed: run  {install}", name=package)
    folder = Path(next(iter(spec.submodule_search_locations)))
    paths = {name: folder / name for name in sha256}
    for name, path in paths.items():
        _check(path, sha256[name], install)
    return paths


def _check(path: Path, expected: str, install: str) -> None:
    if not path.is_file():
        raise ModelFileError(f"{path} is absent; install the pinned package again: {install}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelFileError(
            f"{path} is not the file this loader knows: expected sha256 {expected}, found {found}; "
            f"install the pinned package again: {install}"
        )
