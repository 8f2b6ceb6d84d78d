"""The trained models that can be opened, by name."""

from collections.abc import Callable
from typing import Literal, overload

from . import e5, minilm, smollm2
from .decoder import Decoder
from .encoder import Encoder
from .model import Model

LOADERS: dict[str, Callable[[], Model]] = {"e5": e5.load, "minilm": minilm.load, "smollm2": smollm2.load}


@overload
def load(name: Literal["minilm", "e5"] = "minilm") -> Encoder: ...
@overload
def load(name: Literal["smollm2"]) -> Decoder: ...
@overload
def load(name: str) -> Model: ...
def load(name: str = "minilm") -> Model:
    """Open a trained model that was installed as a package; nothing is fetched over the network.

    Args:
        name: which model.

            - "minilm": all-MiniLM-L6-v2, an `Encoder` for English sentences; 6 layers of 12 heads, 86 MiB.
            - "smollm2": SmolLM2-135M-Instruct, a `Decoder` that writes English; 30 layers of 9 heads that share 3 sets
              of keys and values; 513 MiB. Its weights are 4-bit approximations (Q4_1) of the published ones, word
              vectors 8-bit ones. It puts no mark at the beginning of a text.
            - "e5": multilingual-e5-small, an `Encoder` for sentences in about a hundred languages, Chinese among them;
              12 layers of 12 heads, 139 MiB. Its matrices are 4-bit approximations (Q4_0) of the published ones. To
              embed as it was trained, begin every text with "query: " or "passage: "; nothing is added for you.

    Returns:
        The model on the CPU in float32; `.to(device)` and `.double()` move it. Its weights are frozen.

    Raises:
        ValueError: no such model; the message lists the known names.
        ModelMissingError: the package with the weights, or a library that reads it, is not installed; the message says
            what to run.
        ModelFileError: a file is not the one this loader was written for; names it, the expected and the found sha256.

    Cost: MiniLM about a second, most of it hashing the file. SmolLM2 4 to 5 seconds of one core, and 870 MiB at the
    most on top of torch's own 220. e5 2 seconds, and 550 MiB. Every call reads the files again, so two models share
    nothing.
    """
    if name not in LOADERS:
        raise ValueError(f"no model is called {name!r}; the known models are {sorted(LOADERS)}")
    return LOADERS[name]()
