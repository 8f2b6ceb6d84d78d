"""Every kernel of the list keeps the contract; and the contract notices kernels that do not."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import matchkernel as mk
from matchkernel.testing import KernelContract, check

sys.path.insert(0, str(Path(__file__).parent))
import kernels_under_test

KERNELS = kernels_under_test.make()


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> mk.MatchKernel:
    return KERNELS[request.param]


class TestEveryKernel(KernelContract):
    @pytest.fixture(autouse=True)
    def _take(self, kernel: mk.MatchKernel) -> None:
        self.kernel = kernel
        self.smooth = not isinstance(kernel, kernels_under_test.Distance)

    def make_kernel(self) -> mk.MatchKernel:
        return copy.deepcopy(self.kernel)


class TestRectangularBilinear(KernelContract):
    query_dim, key_dim, heads = 5, 3, 4

    def make_kernel(self) -> mk.MatchKernel:
        return mk.Bilinear(5, 3, generator=torch.Generator().manual_seed(3))


def test_check_runs_the_same_tests_outside_pytest() -> None:
    tests = [name for name in dir(KernelContract) if name.startswith("test_")]
    assert check(mk.ScaledDot()) == len(tests) >= 18


class _Broken(mk.MatchKernel):
    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT


class _WrongPair(_Broken):
    """Scores that depend on the other keys."""

    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT - k.mean(-2, keepdim=True) @ k.mT


class _WrongFact(_Broken):
    translation_invariant = True


class _WrongDenial(_Broken):
    symmetric = False


class _NotPositive(_Broken):
    positive_definite = True

    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.tanh(q @ k.mT)


class _NoSecondDerivative(_Broken):
    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(q, k)


class _Writes(_Broken):
    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k.data.add_(0.0).mul_(1.0 + 1e-12)
        return q @ k.mT


class _Idle(_Broken):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "broken",
    [_WrongPair, _WrongFact, _WrongDenial, _NotPositive, _NoSecondDerivative, _Writes, _Idle],
)
def test_the_contract_catches(broken: type[mk.MatchKernel]) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        check(broken())


def test_a_dot_kernel_cannot_have_another_match() -> None:
    with pytest.raises(TypeError, match="override the encoders, or subclass MatchKernel"):

        class _LyingDot(mk.ScaledDot):
            def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                return 1.01 * (q @ k.mT)
