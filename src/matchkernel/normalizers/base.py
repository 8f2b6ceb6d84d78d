"""What a normaliser is: how scores become weights, all at once and tile by tile."""

from __future__ import annotations

from torch import Tensor, nn

from ..kernels.values import HeadValue

State = tuple[Tensor, ...]
"""What is remembered of each row between one tile of keys and the next; every entry has shape (…, n)."""


class Normalizer(nn.Module):
    """Turns a row of scores into a row of weights.

    weights = weigh(factor · score + float mask + shift), with −inf where a query may not attend

    `factor(visible)` is what multiplies the score before a float mask is added, `shift(visible)` what is added to the
    row; `visible` holds how many keys each query may attend to. A member of the softmax family also says what is left
    of a plain softmax once its log-sum-exp is known, so that an engine can compute it without forming the table:

    weights = softmax(factor · score + float mask + shift) · remainder(logsumexp)

    A normaliser with `online` = True also has a form for engines that see the keys one tile after another, and hold
    neither the table nor any other tile. The output is `remainder`'s part short of Σ_j α_ij v_j:

    state = start(rows); for each tile: state, w, carry = absorb(state, scores), accumulated = carry · accumulated + w v
    out, statistic = close(state, accumulated)

    Backward, the weights of a tile come again from its scores and the row's statistic, and `score_gradient` takes the
    gradient of the weights, v dOᵀ, to that of the scores.
    """

    shift_invariant: bool = False
    """Whether a constant added to a whole row of scores leaves the weights as they are."""

    counts_keys: bool = False
    """Whether `factor` or `shift` needs the number of visible keys."""

    @property
    def proportional(self) -> bool:
        """Whether each weight is e^score over one sum for the row: what has a weight κ, and no score, is then weighed
        by `share`."""
        return False

    online: bool = False
    """Whether the weights can be had tile by tile: `start`, `absorb`, `close`, `again` and `score_gradient` exist."""

    def factor(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        """The multiplier of the scores (…, n, m): a number or a tensor (…, n | 1, 1) in the dtype of `like`."""
        return 1.0

    def shift(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        """What is added to the scores (…, n, m): a number or a tensor (…, n | 1, 1) in the dtype of `like`."""
        return 0.0

    def weigh(self, scores: Tensor) -> Tensor:
        """Weights (…, n, m) from scores that already carry factor, mask and shift; a row of −inf gives zeros."""
        raise NotImplementedError(f"{type(self).__name__} must define weigh(scores)")

    def share(self, product: Tensor, log_scale: Tensor) -> Tensor:
        """Weights (…, n, m) from κ = product · e^log_scale in the place of e^score, of either sign.

        log_scale (…, n, m) is −inf, and the product finite, where a query may not attend. A row whose sum is 0 gives
        zeros. Only for `proportional` normalisers.
        """
        raise NotImplementedError(f"{self!r}: its weights are not proportional to e^score")

    def remainder(self, logsumexp: Tensor) -> Tensor | None:
        """What multiplies a plain softmax's row, given its log-sum-exp (…, n); None for nothing."""
        return None

    def start(self, rows: Tensor) -> State:
        """The state before any key, for rows (…, n), in the dtype and on the device of `rows`, whose entries are not
        read."""
        raise self._not_online("start(rows)")

    def absorb(self, state: State, scores: Tensor) -> tuple[State, Tensor, Tensor | None]:
        """The state after one more tile, the tile's weights, and what to multiply the sum over earlier tiles with.

        scores (…, n, t) carry factor, mask and shift, −inf where a query may not attend, t ≥ 1. The weights (…, n, t)
        are in units that `close` settles; they are 0 where the score is −inf. The multiplier is (…, n), or None for 1.
        """
        raise self._not_online("absorb(state, scores)")

    def close(self, state: State, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        """The output (…, n, d_v) from the sum of weights times values, and the row's statistic (…, n).

        A row that saw no key gives zeros and a finite statistic.
        """
        raise self._not_online("close(state, accumulated)")

    def again(self, scores: Tensor, statistic: Tensor) -> Tensor:
        """The final weights (…, n, t) of a tile whose rows' statistic (…, n) is known."""
        raise self._not_online("again(scores, statistic)")

    def score_gradient(self, weights: Tensor, grad_weights: Tensor, row: Tensor) -> Tensor:
        """The gradient of a tile's scores (…, n, t), from its final weights and their gradient.

        row (…, n, 1) is Σ_c dO_c O_c − d statistic, summed over the coordinates of the output.
        """
        raise self._not_online("score_gradient(weights, grad_weights, row)")

    def _not_online(self, call: str) -> NotImplementedError:
        name = type(self).__name__
        why = f"declares online = True and must define {call}" if self.online else "needs whole rows of scores"
        return NotImplementedError(f"{name} {why}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
