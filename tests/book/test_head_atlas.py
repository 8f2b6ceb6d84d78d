"""The stored measurements of chapter 11: complete, and what the weights give when a sample is measured again."""

import json

import pytest

from experiments import head_atlas as measured

STORED = json.loads(measured.STORED.read_text(encoding="utf-8"))
MINILM, SMOLLM2 = STORED["minilm"], STORED["smollm2"]


@pytest.fixture(scope="module")
def found():
    return measured.texts()


@pytest.fixture(scope="module")
def encoder():
    return measured.load("minilm")


@pytest.fixture(scope="module")
def decoder():
    return measured.load("smollm2")


def test_it_belongs_to_these_texts():
    assert STORED["texts"] == MINILM["texts"] == SMOLLM2["texts"] == measured.fingerprint()


def test_it_covers_every_head():
    assert {name: len(cosines) for name, cosines in MINILM["alone"].items()} == {
        "chosen_on": 72, "tested_on": 72, "to_mean": 72,
    }  # fmt: skip
    assert list(MINILM["random"]) == [str(count) for count in measured.SHARES]
    assert list(MINILM["surgery"]) == list(measured.operations())
    assert len(SMOLLM2["shares"]) == len(measured.KINDS) * len(measured.FOUND_ON)
    assert all(len(row) == 270 for row in SMOLLM2["shares"])
    assert not set(measured.FOUND_ON) & set(measured.TESTED_ON)


def test_no_text_that_chose_a_head_tests_it(found):
    assert not set(found["alice"]) & set(measured.unseen(found))


@pytest.mark.parametrize("place", [(0, 2), (2, 9), (5, 11)])
def test_a_removed_head_costs_the_same_again(encoder, found, place):
    read = measured.unseen(found)
    again = measured.removed_alone(encoder, place, read, encoder.embed(read))
    assert again == pytest.approx(MINILM["alone"]["tested_on"][12 * place[0] + place[1]], abs=2e-4)


def test_a_random_half_costs_the_same_again(encoder, found):
    read = measured.unseen(found)
    half = measured.draw(36, 3, measured.places(encoder))
    again = measured.kept(encoder, read, encoder.embed(read), intervene=measured.ablate(half))
    assert again == pytest.approx(MINILM["random"]["36"][3], abs=5e-4)


@pytest.mark.parametrize("name", ["symmetric part", "transposed", "rank 4"])
def test_an_operation_gives_the_same_again(encoder, found, name):
    again = measured.operated(encoder, measured.operations()[name], found["plain"])
    assert again == pytest.approx(MINILM["surgery"][name], abs=1e-3)


def test_the_ranking_is_that_of_the_stored_shares():
    rows = SMOLLM2["shares"]
    mean = [sum(row[at] for row in rows) / len(rows) for at in range(270)]
    order = sorted(range(270), key=lambda at: -mean[at])
    assert [list(divmod(at, 9)) for at in order[:8]] == SMOLLM2["ranked"][:8]


@pytest.mark.parametrize(("kind", "seed", "name"), [("random", 11, "top 8"), ("words", 13, "control 1")])
def test_a_second_copy_is_as_hard_again(decoder, found, kind, seed, name):
    tokens = measured.twice(decoder, kind, seed, found["common"])
    heads = {tuple(place) for place in SMOLLM2["taken"][name]}
    stored = SMOLLM2["copies"][kind][name][measured.TESTED_ON.index(seed)]
    assert measured.copies(decoder, tokens, heads) == pytest.approx(stored, abs=0.02)


def test_a_forbidden_sink_moves_again(decoder, found):
    again = measured.first_key(decoder, measured.prose_of(found)[1], measured.SINKS["forbidden"])
    assert again == pytest.approx(SMOLLM2["sink"]["forbidden"][1], abs=0.01)
    assert again[0] == 0 < 0.4 < again[1]
