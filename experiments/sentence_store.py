"""Chapter 16's memory of sentences: python experiments/sentence_store.py FOLDER, ten minutes of one core.

FOLDER holds the data files of WordNet 3.0 (data.noun, data.verb, data.adj, data.adv; Debian's package wordnet-base puts
them in /usr/share/wordnet). Each definition of 2 words or more and at most 100 characters is embedded by MiniLM, and
the vectors are compressed to 48 bytes each. Written to chapters/data:
  16-definitions.txt.xz   a line per definition: its words, a tab, the definition; the same words at most once
  16-keys.npz             codes (m, 48), codebook (48, 256, 8), rotation (384, 384): how to undo them is in `decode`
  16-examples.json        sentences in which a word is used, each with the number of the definition that it illustrates
  16-store.json           counts, and what the compression costs
With --vectors FILE the embeddings are read from there, or written there if there are none yet.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from pathlib import Path
from typing import Any, NamedTuple

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapter's own environment

import faiss  # type: ignore[import-untyped, unused-ignore] # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bookkit.paths import ROOT  # noqa: E402
from matchkernel.dissect import load  # noqa: E402

DATA = ROOT / "chapters" / "data"
LONGEST = 100  # characters of a definition
BYTES = 48  # for a vector
SAMPLE = 13_000  # vectors that the codes are fitted to: the fewest that 256 centres ask for
ASKED = 400  # sentences that ask
Array = NDArray[np.float32]


class Definition(NamedTuple):
    words: list[str]
    text: str
    examples: list[str]


def definitions(folder: Path) -> list[Definition]:
    """The distinct definitions of WordNet, in its order; words that share one stand together."""
    found: dict[str, Definition] = {}
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):  # the licence, at the top of each file
                continue
            head, gloss = line.strip().split(" | ", 1)
            # "extreme(a)": the mark says where an adjective may stand.
            word = re.sub(r"\(\w+\)$", "", head.split()[4]).replace("_", " ")
            text = re.split(r'[;:]? "|;"', gloss, maxsplit=1)[0].strip().rstrip(";:").strip()
            entry = found.setdefault(text, Definition([], text, []))
            entry.examples.extend(re.findall(r'"([^"]+)"', gloss[len(text) :]))
            if word not in entry.words:
                entry.words.append(word)
    return [entry for text, entry in found.items() if len(text.split()) >= 2 and len(text) <= LONGEST]


def embed(texts: list[str]) -> Array:
    """Unit vectors (m, 384). Sorted by length, so that the model's batches of equal length are full."""
    model, vectors = load("minilm"), np.empty((len(texts), 384), np.float32)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), 4000):
        rows = order[start : start + 4000]
        vectors[rows] = model.embed([texts[row] for row in rows]).numpy()
    return vectors


def compress(vectors: Array) -> dict[str, NDArray[Any]]:
    """Optimised product quantisation (Ge et al. 2013): turn, cut into 48 pieces, name the nearest of 256 centres."""
    some = vectors[np.random.default_rng(0).permutation(len(vectors))[:SAMPLE]]
    turn = faiss.OPQMatrix(vectors.shape[1], BYTES)
    turn.niter, turn.niter_pq, turn.niter_pq_0, turn.max_train_points = 8, 4, 10, SAMPLE
    turn.train(some)
    quantizer = faiss.ProductQuantizer(vectors.shape[1], BYTES, 8)
    quantizer.cp.niter = 15
    quantizer.train(turn.apply(some))
    rotation = faiss.vector_to_array(turn.A).reshape(vectors.shape[1], -1)
    codebook = faiss.vector_to_array(quantizer.centroids).reshape(BYTES, 256, -1)
    return {
        "codes": quantizer.compute_codes(turn.apply(vectors)),
        "codebook": codebook.astype(np.float16),
        "rotation": rotation.astype(np.float16),
    }


def decode(codes: NDArray[np.uint8], codebook: NDArray[Any], rotation: NDArray[Any]) -> Array:
    """Unit vectors again: each byte's centre, set side by side, turned back."""
    pieces = codebook.astype(np.float32)[np.arange(BYTES), codes]
    vectors: Array = pieces.reshape(len(codes), -1) @ rotation.astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def examples(store: list[Definition]) -> list[tuple[str, int]]:
    """Sentences of six words or more, one for a definition, drawn without regard to what they say."""
    usable = [
        (sentence, row)
        for row, entry in enumerate(store)
        for sentence in entry.examples[:1]
        if 6 <= len(sentence.split()) and len(sentence) <= LONGEST
    ]
    chosen = np.random.default_rng(0).permutation(len(usable))[:ASKED]
    return [usable[at] for at in sorted(chosen)]


def quality(vectors: Array, stored: Array, asking: Array) -> dict[str, float]:
    """Cosine to the vector that was stored, and how much of the ten nearest of a query survives."""
    cosine = (vectors * stored).sum(axis=1)
    ten, ten_stored = (np.argsort(-asking @ keys.T, axis=1, kind="stable")[:, :10] for keys in (vectors, stored))
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(ten, ten_stored, strict=True)]
    first = np.mean([a[0] in b for a, b in zip(ten, ten_stored, strict=True)])
    return {
        "cosine, mean": round(float(cosine.mean()), 4),
        "cosine, lowest of 95 %": round(float(np.quantile(cosine, 0.05)), 4),
        "ten nearest that stay": round(float(np.mean(shared)), 4),
        "nearest that stays among ten": round(float(first), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vectors", type=Path, help="a .npy file of the embeddings")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    store = definitions(given.folder)
    if given.vectors and given.vectors.exists():
        vectors: Array = np.load(given.vectors)
    else:
        vectors = embed([entry.text for entry in store])
        if given.vectors:
            np.save(given.vectors, vectors)
    if len(vectors) != len(store):
        raise SystemExit(f"{given.vectors} holds {len(vectors)} vectors, the store has {len(store)} definitions")
    packed, asked = compress(vectors), examples(store)
    asking = embed([sentence for sentence, _ in asked])
    lines = "".join(f"{', '.join(entry.words)}\t{entry.text}\n" for entry in store)
    (DATA / "16-definitions.txt.xz").write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    np.savez_compressed(DATA / "16-keys.npz", **packed)
    (DATA / "16-examples.json").write_text(json.dumps(asked, indent=0, ensure_ascii=False) + "\n")
    report = {"definitions": len(store), "bytes": BYTES, **quality(vectors, decode(**packed), asking)}
    (DATA / "16-store.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
