"""Gram matrices of a match kernel, and what their eigenvalues say about positive definiteness.

A kernel is positive definite when no table of its values on points with themselves, whatever the points, has a negative
eigenvalue. One table with a negative eigenvalue, beyond what rounding can have made, refutes that. No table proves it:
what is proved is in `kernel.positive_definite` and `kernel.score_positive_definite`, with the theorem in the docstring.

Tables: `gram_of_scores`, `gram_of_weights`, `centred`. Their spectra, with an error bound: `spectrum`,
`conditional_spectrum`. Short of eigenvalues: `asymmetry`, `pair_excess`. The search for a refutation is in
`counterexample`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import MatchKernel

NEGATIVE = "negative beyond rounding"
NOT_NEGATIVE = "not negative on this sample"


def gram_of_scores(kernel: MatchKernel, x: Tensor, position: Tensor | None = None) -> Tensor:
    """The scores of all pairs out of one set of points: G_ij = s(x_i, x_j).

    x (…, n, d) → (…, n, n), in float64. All points stand at position 0 unless `position` (n,) is given, so that only
    content enters. The full score is taken, with the terms that softmax does not see. Raises ValueError for x of fewer
    than two dimensions, and for a kernel whose weight may be negative: it has no score. Cost: n² scores.
    """
    scores: Tensor = kernel(*_points(x), *_places(x, position))
    return scores


def gram_of_weights(kernel: MatchKernel, x: Tensor, position: Tensor | None = None) -> Tensor:
    """The kernel weights of all pairs out of one set of points: G_ij = κ(x_i, x_j), κ = eˢ, before any normaliser.

    As `gram_of_scores`. A kernel that is given by features has its κ taken directly, signed or not. Raises ValueError
    where eˢ leaves the range of float64 (scores above 709): divide x, or look at `pair_excess` of the scores.
    """
    weights = kernel.kappa(*_points(x), *_places(x, position))
    if weights.isinf().any():
        raise ValueError(f"x: {kernel!r} gives a weight of more than float64 can hold, that is a score above 709")
    return weights


def centred(gram: Tensor) -> Tensor:
    """H G H with H = I − 11ᵀ/n: what is left of the table for coefficients that sum to zero.

    gram (…, n, n) → (…, n, n), rows and columns of sum 0. The kernel is *conditionally* positive definite when no such
    table has a negative eigenvalue. Source: Berg, Christensen & Ressel 1984, chapter 3.
    """
    _square("gram", gram)
    half = gram - gram.mean(-1, keepdim=True)
    return half - half.mean(-2, keepdim=True)


def asymmetry(gram: Tensor) -> Tensor:
    """‖G − Gᵀ‖ / ‖G‖ in the Frobenius norm: 0 for a symmetric table, 2 for an antisymmetric one, √2 by chance.

    gram (…, n, n) → (…). A table of zeros is symmetric. Raises ValueError for a table that is not square.
    """
    _square("gram", gram)
    # In units of the largest entry: squares of what is very large or small would leave the range of the type.
    if gram.shape[-1]:
        largest = gram.abs().amax((-2, -1), keepdim=True)
        gram = gram / torch.where(largest > 0, largest, 1.0)
    size = torch.linalg.matrix_norm(gram)
    apart: Tensor = torch.linalg.matrix_norm(gram - gram.mT)
    return apart / torch.where(size > 0, size, 1.0)


def pair_excess(scores: Tensor) -> Tensor:
    """How much more two points score each other than themselves: e_ij = ½ (s_ij + s_ji) − ½ (s_ii + s_jj).

    scores (…, n, n) → (…, n, n), symmetric, diagonal 0, in score units. One positive entry refutes that κ = eˢ is
    positive definite, without an eigenvalue: the two points have κ_ij κ_ji > κ_ii κ_jj, so their 2 × 2 table, or its
    symmetric part, has a negative determinant. Terms of the score that depend on the query alone or on the key alone
    drop out, so biases and what softmax does not see change nothing. For s = x M yᵀ it is −½ (x − y) M (x − y)ᵀ.
    e^{e_ij} is κ of the symmetric part of s with its diagonal brought to 1 by a factor for each point, which keeps the
    signs of the eigenvalues: `spectrum(pair_excess(scores).exp())` tests that part without overflow.
    """
    _square("scores", scores)
    own = scores.diagonal(dim1=-2, dim2=-1)
    return (scores + scores.mT - own.unsqueeze(-1) - own.unsqueeze(-2)) / 2


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigenvalues of a symmetric table, and how far rounding may have moved each of them.

    Attributes:
        eigenvalues: (n,), smallest first, float64.
        error: no eigenvalue of the exact table is further than this from its computed one (Weyl 1912).
    """

    eigenvalues: Tensor
    error: float

    def __repr__(self) -> str:
        return (
            f"Spectrum({len(self.eigenvalues)} eigenvalues from {self.smallest:.4g} to {self.largest:.4g}, "
            f"each ± {self.error:.1e}: {self.verdict})"
        )

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue, as computed."""
        return float(self.eigenvalues[0])

    @property
    def largest(self) -> float:
        """The largest eigenvalue, as computed."""
        return float(self.eigenvalues[-1])

    @property
    def ratio(self) -> float:
        """Smallest over largest eigenvalue, which does not change when the table is multiplied by a number."""
        return self.smallest / self.largest

    @property
    def negative(self) -> bool:
        """Whether the exact table has a negative eigenvalue for certain: smallest + error < 0."""
        return self.smallest + self.error < 0

    @property
    def verdict(self) -> str:
        """"negative beyond rounding", which refutes, or "not negative on this sample", which proves nothing."""
        return NEGATIVE if self.negative else NOT_NEGATIVE


def spectrum(gram: Tensor, *, entry_error: float | Tensor | None = None) -> Spectrum:
    """All eigenvalues of a symmetric table, with a bound on what rounding did to them.

    |λ̂ − λ| ≤ n·ε·‖G‖₂ + ‖E‖_F,  E_ij ≥ the error of entry ij

    The first term is that of a backward stable eigensolver (Anderson et al. 1999, LAPACK Users' Guide, section 4.7,
    with p(n) = n), the second is Weyl's inequality for the entries' own errors.

    Args:
        gram: (n, n), symmetric up to those errors; decomposed in float64.
        entry_error: absolute error of the entries, one number or a table (n, n). Default 8·ε·max|G| with the ε of
            gram's type: entries that carry a few roundings. For those that carry more say so: a dot product over d
            coordinates is off by up to d·ε·Σ|q_c k_c|, and κ = eˢ has the absolute error of s as its relative one.

    Raises:
        ValueError: a table that is not one square table, not finite, or not symmetric: take (G + Gᵀ)/2 for what the
            quadratic form cᵀGc sees.

    Cost: one symmetric eigenvalue problem, about n³ operations.
    """
    wide, error = _prepare(gram, entry_error)
    values = torch.linalg.eigvalsh(wide)
    return Spectrum(values, _eigensolver_error(values) + error)


def conditional_spectrum(gram: Tensor, *, entry_error: float | Tensor | None = None) -> Spectrum:
    """The n − 1 eigenvalues of a table on coefficients that sum to zero: those of BᵀGB, BᵀB = I, Bᵀ1 = 0.

    A negative one refutes that the kernel is conditionally positive definite. They are those of `centred(gram)` without
    the 0 that belongs to the constant vector. Arguments and errors as in `spectrum`, for n ≥ 2; the bound counts the
    two products with B, whose errors are relative to G and not to what is left of it.
    """
    wide, error = _prepare(gram, entry_error)
    n = wide.shape[-1]
    if n < 2:
        raise ValueError(f"gram has shape {tuple(gram.shape)}: one coefficient that sums to zero is zero")
    basis = _sum_zero_basis(n, wide.device)
    size = float(torch.linalg.matrix_norm(wide))
    inside = basis.mT @ wide @ basis
    values = torch.linalg.eigvalsh((inside + inside.mT) / 2)
    products = 2 * n * torch.finfo(torch.float64).eps * size
    return Spectrum(values, _eigensolver_error(values) + error + products)


def _eigensolver_error(eigenvalues: Tensor) -> float:
    return len(eigenvalues) * torch.finfo(torch.float64).eps * float(eigenvalues.abs().max())


def _sum_zero_basis(n: int, device: torch.device) -> Tensor:
    """(n, n − 1): Helmert's orthonormal basis of the vectors that sum to zero."""
    k = torch.arange(1, n, dtype=torch.float64, device=device)
    columns = torch.ones(n, n - 1, dtype=torch.float64, device=device).triu()
    columns[1:] -= torch.diag(k)
    return columns / (k * (k + 1)).sqrt()


