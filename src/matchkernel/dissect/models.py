"""The trained models that can be opened, by name."""

from collections.abc import Callable

from . import minilm
from .encoder import Encoder

LOADERS: dict[str, Callable[[], Encoder]] = {"minilm": minilm.load}


def load(name: str = "minilm") -> Encoder:
    """Open a trained model that was installed as a package; nothing is fetched over the network.

    Args:
        name: which model; "minilm" is all-MiniLM-L6-v2 (English sentences, 6 layers of 12 heads, 86 MiB).

    Returns:
        The model on the CPU in float32; `.to(device)` and `.double()` move it. Its weights are frozen.

    Raises:
        ValueError: no such model; the message lists the known names.
        ModelMissingError: the package with the weights, or a library that reads it, is not installed; the message says
            what to run.
        ModelFileError: a file is not the one this loader was written for; names it, the expected and the found sha256.

    Cost: about a second, most of it hashing the file. Every call reads the files again, so two models share nothing.
    """
    if name not in LOADERS:
        raise ValueError(f"no model is called {name!r}; the known models are {sorted(LOADERS)}")
    return LOADERS[name]()
