"""This rank's queries against every rank's keys: blocks travel round, gradients go with them and come home."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.base import DotKernel
from . import _ring_block as block
from ._dot_softmax import fold, unfold
from ._fused_function import dense
from ._ring_circle import Circle, Pair
from ._ring_gather import gathered
from ._ring_plan import Piece, pieces
from .problem import Problem

Grads = list[Tensor | None]


@dataclass(frozen=True)
class Job:
    """What stays the same while blocks come and go."""

    circle: Circle
    problem: Problem
    kernel: DotKernel
    causal: bool
    query_position: Tensor
    key_positions: list[Tensor]
    """Of each rank."""
    factor: float
    """What multiplies the scores, where that is a plain number."""

    def encoded(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, key_position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Queries and one block as the fused kernel takes them, and the scale.

        With the whole score: what a row's blocks share must not depend on which block is at hand.
        """
        q, k = self.kernel.encode(q, k, self.query_position, key_position)
        scale = self.kernel.scale(q.shape[-1]) * self.factor
        if factor is not None:
            q = (q * factor).to(q.dtype)
        if scale <= 0.0:
            q, scale = q * scale, 1.0
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = (fold(x.to(dtype), self.problem) for x in (q, k, v))
        return q, k, v, scale

    def plan(self, owner: int) -> list[Piece]:
        """Which of this rank's queries meet which keys of `owner`."""
        return pieces(self.query_position, self.key_positions[owner], self.causal)

    def room(self, owner: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
        """Room for a rank's keys and values, which differ from this one's in the number of tokens alone."""
        tokens = len(self.key_positions[owner])
        first, second = (x.new_empty((*x.shape[:-2], tokens, x.shape[-1]), dtype=dtype) for x in (k, v))
        return first, second

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every rank's keys and values in the order in which they come by, this rank's own first.

        While a block is computed on, it is already on its way to the next rank, and the one after it on its way here.
        """
        circle = self.circle
        pair = k.contiguous(), v.contiguous()
        for step in range(circle.world):
            owner = (circle.rank - step) % circle.world
            last = step + 1 == circle.world
            if not last:
                following = self.room((owner - 1) % circle.world, k, v, k.dtype)
                what = f"keys and values, step {step + 1} of {circle.world - 1}"
                arrived = circle.exchange(pair, following, what)
            yield owner, *pair
            if not last:
                arrived()
                pair = following


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (…, n, d_v) in float32 or wider and log-sum-exp (…, n), −inf where a query met no key."""
    batch, wide = job.problem.batch, job.problem.wide
    shape = (batch[:-1].numel(), batch[-1] if batch else 1, q.shape[-2])
    out = q.new_zeros((*shape, v.shape[-1]), dtype=wide)
    logsumexp = q.new_full(shape, float("-inf"), dtype=wide)
    for owner, key, value in job.blocks(k, v):
        plan = job.plan(owner)
        if not plan:
            continue
        *_, scale = encoded = job.encoded(q, key, value, factor, job.key_positions[owner])
        for piece in plan:
            block.absorb(out, logsumexp, piece.rows, *block.partial(*encoded[:3], piece, scale))
    return unfold(out, job.problem, 2), unfold(logsumexp, job.problem, 1)


def backward(
    job: Job, grad: Tensor, grad_logsumexp: Tensor | None, inputs: tuple[Any, ...], out: Tensor, logsumexp: Tensor
) -> Grads:
    """Gradients of q, k, v, the factor and the parameters; of the last two what this rank's queries have to say."""
    circle, problem, (q, k, v, *rest) = job.circle, job.problem, inputs
    # A row that met nothing has no weight, whatever its score.
    logsumexp = torch.where(logsumexp == float("-inf"), 0.0, logsumexp)
    upstream = (
        fold(grad, problem),
        None if grad_logsumexp is None else _rows(grad_logsumexp, problem),
        fold(out, problem),
        _rows(logsumexp, problem),
    )
    own: Grads = [None, *(None for _ in rest)]
    kept: Grads = [None, None]
    incoming: Pair | None = None
    home: Callable[[], None] | None = None
    for owner, key, value in job.blocks(k, v):
        dq, dk, dv, *others = _of_block(job, owner, upstream, (q, key, value, *rest)) or [None] * (3 + len(rest))
        own = [_sum(total, more) for total, more in zip(own, (dq, *others), strict=True)]
        if owner == circle.rank:
            # What a rank finds for its own keys need not travel.
            kept = [dk, dv]
            continue
        # Nobody before the block's second rank has found anything; later ones add to what comes with it.
        if home is not None:
            home()
        outgoing = _added(incoming, (dk, dv), (key, value), problem.wide)
        incoming = job.room((owner - 1) % circle.world, k, v, problem.wide)
        home = circle.exchange(outgoing, incoming, "gradients of keys and values")
    if home is not None:
        home()
    of_own = _added(incoming, kept, (k, v), problem.wide)
    dq, *others = own
    return [torch.zeros_like(q) if dq is None else dq, *of_own, *others]


def _added(totals: Pair | None, shares: Sequence[Tensor | None], like: Pair, wide: torch.dtype) -> Pair:
    """The sum of both, either of which may be missing: in the place of `totals`, contiguous."""
    if totals is None:
        first, second = (
            torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
            if share is None
            else share.to(wide).contiguous()
            for x, share in zip(like, shares, strict=True)
        )
        return first, second
    for total, share in zip(totals, shares, strict=True):
        if share is not None:
            total += share
    return totals


def _of_block(
    job: Job, owner: int, upstream: tuple[Tensor, Tensor | None, Tensor, Tensor], inputs: tuple[Any, ...]
) -> Grads | None:
    """One block's share of all gradients, through the fused operator and then through the encoders."""
    plan = job.plan(owner)
    if not plan:
        return None
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        factor = None if inputs[3] is None else inputs[3].detach().requires_grad_()
        *folded, scale = job.encoded(q, k, v, factor, job.key_positions[owner])
    dtype = folded[0].dtype
    grad, grad_logsumexp, out, logsumexp = upstream
    grad, out = grad.to(dtype), out.to(dtype)
    detached = folded[0].detach(), folded[1].detach(), folded[2].detach()
    totals: Grads = [None, None, None]
    for piece in plan:
        shares = block.gradients(grad, grad_logsumexp, *detached, out, logsumexp, piece, scale)
        for index, where in enumerate((piece.rows, piece.keys, piece.keys)):
            totals[index] = _placed(totals[index], detached[index], where, shares[index], job.problem.wide)
    outputs = [(x, dx.to(dtype)) for x, dx in zip(folded, totals, strict=True) if x.requires_grad and dx is not None]
    wanted = [q, k, v, factor, *inputs[4:]]
    asked = [x for x in wanted if x is not None]
    found = torch.autograd.grad([x for x, _ in outputs], asked, [dx for _, dx in outputs], allow_unused=True)
    grads = iter(found)
    return [None if x is None else next(grads) for x in wanted]


def _placed(total: Tensor | None, like: Tensor, where: slice, share: Tensor, wide: torch.dtype) -> Tensor:
    """`total` and `share`, which is of some of the tokens alone, added up."""
    if total is None and share.shape == like.shape:
        return share
    if total is None:
        total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, wide))
    elif total.dtype != torch.promote_types(total.dtype, wide):
        total = total.to(wide)
    total[..., where, :] += share
    return total


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return total if more is None else more
    return total + more


