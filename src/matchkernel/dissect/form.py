"""The bilinear form of a head: what does not depend on the choice of basis inside the head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:  # Head.form() returns a Form, so at run time the arrow points here only
    from .head import Head

MEASURES = (
    "norm",
    "trace",
    "rank",
    "participation_ratio",
    "entropy_rank",
    "rank_90",
    "symmetric_share",
    "positive_share",
    "overlap",
    "key_term",
)
"""The numbers that `Form.measures` lists."""


@dataclass(frozen=True, eq=False)
class Form:
    """A head's bilinear form M = W_Q W_Kᵀ, known by what survives a change of basis inside the head.

    x M x'ᵀ is all that a score sees of W_Q and W_K, apart from the biases: W_Q A and W_K A⁻ᵀ, for any invertible A, are
    the same head. Of a rotary head, M at an offset Δ = j − i is W_Q R_Δ W_Kᵀ, and there is one for each offset.
    M is taken without the head's scale 1/√d_head, which changes norm, trace and eigenvalues by a factor and no share.

    M is split into M = S + A, S = (M + Mᵀ)/2 symmetric, A antisymmetric; ‖M‖² = ‖S‖² + ‖A‖² (Frobenius). r is the
    inner width (d_head, or that of a head put in its place). Everything is float64.

    Attributes:
        singular_values: (min(r, d_model),) of M, largest first.
        eigenvalues: (min(2r, d_model),) of S, largest first; its other eigenvalues are zero.
        rank: how many singular values are above rounding, σ > σ₁ · min(d_model · ε, √ε) with the ε of the weights' own
            type.
        overlap: mean squared cosine of the principal angles between the directions of the stream that W_Q and W_K read:
            0 for orthogonal subspaces, 1 for the same; r/d_model by chance.
        query_term: ‖W_Q b_K‖, how fast a score's query term x W_Q b_Kᵀ grows with x; softmax does not see it.
        key_term: ‖W_K b_Q‖, the same of the key term b_Q W_Kᵀ x'ᵀ, the loudness of a key; softmax sees it.
            Of a rotary head W_K and b_K are turned by R_Δ.

    Source: Elhage et al. 2021, who read a head by W_Q W_Kᵀ and not by its two factors.
    """

    singular_values: Tensor
    eigenvalues: Tensor
    rank: int
    overlap: float
    query_term: float
    key_term: float

    def __repr__(self) -> str:
        return (
            f"Form(rank {self.rank}, participation ratio {self.participation_ratio:.1f}, "
            f"symmetric share {self.symmetric_share:.3f}, positive share {self.positive_share:.3f}, "
            f"norm {self.norm:.3g}, trace {self.trace:.3g})"
        )

    @property
    def norm(self) -> float:
        """‖M‖ = √Σσ², the Frobenius norm."""
        return float(self.singular_values.norm())

    @property
    def trace(self) -> float:
        """tr M = tr S = Σλ: above zero where a direction of the stream matches itself rather than repels itself."""
        return float(self.eigenvalues.sum())

    @property
    def energy(self) -> Tensor:
        """(min(r, d_model),): σ²/Σσ², the share of ‖M‖² in each singular direction."""
        square = self.singular_values.square()
        return square / square.sum()

    @property
    def participation_ratio(self) -> float:
        """(Σσ²)²/Σσ⁴: k for k equal singular values, 1 for a form of rank one."""
        return float(1 / self.energy.square().sum())

    @property
    def entropy_rank(self) -> float:
        """exp(−Σ p log p), p = σ²/Σσ²: k for k equal singular values; never below the participation ratio.

        Roy & Vetterli 2007 take p = σ/Σσ; here p is the share of energy, as in the other measures.
        """
        return float(torch.special.entr(self.energy).sum().exp())

    def rank_for(self, share: float) -> int:
        """The least rank whose best approximation of M keeps `share` of ‖M‖² (Eckart & Young 1936).

        Raises:
            ValueError: share is not in (0, 1].
        """
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: expected a share of the energy, above 0 and at most 1")
        # Rounding may leave the last sum a hair below one.
        kept = self.energy.cumsum(0)
        return int((kept < share * kept[-1] * (1 - 1e-12)).sum()) + 1

    @property
    def symmetric_share(self) -> float:
        """‖S‖²/‖M‖²: 1 for a symmetric form, 0 for an antisymmetric one, ½ + 1/(2 d_model) by chance."""
        return float(self.eigenvalues.square().sum() / self.singular_values.square().sum())

    @property
    def antisymmetric_share(self) -> float:
        """‖A‖²/‖M‖² = 1 − symmetric share."""
        return 1 - self.symmetric_share

    @property
    def positive_share(self) -> float:
        """Σ max(λ, 0) / Σ|λ| over the eigenvalues of S; NaN for a form without a symmetric part.

        1 means that x M xᵀ ≥ 0 for every x; M is then a Mercer kernel if it is also symmetric. ½ by chance.
        """
        return float(self.eigenvalues.clamp(min=0).sum() / self.eigenvalues.abs().sum())

    def measures(self) -> dict[str, float]:
        """The numbers of this form under the names in `MEASURES`; rank_90 is rank_for(0.9)."""
        return {name: float(self.rank_for(0.9) if name == "rank_90" else getattr(self, name)) for name in MEASURES}


class Spread(NamedTuple):
    """Many values of one measure."""

    mean: float
    sd: float
    """Standard deviation from one to the next (divided by count − 1), not of the mean."""
    low: float
    high: float
    size: int
    """How many values."""


def form(head: Head, offset: int = 0) -> Form:
    """The bilinear form of a head: M = W_Q W_Kᵀ, or W_Q R_Δ W_Kᵀ of a rotary head at the offset Δ.

    Args:
        head: its W_Q and W_K are (d_model, r).
        offset: j − i, the key's place less the query's, in tokens; negative for a key further back. Only a rotary head
            has more than one form.

    Raises:
        ValueError: an offset for a head without rotation; a form that is zero, of which no share can be taken.

    Cost: a QR decomposition of d_model × 2r and decompositions of matrices of 2r × 2r; M itself is never made.
    """
    if head.rotation is None and offset:
        raise ValueError(f"offset={offset}: {head!r} does not rotate, so its form is the same at every offset")
    left, right, b_q, b_k = (part.double() for part in (head.W_Q, head.W_K, head.b_Q, head.b_K))
    # The query stands at 0 and the key at the offset: its rows are turned as if each were a key there.
    place = torch.full((right.shape[0],), offset, device=right.device)
    return _form(left, head.rotate(right, place), b_q, head.rotate(b_k[None], place[:1])[0], head.W_Q.dtype)


def random_forms(head: Head, draws: int = 100, *, generator: torch.Generator) -> list[Form]:
    """Forms of independent Gaussian W_Q and W_K in the shapes, and with the Frobenius norms, of a head's.

    What a head would look like that had learned nothing but the size of its weights. The biases are redrawn too, with
    their norms. A rotation changes nothing here: turned Gaussian entries are Gaussian entries. `spreads` gives mean and
    spread of each measure.

    Args:
        head: gives d_model, r and the norms.
        draws: how many.
        generator: on the CPU; everything random is drawn from it, in float64.

    Raises:
        ValueError: fewer draws than one.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}: expected at least 1")

    def draw(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return torch.mul(drawn, like.double().norm().cpu() / drawn.norm())

    return [_form(draw(head.W_Q), draw(head.W_K), draw(head.b_Q), draw(head.b_K), head.W_Q.dtype) for _ in range(draws)]


def mismatched_forms(heads: Iterable[Head], offset: int = 0) -> list[Form]:
    """Forms of W_Q of one head with W_K of another head of the same layer: every such pair, in both directions.

    A harder baseline than Gaussian weights: both sides are trained, on the same stream, and only their being a pair is
    missing. Heads that share their keys (grouped queries) are no mismatch, and each such group gives its W_K once.

    Args:
        heads: of one layer or of several, such as `model.heads()`; pairs are made within a layer.
        offset: as in `form`.

    Raises:
        ValueError: no layer among them has two heads with different keys.
    """
    layers: dict[int, list[Head]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head)
    pairs = [(asks, answers) for layer in layers.values() for asks in layer for answers in _strangers(asks, layer)]
    if not pairs:
        raise ValueError("heads: expected at least two heads of one layer whose W_K differ")
    return [form(replace(asks, W_K=answers.W_K, b_K=answers.b_K), offset) for asks, answers in pairs]


def _strangers(head: Head, layer: list[Head]) -> list[Head]:
    """One head of the layer for each W_K that is not this head's own."""
    met = [head]
    for other in layer:
        if not any(torch.equal(other.W_K, known.W_K) for known in met):
            met.append(other)
    return met[1:]


def spreads(forms: Iterable[Form]) -> dict[str, Spread]:
    """Mean, standard deviation, least and greatest of each measure in `MEASURES`.

    Raises:
        ValueError: fewer than two forms, which have no spread.
    """
    rows = [list(each.measures().values()) for each in forms]
    if len(rows) < 2:
        raise ValueError(f"forms: got {len(rows)}, expected at least 2 to have a spread")
    table = torch.tensor(rows, dtype=torch.float64)
    columns = torch.stack([table.mean(0), table.std(0), table.amin(0), table.amax(0)], -1).tolist()
    return {
        name: Spread(mean, sd, low, high, len(rows))
        for name, (mean, sd, low, high) in zip(MEASURES, columns, strict=True)
    }


def _form(left: Tensor, right: Tensor, b_q: Tensor, b_k: Tensor, stored: torch.dtype) -> Form:
    """The form left rightᵀ; `stored` is the type whose rounding the weights carry."""
    width = left.shape[-1]
    # In an orthonormal basis of all that W_Q and W_K read, M is 2r × 2r and has kept its singular values, its trace and
    # the eigenvalues of its symmetric part.
    small_left, small_right = torch.linalg.qr(torch.cat([left, right], -1))[1].split(width, -1)
    core = small_left @ small_right.mT
    if not 0 < float(core.abs().max()) < math.inf:
        raise ValueError("the form is zero or not finite: W_Q W_Kᵀ needs finite entries, and one other than 0")
    singular = torch.linalg.svdvals(core)[: min(width, left.shape[0])]
    eps = torch.finfo(stored).eps
    # In types of 16 bits the first is 1 and more, above which there is nothing.
    least = min(max(left.shape) * eps, math.sqrt(eps))
    return Form(
        singular_values=singular,
        eigenvalues=torch.linalg.eigvalsh((core + core.mT) / 2).flip(0),
        rank=int((singular > singular[0] * least).sum()),
        overlap=_overlap(_span(small_left, least), _span(small_right, least)),
        query_term=float((left @ b_k).norm()),
        key_term=float((right @ b_q).norm()),
    )


def _span(columns: Tensor, least: float) -> Tensor:
    """An orthonormal basis of what the columns span, those within rounding of nothing left out."""
    basis: Tensor
    basis, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return basis[:, singular > singular[0] * least]


def _overlap(a: Tensor, b: Tensor) -> float:
    return float((a.mT @ b).square().sum() / min(a.shape[1], b.shape[1]))
