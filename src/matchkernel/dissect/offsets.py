"""How far a head's scores depend on the offset j − i alone, or on the key alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reading import Reading
from .rows import as_readings, content, permitted


@dataclass(frozen=True, eq=False)
class OffsetProfile:
    """A head's scores as a function of the offset: s_ij ≈ a_i + g(j − i), and its mean weight at each offset.

    L layers, h heads, K offsets at which at least one pair was counted.

    Attributes:
        offsets: (K,) int64, j − i in tokens, rising; −1 is the token before.
        count: (K,) int64, pairs counted at each.
        score: (L, h, K), g by least squares with a free a_i for each row. A softmax cannot see the a_i, and g is
            determined up to a constant: its mean over the counted pairs is 0.
        mean_score: (L, h, K), the plain mean of the scores at each offset, rows not centred.
        weight: (L, h, K), the mean weight at each offset.
        explained: (L, h), the share of the within-row variance of the scores that g explains, in sample:
            1 − Σ (s_ij − a_i − g)² / Σ (s_ij − s̄_i)²; 1 for a score that depends on the offset alone, NaN for constant
            rows.
        chance: what `explained` would be in the mean for scores that are independent noise: fitted numbers over degrees
            of freedom. Not small for a single short text.
    """

    offsets: Tensor
    count: Tensor
    score: Tensor
    mean_score: Tensor
    weight: Tensor
    explained: Tensor
    chance: float

    def __repr__(self) -> str:
        layers, heads = self.explained.shape
        span = f"{int(self.offsets[0])} … {int(self.offsets[-1])}"
        return f"OffsetProfile(offsets {span}, {int(self.count.sum())} pairs, {layers} layers of {heads} heads)"

    def at(self, offset: int) -> int:
        """The column of an offset. Raises ValueError where no pair was counted."""
        found = (self.offsets == offset).nonzero()
        if not len(found):
            raise ValueError(
                f"offset={offset}: no pair was counted there; "
                f"the profile has {int(self.offsets[0])} … {int(self.offsets[-1])}"
            )
        return int(found)

    @property
    def adjusted(self) -> Tensor:
        """(L, h): `explained` less what chance gives, 1 − (1 − explained) / (1 − chance); 0 in the mean for noise."""
        return 1 - (1 - self.explained) / (1 - self.chance)


@dataclass(frozen=True, eq=False)
class KeyShare:
    """The share of the within-row variance of the scores that the key alone explains: s_ij ≈ a_i + b_j.

    explained: (L, h), in sample, with one b_j for each token of each text; chance: as in `OffsetProfile`.
    """

    explained: Tensor
    chance: float

    @property
    def adjusted(self) -> Tensor:
        """(L, h): `explained` less what chance gives, 1 − (1 − explained) / (1 − chance)."""
        return 1 - (1 - self.explained) / (1 - self.chance)


def offset_profile(readings: Reading | Iterable[Reading], *, marks: bool = False) -> OffsetProfile:
    """The offset profile g(j − i) of every head, over all texts together, and how much of the scores it explains.

    Args:
        readings: of one model; read one at a time, so a generator keeps memory small.
        marks: True counts the model's own marks ([CLS], [SEP]) as rows and keys too. Without, pairs of content tokens
            only: a sink at the start would otherwise be spread over all offsets.

    Raises:
        ValueError: no readings; no row with two keys to compare; a mask that differs between heads.

    Cost: O(L h n²) per text, and one decomposition of a K × K matrix, K ≤ 2n − 1.
    Source: the model s_ij = a_i + g(j − i) is two-way analysis of variance without interaction.
    """
    fits = [
        _fit(reading, lambda n: torch.arange(n) - torch.arange(n)[:, None] + n - 1, lambda n: 2 * n - 1, marks)
        for reading in as_readings(readings)
    ]
    fit = _together(fits)
    g, gained, rank = fit.solve()
    seen = fit.count > 0
    count, reach = fit.count[seen], len(fit.count) // 2
    g = g[..., seen]
    return OffsetProfile(
        offsets=torch.arange(-reach, reach + 1, device=seen.device)[seen],
        count=count,
        score=g - (g * count).sum(-1, keepdim=True) / count.sum(),
        mean_score=fit.score[..., seen] / count,
        weight=fit.weight[..., seen] / count,
        explained=gained / fit.energy,
        chance=rank / fit.freedom,
    )


def key_share(readings: Reading | Iterable[Reading], *, marks: bool = False) -> KeyShare:
    """How much of the within-row variance of the scores is the key's alone: how loud a token is, whoever asks.

    Arguments, errors and cost as in `offset_profile`. What neither this nor the offset explains takes both tokens.
    """
    gained, energy, rank, freedom = [], [], 0, 0
    for reading in as_readings(readings):
        fit = _fit(reading, lambda n: torch.arange(n).expand(n, n), lambda n: n, marks)
        _, more, fitted = fit.solve()
        gained.append(more)
        energy.append(fit.energy)
        rank, freedom = rank + fitted, freedom + fit.freedom
    _check_freedom(freedom)
    return KeyShare(torch.stack(gained).sum(0) / torch.stack(energy).sum(0), rank / freedom)


@dataclass(frozen=True, eq=False)
class _Fit:
    """The normal equations of s_ij ≈ a_i + g[index_ij], the a_i already eliminated, and sums over the pairs.

    gram: (K, K). moment: (L, h, K). energy: (L, h), Σ (s_ij − s̄_i)². freedom: pairs less rows.
    count: (K,). score, weight: (L, h, K), sums.
    """

    gram: Tensor
    moment: Tensor
    energy: Tensor
    freedom: int
    count: Tensor
    score: Tensor
    weight: Tensor

    def solve(self) -> tuple[Tensor, Tensor, int]:
        """g (L, h, K), the sum of squares that it takes away (L, h), and how many numbers were fitted."""
        # Singular, since a constant can pass from g to the a_i: the pseudo-inverse takes the smallest g.
        g = self.moment @ torch.linalg.pinv(self.gram, hermitian=True)
        return g, (g * self.moment).sum(-1), int(torch.linalg.matrix_rank(self.gram, hermitian=True))

    def padded(self, size: int) -> _Fit:
        """The same with room for `size` offsets, 0 in the middle."""
        by = (size - len(self.count)) // 2
        return _Fit(
            pad(self.gram, (by,) * 4), pad(self.moment, (by, by)), self.energy, self.freedom,
            pad(self.count, (by, by)), pad(self.score, (by, by)), pad(self.weight, (by, by)),
        )  # fmt: skip


def _together(fits: list[_Fit]) -> _Fit:
    """One fit to the pairs of all texts."""
    size = max(len(fit.count) for fit in fits)
    wide = [fit.padded(size) for fit in fits]

    def total(name: str) -> Tensor:
        return torch.stack([getattr(fit, name) for fit in wide]).sum(0)

    freedom = sum(fit.freedom for fit in wide)
    _check_freedom(freedom)
    return _Fit(
        total("gram"), total("moment"), total("energy"), freedom, total("count"), total("score"), total("weight")
    )


def _check_freedom(freedom: int) -> None:
    if freedom < 1:
        raise ValueError("readings: expected a row with at least two keys that count; a longer text, or marks=True")


def _fit(reading: Reading, index: Callable[[int], Tensor], size: Callable[[int], int], marks: bool) -> _Fit:
    """Collect one text's normal equations; index (n, n) says which of the `size` values of g a pair has."""
    n, device = len(reading.tokens), reading.scores.device
    allowed = permitted(reading)
    if allowed.shape[:2] != (1, 1):
        raise ValueError("readings: the mask differs between heads; expected the same one for all")
    counted = content(reading.tokens).to(device) | marks
    pairs = allowed[0, 0] & counted & counted[:, None]
    at = index(n).to(device)
    rows = torch.zeros(n, size(n), dtype=torch.float64, device=device).scatter_add_(1, at, pairs.double())
    keys = pairs.sum(-1, keepdim=True)
    scores = reading.scores.double().masked_fill(~pairs, 0)
    centred = (scores - scores.sum(-1, keepdim=True) / keys.clamp(min=1)).masked_fill(~pairs, 0)

    def collect(table: Tensor) -> Tensor:
        sums = torch.zeros(*table.shape[:2], size(n), dtype=torch.float64, device=device)
        return sums.index_add_(-1, at.flatten(), table.flatten(-2))

    return _Fit(
        gram=rows.sum(0).diag() - rows.mT @ (rows / keys.clamp(min=1)),
        moment=collect(centred),
        energy=centred.square().sum((-2, -1)),
        freedom=int((keys - 1).clamp(min=0).sum()),
        count=rows.sum(0).long(),
        score=collect(scores),
        weight=collect(reading.weights.double().masked_fill(~pairs, 0)),
    )
