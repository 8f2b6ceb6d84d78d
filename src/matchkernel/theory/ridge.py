"""Kernel ridge regression, for contrast with smoothing: the same kernel, but its weights are solved for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.base import MatchKernel
from ._observations import check_observations


def kernel_ridge(
    x_train: Tensor, y_train: Tensor, x_query: Tensor, kernel: MatchKernel, *, penalty: float
) -> Tensor:  # fmt: skip
    """Kernel ridge regression with the kernel weight κ of any symmetric MatchKernel.

    f(x_i) = Σ_j κ(x_i, x_j) c_j,  c = (G + λI)⁻¹ y,  G_jj' = κ(x_j, x_j')

    κ = exp(score); that of a kernel given by features φ is taken directly, signed or not, and f is then the ridge
    regression that is linear in φ. For a positive definite κ it is the minimiser of Σ_j |y_j − f(x_j)|² + λ|f|² over
    the kernel's space of functions. No mean is taken off and no row is divided by its sum: far from all data a
    Gaussian's f goes to 0.

    Args:
        x_train, y_train, x_query: (…, m, d), (…, m, c), (…, n, d), one floating dtype. Give double precision.
        kernel: its table G must be symmetric and G + λI positive definite.
        penalty: λ > 0, in the unit of κ; it has no default, since no value suits all data.

    Returns:
        (…, n, c) in y's unit.

    Raises:
        TypeError: more than one dtype, or half precision.
        ValueError: a penalty that is not above zero; shapes that do not fit; κ that overflows; G not symmetric, or
            G + λI not positive definite: with such a kernel the ridge problem has no minimiser to return.

    Cost: O(m³) time for the solve, m² memory; then O(nm) for the queries.
    Source: Saunders, Gammerman & Vovk 1998; that the minimiser has this form, Schölkopf & Smola 2002, section 4.2.
    """
    if not penalty > 0.0:
        raise ValueError(f"penalty={penalty}: expected a number above zero")
    check_observations(x_train, y_train, x_query)
    gram = _kappa(x_train, x_train, kernel)
    largest = gram.abs().amax((-2, -1), keepdim=True)
    # A score that is a small difference of large numbers is as uneven as those are rounded: half the digits are enough.
    if ((gram - gram.mT).abs() > torch.finfo(gram.dtype).eps ** 0.5 * largest).any():
        raise ValueError(f"kernel={kernel!r}: its table is not symmetric, so kernel ridge regression is not defined")
    ridge = gram + penalty * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(ridge)
    if failed.any():
        raise ValueError(
            f"kernel={kernel!r} with penalty={penalty}: its table plus λI is not positive definite, "
            "so the ridge problem has no minimiser; use a positive definite kernel or a larger penalty"
        )
    return _kappa(x_query, x_train, kernel) @ torch.cholesky_solve(y_train, factor)


def _kappa(q: Tensor, k: Tensor, kernel: MatchKernel) -> Tensor:
    kappa = kernel.kappa(q, k)
    if not kappa.isfinite().all():
        raise ValueError(f"kernel={kernel!r}: its weight κ is not finite for these inputs; shrink them or the score")
    return kappa
