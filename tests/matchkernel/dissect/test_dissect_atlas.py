"""The atlas says of each head what its weights and its form say, and names what stands above chance."""

import math
import re
from dataclasses import replace

import pytest
import torch

from matchkernel.dissect import METRICS, Metric, Tokens, atlas
from matchkernel.dissect.atlas import COLUMNS, LAST, ROLES
from tests.matchkernel.dissect.tiny import make_decoder

TEXTS = [
    "The old gardener watered the roses because the roses were dry.",
    "In the evening, the garden smelled of rain and the gardener slept.",
]


@pytest.fixture(scope="module")
def found(model):
    return atlas(model, TEXTS)


def cells(line):
    """The line's numbers by column, with the head and what it does in front."""
    head, role, *numbers = re.fullmatch(r"( ?\d+\.\d+ ?) ([a-z]+ +[+-]\d\.\d\d|– +) +(.*)", line).groups()
    return head.strip(), role.strip(), dict(zip(list(COLUMNS)[2:], numbers[0].split(), strict=True))


def test_a_line_holds_what_weights_and_form_say(model, found):
    lines = found.table().splitlines()
    assert len(lines) == 1 + 1 + 72 + 1 + 1
    rows = {head: (role, numbers) for head, role, numbers in map(cells, lines[2:-2])}
    assert list(rows) == [f"{layer}.{head}" for layer in range(6) for head in range(12)]

    readings = [model.read(text) for text in TEXTS]
    for layer, head in ((0, 2), (1, 8), (4, 9)):
        previous, first, entropy = [], [], []
        for reading in readings:
            weights = reading.weights[layer, head].double()
            own = range(1, len(reading.tokens) - 1)
            previous.append(sum(float(weights[i, i - 1]) for i in own if i > 1) / (len(own) - 1))
            first.append(sum(float(weights[i, 0]) for i in own) / len(own))
            bits = [-sum(w * math.log(w) for w in weights[i].tolist() if w) for i in own]
            entropy.append(sum(bits) / len(own) / math.log(len(weights)))
        numbers = rows[f"{layer}.{head}"][1]
        assert float(numbers["previous"]) == pytest.approx(sum(previous) / 2, abs=0.0051)
        assert float(numbers["first"]) == pytest.approx(sum(first) / 2, abs=0.0051)
        assert float(numbers["entropy"]) == pytest.approx(sum(entropy) / 2, abs=0.0051)

        M = model.head(layer, head).M.double()
        spectrum = torch.linalg.svdvals(M).square()
        assert float(numbers["symmetric_share"]) == pytest.approx(
            float(((M + M.T) / 2).norm() ** 2 / M.norm() ** 2), abs=0.0051
        )
        assert float(numbers["participation_ratio"]) == pytest.approx(
            float(spectrum.sum() ** 2 / spectrum.square().sum()), abs=0.051
        )
        assert int(numbers["rank_90"]) == int((spectrum.cumsum(0) < 0.9 * spectrum.sum()).sum()) + 1
    assert rows["0.2"][0] == f"previous    {found.roles(0, 2)[0].above:+.2f}"


def test_the_table_is_aligned_and_narrow(found):
    lines = found.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert set(lines[1]) == set(lines[-2]) == {"─"}
    ends = [
        match.end() for match in re.finditer(r"r90|PR|sym|pos|prev|next|self|same|ind|long|punc|sep|sink|ent", lines[0])
    ]
    for line in [*lines[2:-2], lines[-1]]:
        for end in ends:
            assert line[end - 1] != " " and line[end : end + 1] in ("", " "), (line, end)


def test_the_last_line_is_chance(found):
    chance = found.table().splitlines()[-1].split()
    values = dict(zip(list(COLUMNS)[2:], map(float, chance[1:]), strict=True))
    assert chance[0] == "chance"
    assert values["symmetric_share"] == pytest.approx(0.5 + 1 / (2 * 384), abs=0.011)
    assert values["positive_share"] == pytest.approx(0.5, abs=0.021)
    assert 25 <= values["participation_ratio"] <= 29
    lengths = [14, 15]
    assert values["first"] == pytest.approx(sum(1 / n for n in lengths) / 2, abs=0.006)
    assert values["entropy"] == 1.0


