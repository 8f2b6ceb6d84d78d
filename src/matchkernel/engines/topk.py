"""The top-k engine: each query attends to its k best keys, chosen by the kernel or by a cheaper one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.base import MatchKernel
from ..kernels.encoding import leaves
from ..kernels.feature_base import why_no_score
from ..masks import Visibility
from ._encoding import four, rebuild
from ._gather import Chunk, Plan, sizes
from ._gathered import attend_gathered
from .problem import Cost, Problem, product_flops, traffic, why_not_by_hand, zero_where_not
from .reference import Reference

SCORES = 2**20
"""Scores that are ranked at a time."""

TILE = 1024
"""Keys that stream past a tile of queries together."""

NUMBERS = 2**20
"""Numbers fetched at a time for the chosen keys and values."""


@dataclass(frozen=True, eq=False)
class TopK:
    """Each query attends to the k permitted keys with the highest score, and to no other.

    out_i = Σ_{j ∈ C_i} α_ij v_j,  C_i = the k best j by s_ij, or by the score of `by`;  α_i = normalizer(s_i over C_i)

    k: keys per query, at least 1; with k ≥ m the attention is exact. by: a MatchKernel that is cheap to compute and
    chooses for the call's kernel, which then scores the chosen alone; None (default) lets the call's kernel choose.
    A float mask is added before ranking. Of equal scores the earlier key is taken. What is permitted and has the score
    −∞ is not taken.

    The keys stream past the queries, so the choice takes n · m scores' time but no n × m table: n · k indices are held.
    The output, and the gradients of q, k, v, mask and parameters, are exact for the chosen keys. The choice has no
    gradient: what `by` learns must be taught by a loss of its own.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.1, for the cheap kernel that chooses.
    """

    k: int
    by: MatchKernel | None = None

    name = "topk"
    exact = False

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"TopK(k={self.k!r}): expected an integer of at least 1")
        if self.by is not None and not isinstance(self.by, MatchKernel):
            hint = "; it is a class, so add parentheses" if isinstance(self.by, type) else ""
            raise TypeError(f"TopK(by={self.by!r}): expected a MatchKernel{hint}")

    def refuse(self, problem: Problem) -> str | None:
        ranks = problem.kernel if self.by is None else self.by
        if (reason := why_no_score(ranks)) is not None:
            return f"{reason}, and keys are ranked by scores"
        return Reference().refuse(problem) or refuse_gathered(problem)

    def declines(self, problem: Problem) -> str | None:
        return "it approximates"

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        q, k, v = with_all_heads(problem)
        chosen, valid = self._choose(problem, q.detach(), k.detach())
        block_rows = max(1, NUMBERS // (chosen[:, :, 0].numel() * (k.shape[-1] + v.shape[-1])))
        chunks = [
            Chunk(rows, chosen[:, :, rows], valid[:, :, rows])
            for rows in torch.split(torch.arange(problem.visibility.queries, device=q.device), block_rows)
        ]
        seen = torch.zeros(*chosen.shape[:2], problem.visibility.keys, dtype=torch.int32, device=q.device)
        seen.scatter_add_(-1, chosen.flatten(-2), valid.flatten(-2).to(seen.dtype))
        sees = valid.any(-1)
        q, k, v = met(problem, sees, seen > 0, q, k, v)
        out = attend_gathered(problem, Plan.of(problem, 1, chunks), q, k, v)
        return finished(problem, sees, out)

    @torch.no_grad()
    def _choose(self, problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen keys (batch, heads, n, k), the best first, and whether each is permitted and real."""
        kernel, place, batch = problem.kernel if self.by is None else self.by, problem.visibility, problem.batch
        query, key = kernel.encode(
            q.to(problem.wide), k.to(problem.wide), place.query_position, place.key_position, up_to_row_shift=True
        )
        of_query, of_key = ([four(x, batch) for x in leaves(encoding)] for encoding in (query, key))
        plan = Plan.of(problem, 1, [])
        b, h = sizes(batch)
        width, n, m = min(self.k, place.keys), place.queries, place.keys
        rows = max(1, SCORES // (b * h * min(TILE, m)))
        keys, marks = [], []
        for start in range(0, n, rows):
            mine = slice(start, min(n, start + rows))
            tile = rebuild(query, [_cut(x, mine) for x in of_query])
            best = torch.full((b, h, mine.stop - start, 0), float("-inf"), dtype=problem.wide, device=q.device)
            where = torch.zeros(best.shape, dtype=torch.long, device=q.device)
            for first in range(0, m, TILE):
                theirs = slice(first, min(m, first + TILE))
                meeting = _meeting(plan, mine, theirs)
                if meeting.allowed is not None and not bool(meeting.allowed.any()):
                    continue
                scores = kernel.match(tile, rebuild(key, [_cut(x, theirs) for x in of_key]))
                if meeting.bias is not None:
                    scores = scores + meeting.bias
                if meeting.allowed is not None:
                    scores = torch.where(meeting.allowed, scores, float("-inf"))
                scores = scores.expand(b, h, mine.stop - start, theirs.stop - first)
                number = torch.arange(first, theirs.stop, device=q.device).expand(scores.shape)
                best, where = _best(torch.cat([best, scores], -1), torch.cat([where, number], -1), width)
            short = width - best.shape[-1]
            best = torch.nn.functional.pad(best, (0, short), value=float("-inf"))
            where = torch.nn.functional.pad(where, (0, short))
            real = best != float("-inf")
            # A place that nobody fills repeats the best key, which the query does see.
            keys.append(torch.where(real, where, where[..., :1]))
            marks.append(real)
        return torch.cat(keys, 2), torch.cat(marks, 2)

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, torch.finfo(problem.wide).bits // 8
        chosen = problem.batch.numel() * place.queries * min(self.k, place.keys)
        ranks = problem.kernel if self.by is None else self.by
        ranking, scoring = (
            ranks.flops_per_pair(problem.q.shape[-1], problem.k.shape[-1]),
            product_flops(problem, chosen),
        )
        ranked = problem.pairs
        if place.plain_causal:
            # Of the rows that see anything, m, m − 1, … keys: tiles of the future alone are not ranked.
            rows = min(place.queries, place.keys)
            ranked = problem.batch.numel() * (rows * place.keys - rows * (rows - 1) // 2)
        flops = None if ranking is None or scoring is None else ranking * ranked + scoring
        held = (problem.q.numel() + problem.k.numel() + problem.v.numel()) * size + chosen * 9
        return Cost(flops, traffic(problem) + 8 * chosen, held + 3 * (SCORES + NUMBERS) * size)

    def reason(self, problem: Problem) -> str:
        who = "the kernel itself" if self.by is None else repr(self.by)
        kept = min(self.k, problem.visibility.keys)
        return f"exact for the {kept} keys of each query that {who} scores highest; others are not seen"


def refuse_gathered(problem: Problem) -> str | None:
    """Why a problem cannot be computed from fetched keys, whatever the plan, or None."""
    if problem.dropout:
        return "dropout would have to draw the same weights again in the backward pass"
    return why_not_by_hand(problem)


def with_all_heads(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as `hide` gives them, with a head of keys for each of the queries."""
    q, k, v = problem.hide()
    if problem.groups > 1:
        k, v = (x.repeat_interleave(problem.groups, dim=-3) for x in (k, v))
    return q, k, v


def met(problem: Problem, sees: Tensor, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with zeros for queries that see nothing, sees (batch | 1, heads | 1, n), and for keys that nobody does,
    seen (…, m): no NaN can come from there."""
    if not bool(sees.all()):
        q = zero_where_not(_leading(sees, problem), q)
    if bool(seen.all()):
        return q, k, v
    seen = _leading(seen, problem)
    return q, zero_where_not(seen, k), zero_where_not(seen, v)


def _leading(x: Tensor, problem: Problem) -> Tensor:
    """x (batch | 1, heads | 1, tokens) with the call's leading dimensions, or ones, or none of them."""
    if not problem.batch:
        return x[0, 0]
    return x.reshape(*problem.batch[:-1], *x.shape[1:]) if x.shape[0] > 1 else x[0]


def finished(problem: Problem, sees: Tensor, out: Tensor) -> Tensor:
    """The output (batch, heads, n, d_v) in the call's shape and dtype, zeros for queries that see nothing."""
    if not bool(sees.all()):
        out = zero_where_not(sees, out)
    return out.reshape(*problem.batch, *out.shape[-2:]).to(problem.q.dtype)


def _meeting(plan: Plan, mine: slice, theirs: slice) -> Visibility:
    """Who may meet whom among a slice of the queries and one of the keys."""
    mask = None if plan.mask is None else _cut(plan.mask.detach(), mine)
    mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., theirs]
    own, other = plan.query_position[..., mine], plan.key_position[..., theirs]
    return Visibility(
        own.shape[-1], other.shape[-1], mask, plan.place.causal, plan.place.window, own, other, aligned=False
    )


def _cut(x: Tensor, tokens: slice) -> Tensor:
    """Tokens of x (batch | 1, heads | 1, tokens | 1, ·)."""
    return x[:, :, tokens] if x.shape[2] > 1 else x


def _best(scores: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row, the highest first, with their numbers; of equal ones those that stand first."""
    if scores.shape[-1] <= k:
        top, at = scores.sort(dim=-1, descending=True, stable=True)
        return top, numbers.gather(-1, at)
    top, at = scores.topk(k, dim=-1)
    last = top[..., -1:]
    # topk takes any of those that are as good as the last: where some are left over, the order of the keys decides.
    tied = ((scores == last) & (last != float("-inf"))).sum(-1) > (top == last).sum(-1)
    if bool(tied.any()):
        in_order = numbers[tied].argsort(dim=-1)
        best = scores[tied].gather(-1, in_order).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        at[tied] = in_order.gather(-1, best)
        top = scores.gather(-1, at)
    return top, numbers.gather(-1, at)