def _prepare(gram: Tensor, entry_error: float | Tensor | None) -> tuple[Tensor, float]:
    """The table in float64, made exactly symmetric, and the bound on the norm of its entries' errors."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not len(gram):
        raise ValueError(f"gram must be one square table (n, n) with n ≥ 1, got {tuple(gram.shape)}")
    wide = gram.detach().double()
    if not wide.isfinite().all():
        raise ValueError("gram: expected finite entries")
    if entry_error is None:
        each = (8 * torch.finfo(gram.dtype).eps * wide.abs().max()).expand_as(wide)
    else:
        given = torch.as_tensor(entry_error, dtype=torch.float64, device=wide.device)
        if given.shape not in ((), wide.shape) or not bool((given >= 0).all()):
            raise ValueError(
                f"entry_error must be a number ≥ 0 or a table {tuple(wide.shape)} of them, got shape "
                f"{tuple(given.shape)}"
            )
        each = given.expand_as(wide)
    # Rounding makes the two halves of a table differ, by their two errors at most.
    apart = (wide - wide.mT).abs()
    if bool((apart > each + each.mT).any()):
        raise ValueError(
            f"gram is not symmetric: entries differ from their mirror images by up to {float(apart.max()):.3g}; "
            "expected no more than entry_error on either side. (gram + gram.mT) / 2 is what the quadratic form sees"
        )
    return (wide + wide.mT) / 2, float(torch.linalg.matrix_norm(each))


def _points(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.ndim < 2:
        raise ValueError(f"x must have shape (…, n, d), got {tuple(x.shape)}")
    wide = x.double()
    return wide, wide


def _places(x: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
    place = torch.zeros(x.shape[-2], device=x.device, dtype=torch.long) if position is None else position
    if place.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"position must have shape (…, {x.shape[-2]}) as x has points, got {tuple(place.shape)}")
    return place, place


def _square(name: str, table: Tensor) -> None:
    if table.ndim < 2 or table.shape[-1] != table.shape[-2]:
        raise ValueError(f"{name} must have shape (…, n, n), got {tuple(table.shape)}")
