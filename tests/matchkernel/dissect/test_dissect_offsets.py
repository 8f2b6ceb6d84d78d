"""Offset profiles against planted ones, and against least squares with every row's own constant written out."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from matchkernel.dissect import key_share, offset_profile
from tests.matchkernel.dissect.readings import causal, reading
from tests.matchkernel.oracle import draw

EIGHT = "[CLS] a b c d a b [SEP]"
FIVE = "[CLS] x y z [SEP]"


def counted(read, marks=False):
    """The pairs (i, j) that count, and the score of one head there."""
    inside = [marks or piece not in {"[CLS]", "[SEP]"} for piece in read.tokens.text]
    n = len(inside)
    may = read.scores[0, 0] != -torch.inf
    return [(i, j) for i in range(n) for j in range(n) if inside[i] and inside[j] and may[i, j]]


def least_squares(reads, layer, head, column, marks=False):
    """Fit s = a_i + g[column] with one column for each row of each text; (g, share explained, chance)."""
    names, rows, targets, texts = [], [], [], []
    for t, read in enumerate(reads):
        for i, j in counted(read, marks):
            rows.append((t, i))
            names.append(column(t, i, j))
            targets.append(read.scores[layer, head, i, j].item())
            texts.append(t)
    row_names, columns = sorted(set(rows)), sorted(set(names))
    A = np.zeros((len(rows), len(row_names)))
    G = np.zeros((len(rows), len(columns)))
    for pair, (row, name) in enumerate(zip(rows, names, strict=True)):
        A[pair, row_names.index(row)] = 1
        G[pair, columns.index(name)] = 1
    s = np.array(targets)

    def left(design):
        return ((s - design @ np.linalg.lstsq(design, s, rcond=None)[0]) ** 2).sum()

    both = np.hstack([A, G])
    g = np.linalg.lstsq(both, s, rcond=None)[0][len(row_names) :]
    counts = G.sum(0)
    fitted = np.linalg.matrix_rank(both) - len(row_names)
    return columns, g - (g * counts).sum() / counts.sum(), 1 - left(both) / left(A), fitted / (len(s) - len(row_names))


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "window"])
def test_the_fit_is_least_squares_over_all_texts(mask, marks):
    def allowed(n):
        place = torch.arange(n)
        return {None: None, "causal": causal(n), "window": (place - place[:, None]).abs() < 3}[mask]

    # The longer text in the middle, so that room has to be made on both sides.
    reads = [reading(words, seed=i, allowed=allowed(len(words.split()))) for i, words in enumerate([FIVE, EIGHT, FIVE])]
    profile = offset_profile(iter(reads), marks=marks)
    keys = key_share(iter(reads), marks=marks)
    for layer, head in [(0, 0), (1, 2)]:
        columns, g, explained, chance = least_squares(reads, layer, head, lambda t, i, j: j - i, marks)
        assert profile.offsets.tolist() == columns
        np.testing.assert_allclose(profile.score[layer, head], g, atol=1e-9)
        assert profile.explained[layer, head].item() == pytest.approx(explained)
        assert profile.chance == pytest.approx(chance)
        assert profile.adjusted[layer, head].item() == pytest.approx(1 - (1 - explained) / (1 - chance))
        _, _, explained, chance = least_squares(reads, layer, head, lambda t, i, j: (t, j), marks)
        assert keys.explained[layer, head].item() == pytest.approx(explained)
        assert keys.chance == pytest.approx(chance)
        assert keys.adjusted[layer, head].item() == pytest.approx(1 - (1 - explained) / (1 - chance))
        for at, offset in enumerate(columns):
            pairs = [(read, i, j) for read in reads for i, j in counted(read, marks) if j - i == offset]
            assert profile.count[at] == len(pairs)
            for table, name in (("scores", "mean_score"), ("weights", "weight")):
                mean = np.mean([getattr(read, table)[layer, head, i, j].item() for read, i, j in pairs])
                assert getattr(profile, name)[layer, head, at].item() == pytest.approx(mean)


@pytest.mark.parametrize("allowed", [None, causal(8)])
def test_a_planted_profile_is_found_whatever_the_rows_add(allowed):
    place = torch.arange(8)
    offset = place - place[:, None]
    g = draw(15, seed=1)
    scores = (g[offset + 7] + 10 * draw(8, 1, seed=2))[None, None]
    profile = offset_profile(reading(EIGHT, scores, allowed=allowed))
    known = profile.offsets + 7
    expected = g[known] - (g[known] * profile.count).sum() / profile.count.sum()
    assert_close(profile.score[0, 0], expected)
    assert_close(profile.explained, torch.ones(1, 1, dtype=torch.float64))
    assert not torch.allclose(profile.mean_score[0, 0], profile.score[0, 0], atol=0.5)
    assert profile.score[0, 0, profile.at(-2)] == profile.score[0, 0, (profile.offsets == -2)].item()


def test_a_planted_key_effect_is_the_keys_alone():
    scores = (draw(1, 8, seed=1) + 10 * draw(8, 1, seed=2))[None, None].expand(1, 1, 8, 8)
    read = reading(EIGHT, scores)
    assert_close(key_share(read).explained, torch.ones(1, 1, dtype=torch.float64))
    assert offset_profile(read).explained.item() < 0.9


def test_noise_is_explained_by_chance_only():
    n = 12
    words = " ".join(f"w{i}" for i in range(n))
    reads = [reading(words, layers=1, heads=500, seed=seed) for seed in range(2)]
    for found in (offset_profile(reads), key_share(reads)):
        standard_error = found.explained.std() / 500**0.5
        assert (found.explained.mean() - found.chance).abs() < 4 * standard_error
        assert found.adjusted.mean().abs() < 4 * standard_error / (1 - found.chance)
        assert found.chance > 0.05, "in short texts chance is not small"


def test_a_sink_in_front_does_not_reach_the_profile():
    read = reading(EIGHT, seed=3)
    louder = read.scores.clone()
    louder[..., 0] += 20
    loud = reading(EIGHT, louder)
    assert_close(offset_profile(loud).score, offset_profile(read).score)
    assert_close(offset_profile(loud).explained, offset_profile(read).explained)
    assert not torch.allclose(offset_profile(loud, marks=True).explained, offset_profile(read, marks=True).explained)


def test_constant_rows_have_nothing_to_explain():
    profile = offset_profile(reading(EIGHT, torch.zeros(1, 1, 8, 8, dtype=torch.float64)))
    assert profile.explained.isnan().all()
    assert_close(profile.weight, torch.full_like(profile.weight, 1 / 8))


def test_what_has_no_profile_is_refused():
    for measure in (offset_profile, key_share):
        with pytest.raises(ValueError, match=r"expected at least one"):
            measure([])
        with pytest.raises(ValueError, match=r"expected a row with at least two keys"):
            measure(reading("[CLS] a [SEP]"))
        allowed = torch.ones(1, 3, 8, 8, dtype=torch.bool)
        allowed[0, 1, 3, 4] = False
        with pytest.raises(ValueError, match=r"the mask differs between heads"):
            measure(reading(EIGHT, allowed=allowed))
        with pytest.raises(TypeError, match=r"got a str"):
            measure("text")
    with pytest.raises(ValueError, match=r"offset=6: no pair was counted there; the profile has -5 … 5"):
        offset_profile(reading(EIGHT)).at(6)


def test_the_previous_token_head_is_a_bump_at_minus_one(model):
    read = model.read(
        "Because the server is overloaded, the system responds slowly, and finally the request times out."
    )
    profile = offset_profile(read)
    assert profile.offsets[profile.score[0, 2].argmax()] == -1
    assert profile.explained[0, 2] > 0.8
    assert profile.weight[0, 2, profile.at(-1)] > 0.95
    assert profile.explained[0, 2] > profile.explained[2, 9] + 0.3
    assert repr(profile) == "OffsetProfile(offsets -18 … 18, 361 pairs, 6 layers of 12 heads)"
