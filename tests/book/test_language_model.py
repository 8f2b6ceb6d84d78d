"""The stored sweep of chapter 23: complete, and a sample of it made again."""

import copy

import pytest
import torch

from experiments import language_model as sweep

STORE = sweep.read()


def test_every_kernel_was_tuned_and_run():
    assert list(STORE["tuning"]) == list(STORE["fresh"]) == list(sweep.KERNELS)
    for name, kept in STORE["fresh"].items():
        tried = STORE["tuning"][name]
        assert {float(rate) for rate in tried} == set(sweep.RATES)
        assert kept["rate"] == sweep.best(tried)
        assert kept["seeds"] == list(sweep.FRESH)
        assert len(kept["loss"]) == len(kept["by_position"]) == len(sweep.FRESH)
        assert all(len(row) == len(sweep.RANGES) for row in kept["by_position"])
        assert all(0 < loss < 3 for row in [kept["loss"], *kept["by_position"]] for loss in row)
    assert STORE["ranges"] == [list(pair) for pair in sweep.RANGES]
    assert sweep.TUNING not in sweep.FRESH


def test_a_loss_is_the_mean_over_the_ranges():
    wide = torch.tensor([high - low for low, high in sweep.RANGES]) / sweep.LENGTH
    for kept in STORE["fresh"].values():
        for loss, row in zip(kept["loss"], kept["by_position"], strict=True):
            assert loss == pytest.approx((torch.tensor(row) * wide).sum().item(), abs=2e-4)


def test_the_parameters_are_those_of_the_models():
    for name, way in sweep.KERNELS.items():
        model = sweep.Model(way, torch.Generator().manual_seed(0))
        assert sum(p.numel() for p in model.parameters()) == STORE["fresh"][name]["parameters"]


def test_what_is_shared_starts_alike():
    models = [sweep.Model(way, torch.Generator().manual_seed(3)) for way in sweep.KERNELS.values()]
    first = {name: x for name, x in models[0].named_parameters() if ".kernel." not in name}
    for model in models[1:]:
        others = {name: x for name, x in model.named_parameters() if ".kernel." not in name}
        assert others.keys() == first.keys() and all(torch.equal(others[name], first[name]) for name in first)


def test_tokens_spell_the_book_and_the_end_is_held_out():
    text = sweep.alice()
    assert text.train.max() < sweep.TOKENS and text.held_out.max() < sweep.TOKENS
    assert len(text.train.unique()) > 0.9 * sweep.TOKENS
    assert STORE["characters_per_token"] == pytest.approx(text.characters_per_token)


@pytest.mark.parametrize(
    ("parts", "pair", "expected"),
    [("abab", "ab", ["ab", "ab"]), ("aaa", "aa", ["aa", "a"]), ("xab", "ab", ["x", "ab"]), ("ba", "ab", ["b", "a"])],
)
def test_pairs_are_merged_from_the_left(parts, pair, expected):
    assert list(sweep.merged(tuple(parts), tuple(pair))) == expected


def test_no_model_reads_ahead():
    for way in sweep.KERNELS.values():
        model = sweep.Model(way, torch.Generator().manual_seed(0))
        tokens = torch.arange(2 * 40).view(2, 40)
        changed = torch.cat([tokens[:, :20], 500 - tokens[:, 20:]], dim=-1)
        with torch.no_grad():
            apart = (model(changed) - model(tokens)).abs()
        assert apart[:, :20].max() < 1e-4 < apart[:, 20:].max()


def test_a_sample_made_again_agrees():
    assert sweep.disagreements(STORE, sweep.SAMPLE[:1]) == []


def test_a_loss_that_was_changed_is_noticed(monkeypatch):
    changed = copy.deepcopy(STORE)
    changed["fresh"]["rotary"]["loss"][0] += 0.04
    same = {"loss": STORE["fresh"]["rotary"]["loss"][0]}
    monkeypatch.setattr(sweep, "run", lambda name, rate, seed: same)
    (told,) = sweep.disagreements(changed, ("rotary",))
    assert "rotary: the loss is 0.040 off" in told


def test_only_what_a_store_lacks_is_run(monkeypatch, tmp_path):
    ran = []

    def run(name, rate, seed):
        ran.append((name, seed))
        return {"loss": float(seed), "by_position": [float(seed)] * len(sweep.RANGES), "parameters": 1}

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(sweep, "STORE", tmp_path / "store.json")
    kept = copy.deepcopy(STORE)
    new = max(sweep.FRESH) + 1
    for part in ("seeds", "loss", "by_position"):
        del kept["fresh"]["rotary"][part][1]
    sweep.measure(kept, (*sweep.FRESH, new))
    assert ran == [("rotary", sweep.FRESH[1]), *((name, new) for name in sweep.KERNELS)]
    loss = STORE["fresh"]["rotary"]["loss"]
    assert kept["fresh"]["rotary"]["seeds"] == [*sweep.FRESH, new]
    assert kept["fresh"]["rotary"]["loss"] == [loss[0], float(sweep.FRESH[1]), *loss[2:], float(new)]
