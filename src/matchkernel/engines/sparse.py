"""The sparse engine: windows, in blocks of queries and the keys around them, without an n × m table or mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.base import DotKernel
from ..masks import Visibility, check_window
from ._dot_softmax import additive, encoded, finished, form, merged, refuse, with_logsumexp
from ._thinned import Thinned
from ._window_function import attend_within
from .fused import call
from .problem import Cost, Problem, product_flops, traffic

FEW = 2**17
"""Scores of a head up to which "auto" leaves a window of several blocks to others: blocks cost more calls."""

LEAST = -1e30
"""A log-sum-exp of nothing: its part weighs 0 beside any other, and two of them make no NaN."""

SHARE = 0.5
"""The part of the table that blocks must not exceed for "auto" to choose them."""


@dataclass(frozen=True)
class Sparse:
    """Blocks of queries meet the keys that their windows cover, as overlapping views, in one call of the fused kernel.

    out_i = Σ_j α_ij v_j over the keys j within the window of i, as `attend` defines it

    dilation: r for keys at distances 0, r, 2r, … on either side that the window allows; 1 by default. The window counts
    keys, so w of them reach back (w − 1) r tokens.
    sinks: how many of the first keys every query sees beside its window, 0 by default. Causal order holds for them.

    For a DotKernel under a softmax, positions by default, a window that is limited on both sides (causal order limits
    one), and a mask over the keys alone. As it stands it is exact, and "auto" chooses it where windows are much shorter
    than the keys. With a dilation or sinks it sees other keys than the call says, and is exact for those: `mask` gives
    them. The first derivative takes the fused kernel's own, block by block.
    Cost: O((n + m)(d + d_v)) memory and O(n w (d + d_v)) time; blocks compute about 1.5 times the scores of a window.
    Source: Beltagy et al. 2020 (Longformer), section 3.1, for windows and their dilation; Xiao et al. 2024
    (StreamingLLM), section 3.2, for the first keys.
    """

    dilation: int = 1
    sinks: int = 0

    name = "sparse"

    def __post_init__(self) -> None:
        for name, least in (("dilation", 1), ("sinks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Sparse({name}={value!r}): expected an integer of at least {least}")

    @property
    def exact(self) -> bool:
        """Whether it sees the keys that the call says, and no others."""
        return self.dilation == 1 and self.sinks == 0

    def mask(self, n: int, m: int, window: int | tuple[int | None, int | None] | None, causal: bool = False) -> Tensor:
        """Who meets whom, bool (n, m): what the reference would be given as a mask. Arguments as of `attend`."""
        positions = torch.arange(m - n, m), torch.arange(m)
        place = Visibility(n, m, None, causal, check_window(window), *positions, aligned=True)
        if (reason := _unlimited(place)) is not None:
            raise ValueError(f"window={window!r}: {reason}")
        table = self._seen(place).by_position
        assert table is not None
        return table

    def concerns(self, problem: Problem) -> bool:
        """Whether there is a window at all."""
        return problem.visibility.window is not None

    def refuse(self, problem: Problem) -> str | None:
        place = problem.visibility
        if (reason := _unlimited(place)) is not None:
            return reason
        if (reason := refuse(problem)) is not None:
            return reason
        if not place.aligned:
            return "positions of one's own put no order on the rows"
        if not place.by_key:
            return "the mask has a row per query"
        if self.sinks and not with_logsumexp(problem.q.device):
            return "the first keys are merged by the log-sum-exp, which only torch's private CPU call returns"
        return None

    def declines(self, problem: Problem) -> str | None:
        place = problem.visibility
        table, band = place.queries * place.keys, self._seen(place).band
        if table <= FEW and place.queries > band.block:
            return f"the whole table of a head has only {table} scores"
        share = band.scores() / table
        if share > SHARE:
            # No format of a float: a compiler that traces any n has none.
            return f"its blocks would compute more than {SHARE:.0%} of the table"
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        positions = problem.visibility.query_position, problem.visibility.key_position
        problem, place = self._near(problem)
        q, k, v, scale = encoded(problem, (positions[0], positions[1][-place.keys :]))
        bias = None if place.mask is None else additive(place.mask, problem, q.dtype).squeeze(-2)
        s = place.sinks
        near, logsumexp = attend_within(
            q, k[:, :, s:], v[:, :, s:], None if bias is None else bias[..., s:], place.band, scale
        )
        if not s:
            return finished(near, logsumexp, problem)
        first, of_first = _first(q, k[:, :, :s], v[:, :, :s], None if bias is None else bias[..., :s], place, scale)
        assert logsumexp is not None and of_first is not None
        logsumexp = _where(place.sees_near, logsumexp, problem)
        of_first = _where(place.of_sinks.query_sees, of_first, problem)
        return finished(*merged(near, logsumexp, first, of_first), problem)

    def cost(self, problem: Problem) -> Cost:
        place = self._seen(problem.visibility)
        size, heads = problem.q.element_size(), problem.batch.numel()
        pairs = heads * (place.band.scores() + place.queries * place.sinks)
        rows = heads * place.queries
        width = max(problem.q.shape[-1], problem.v.shape[-1])
        # Output and log-sum-exp, and one copy of whatever was padded or encoded.
        held = rows * (width * size + 4) + (problem.q.numel() + problem.k.numel()) * size
        return Cost(product_flops(replace(problem, kernel=form(problem)), pairs), traffic(problem), held)

    def reason(self, problem: Problem) -> str:
        band = self._seen(problem.visibility).band
        when = "" if isinstance(problem.kernel, DotKernel) else " where no key is later than its query"
        changed = [f"dilation {self.dilation}"] if self.dilation > 1 else []
        changed += [f"a view of {self.sinks} first keys"] if self.sinks else []
        what = f"; {' and '.join(changed)} make it another window" if changed else ""
        return (
            f"{problem.kernel!r} is an inner product of encodings{when}, and blocks of {band.block} queries meet the "
            f"{band.span} keys around them in torch's fused kernel{what}"
        )

    def _near(self, problem: Problem) -> tuple[Problem, Thinned]:
        """The problem without the keys before every window, as it is when a token is decoded, and who sees whom in it.

        Positions there are counted from the first key that is left.
        """
        place = problem.visibility
        left, _ = place.sides
        assert left is not None
        far = 0 if self.sinks else place.keys - place.queries - left * self.dilation
        if far > 0:
            mask = place.mask if place.mask is None or place.mask.shape[-1] == 1 else place.mask[..., far:]
            place = replace(
                place, keys=place.keys - far, mask=mask, query_position=place.query_position - far,
                key_position=place.key_position[:-far],
            )  # fmt: skip
            problem = replace(problem, k=problem.k[..., far:, :], v=problem.v[..., far:, :])
        seen = self._seen(place)
        return replace(problem, visibility=place if self.exact else seen), seen

    def _seen(self, place: Visibility) -> Thinned:
        return Thinned.of(place, self.dilation, self.sinks)


def _unlimited(place: Visibility) -> str | None:
    if place.window is None:
        return "there is no window"
    if None in place.sides:
        return "the window has no limit on one side"
    return None


def _first(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, place: Thinned, scale: float
) -> tuple[Tensor, Tensor | None]:
    """All queries against the first keys; those that stand among these, in causal order, against fewer."""
    among = min(place.queries, place.sinks + place.queries - place.keys) if place.causal else 0
    bias = None if bias is None else bias.unsqueeze(-2)
    if among <= 0:
        return call(q, k, v, bias, False, scale)
    before = place.of_sinks.by_position
    assert before is not None
    ordered = torch.where(before[:among], torch.zeros((), dtype=q.dtype, device=q.device), float("-inf"))[None, None]
    parts = [call(q[:, :, :among], k, v, ordered if bias is None else bias + ordered, False, scale)]
    if among < place.queries:
        parts.append(call(q[:, :, among:], k, v, bias, False, scale))
    sums = [part[1] for part in parts if part[1] is not None]
    return torch.cat([part[0] for part in parts], 2), torch.cat(sums, 2) if sums else None


def _where(seen: Tensor | None, logsumexp: Tensor, problem: Problem) -> Tensor:
    """The log-sum-exp (batch, heads, n), of nothing where a query sees nothing, for seen (…, n | 1)."""
    if seen is None:
        return logsumexp
    rows = seen.expand(*problem.batch, logsumexp.shape[-1]).reshape(logsumexp.shape)
    return torch.where(rows, logsumexp, LEAST)
