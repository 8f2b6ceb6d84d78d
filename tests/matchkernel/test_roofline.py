"""The roofline's guess: the larger of two quotients, from speeds that were measured."""

import pytest
import torch

import matchkernel as mk
from matchkernel.roofline import roofline

CPU = torch.device("cpu")


def test_the_longer_of_the_two_times_binds() -> None:
    once = roofline(10**9, 1, CPU)
    assert once.bound == "compute" and once.seconds == pytest.approx(1e9 / once.flops_per_second)
    moved = roofline(1, 10**9, CPU)
    assert moved.bound == "memory" and moved.seconds == pytest.approx(1e9 / moved.bytes_per_second)
    # Measured once: a second guess rests on the same speeds.
    assert moved.flops_per_second == once.flops_per_second and moved.bytes_per_second == once.bytes_per_second


def test_speeds_are_those_of_a_machine_and_not_of_a_slip() -> None:
    guess = roofline(1, 1, CPU)
    assert 1e8 < guess.flops_per_second < 1e15
    assert 1e7 < guess.bytes_per_second < 1e13


def test_an_explanation_guesses_its_time() -> None:
    q = torch.zeros(2, 512, 64)
    explained = mk.explain(q, q, q)
    guess = explained.roofline()
    assert explained.flops is not None
    assert guess.seconds == max(
        explained.flops / guess.flops_per_second, explained.bytes / guess.bytes_per_second
    )
    assert f"bound by {guess.bound}" in str(guess) and "GFLOP/s" in str(guess)
    # Two runs print the same explanation.
    assert "ms" not in str(explained)


def test_uncounted_operations_have_no_roofline() -> None:
    class Own(mk.MatchKernel):
        def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q @ k.mT

    q = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="flops_per_pair"):
        mk.explain(q, q, q, Own()).roofline()
