"""The search for points whose Gram matrix has a negative eigenvalue: what one such set refutes, and what none means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .gram import Spectrum, spectrum


@dataclass(frozen=True, eq=False)
class CounterExample:
    """Points that refute positive definiteness.

    Attributes:
        points: (n, d), float64.
        gram: (n, n), the table of the points with themselves.
        spectrum: its eigenvalues with their error bound; the smallest is negative beyond rounding.
        coefficients: (n,), of length 1, with cᵀ G c = the smallest eigenvalue < 0.
    """

    points: Tensor
    gram: Tensor
    spectrum: Spectrum
    coefficients: Tensor

    def __repr__(self) -> str:
        n, d = self.points.shape
        s = self.spectrum
        return f"CounterExample({n} points, d = {d}: smallest eigenvalue {s.smallest:.4g} ± {s.error:.1e})"


def search(
    table: Callable[[Tensor], Tensor],
    dim: int,
    *,
    generator: torch.Generator,
    sizes: Sequence[int] = (2, 3, 5, 10, 20),
    scales: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    draws: int = 20,
    entry_error: float | None = None,
) -> CounterExample | None:
    """The smallest set of random points found whose table has a negative eigenvalue, or None if there was none.

    For each size in turn, `draws` sets of normal points at each scale; of the first size at which one refutes, the one
    whose smallest eigenvalue is most negative relative to its largest.

    None proves nothing: the points that refute may be others, more, closer or further apart.

    Args:
        table: points (n, dim) → their Gram matrix (n, n), symmetric; `partial(gram_of_weights, kernel)`, or a function
            of one's own.
        dim: coordinates of a point.
        generator: everything is drawn from it, in float64 on its device.
        sizes: how many points, in the order in which they are tried.
        scales: standard deviations of the coordinates. Several, since what looks positive definite on distant points
            may fail on close ones.
        draws: sets of points for each size and scale.
        entry_error: as in `spectrum`.

    Raises:
        ValueError: nothing to try, or what `spectrum` refuses.

    Cost: sizes × scales × draws tables and their eigenvalues; with the defaults 600, up to 20 × 20.
    """
    if dim < 1 or draws < 1 or not sizes or not scales:
        raise ValueError(f"dim={dim}, draws={draws}, sizes={tuple(sizes)}, scales={tuple(scales)}: nothing to try")
    for n in sizes:
        worst: CounterExample | None = None
        for scale in scales:
            for _ in range(draws):
                x = scale * torch.randn(n, dim, generator=generator, dtype=torch.float64, device=generator.device)
                found = _examine(table, x, entry_error)
                if found is not None and (worst is None or found.spectrum.ratio < worst.spectrum.ratio):
                    worst = found
        if worst is not None:
            return worst
    return None


def examine(
    table: Callable[[Tensor], Tensor], points: Tensor, *, entry_error: float | None = None
) -> CounterExample | None:
    """Whether these points (n, d) refute that `table` is positive definite: the counter-example, or None."""
    return _examine(table, points, entry_error)


def _examine(table: Callable[[Tensor], Tensor], points: Tensor, entry_error: float | None) -> CounterExample | None:
    gram = table(points)
    if gram.shape != (len(points), len(points)):
        raise ValueError(
            f"table returned shape {tuple(gram.shape)} for {len(points)} points, expected {(len(points),) * 2}"
        )
    found = spectrum(gram, entry_error=entry_error)
    if not found.negative:
        return None
    wide = gram.double()
    return CounterExample(points, gram, found, torch.linalg.eigh((wide + wide.mT) / 2).eigenvectors[:, 0])
