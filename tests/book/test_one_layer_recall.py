"""The stored accuracies of chapter 15's one-layer recall: complete, near the reference, a sample made again."""

import copy
import json

import pytest
import torch

from experiments import one_layer_recall as recall


@pytest.fixture(scope="module")
def store():
    return json.loads(recall.STORE.read_text(encoding="utf-8"))


def test_every_kernel_and_width_was_run_with_every_seed(store):
    assert list(store["ours"]) == list(store["reference"]) == list(recall.REFERENCE)
    for runs in store["ours"].values():
        assert tuple(map(int, runs)) == recall.WIDTHS
        assert all(len(found) == recall.SEEDS and all(0 <= right <= 1 for right in found) for found in runs.values())


def test_the_accuracies_are_those_of_the_reference(store):
    for name, runs in store["ours"].items():
        for width, found in runs.items():
            assert abs(sum(found) / len(found) - store["reference"][name][width]) < 0.15, (name, width)


def test_a_sample_made_again_agrees(store):
    assert recall.disagreements(store) == []


def test_an_accuracy_that_was_changed_is_noticed(store):
    changed = copy.deepcopy(store)
    changed["ours"]["softmax"]["8"][0] -= 0.08
    (told,) = recall.disagreements(changed, sample=(("softmax", 8),))
    assert told == "softmax, width 8: the accuracy is 0.080 off the stored one"


@pytest.mark.parametrize("name", recall.REFERENCE)
def test_weights_from_one_table_are_those_of_each_text(name):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, recall.SYMBOLS, 8, generator=generator)
    shown, _ = recall.texts(3, generator)
    found = recall.weights(name, q, k, shown)
    for text, own in zip(shown, found, strict=True):
        scores = q[text] @ k[text].mT / 8**0.5
        distances = torch.cdist(q[text], k[text], compute_mode="donot_use_mm_for_euclid_dist").square()
        elu = [torch.nn.functional.elu(x[text]) + 1 for x in (q, k)]
        kappa = {
            "softmax": scores.exp(),
            "Gaussian": (-distances / (2 * 8**0.5)).exp(),
            "Taylor-2": 1 + scores + scores.square() / 2,
            "identity": scores,
            "elu+1": elu[0] @ elu[1].mT,
        }[name]
        expected = kappa if name == "identity" else kappa / kappa.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
