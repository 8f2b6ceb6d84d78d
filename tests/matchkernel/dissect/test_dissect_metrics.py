"""What heads attend to: each metric against its definition, pair by pair in plain Python, and tables by hand."""

import math
import statistics

import pytest
import torch
from torch.testing import assert_close

from matchkernel.dissect import METRICS, Metric, confirm, draw_ids, head_metrics, offset_profile, sinks
from tests.matchkernel.dissect.readings import causal, reading, tokens

SENTENCE = "[CLS] the man saw the dog , and the dog saw him . [SEP]"
SHORT = "[CLS] a b a [SEP]"
MARKS = {"[CLS]", "[SEP]"}
LONG = (
    "Nobody had told us that rivers freeze so slowly here, although each winter brings a few weeks of cold and storms."
)


def is_target(name, ids, pieces, i, j, reach, inside):
    both = inside[i] and inside[j]
    match name:
        case "previous":
            return both and j == i - 1
        case "next":
            return both and j == i + 1
        case "self":
            return both and j == i
        case "same":
            return both and j != i and ids[j] == ids[i]
        case "induction":
            return both and 0 < j < i and inside[j - 1] and ids[j - 1] == ids[i]
        case "long":
            return both and abs(i - j) > reach
        case "punctuation":
            return pieces[j] in {",", "."} and j != i
        case "first":
            return j == 0
        case "separator":
            return any(piece not in MARKS for piece in pieces[:j]) and pieces[j] in MARKS


def by_definition(name, read, layer, head, reach=8, marks=False, profile=None):
    """(value, uniform, matched) of one head on one text."""
    pieces, ids = read.tokens.text, read.tokens.ids.tolist()
    n = len(ids)
    mark = [piece in MARKS for piece in pieces]
    inside = [marks or not m for m in mark]
    weight = read.weights[layer, head].tolist()
    may = [[score != -math.inf for score in row] for row in read.scores[layer, head].tolist()]
    rows = [i for i in range(n) if inside[i]]
    if name == "sink":
        if not rows:
            return math.nan, math.nan, None
        even = [sum(may[i][j] / max(sum(may[i]), 1) for i in rows) / len(rows) for j in range(n)]
        return max(sum(weight[i][j] for i in rows) / len(rows) for j in range(n)), max(even), None
    if name == "entropy":
        rows = [i for i in rows if sum(may[i]) > 1]
        bits = [-sum(w * math.log(w) for w in weight[i] if w) / math.log(sum(may[i])) for i in rows]
        return statistics.fmean(bits) if bits else math.nan, 1.0 if bits else math.nan, None
    if profile is None:
        pairs = [(i, j) for i in rows for j in rows if may[i][j]]
        profile = {}
        for offset in {j - i for i, j in pairs}:
            there = [(i, j) for i, j in pairs if j - i == offset]
            others = [(i, j) for i, j in there if not is_target(name, ids, pieces, i, j, reach, inside)]
            profile[offset] = statistics.fmean(weight[i][j] for i, j in others or there)
    values, uniforms, matches = [], [], []
    for i in rows:
        keys = [j for j in range(n) if may[i][j]]
        targets = [j for j in keys if is_target(name, ids, pieces, i, j, reach, inside)]
        if not targets or len(targets) == len(keys):
            continue
        values.append(sum(weight[i][j] for j in targets))
        uniforms.append(len(targets) / len(keys))
        choice = [j for j in keys if inside[j]]
        total = sum(profile[j - i] for j in choice)
        mass = sum(weight[i][j] for j in choice)
        matches.append(sum(mass * profile[j - i] / total for j in targets if j in choice))
    if not values:
        return math.nan, math.nan, math.nan
    return tuple(statistics.fmean(column) for column in (values, uniforms, matches))


def check(read, reach=8, marks=False, profile=None):
    found = head_metrics(read, reach=reach, marks=marks, profile=profile)
    assert tuple(found) == METRICS
    layers, heads = read.weights.shape[:2]
    for name, metric in found.items():
        assert metric.value.shape == metric.uniform.shape == (1, layers, heads)
        assert (metric.matched is None) == (name not in {"same", "induction", "punctuation"})
        for layer in range(layers):
            for head in range(heads):
                mine = None
                if profile is not None:
                    mine = dict(zip(profile.offsets.tolist(), profile.weight[layer, head].tolist(), strict=True))
                value, uniform, matched = by_definition(name, read, layer, head, reach, marks, mine)
                message = f"{name} of {layer}.{head}"
                assert metric.value[0, layer, head].item() == pytest.approx(value, rel=1e-9, nan_ok=True), message
                assert metric.uniform[0, layer, head].item() == pytest.approx(uniform, rel=1e-9, nan_ok=True), message
                if metric.matched is not None:
                    there = metric.matched[0, layer, head].item()
                    assert there == pytest.approx(matched, rel=1e-9, nan_ok=True), message
    return found


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("words", [SENTENCE, SHORT, "[CLS] [SEP]", "[CLS] [SEP] one [SEP] two [SEP]", "x x x x y", "x"])
def test_every_metric_is_its_definition(words, marks):
    check(reading(words), reach=3, marks=marks)


