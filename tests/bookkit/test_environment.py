"""What stored outputs depend on is the same wherever they are made."""

import os

from bookkit.environment import pinned


def test_a_readers_settings_do_not_reach_the_kernel():
    fixed = pinned({"MPLBACKEND": "agg", "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "8", "PATH": "/bin"}, "x86_64")
    assert "MPLBACKEND" not in fixed and "PYTHONWARNINGS" not in fixed and fixed["PATH"] == "/bin"
    assert fixed["OMP_NUM_THREADS"] == fixed["MKL_NUM_THREADS"] == "1" and fixed["PYTHONHASHSEED"] == "0"


def test_the_instruction_set_is_pinned_where_it_exists():
    assert pinned({}, "x86_64")["ATEN_CPU_CAPABILITY"] == pinned({}, "AMD64")["ATEN_CPU_CAPABILITY"] == "avx2"
    assert pinned({}, "x86_64")["FAISS_SIMD_LEVEL"] == "AVX2"
    assert "ATEN_CPU_CAPABILITY" not in pinned({}, "aarch64") and "FAISS_SIMD_LEVEL" not in pinned({}, "aarch64")


def test_pinning_twice_changes_nothing():
    once = pinned({"PYTHONPATH": "/somewhere"})
    assert pinned(once) == once and once["PYTHONPATH"].endswith(os.pathsep + "/somewhere")


def test_these_very_tests_run_pinned():
    import torch

    assert pinned(os.environ) == dict(os.environ)
    assert torch.get_num_threads() == 1
