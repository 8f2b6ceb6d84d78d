"""The blocks engine: attention within a block pattern, never forming the n × m table."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import BlockPattern
from . import _flex, _gathered_fused
from ._gather import Chunk, Plan
from ._gathered import attend_gathered
from .problem import Cost, Problem, product_flops, traffic
from .reference import Reference
from .topk import finished, met, refuse_gathered, with_all_heads

PAIRS = 2**18
"""Scores of all heads that are held at a time."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Attention among the pairs of a `BlockPattern`, of which the call's causal order, window and masks keep theirs.

    out_i = Σ_j α_ij v_j over the keys j that pattern and call permit; exactly what `mask=pattern.mask(n, m)` gives.

    Any kernel and any normaliser. Each block of queries is given its blocks of keys, a few blocks of queries at a time:
    an inner product under a softmax goes through torch's fused kernel, on CUDA through FlexAttention, and everything
    else scores what it is given in plain operations. The backward does the same again, from the output.
    Memory: O(n + m), for a bounded number of blocks per row and for any other, and the pattern's own table.
    Time: proportional to the pairs of the pattern, whole blocks counted.
    Source: Child et al. 2019 (Sparse Transformers); Zaheer et al. 2020 (BigBird), appendix, for gathering blocks.
    """

    pattern: BlockPattern

    name = "blocks"
    exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, BlockPattern):
            raise TypeError(f"Blocks(pattern={self.pattern!r}): expected a BlockPattern")

    def refuse(self, problem: Problem) -> str | None:
        place, table = problem.visibility, self.pattern.table
        if (reason := Reference().refuse(problem) or refuse_gathered(problem)) is not None:
            return reason
        heads = problem.batch[-1] if problem.batch else 1
        if table.dim() == 3 and table.shape[0] not in (1, heads):
            return f"{self.pattern!r} is for {table.shape[0]} heads, and there are {heads}"
        return self.pattern.misfit(place.queries, place.keys)

    def declines(self, problem: Problem) -> str | None:
        return "it leaves pairs out"

    def compiles(self, problem: Problem) -> bool:
        return _flex.takes(problem, self.pattern.block)

    def run(self, problem: Problem) -> Tensor:
        plan = Plan.of(problem, self.pattern.block, self._chunks(problem))
        visible, seen = plan.census()
        q, k, v = met(problem, visible > 0, seen, *with_all_heads(problem))
        if _flex.takes(problem, self.pattern.block):
            out = _flex.attend(problem, plan, self.pattern.table, visible, q, k, v)
        elif _gathered_fused.takes(problem):
            out = _gathered_fused.attend(problem, plan, visible, q, k, v)
        else:
            out = attend_gathered(problem, plan, q, k, v)
        return finished(problem, visible > 0, out)

    def _chunks(self, problem: Problem) -> list[Chunk]:
        """Query blocks with equally many key blocks together, as many as the budget holds."""
        block, device = self.pattern.block, problem.q.device
        table = self.pattern.table.to(device)
        table = table if table.dim() == 3 else table[None]
        most = table.sum(-1).amax(0).tolist()
        alike: dict[int, list[int]] = defaultdict(list)
        for row, count in enumerate(most):
            if count:
                alike[count].append(row)
        chunks = []
        for count, rows in alike.items():
            together = max(1, PAIRS // (problem.batch.numel() * block * block * count))
            for own in torch.split(torch.tensor(rows, device=device), together):
                # A stable sort of booleans lists the blocks in their order, the pattern's before the others.
                marks, keys = table[:, own].to(torch.uint8).sort(dim=-1, descending=True, stable=True)
                valid = marks[..., :count].bool()
                keys = torch.where(valid, keys[..., :count], keys[..., :1])
                chunks.append(Chunk(own, keys[None], valid[None]))
        return chunks

    def cost(self, problem: Problem) -> Cost:
        size = torch.finfo(problem.wide).bits // 8
        pairs = int(problem.pairs * self.pattern.density)
        rows = problem.batch.numel() * problem.visibility.queries
        held = problem.q.numel() + problem.k.numel() + problem.v.numel() + rows * (problem.v.shape[-1] + 1)
        return Cost(product_flops(problem, pairs), traffic(problem), (held + 4 * PAIRS) * size)

    def reason(self, problem: Problem) -> str:
        return f"exact for the pairs of its pattern, {self.pattern.density:.3g} of all; others are not seen"
