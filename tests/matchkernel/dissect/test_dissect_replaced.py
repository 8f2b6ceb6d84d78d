"""A head may be put in the place of another: it decides who attends to whom there, and nothing else changes."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk

TEXT = "Because the server is overloaded, the system responds slowly, and finally the request times out."


@pytest.fixture(scope="module")
def trained(model):
    return model.read(TEXT)


@pytest.fixture(scope="module")
def wide(model):
    """A head with 45 columns of its own, another scale and biases."""
    draw = torch.Generator().manual_seed(0)
    parts = {"W_Q": (384, 45), "W_K": (384, 45), "b_Q": (45,), "b_K": (45,)}
    drawn = {name: torch.randn(shape, generator=draw) / 20 for name, shape in parts.items()}
    return replace(model.head(5, 1), **drawn, scale=0.75)


def test_every_head_put_in_its_own_place_changes_nothing(model, trained):
    heads = {(head.layer, head.index): head for head in model.heads()}
    again = model.read(TEXT, heads=heads)
    assert_close(again.sentence, trained.sentence, rtol=0, atol=2e-6)
    assert_close(again.weights, trained.weights, rtol=0, atol=1e-5)
    assert_close(again.scores, trained.scores, rtol=0, atol=1e-4)
    assert_close(model.embed([TEXT], heads=heads)[0], trained.sentence, rtol=0, atol=2e-6)


def test_its_form_scores_and_the_models_values_answer(model, trained, wide):
    changed = model.read(TEXT, heads={(2, 9): wide})
    x = changed.inputs[2]
    expected = 0.75 * (x @ wide.W_Q + wide.b_Q) @ (x @ wide.W_K + wide.b_K).T
    assert_close(changed.scores[2, 9], expected, rtol=1e-4, atol=1e-4)
    assert_close(wide.scores(x), expected, rtol=1e-4, atol=1e-4)
    assert_close(changed.weights[2, 9], expected.softmax(-1), rtol=0, atol=1e-5)
    assert_close(changed.mixed[2, 9], expected.softmax(-1) @ trained.values[2, 9], rtol=0, atol=1e-5)
    assert_close(changed.values[2], trained.values[2], rtol=0, atol=0)
    others = [index for index in range(12) if index != 9]
    assert_close(changed.scores[2, others], trained.scores[2, others], rtol=0, atol=1e-5)
    assert_close(changed.hidden[:3], trained.hidden[:3], rtol=0, atol=0)
    assert not torch.allclose(changed.hidden[3], trained.hidden[3], atol=1e-2)
    assert_close(model.embed([TEXT, "short"], heads={(2, 9): wide})[0], changed.sentence, rtol=0, atol=2e-6)


def test_its_queries_and_keys_are_not_shown_as_the_models(model, trained, wide):
    changed = model.read(TEXT, heads={(2, 9): wide, (0, 0): wide})
    for kept, own in ((changed.queries, trained.queries), (changed.keys, trained.keys)):
        replaced = kept.isnan().all(-1).all(-1)
        assert replaced.nonzero().tolist() == [[0, 0], [2, 9]]
        assert kept.isnan().any(-1).any(-1).sum() == 2
        assert_close(kept[0, 1:], own[0, 1:], rtol=0, atol=0)
    assert not changed.values.isnan().any()


def test_heads_of_several_widths_and_scales_stand_in_one_layer(model, trained, wide):
    narrow = replace(wide, W_Q=wide.W_Q[:, :3], W_K=wide.W_K[:, :3], b_Q=wide.b_Q[:3], b_K=wide.b_K[:3])
    loud = replace(wide, scale=3.0)
    stranger = model.head(5, 5)
    heads = {(4, 11): narrow, (4, 0): wide, (4, 5): loud, (4, 6): wide, (4, 2): stranger}
    changed = model.read(TEXT, heads=heads)
    x = changed.inputs[4]
    for (_, index), head in heads.items():
        assert_close(changed.scores[4, index], head.scores(x), rtol=1e-4, atol=1e-4)
    assert_close(changed.scores[4, 5], 4 * changed.scores[4, 0], rtol=1e-4, atol=1e-4)
    others = [index for index in range(12) if (4, index) not in heads]
    assert_close(changed.scores[4, others], trained.scores[4, others], rtol=0, atol=1e-5)
    assert_close(model.embed([TEXT], heads=heads)[0], changed.sentence, rtol=0, atol=2e-6)


def test_masks_and_normalisers_hold_for_it(model, wide):
    n = len(model.tokenize(TEXT))
    mask = torch.ones(12, n, n, dtype=torch.bool)
    mask[9, :, 3] = False
    changed = model.read(TEXT, normalizer={(2, 9): mk.Softmax(temperature=2.0)}, heads={(2, 9): wide}, mask=mask)
    scores = changed.scores[2, 9]
    assert (scores[:, 3] == -math.inf).all()
    assert torch.isfinite(scores[:, 4:]).all()
    assert_close(changed.weights[2, 9], (scores / 2).softmax(-1), rtol=0, atol=1e-5)
    causal = model.read(TEXT, heads={(2, 9): wide}, causal=True)
    assert ((causal.weights[2, 9] > 0) == torch.ones(n, n, dtype=torch.bool).tril()).all()


@pytest.mark.parametrize("kernel", [mk.Dot(), {2: mk.Dot()}, {(2, 9): mk.Dot()}], ids=["all", "layer", "head"])
def test_a_kernel_and_a_head_in_one_place_are_refused(model, wide, kernel):
    for run in (model.read, lambda text, *given, **more: model.embed([text], *given, **more)):
        with pytest.raises(ValueError, match=r"heads\[\(2, 9\)\]: a kernel is given for the same head"):
            run(TEXT, kernel, heads={(2, 9): wide})


def test_kernels_of_other_heads_stand_beside_it(model, trained, wide):
    changed = model.read(TEXT, {(2, 3): mk.Dot()}, heads={(2, 9): wide})
    assert_close(changed.scores[2, 3], math.sqrt(32) * trained.scores[2, 3], rtol=1e-4, atol=1e-4)
    assert_close(changed.scores[2, 9], wide.scores(changed.inputs[2]), rtol=1e-4, atol=1e-4)


def test_a_hook_may_change_its_values_but_not_what_no_longer_scores(model, trained, wide):
    silent = model.read(TEXT, heads={(2, 9): wide}, intervene=lambda layer, q, k, v: (q, k, 0 * v))
    assert_close(silent.mixed[2, 9], torch.zeros_like(silent.mixed[2, 9]))

    def in_place(layer, q, k, v):
        return q.zero_(), k, v

    for hook in (lambda layer, q, k, v: (2 * q, k, v), lambda layer, q, k, v: (q, k + 1, v), in_place):
        with pytest.raises(ValueError, match=r"intervene changed q or k of head \(2, 9\), which heads replaces"):
            model.embed([TEXT], heads={(2, 9): wide}, intervene=hook)

    def of_another(layer, q, k, v):
        return torch.cat([2 * q[:9], q[9:]]), k, v

    changed = model.read(TEXT, heads={(0, 9): wide}, intervene=of_another)
    assert_close(changed.scores[0, :9], 2 * trained.scores[0, :9], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [(6, 0), (0, 12), (-1, 0), 3, "2.9", (1, 2, 3)])
def test_a_place_outside_the_model_is_refused(model, wide, place):
    with pytest.raises(ValueError, match=r"heads has the key .*layer 0…5 and head 0…11"):
        model.read(TEXT, heads={place: wide})


def test_what_is_put_there_must_be_a_head_of_this_model(model, wide):
    with pytest.raises(TypeError, match=r"heads\[\(2, 9\)\]: expected a Head, got Dot"):
        model.read(TEXT, heads={(2, 9): mk.Dot()})
    for wrong in (
        replace(wide, W_K=wide.W_K[:, :9]),
        replace(wide, b_Q=wide.b_Q[:9]),
        replace(wide, W_Q=wide.W_Q[:9], W_K=wide.W_K[:9]),
    ):
        with pytest.raises(ValueError, match=r"W_Q, W_K, b_Q, b_K have shapes .*; expected \(384, r\) twice"):
            model.embed([TEXT], heads={(2, 9): wrong})


def test_gradients_reach_its_weights_when_asked_for(model, trained, wide):
    W_Q = torch.nn.Parameter(wide.W_Q.clone())
    heads = {(2, 9): replace(wide, W_Q=W_Q)}
    assert not model.embed([TEXT], heads=heads).requires_grad
    (model.embed([TEXT], heads=heads, differentiable=True)[0] @ trained.sentence).backward()
    assert (W_Q.grad != 0).any()


def test_its_repr_says_its_width(wide):
    assert repr(wide) == "Head(layer=5, index=1, d_model=384, d_head=32, width=45)"


def test_a_rotated_head_turns_each_chunk_and_leaves_its_bias_columns(smollm):
    text = "The cat sat on the mat because the dog"
    own = smollm.head(7, 4)
    one = torch.ones(576, 1)
    # Two halves of the head's own form and a column that meets at no position: the score and a constant.
    doubled = replace(
        own,
        W_Q=torch.cat([own.W_Q, own.W_Q, 0 * one], 1), W_K=torch.cat([own.W_K / 4, own.W_K * 3 / 4, 0 * one], 1),
        b_Q=torch.cat([own.b_Q, own.b_Q, torch.tensor([2.0])]), b_K=torch.cat([own.b_K, own.b_K, torch.tensor([8.0])]),
    )  # fmt: skip
    trained, changed = smollm.read(text), smollm.read(text, heads={(7, 4): doubled})
    earlier = torch.ones(2 * (len(trained.tokens),), dtype=torch.bool).tril()
    assert_close(changed.scores[7, 4][earlier], trained.scores[7, 4][earlier] + 16 / 8, rtol=1e-4, atol=1e-3)
    assert_close(changed.losses, trained.losses, rtol=0, atol=1e-3)
    still = smollm.read(text, heads={(7, 4): replace(own, rotation=None)})
    x = still.inputs[7]
    assert_close(still.scores[7, 4][earlier], ((x @ own.W_Q) @ (x @ own.W_K).T / 8)[earlier], rtol=1e-4, atol=1e-3)
    places = torch.arange(len(trained.tokens)) * 3
    spread = smollm.read(text, heads={(7, 4): doubled}, position=places)
    expected = doubled.scores(spread.inputs[7], query_position=places, key_position=places)
    assert_close(spread.scores[7, 4][earlier], expected[earlier], rtol=1e-4, atol=1e-3)


def test_a_replaced_head_runs_under_autocast(model, trained, wide):
    heads = {(2, 9): wide, (3, 1): model.head(3, 1)}
    expected = model.embed([TEXT], heads=heads)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.embed([TEXT], heads=heads)
        read = model.read(TEXT, heads=heads)
    assert_close(found.float(), expected, rtol=0, atol=0.02)
    assert_close(read.sentence.float(), expected[0], rtol=0, atol=0.02)
