"""The stored tables of chapter 23: every public method has a row, and a sample of rows comes out again."""

import copy
import json

import pytest
import torch

import matchkernel as mk
from experiments import methods

STORE = json.loads(methods.STORE.read_text(encoding="utf-8"))
SAMPLE = ("window and sinks", "top k", "elu + 1, decay")


def public(is_one):
    return {name for name in mk.__all__ if isinstance(getattr(mk, name), type) and is_one(getattr(mk, name))}


def parts(kernel):
    """The classes of a kernel and of what it is put together from."""
    return {type(module).__name__ for module in kernel.modules()}


def test_every_public_engine_has_a_row():
    made = {type(method.make(64)).__name__ for method in methods.ENGINES.values()}
    # Every map of features goes through the linear engine.
    assert public(lambda cls: all(hasattr(cls, part) for part in ("refuse", "declines", "run", "cost"))) <= made | {
        "Linear"
    }
    assert {"reference", "fused"} <= set(methods.ENGINES)


def test_every_public_feature_kernel_has_a_row():
    made = {type(method.make(64)).__name__ for method in methods.FEATURES.values()}
    assert public(lambda cls: issubclass(cls, mk.FeatureKernel) and cls is not mk.FeatureKernel) <= made


def test_every_public_update_has_a_row():
    keys = torch.ones(8, methods.WIDTH)
    made = {type(method.make(keys)).__name__ for method in methods.UPDATES.values()}
    assert public(lambda cls: issubclass(cls, mk.updates.StateUpdate)) <= made


def test_every_other_public_kernel_has_a_row():
    bases = {mk.MatchKernel, mk.DotKernel, mk.ProductKernel}
    made = {name for make in methods.KERNELS.values() for name in parts(make())}
    assert public(lambda cls: issubclass(cls, mk.MatchKernel) and not issubclass(cls, mk.FeatureKernel)) <= made | {
        base.__name__ for base in bases
    }


def test_the_store_has_the_rows_that_are_defined():
    assert list(STORE["methods"]) == list(methods.METHODS)
    assert list(STORE["kernels"]) == list(methods.KERNELS)


def test_a_distance_is_that_of_each_head_over_its_second_half():
    q, k, v = methods.random()
    window, half = methods.METHODS["window"], methods.TOKENS // 2
    found = methods.distances(window, (q, k, v), causal=True)
    by_hand = mk.attend(q[-1:, half:], k[-1:], v[-1:], causal=True, window=methods.SEEN)
    full = mk.attend(q[-1:, half:], k[-1:], v[-1:], causal=True)
    assert len(found) == methods.HEADS and found[-1].item() == pytest.approx(methods.apart(by_hand, full))
    twice = methods.distances(window, (torch.cat([q, q]), torch.cat([k, k]), torch.cat([v, v])), causal=True)
    assert torch.equal(twice, torch.cat([found, found]))


def test_a_sample_comes_out_again():
    assert methods.disagreements(STORE, SAMPLE) == []


@pytest.mark.parametrize(
    ("key", "value"), [("causal", False), ("held", 1), ("flops", 7), ("softmax", {"real": 0.1, "random": 0.2})]
)
def test_a_row_that_was_changed_is_noticed(key, value):
    changed = copy.deepcopy(STORE)
    changed["methods"]["window"][key] = value
    (told,) = methods.disagreements(changed, ("window",))
    assert told.startswith(f"window: {key} is")


def test_a_method_without_a_row_is_noticed():
    changed = copy.deepcopy(STORE)
    del changed["methods"]["window"]
    assert methods.disagreements(changed, ("window",)) == ["window has no row"]
