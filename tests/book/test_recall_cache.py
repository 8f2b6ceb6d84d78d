"""The stored sweep of chapter 6: complete, made by the chapter's own cells, and a sample of it made again."""

import json
import subprocess
import sys

import pytest
from scipy.stats import t

from bookkit.paths import ROOT

STORE = ROOT / "chapters" / "data" / "06-recall.json"
KERNELS = {"Dot", "ScaledDot", "Cosine", "Bilinear", "Gaussian", "RationalQuadratic", "Laplacian", "Additive"}
SETTINGS = {"recall, width 16", "recall, width 4", "nearest, width 16"}


@pytest.fixture(scope="module")
def store():
    return json.loads(STORE.read_text())


def check(*options):
    command = [sys.executable, ROOT / "experiments" / "recall_sweep.py", "--check", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_kernel_was_tuned_and_run_in_every_setting(store):
    assert set(store["tuning"]) == set(store["fresh"]) == SETTINGS
    for setting in SETTINGS:
        assert set(store["tuning"][setting]) == set(store["fresh"][setting]) == KERNELS
        for kernel in KERNELS:
            tried, found = store["tuning"][setting][kernel], store["fresh"][setting][kernel]
            assert len(tried) == 5 and all(len(runs) == 3 for runs in tried.values())
            assert 1 <= len(found) <= 2 and set(found) <= set(tried)
            assert all(len(runs) == 12 for runs in found.values())


def test_every_curve_is_of_one_length_and_holds_accuracies(store):
    runs = [run for part in ("tuning", "fresh") for kernels in store[part].values() for run in kernels.values()]
    curves = [curve for rates in runs for some in rates.values() for curve in some]
    assert {len(curve) for curve in curves} == {11}
    assert all(0 <= accuracy <= 1 for curve in curves for accuracy in curve)


def test_a_sample_made_again_agrees():
    result = check()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 runs agree" in result.stdout


def test_a_curve_that_was_changed_is_noticed(store, tmp_path):
    (runs,) = list(store["fresh"]["recall, width 16"]["Dot"].values())[:1]
    runs[0][-1] -= 0.05
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(store))
    result = check("--store", changed, "--only", "Dot")
    assert result.returncode == 1 and "Dot" in result.stdout, result.stdout + result.stderr


def test_a_store_made_by_other_cells_is_noticed(store, tmp_path):
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(store | {"cells": "0" * 16}))
    result = check("--store", changed)
    assert result.returncode == 1 and "other cells" in result.stdout, result.stdout + result.stderr


def test_the_quantiles_that_the_chapter_writes_are_students():
    chapter = (ROOT / "chapters" / "06-why-the-dot-product-won.ipynb").read_text()
    for written, tail, where in (("2.201", 0.025, "quantile=2.201"), ("3.923", 0.025 / 21, "half_width(apart, 3.923)")):
        assert abs(t.ppf(1 - tail, df=12 - 1) - float(written)) < 5e-4
        assert where in chapter
