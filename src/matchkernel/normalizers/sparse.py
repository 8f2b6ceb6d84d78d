"""Weights that can be exactly zero: sparsemax and entmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.values import HeadValue, as_factor, hold, show
from .base import Normalizer


class Entmax(Normalizer):
    """A threshold of its own for each row: keys below it get weight zero, the others share 1.

    α_ij = [(a − 1) s_ij − τ_i]₊ ^ (1 / (a − 1)),  τ_i such that Σ_j α_ij = 1

    `alpha` a > 1 is a number (default 1.5, as in the paper), a tensor with one entry per head, or an `nn.Parameter`
    (Correia et al. learn 1 + sigmoid(x) per head; nothing here keeps a learned a above 1). Towards a = 1 it becomes
    `Softmax()`, a = 2 is `Sparsemax()`, and the larger a, the fewer keys have weight. A row with no permitted key is
    zero. Derivatives are exact, in a too; where a key stands exactly on the threshold there is none, and the key
    counts as outside. ValueError for an a that is not above 1.

    A threshold needs the whole row, so there is no online form. Cost: a sort of each row for a = 1.5 and 2; for any
    other number, and for a tensor, one pass over the table for each binary digit of its dtype. O(nm) memory.
    Source: Peters, Niculae & Martins 2019 (arXiv 1905.05702), eq. 6 and algorithm 2; Correia, Niculae & Martins 2019
    (arXiv 1909.00015) for a learned a.
    """

    shift_invariant = True
    alpha: HeadValue

    def __init__(self, alpha: HeadValue = 1.5) -> None:
        super().__init__()
        hold(self, "alpha", alpha)
        if not bool((torch.as_tensor(alpha) > 1.0).all()):
            raise ValueError(f"Entmax(alpha=…): every entry must be above 1, got {show(alpha)}; for 1 take Softmax()")

    def weigh(self, scores: Tensor) -> Tensor:
        return _entmax(scores, as_factor(self.alpha, scores))

    def extra_repr(self) -> str:
        plain = not isinstance(self.alpha, Tensor) and self.alpha == 1.5
        return "" if plain else f"alpha={show(self.alpha)}"


class Sparsemax(Normalizer):
    """The point of the probability simplex that is nearest to the row of scores.

    α_ij = [s_ij − τ_i]₊,  τ_i such that Σ_j α_ij = 1

    A key more than 1 below the best one gets weight zero. A row with no permitted key is zero. Derivatives are exact;
    where a key stands exactly on the threshold there is none, and the key counts as outside. A threshold needs the
    whole row, so there is no online form. Cost: a sort of each row, O(m log m); O(nm) memory.
    Source: Martins & Astudillo 2016 (arXiv 1602.02068), eq. 2 and algorithm 1.
    """

    shift_invariant = True

    def weigh(self, scores: Tensor) -> Tensor:
        return _entmax(scores, 2.0)


def _entmax(scores: Tensor, alpha: HeadValue) -> Tensor:
    if scores.shape[-1] == 0:
        return scores
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if isinstance(alpha, Tensor):
        # a − 1 and 1/(a − 1) rounded to half precision are no longer each other's inverse.
        alpha = alpha.to(torch.promote_types(alpha.dtype, wide.dtype))
    top = wide.detach().amax(dim=-1, keepdim=True)
    empty = top == float("-inf")
    # No threshold exists for a row of −inf. Give it equal scores first.
    below = torch.where(empty, 0.0, wide - torch.where(empty, 0.0, top))
    # −inf times the zero gradient of a learned alpha is NaN.
    below = below.clamp_min(torch.finfo(below.dtype).min)
    # The best key alone has the threshold −1, and more keys a higher one: what is lower has no weight, and is moved to
    # where running sums stay exact and no rounding takes it for a key on the threshold.
    z = (below * (alpha - 1.0)).clamp_min(-2.0)
    if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
        weights = _by_bisection(z, 1.0 / (alpha - 1.0))
    elif alpha == 2.0:
        weights = _linear(z)
    else:
        weights = _square(z)
    return torch.where(empty, 0.0, weights).to(scores.dtype)


# Which keys have weight is found without derivatives; given them, the threshold is a smooth function of their scores,
# in plain operations that can be differentiated as often as one likes.


def _linear(z: Tensor) -> Tensor:
    """[z − τ]₊ of rows z (…, m) in [−2, 0] with largest entry 0."""
    rows, rank, total = _sorted(z.detach())
    inside = _first(z, rows * rank > total - 1.0, rows)
    count = inside.sum(dim=-1, keepdim=True)
    threshold = (torch.where(inside, z, 0.0).sum(dim=-1, keepdim=True) - 1.0) / count
    return (z - threshold).relu()


def _square(z: Tensor) -> Tensor:
    """[z − τ]₊² of rows z (…, m) in [−2, 0] with largest entry 0."""
    rows, rank, total = _sorted(z.detach())
    # The k-th key has weight if the squares of what the keys before it stand above it sum to less than 1.
    above = rows.square().cumsum(dim=-1) - 2.0 * rows * total + rank * rows.square()
    inside = _first(z, above < 1.0, rows)
    count = inside.sum(dim=-1, keepdim=True)
    mean = torch.where(inside, z, 0.0).sum(dim=-1, keepdim=True) / count
    spread = torch.where(inside, z - mean, 0.0).square().sum(dim=-1, keepdim=True)
    # At least 1/count is left under the root: k numbers whose squares sum to 1 have a sum of at least 1.
    return (z - (mean - ((1.0 - spread) / count).sqrt())).relu().square()


def _sorted(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row from its largest entry down, the ranks from 1, and running sums."""
    rows = z.sort(dim=-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    return rows, rank, rows.cumsum(dim=-1)


def _first(z: Tensor, holds: Tensor, rows: Tensor) -> Tensor:
    """The entries of z (…, m) that are among the first of the sorted rows, as many as `holds` says."""
    # NaN holds nowhere, and is to come out as NaN and not as an index of −1.
    last = rows.gather(-1, (holds.sum(dim=-1, keepdim=True) - 1).clamp_min(0))
    return z.detach() >= last


def _by_bisection(z: Tensor, exponent: HeadValue) -> Tensor:
    """[z − τ]₊ to the power `exponent`, of rows z (…, m) in [−2, 0] with largest entry 0."""
    rows = z.detach()
    power = exponent.detach() if isinstance(exponent, Tensor) else exponent
    threshold = torch.full_like(rows[..., :1], -1.0)
    step = 1.0
    while step > torch.finfo(z.dtype).eps:
        step /= 2.0
        total = (rows - threshold - step).relu().pow(power).sum(dim=-1, keepdim=True)
        threshold = torch.where(total >= 1.0, threshold + step, threshold)
    # Newton's step from the solution has the solution's first derivative, and a second step its second and third.
    for _ in range(2):
        weights, slope = _powers(z, threshold, exponent)
        threshold = threshold + (weights.sum(dim=-1, keepdim=True) - 1.0) / slope.sum(dim=-1, keepdim=True)
    return _powers(z, threshold, exponent)[0]


def _powers(z: Tensor, threshold: Tensor, exponent: HeadValue) -> tuple[Tensor, Tensor]:
    """[z − threshold]₊ to the power `exponent`, and minus its derivative in the threshold."""
    above = z - threshold
    # NaN is not below: it stays NaN.
    inside = ~(above.detach() <= 0.0)
    # 0 to a power below 1 has no derivative: what is outside never enters.
    safe = torch.where(inside, above, 1.0)
    powers = safe.pow(exponent)
    return torch.where(inside, powers, 0.0), torch.where(inside, exponent * powers / safe, 0.0)
