"""A head with another form in it scores as the formula says, biases and rotation included; hooks, masks and shifts."""

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.dissect import (
    Head,
    ablate,
    ablate_to_mean,
    antisymmetric_part,
    compose,
    embedding_shift,
    forbid,
    loss_shift,
    mean_mixed,
    only_key_term,
    random_like,
    silence,
    silence_to_mean,
    spearman,
    symmetric_part,
    transposed,
    truncated,
    window_with_first,
    without_key_term,
)
from tests.matchkernel.dissect.tiny import make_decoder

TEXTS = [
    "Because the server is overloaded, the system responds slowly, and finally the request times out.",
    "The server is overloaded.",
    "Sparrows sing in the old garden behind the mill.",
    "The machine has too many requests to handle.",
    "Someone plays an instrument.",
]


def make_head(*, biases=True, rotation=None, width=6, d_model=11, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Head(
        2, 3,
        W_Q=draw(d_model, width), W_K=draw(d_model, width), W_V=draw(d_model, 6), W_O=draw(6, d_model),
        b_Q=draw(width) * biases, b_K=draw(width) * biases, b_V=draw(6), scale=0.37, rotation=rotation,
    )  # fmt: skip


@pytest.fixture(scope="module")
def x():
    return torch.randn(7, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(head, x, form):
    """scale · (x M' x'ᵀ + x W_Q b_K + b_Q W_K x' + b_Q·b_K), M' made whole from M, entry by entry."""
    M = form(torch.einsum("ar,br->ab", head.W_Q, head.W_K))
    table = torch.einsum("ia,ab,jb->ij", x, M, x)
    table = table + torch.einsum("ia,ar,r->i", x, head.W_Q, head.b_K)[:, None]
    table = table + torch.einsum("r,ar,ja->j", head.b_Q, head.W_K, x)[None, :]
    return head.scale * (table + float(head.b_Q @ head.b_K))


def best_of_rank(rank):
    def form(M):
        U, S, Vh = torch.linalg.svd(M)
        S[rank:] = 0
        return U @ S.diag() @ Vh

    return form


CHANGES = {
    "symmetric": (symmetric_part, lambda M: (M + M.T) / 2),
    "antisymmetric": (antisymmetric_part, lambda M: (M - M.T) / 2),
    "transposed": (transposed, lambda M: M.T),
    "rank 0": (lambda head: truncated(head, 0), best_of_rank(0)),
    "rank 1": (lambda head: truncated(head, 1), best_of_rank(1)),
    "rank 4": (lambda head: truncated(head, 4), best_of_rank(4)),
    "rank 6": (lambda head: truncated(head, 6), lambda M: M),
}


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_only_the_content_term_changes(x, name, biases):
    change, form = CHANGES[name]
    head = make_head(biases=biases)
    changed = change(head)
    assert_close(changed.scores(x), by_hand(head, x, form), rtol=0, atol=1e-11)
    assert_close(changed.M, form(head.M), rtol=0, atol=1e-11)
    assert changed.scale == head.scale and (changed.layer, changed.index) == (2, 3)
    assert changed.W_V is head.W_V and changed.W_O is head.W_O
    before, after = head.terms(x), changed.terms(x)
    for term in ("query", "key", "constant"):
        assert_close(getattr(after, term), getattr(before, term), rtol=0, atol=1e-12)


def test_surgery_can_be_done_twice(x):
    head = make_head()
    assert_close(transposed(transposed(head)).scores(x), head.scores(x), rtol=0, atol=1e-11)
    twice = truncated(symmetric_part(head), 2)
    assert_close(twice.M, best_of_rank(2)((head.M + head.M.T) / 2), rtol=0, atol=1e-11)
    assert_close(twice.terms(x).key, head.terms(x).key, rtol=0, atol=1e-12)
    nothing = antisymmetric_part(symmetric_part(head)).terms(x).content
    assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=1e-11)


@pytest.mark.parametrize("rank", [-1, 7])
def test_a_rank_that_the_head_does_not_have_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank is {rank}; .* expected 0…6"):
        truncated(make_head(), rank)


def turned_scores(head, x, M_at):
    """Content scores of a rotary head, pair by pair, with the rotation written out as a matrix: x_i M(j − i) x_jᵀ."""
    n, d, base = len(x), head.rotation.dim, head.rotation.base
    table = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            R = torch.zeros(d, d, dtype=torch.float64)
            for pair in range(d // 2):
                a, b = (2 * pair, 2 * pair + 1) if head.rotation.interleaved else (pair, pair + d // 2)
                angle = (j - i) * base ** (-2 * pair / d)
                R[a, a] = R[b, b] = math.cos(angle)
                R[a, b], R[b, a] = -math.sin(angle), math.sin(angle)
            table[i, j] = x[i] @ M_at(R) @ x[j]
    return table


@pytest.mark.parametrize("interleaved", [True, False])
def test_under_a_rotation_the_table_itself_is_transposed(x, interleaved):
    head = make_head(biases=False, rotation=mk.Rotary(6, base=50.0, interleaved=interleaved))
    content = head.scale * turned_scores(head, x, lambda R: head.W_Q @ R @ head.W_K.T)
    assert_close(head.scores(x), content, rtol=0, atol=1e-11)
    assert not torch.allclose(content, content.T, atol=1.0)
    assert_close(transposed(head).scores(x), content.T, rtol=0, atol=1e-11)
    assert_close(symmetric_part(head).scores(x), (content + content.T) / 2, rtol=0, atol=1e-11)
    assert_close(antisymmetric_part(head).scores(x), (content - content.T) / 2, rtol=0, atol=1e-11)


def test_under_a_rotation_biases_keep_their_terms(x):
    head = make_head(rotation=mk.Rotary(6, base=50.0))
    content = head.scores(x, biases=False)
    rest = head.scores(x) - content
    assert rest.std() > 0.1
    assert_close(transposed(head).scores(x), content.T + rest, rtol=0, atol=1e-11)
    assert_close(symmetric_part(head).scores(x), (content + content.T) / 2 + rest, rtol=0, atol=1e-11)


def test_a_rotary_head_has_no_one_form_to_truncate():
    with pytest.raises(ValueError, match=r"head \(2, 3\) rotates .* a bilinear form for each offset"):
        truncated(make_head(rotation=mk.Rotary(6)), 2)
    unfit = make_head(rotation=mk.Rotary(4))
    with pytest.raises(ValueError, match=r"has 6 columns; its rotation turns chunks of 4"):
        symmetric_part(unfit)


def test_the_random_head_has_the_norm_of_the_form_and_the_terms_of_the_biases(x):
    head = make_head()
    drawn = random_like(head, torch.Generator().manual_seed(5))
    assert_close(drawn.M.norm(), head.M.norm(), rtol=1e-12, atol=0)
    assert_close(drawn.terms(x).key, head.terms(x).key, rtol=0, atol=1e-12)
    assert_close(drawn.terms(x).query, head.terms(x).query, rtol=0, atol=1e-12)
    assert float((drawn.M * head.M).sum() / head.M.norm() ** 2) < 0.5
    assert_close(random_like(head, torch.Generator().manual_seed(5)).M, drawn.M, rtol=0, atol=0)
    assert not torch.allclose(random_like(head, torch.Generator().manual_seed(6)).M, drawn.M)


def test_the_key_term_alone_and_without_it(x):
    head = make_head()
    terms = head.terms(x)
    assert_close(without_key_term(head).scores(x), terms.content + terms.query, rtol=0, atol=1e-11)
    assert_close(only_key_term(head).scores(x), (terms.key + terms.constant).expand(7, 7), rtol=0, atol=1e-11)


# ---- in the model -------------------------------------------------------------------------------------------------


def test_a_changed_head_stands_in_the_model(model):
    head = model.head(3, 1)
    before, after = model.read(TEXTS[0]), model.read(TEXTS[0], heads={(3, 1): symmetric_part(head)})
    M = (head.M + head.M.T).double() / 2
    terms = head.terms(before.inputs[3])
    expected = before.inputs[3].double() @ M @ before.inputs[3].double().T / math.sqrt(32) + terms.query + terms.key
    assert_close(after.scores[3, 1].double(), expected + float(terms.constant), rtol=0, atol=1e-4)
    assert_close(after.scores[3, 0], before.scores[3, 0], rtol=0, atol=1e-5)
    assert_close(after.values[3], before.values[3], rtol=0, atol=1e-5)


def test_the_full_rank_changes_nothing_and_the_transpose_breaks_the_model(model):
    every = list(model.heads())

    def shift(change):
        return embedding_shift(model, TEXTS, heads={(head.layer, head.index): change(head) for head in every})

    assert shift(lambda head: truncated(head, 32)).mean > 1 - 1e-5
    assert shift(lambda head: truncated(head, 24)).mean > 0.9
    assert shift(transposed).mean < 0.7
    ranks = [shift(lambda head, r=r: truncated(head, r)).mean for r in (2, 8, 24)]
    assert ranks == sorted(ranks)


def test_silence_leaves_the_weights_of_its_layer_and_takes_the_value(model):
    before = model.read(TEXTS[0])
    after = model.read(TEXTS[0], intervene=silence(0, -1))
    assert_close(after.weights[0], before.weights[0], rtol=0, atol=0)
    for layer in range(6):
        assert after.values[layer, :, [0, -1]].abs().max() == 0
        assert after.values[layer, :, 1:-1].abs().amax(-1).min() > 0
    once = model.read(TEXTS[0], intervene=silence(2, places={4, (5, 3)}))
    assert_close(once.values[:4], before.values[:4], rtol=0, atol=0)
    assert once.values[4, :, 2].abs().max() == 0 == once.values[5, 3, 2].abs().max()
    assert once.values[5, [0, 1, 2, 4, 11], 2].abs().amax(-1).min() > 0


def test_silence_to_mean_puts_the_mean_of_the_values(model):
    before = model.read(TEXTS[0])
    after = model.read(TEXTS[0], intervene=silence_to_mean(3))
    mean = before.values[0].double().mean(1)
    assert_close(after.values[0, :, 3].double(), mean, rtol=0, atol=1e-6)
    assert_close(after.values[0, :, 4:], before.values[0, :, 4:], rtol=0, atol=0)


@pytest.mark.parametrize("position", [5, -6])
def test_a_position_that_the_text_does_not_have_is_refused(model, position):
    for change in (
        {"intervene": silence(position)},
        {"intervene": silence_to_mean(position)},
        {"mask": forbid(position)},
    ):
        with pytest.raises(IndexError, match=rf"no position {position} in a text of 5 tokens"):
            model.read(model.tokenize("one two three"), **change)


def test_ablated_heads_hand_on_nothing_or_their_mean(model):
    before = model.read(TEXTS[0])
    after = model.read(TEXTS[0], intervene=ablate({2, (4, 7)}))
    assert after.mixed[2].abs().max() == 0 == after.mixed[4, 7].abs().max()
    assert after.mixed[4, [0, 6, 8, 11]].abs().amax((-1, -2)).min() > 0
    assert_close(after.mixed[:2], before.mixed[:2], rtol=0, atol=0)

    means = mean_mixed(model, TEXTS[1:])
    assert means.shape == (6, 12, 32)
    readings = [model.read(text) for text in TEXTS[1:]]
    assert_close(means[4, 7], torch.cat([r.mixed[4, 7] for r in readings]).mean(0), rtol=0, atol=1e-6)
    after = model.read(TEXTS[0], intervene=ablate_to_mean({(4, 7)}, means))
    assert_close(after.mixed[4, 7], means[4, 7].expand(len(before.tokens), -1), rtol=0, atol=1e-6)
    assert_close(after.mixed[4, 6], before.mixed[4, 6], rtol=0, atol=0)
    with pytest.raises(IndexError, match=r"no head \(4, 12\): layer 4 has heads 0…11"):
        model.read(TEXTS[0], intervene=ablate({(4, 12)}))
    with pytest.raises(ValueError, match="texts is empty"):
        mean_mixed(model, [])


def test_hooks_run_in_the_order_given():
    seen = []

    def hook(name):
        def run(layer, q, k, v):
            seen.append((name, layer))
            return q + 1, 2 * k, v

        return run

    one = torch.ones(1, 1, 1)
    q, k, v = compose(hook("a"), hook("b"))(3, one, one, one)
    assert seen == [("a", 3), ("b", 3)]
    assert (float(q), float(k), float(v)) == (3.0, 4.0, 1.0)
    assert compose()(0, one, one, one) == (one, one, one)


def test_a_forbidden_key_gets_no_weight_and_the_others_share_it(model):
    tokens = model.tokenize(TEXTS[0])
    before = model.read(tokens)
    for keys in (0, [0], lambda tokens: tokens.find("[CLS]")):
        after = model.read(tokens, mask=forbid(keys))
        assert after.weights[..., 0].max() == 0
        rest = before.weights[0, :, :, 1:]
        assert_close(after.weights[0, :, :, 1:], rest / rest.sum(-1, keepdim=True), rtol=0, atol=1e-5)
    both = model.read(tokens, mask=forbid([0, -1]))
    assert both.weights[..., [0, -1]].max() == 0 and both.weights[..., 1:-1].min() > 0
    causal = model.read(tokens, mask=forbid(0), causal=True)
    assert causal.weights[:, :, 0].abs().max() == 0 == causal.mixed[:, :, 0].abs().max()


def test_the_window_keeps_the_first_tokens(model):
    tokens = model.tokenize(TEXTS[0])
    mask = window_with_first(3, first=2)(tokens)
    n = len(tokens)
    assert mask.tolist() == [[abs(i - j) < 3 or j < 2 for j in range(n)] for i in range(n)]
    weights = model.read(tokens, mask=window_with_first(3, first=2), causal=True).weights
    assert (weights[0, 0] > 0).sum(-1).tolist() == [min(i + 1, 5) for i in range(n)]
    plain = model.read(tokens, window=3, causal=True).weights
    assert_close(model.read(tokens, mask=window_with_first(3, first=0), causal=True).weights, plain, rtol=0, atol=1e-6)
    for bad in ((-1, 1), (1, -1), (0, 0)):
        with pytest.raises(ValueError, match="expected both at least 0"):
            window_with_first(*bad)


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


WORDS = ["overthelazydog", "thequickbrownfox", "jumps", "jumpsagain", "ab"]


def test_a_changed_head_of_a_decoder_meets_turned_and_shares_nothing(decoder):
    head = decoder.head(1, 2)
    before, after = decoder.read(WORDS[0]), decoder.read(WORDS[0], heads={(1, 2): transposed(head)})
    full = head.scores(before.inputs[1]).T
    seen = torch.ones_like(full, dtype=torch.bool).tril()
    assert_close(after.scores[1, 2][seen], full[seen], rtol=0, atol=1e-12)
    assert_close(after.scores[1, [0, 1, 3]][:, seen], before.scores[1, [0, 1, 3]][:, seen], rtol=0, atol=1e-12)
    assert not torch.allclose(after.scores[1, 2][seen], before.scores[1, 2][seen], atol=0.1)
    half = decoder.read(WORDS[0], heads={(1, 2): symmetric_part(head)})
    assert_close(half.scores[1, 2][seen], ((full + full.T) / 2)[seen], rtol=0, atol=1e-12)


def test_an_ablated_head_of_a_decoder_is_one_of_those_that_ask(decoder):
    after = decoder.read(WORDS[0], intervene=ablate({(0, 1)}))
    assert after.mixed[0, 1].abs().max() == 0
    assert after.mixed[0, [0, 2, 3]].abs().amax((-1, -2)).min() > 0


def test_forbidding_the_first_token_leaves_it_alone_with_nothing(decoder):
    after = decoder.read(WORDS[0], mask=forbid(0))
    assert after.mixed[:, :, 0].abs().max() == 0
    assert after.weights[:, :, 1, 1].min() == 1
    mask = torch.ones(14, 14, dtype=torch.bool)
    mask[1:, 0] = False  # the same, but the first token may look at itself
    kept = decoder.read(WORDS[0], mask=mask)
    assert_close(after.losses[1:], kept.losses[1:], rtol=0, atol=1e-12)
    assert abs(after.losses[0] - kept.losses[0]) > 1e-3


# ---- measures -----------------------------------------------------------------------------------------------------


def test_spearman_equals_scipy_ties_included():
    g = torch.Generator().manual_seed(0)
    for n, values in ((3, 9), (40, 5), (40, 1000), (200, 3)):
        a, b = (torch.randint(values, (n,), generator=g).double() for _ in range(2))
        b = a + b
        assert_close(spearman(a, b), float(spearmanr(a.numpy(), b.numpy()).statistic), rtol=0, atol=1e-12)
    a = torch.tensor([1.0, 2.0, 2.0, 3.0])
    assert_close(spearman(a, a.exp()), 1.0, rtol=0, atol=1e-12)
    assert_close(spearman(a, -a), -1.0, rtol=0, atol=1e-12)
    assert all(math.isnan(spearman(x, a[: len(x)])) for x in (torch.ones(4), a[:1], a[:0]))
    unknown = a.clone().index_fill(0, torch.tensor(1), math.nan)
    assert math.isnan(spearman(unknown, a)) and math.isnan(spearman(a, unknown))
    with pytest.raises(ValueError, match="expected two lists of one length"):
        spearman(a, a[:3])


def test_embedding_shift_is_zero_without_a_change_and_counts_each_pair_once(model):
    shift = embedding_shift(model, TEXTS)
    assert_close(shift.cosines, torch.ones(5), rtol=0, atol=1e-6)
    assert shift.rank_correlation == pytest.approx(1.0, abs=1e-12)

    change = {"kernel": 0.0 * mk.ScaledDot()}
    before, after = model.embed(TEXTS), model.embed(TEXTS, **change)
    shift = embedding_shift(model, TEXTS, **change)
    cosines = torch.stack([torch.cosine_similarity(a, b, dim=0) for a, b in zip(before, after, strict=True)])
    assert_close(shift.cosines, cosines, rtol=0, atol=1e-6)
    assert shift.mean == pytest.approx(float(cosines.mean()), abs=1e-6)
    pairs = [(i, j) for i in range(5) for j in range(i)]
    ranks = [[float(e[i] @ e[j]) for i, j in pairs] for e in (before, after)]
    assert shift.rank_correlation == pytest.approx(float(spearmanr(*ranks).statistic), abs=1e-9)
    again = embedding_shift(model, TEXTS, before=before, **change)
    assert_close(again.cosines, shift.cosines, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"before has shape \(4, 384\)"):
        embedding_shift(model, TEXTS, before=before[:4])
    with pytest.raises(ValueError, match="texts is empty"):
        embedding_shift(model, [])
    assert math.isnan(embedding_shift(model, TEXTS[:2]).rank_correlation)


def test_loss_shift_counts_tokens_and_takes_texts_as_the_sample(decoder):
    change = {"kernel": 0.0 * mk.ScaledDot()}
    shift = loss_shift(decoder, WORDS, **change)
    before = [decoder.read(text).losses for text in WORDS]
    after = [decoder.read(text, **change).losses for text in WORDS]
    assert shift.before == pytest.approx(float(torch.cat(before).mean()), abs=1e-12)
    assert shift.after == pytest.approx(float(torch.cat(after).mean()), abs=1e-12)
    assert shift.before == pytest.approx(decoder.loss(WORDS), abs=1e-12)
    difference = [b - a for a, b in zip(before, after, strict=True)]
    assert_close(shift.per_text, torch.stack([d.mean() for d in difference]), rtol=0, atol=1e-12)

    # A ratio of two sums over texts: what a small step of each text's weight does to it, squared and added up.
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    sums, lengths = torch.stack([d.sum() for d in difference]), torch.tensor([len(d) for d in difference])
    (influence,) = torch.autograd.grad((weight * sums).sum() / (weight * lengths).sum(), weight)
    assert shift.standard_error == pytest.approx(float((influence.square().sum() * 5 / 4).sqrt()), abs=1e-12)

    again = loss_shift(decoder, WORDS, before=decoder.losses(WORDS), **change)
    assert again.before == shift.before and again.standard_error == shift.standard_error
    none = loss_shift(decoder, WORDS)
    assert none.before == none.after and none.standard_error == 0.0 == none.per_text.abs().max()


def test_the_standard_error_of_equal_texts_is_the_usual_one(decoder):
    texts = ["jumps", "foxes", "zebra", "quick"]
    shift = loss_shift(decoder, texts, window=2)
    assert shift.standard_error == pytest.approx(float(shift.per_text.std() / 2), abs=1e-12)
    assert shift.after - shift.before == pytest.approx(float(shift.per_text.mean()), abs=1e-12)
    assert math.isnan(loss_shift(decoder, texts[:1], window=2).standard_error)


def test_losses_that_cannot_be_compared_are_refused(decoder):
    with pytest.raises(ValueError, match="texts is empty"):
        loss_shift(decoder, [])
    with pytest.raises(ValueError, match="one token only"):
        loss_shift(decoder, ["ab", "a"])
    with pytest.raises(ValueError, match=r"before has \[1\] losses; the texts have \[4\]"):
        loss_shift(decoder, ["jumps"], before=decoder.losses(["ab"]))


@pytest.mark.parametrize("places", [(0, 2), "0.2", 3])
def test_places_that_could_be_taken_for_others_are_refused(places):
    with pytest.raises(TypeError, match="expected a set or list of layers and"):
        ablate(places)


@pytest.mark.parametrize("place", [(-1, 2), -1, (0, -2), "0.2", (0, 1, 2), 0.5])
def test_what_is_no_place_is_named(place):
    with pytest.raises(ValueError, match="expected a layer or a"):
        silence(0, places=[place])


@pytest.mark.parametrize("places", [{6}, {(9, 2)}, {0, (6, 0)}])
def test_a_layer_that_the_model_has_not_is_refused_before_it_runs(model, places):
    for hook in (ablate(places), compose(silence(0), ablate(places))):
        with pytest.raises(IndexError, match=r"there is no layer [69]; layers are 0…5"):
            model.read(TEXTS[0], intervene=hook)


def test_shifts_say_which_model_they_need(model, decoder):
    with pytest.raises(TypeError, match="Encoder predicts no next token"):
        loss_shift(model, TEXTS)
    with pytest.raises(TypeError, match="Decoder has no sentence vectors"):
        embedding_shift(decoder, WORDS)