def _rows(x: Tensor, problem: Problem) -> Tensor:
    return fold(x.unsqueeze(-1), problem).squeeze(-1)


def over_all(job: Job, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same from all keys gathered on every rank, dense, in operations that differentiate to any order."""
    lengths = [len(position) for position in job.key_positions]
    k, v = (gathered(job.circle, lengths, x) for x in (k, v))
    q, k, v, scale = job.encoded(q, k, v, factor, torch.cat(job.key_positions))
    bias = None
    if job.causal:
        visible = torch.cat(job.key_positions) <= job.query_position.unsqueeze(-1)
        bias = torch.where(visible, torch.zeros((), dtype=q.dtype, device=q.device), float("-inf"))[None, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights, logsumexp, _, v = dense(q.to(wide), k.to(wide), v.to(wide), bias, False, scale)
    return unfold(weights @ v, job.problem, 2), unfold(logsumexp, job.problem, 1)


class RingAttention(torch.autograd.Function):
    """Forward and first derivative by blocks that travel; a second derivative gathers all keys and goes dense."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, logsumexp = forward(job, q, k, v, factor)
        ctx.job = job
        ctx.save_for_backward(q, k, v, factor, *parameters, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, logsumexp = ctx.saved_tensors
        # Every rank takes part in every backward pass, whether or not its own output matters.
        grad = torch.zeros_like(out) if grad is None else grad
        if torch.is_grad_enabled():
            found = _again(ctx.job, grad, grad_logsumexp, inputs)
        else:
            found = backward(ctx.job, grad, grad_logsumexp, tuple(inputs), out, logsumexp)
        return None, *(None if x is None or dx is None else dx.to(x.dtype) for x, dx in zip(inputs, found, strict=True))


def _again(job: Job, grad: Tensor, grad_logsumexp: Tensor | None, inputs: list[Any]) -> Grads:
    out, logsumexp = over_all(job, *inputs[:4])
    outputs, upstream = [out], [grad]
    if grad_logsumexp is not None:
        outputs, upstream = [out, logsumexp], [grad, grad_logsumexp]
    asked = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(outputs, asked, upstream, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