@pytest.mark.parametrize("words", [SENTENCE, SHORT, "x y x y z x y", "x x x", "x"])
def test_under_a_causal_mask_too(words):
    n = len(words.split())
    found = check(reading(words, allowed=causal(n)), reach=2)
    assert found["next"].value.isnan().all(), "no row may look ahead, so none counts"


def test_under_masks_that_differ_between_heads():
    n = len(SENTENCE.split())
    allowed = torch.rand(2, 3, n, n, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed[0, 0, 4] = False
    check(reading(SENTENCE, allowed=allowed), reach=2)


def test_with_the_profile_of_other_texts():
    others = [reading("[CLS] q w e r t y u i o p a s d f [SEP]", seed=5), reading(SENTENCE, seed=6)]
    profile = offset_profile(others)
    found = check(reading(SENTENCE, seed=7), profile=profile)
    own = head_metrics(reading(SENTENCE, seed=7))
    assert not torch.allclose(found["same"].matched, own["same"].matched, rtol=1e-2)
    assert_close(found["same"].value, own["same"].value)


@pytest.mark.parametrize("causally", [False, True])
def test_a_trained_models_readings_too(model, causally):
    read = model.read("The dog saw the man, and the man saw the dog.", causal=causally)
    double = reading("x", scores=read.scores[:, :2].double(), weights=read.weights[:, :2].double())
    found = head_metrics(read)
    for name in METRICS:
        if name in {"same", "induction", "previous", "first", "separator", "sink", "entropy"}:
            table = object.__new__(type(double))
            for field in ("scores", "weights"):
                object.__setattr__(table, field, getattr(double, field))
            object.__setattr__(table, "tokens", read.tokens)
            for layer in (0, 3, 5):
                value, uniform, _ = by_definition(name, table, layer, 1)
                assert found[name].value[0, layer, 1].item() == pytest.approx(value, abs=1e-5, nan_ok=True)
                assert found[name].uniform[0, layer, 1].item() == pytest.approx(uniform, abs=1e-5, nan_ok=True)


def one_hot(words, target):
    """A reading with one head that gives all its attention to `target(i)`."""
    n = len(words.split())
    weights = torch.zeros(1, 1, n, n, dtype=torch.float64)
    for i in range(n):
        weights[0, 0, i, target(i)] = 1
    return reading(words, scores=torch.zeros(1, 1, n, n, dtype=torch.float64), weights=weights)


def test_perfect_heads_score_one():
    n = len(SENTENCE.split())
    same = {1: 4, 4: 8, 8: 1, 3: 10, 10: 3, 5: 9, 9: 5}
    for name, target in {
        "previous": lambda i: max(i - 1, 0), "next": lambda i: min(i + 1, n - 1), "self": lambda i: i,
        "first": lambda i: 0, "separator": lambda i: n - 1, "same": lambda i: same.get(i, 0),
    }.items():  # fmt: skip
        found = head_metrics(one_hot(SENTENCE, target))
        assert found[name].value.item() == 1, name
        assert found["entropy"].value.item() == 0
    assert head_metrics(one_hot(SENTENCE, lambda i: 0))["sink"].value.item() == 1
    # [SEP] is row 13, and 1/14 is what an even head gives it.
    assert head_metrics(one_hot(SENTENCE, lambda i: 0))["separator"].uniform.item() == pytest.approx(1 / 14)


def test_an_even_head_is_at_its_base_rate():
    n = len(SENTENCE.split())
    for allowed in (torch.ones(n, n, dtype=torch.bool), causal(n)):
        found = head_metrics(reading(SENTENCE, torch.zeros(1, 1, n, n, dtype=torch.float64), allowed=allowed))
        for name, metric in found.items():
            assert_close(metric.value, metric.uniform, equal_nan=True, msg=name)
            if metric.matched is not None and allowed.all():
                assert_close(metric.matched, metric.uniform, msg=name)


def test_a_head_that_looks_at_offsets_only_is_at_its_matched_base_rate():
    n = len(SENTENCE.split())
    place = torch.arange(n)
    bump = -1.0 * (place - place[:, None] + 3).abs().double()
    longer = "[CLS] " + " ".join(f"w{i}" for i in range(n)) + " [SEP]"
    m = n + 2
    wide = torch.arange(m)
    profile = offset_profile(reading(longer, (-1.0 * (wide - wide[:, None] + 3).abs().double())[None, None]))
    # The same word three places back, so that offset alone brings a head far above an even one.
    words = "[CLS] a b c a b c a b c a b c [SEP]"
    found = head_metrics(reading(words, bump[None, None]), ["same"], profile=profile)["same"]
    assert found.value.item() > 1.5 * found.uniform.item()
    assert found.matched.item() == pytest.approx(found.value.item(), rel=0.05)


def test_a_metric_over_texts_is_a_mean_with_its_standard_error():
    texts = [SENTENCE, SHORT, "[CLS] c d [SEP]", "[CLS] x x y [SEP]"]
    reads = [reading(words, seed=i) for i, words in enumerate(texts)]
    metric = head_metrics(iter(reads))["same"]
    assert metric.texts == tuple(read.tokens.source for read in reads)
    assert metric.value.shape == (4, 2, 3)
    assert repr(metric) == "Metric(same: 4 texts, 2 layers of 3 heads)"
    assert metric.value[2].isnan().all(), "no word occurs twice there"
    for layer in range(2):
        for head in range(3):
            values = [metric.value[t, layer, head].item() for t in (0, 1, 3)]
            assert metric.mean[layer, head].item() == pytest.approx(statistics.fmean(values))
            assert metric.error[layer, head].item() == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert_close(metric.base, metric.uniform[[0, 1, 3]].mean(0))
    assert_close(metric.matched_base, metric.matched[[0, 1, 3]].mean(0))
    assert head_metrics(reads)["previous"].matched_base is None
    assert head_metrics(reads[:1])["same"].error.isnan().all()


def test_the_top_heads_come_in_order_and_empty_ones_not_at_all():
    value = torch.tensor([[[0.1, 0.7], [math.nan, 0.3]]])
    metric = Metric("same", ("t",), value, value, None)
    assert metric.top(2) == [(0, 1), (1, 1)]
    assert metric.top(9) == [(0, 1), (1, 1), (0, 0)]


def test_what_was_chosen_is_confirmed_on_other_texts():
    chosen = Metric("same", ("a", "b"), torch.tensor([[[0.9, 0.2]], [[0.7, 0.1]]]), torch.full((2, 1, 2), 0.1), None)
    other = Metric(
        "same", ("c", "d"), torch.tensor([[[0.3, 0.8]], [[0.5, 0.6]]]), torch.full((2, 1, 2), 0.2),
        torch.full((2, 1, 2), 0.25),
    )  # fmt: skip
    best = confirm(chosen, other)
    assert [(found.layer, found.head) for found in best] == [(0, 0)]
    assert best[0].selected == pytest.approx(0.8)
    assert best[0].held_out == pytest.approx(0.4)
    assert best[0].error == pytest.approx(0.1)
    assert (best[0].uniform, best[0].matched) == (pytest.approx(0.2), pytest.approx(0.25))
    assert str(best[0]) == (
        "0.0 same 0.400 ± 0.100 on held-out texts (0.200 by chance, 0.250 by position; 0.800 where it was chosen)"
    )
    assert [found.head for found in confirm(chosen, other, 2)] == [0, 1]
    assert confirm(other, chosen)[0].matched is None


def test_a_text_of_the_choice_is_not_held_out():
    metric = head_metrics([reading(SENTENCE), reading(SHORT)])
    with pytest.raises(ValueError, match=r"not held out: 'a b a'"):
        confirm(metric["same"], head_metrics(reading(SHORT))["same"])
    with pytest.raises(ValueError, match=r"expected the metric 'same' of the same model, heads \(2, 3\), got 'self'"):
        confirm(metric["same"], head_metrics(reading("[CLS] u v u [SEP]"))["self"])
    with pytest.raises(ValueError, match=r"heads \(1, 3\)"):
        confirm(metric["same"], head_metrics(reading("[CLS] u v u [SEP]", layers=1))["same"])


def test_sinks_name_the_key_and_its_share():
    read = reading(SENTENCE, seed=3)
    position, share = sinks(read)
    received = read.weights[:, :, 1:-1].mean(2)
    assert torch.equal(position, received.argmax(-1))
    assert_close(share, received.amax(-1))
    everyone, _ = sinks(read, marks=True)
    assert torch.equal(everyone, read.weights.mean(2).argmax(-1))
    assert not torch.equal(everyone, position)
    with pytest.raises(ValueError, match=r"the text is empty"):
        sinks(reading("[CLS] [SEP]"))


def test_drawn_ids_differ_and_follow_their_generator():
    choices = torch.tensor([7, 7, 9, 11, 13])
    drawn = [draw_ids(choices, 4, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == [7, 9, 11, 13]
    with pytest.raises(ValueError, match=r"length=5: choices has 4 different ids"):
        draw_ids(choices, 5, generator=torch.Generator())


def test_an_induction_head_is_found_on_repeated_ids():
    text = tokens("a b c d e a b c d e")
    weights = torch.zeros(1, 1, 10, 10, dtype=torch.float64)
    for i in range(10):
        weights[0, 0, i, i - 4 if i >= 5 else 0] = 1
    base = one_hot("x", lambda i: 0)
    read = type(base)(
        text, base.hidden, base.inputs, base.queries, base.keys, base.values,
        torch.zeros(1, 1, 10, 10).masked_fill(~causal(10), -torch.inf), weights, base.mixed,
    )  # fmt: skip
    found = head_metrics(read, ["induction", "same"])
    assert found["induction"].value.item() == 1
    assert found["same"].value.item() == 0
    # Rows 5 … 9 count; one key of 6 … 10 is the target.
    assert found["induction"].uniform.item() == pytest.approx(sum(1 / m for m in range(6, 11)) / 5)


def test_a_byte_piece_with_a_blank_in_front_is_punctuation():
    text = tokens("a , b")
    read = reading("a , b")
    object.__setattr__(text, "text", ["Ġa", "Ġ,", "Ġb"])
    object.__setattr__(read, "tokens", text)
    assert head_metrics(read, ["punctuation"])["punctuation"].value.isfinite().all()


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"no metric is called 'prev'; the known ones are previous, next"):
        head_metrics(reading(SHORT), ["prev"])
    with pytest.raises(ValueError, match=r"expected at least one"):
        head_metrics([])
    with pytest.raises(TypeError, match=r"got a str"):
        head_metrics(["a text"])
    with pytest.raises(ValueError, match=r"readings of one model, got .*\[\(1, 3\), \(2, 3\)\]"):
        head_metrics([reading(SHORT), reading(SHORT, layers=1)])
    profile = offset_profile(reading(SHORT))
    with pytest.raises(ValueError, match=r"it has offsets -2 … 2, and not all that a text of 14 tokens needs"):
        head_metrics(reading(SENTENCE), profile=profile)


def test_known_heads_of_the_trained_model_are_found(model):
    texts = [
        "Because the server is overloaded, the system responds slowly, and finally the request times out.",
        "The man who saw the dog with the telescope saw the cat, and the cat saw the dog.",
    ]
    held_out = ["Alice was tired of sitting by her sister on the bank, and of having nothing to do on the bank."]
    chosen, other = (head_metrics(model.read(text) for text in part) for part in (texts, held_out))
    for name, place, least in [("previous", (0, 2), 0.95), ("next", (1, 8), 0.6)]:
        found = confirm(chosen[name], other[name])[0]
        assert (found.layer, found.head) == place
        assert found.held_out > least
        assert found.uniform < 0.06
    apart = head_metrics(model.read(held_out[0]), ["same"], profile=offset_profile(model.read(LONG)))["same"]
    for base in (other["same"].matched_base[2, 9], apart.matched_base[2, 9]):
        assert other["same"].mean[2, 9] > 4 * base
    position, _ = sinks(model.read(texts[0]))
    assert (position[1:5] == 0).float().mean() > 0.9


def test_induction_heads_of_the_language_model_are_confirmed_on_other_ids(smollm):
    def metric(seed):
        ids = draw_ids(torch.arange(1000, 40000), 30, generator=torch.Generator().manual_seed(seed))
        return head_metrics(smollm.read(smollm.from_ids([*ids, *ids])), ["induction", "previous"])

    chosen, other = metric(0), metric(1)
    best = confirm(chosen["induction"], other["induction"])[0]
    assert best.held_out > 0.6
    assert best.held_out > 20 * best.uniform
    assert best.layer > 10, "an earlier layer has to carry each token to the next place first"
    assert confirm(chosen["previous"], other["previous"])[0].held_out > 0.7