def test_lines_are_sorted_and_cut_off(found):
    lines = found.table("symmetric_share", top=5).splitlines()[2:-2]
    assert len(lines) == 5
    shares = [float(cells(line)[2]["symmetric_share"]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == max(round(form.symmetric_share, 2) for form in found.forms.values())
    heads = [cells(line)[:2] for line in found.table("above").splitlines()[2:-2]]
    above = [float(role.split()[1]) if role != "–" else -math.inf for _, role in heads]
    assert above == sorted(above, reverse=True) and above[-1] == -math.inf < above[0]
    with pytest.raises(ValueError, match=r"sort is 'size'; the columns are head, above, rank_90"):
        found.table("size")
    with pytest.raises(ValueError, match="top is 0; expected at least 1"):
        found.table(top=0)


def made(found, **shares):
    """The atlas with metrics of 2 × 2 heads in place of its own: name → (value, uniform, matched or None), each 4."""
    nothing = torch.full((1, 2, 2), math.nan)

    def metric(name):
        if name not in shares:
            return Metric(name, ("",), nothing, nothing, None)
        value, uniform, matched = shares[name]
        table = torch.tensor([value]).view(1, 2, 2)
        return Metric(
            name,
            ("",),
            table,
            torch.full_like(table, uniform),
            None if matched is None else torch.full_like(table, matched),
        )

    places = [(layer, head) for layer in range(2) for head in range(2)]
    return replace(
        found, metrics={name: metric(name) for name in METRICS}, forms={place: found.forms[place] for place in places}
    )


def test_what_a_head_does_is_named_by_the_margin_and_the_higher_base_rate(found):
    some = made(found, previous=([0.5, 0.29, 0.6, 0.1], 0.1, None), same=([0.9, 0.9, 0.1, 0.6], 0.1, 0.5))
    assert [[role.name for role in some.roles(*place)] for place in some.forms] == [
        ["previous", "same"],  # the same base either way: 0.40 above chance each, and order of ROLES decides
        ["same"],  # 0.19 above chance is not the margin
        ["previous"],
        [],  # 0.5 above an even spread, 0.1 above what position alone gives
    ]
    role = some.roles(0, 1)[0]
    assert (role.base, round(role.above, 6)) == (0.5, 0.4)
    assert str(role) == "0.1 same 0.90 (chance 0.50)"
    assert [role.name for role in some.roles(0, 1, margin=0.1)] == ["same", "previous"]
    assert [str(role)[:12] for role in some.notable()] == ["1.0 previous", "0.1 same 0.9"]
    assert "–" in some.table().splitlines()[5]


def test_where_attention_is_left_is_named_only_where_nothing_else_is(found):
    assert set(LAST) < set(ROLES) and not {"sink", "entropy"} & set(ROLES)
    some = made(found, first=([0.9, 0.9, 0.1, 0.1], 0.1, None), next=([0.5, 0.1, 0.1, 0.1], 0.1, None),
                long=([0.1, 0.8, 0.8, 0.1], 0.4, None))  # fmt: skip
    assert [[role.name for role in some.roles(*place)] for place in some.forms] == [
        ["next", "first"], ["first", "long"], ["long"], [],
    ]  # fmt: skip
    assert [(role.layer, role.head, role.name) for role in some.notable()] == [
        (0, 0, "next"),
        (0, 1, "first"),
        (1, 0, "long"),
    ]


def test_the_known_heads_are_found(found):
    assert found.roles(0, 2)[0].name == "previous" and found.roles(0, 2)[0].share > 0.9
    assert found.roles(1, 8)[0].name == "next"
    assert {(role.layer, role.head, role.name) for role in found.notable()} >= {(0, 2, "previous"), (1, 8, "next")}


def test_texts_that_make_no_atlas_are_refused(model):
    for texts in ([], "one text"):
        with pytest.raises(ValueError, match="a list of at least one text"):
            atlas(model, texts)
    with pytest.raises(ValueError, match="512 positions"):
        atlas(model, ["word " * 600])


def test_tokens_serve_as_texts(model, found):
    again = atlas(model, [model.tokenize(text) for text in TEXTS])
    assert isinstance(model.tokenize(TEXTS[0]), Tokens)
    assert again.table() == found.table() == str(found)
    assert again.texts == tuple(TEXTS)
    assert repr(again) == "Atlas(all-MiniLM-L6-v2, 72 heads, 2 texts)"


def test_a_decoder_never_attends_to_the_next_token():
    decoder = make_decoder()
    found = atlas(decoder, ["overthelazydog", "thequickbrownfox"])
    rows = {head: numbers for head, _, numbers in map(cells, found.table().splitlines()[2:-2])}
    assert len(rows) == 8
    for place, numbers in rows.items():
        assert numbers["next"] == numbers["separator"] == "–"
        layer, head = map(int, place.split("."))
        M = decoder.head(layer, head).M  # between tokens at the same place
        assert float(numbers["symmetric_share"]) == pytest.approx(
            float(((M + M.T) / 2).norm() ** 2 / M.norm() ** 2), abs=0.0051
        )
    assert found.table().splitlines()[-1].split()[6] == "–"
    assert found.table("next").splitlines()[2:4] == found.table().splitlines()[2:4]
