"""Chapter 16's store of sentences: whole, licensed, and a sample of it embedded and compared again."""

import json
import lzma
import sys

import numpy as np
import pytest

from bookkit.paths import ROOT
from matchkernel.dissect import load

sys.path.insert(0, str(ROOT / "experiments"))
import sentence_store

DATA = ROOT / "chapters" / "data"


@pytest.fixture(scope="module")
def store():
    lines = lzma.decompress((DATA / "16-definitions.txt.xz").read_bytes()).decode().splitlines()
    words, texts = zip(*(line.split("\t") for line in lines), strict=True)
    return words, texts, dict(np.load(DATA / "16-keys.npz")), json.loads((DATA / "16-store.json").read_text())


@pytest.fixture(scope="module")
def sample(store):
    """Every 500th definition: embedded again, and as the store has it."""
    _, texts, packed, _ = store
    stored = sentence_store.decode(packed["codes"][::500], packed["codebook"], packed["rotation"])
    return load("minilm").embed(texts[::500]).numpy(), stored


def test_the_store_is_whole(store):
    words, texts, packed, report = store
    assert len(texts) == len(set(texts)) == len(packed["codes"]) == report["definitions"] >= 100_000
    assert packed["codes"].shape[1] == sentence_store.BYTES and packed["codes"].dtype == np.uint8
    assert all(words) and all(len(text.split()) >= 2 and len(text) <= sentence_store.LONGEST for text in texts)


def test_it_is_small_and_carries_its_licence():
    assert sum(file.stat().st_size for file in DATA.glob("16-*")) < 8e6
    notice = (DATA / "16-LICENSE.txt").read_text()
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in notice and "AS IS" in notice


def test_a_sample_embedded_again_is_as_near_as_the_report_says(store, sample):
    report = store[-1]
    fresh, stored = sample
    cosine = (fresh * stored).sum(axis=1)
    assert abs(cosine.mean() - report["cosine, mean"]) < 0.005
    assert abs(np.quantile(cosine, 0.05) - report["cosine, lowest of 95 %"]) < 0.015


def test_each_stored_vector_is_nearest_to_its_own_definition(sample):
    fresh, stored = sample
    assert ((fresh @ stored.T).argmax(axis=1) == np.arange(len(fresh))).mean() > 0.98


def test_a_vector_that_was_moved_is_noticed(store, sample):
    fresh, stored = sample
    moved = np.roll(stored, 1, axis=0)
    assert abs((fresh * moved).sum(axis=1).mean() - store[-1]["cosine, mean"]) > 0.5


def test_examples_belong_to_definitions_of_the_store(store):
    words, texts, _, _ = store
    examples = json.loads((DATA / "16-examples.json").read_text())
    assert len(examples) == sentence_store.ASKED and len({row for _, row in examples}) == len(examples)
    assert all(0 <= row < len(texts) and len(sentence.split()) >= 6 for sentence, row in examples)
    # A word of more than one form ("ran" for "run") is found by its first letters.
    used = [any(word[:3].lower() in sentence.lower() for word in words[row].split(", ")) for sentence, row in examples]
    assert np.mean(used) > 0.6


def test_the_packing_undoes_itself(store):
    packed = store[2]
    vectors = sentence_store.decode(packed["codes"][:64], packed["codebook"], packed["rotation"])
    rotation = packed["rotation"].astype(np.float32)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(384), atol=5e-3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    centres = packed["codebook"].astype(np.float32)
    turned = (vectors @ rotation.T).reshape(64, sentence_store.BYTES, -1)
    whole = np.linalg.norm(centres[np.arange(48), packed["codes"][:64]].reshape(64, -1), axis=1)
    again = turned * whole[:, None, None]
    nearest = ((again[:, :, None] - centres[None]) ** 2).sum(-1).argmin(-1)
    assert (nearest == packed["codes"][:64]).mean() > 0.99


def test_definitions_are_read_as_wordnet_writes_them(tmp_path):
    line = '01 00 a 02 {} 0 slow 0 001 @ 0 n 0000 | {}; "the system responds slowly today"; "a slow server"\n'
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text("  1 a line of the licence\n", encoding="latin-1")
    text = line.format("late(p)", "not at once") + line.format("tardy", "not at once") + line.format("one", "unique")
    (tmp_path / "data.adj").write_text(text, encoding="latin-1")
    (entry,) = sentence_store.definitions(tmp_path)
    assert entry.words == ["late", "tardy"] and entry.text == "not at once"
    assert entry.examples[:2] == ["the system responds slowly today", "a slow server"]
