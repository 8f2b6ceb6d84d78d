"""What the three regressions say of observations that do not fit together."""

from functools import partial

import pytest
import torch

import matchkernel as mk
from matchkernel.theory.local_linear import local_linear
from matchkernel.theory.ridge import kernel_ridge
from matchkernel.theory.smoothing import smooth

SOLVING = [local_linear, partial(kernel_ridge, penalty=0.1)]
NAMES = ("x_train", "y_train", "x_query")


def given(**changed):
    shapes = {"x_train": (6, 2), "y_train": (6, 1), "x_query": (3, 2)}
    return {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()} | changed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [smooth, *SOLVING])
def test_an_argument_without_rows_is_named(method, name):
    flat = given()[name][:, 0]
    with pytest.raises(ValueError, match=rf"{name} has shape \(\d,\): expected a row for each place"):
        method(**given(**{name: flat}), kernel=mk.Gaussian())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [smooth, *SOLVING])
def test_two_dtypes_are_told(method, name):
    with pytest.raises(TypeError, match=rf"expected one dtype, got .*{name} of torch\.float32"):
        method(**given(**{name: given()[name].float()}), kernel=mk.Gaussian())


@pytest.mark.parametrize("method", SOLVING)
def test_equations_are_not_solved_in_half_precision(method):
    half = {name: x.bfloat16() for name, x in given().items()}
    with pytest.raises(TypeError, match=r"x_train is of torch\.bfloat16: expected float32 or float64"):
        method(**half, kernel=mk.Gaussian())


def test_an_average_is_taken_in_half_precision():
    half = {name: x.bfloat16() for name, x in given().items()}
    assert smooth(**half, kernel=mk.Gaussian()).dtype == torch.bfloat16


@pytest.mark.parametrize("method", SOLVING)
def test_widths_and_counts_must_agree(method):
    with pytest.raises(ValueError, match=r"x_query \(3, 5\)"):
        method(**given(x_query=torch.rand(3, 5, dtype=torch.float64)), kernel=mk.Gaussian())
    with pytest.raises(ValueError, match=r"y_train has shape \(4, 1\): expected \(…, 6, c\)"):
        method(**given(y_train=torch.rand(4, 1, dtype=torch.float64)), kernel=mk.Gaussian())
