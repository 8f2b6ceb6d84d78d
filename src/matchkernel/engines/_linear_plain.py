"""Linear attention to both sides by a kernel's own feature map: head by head, features taken as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._opaque import product
from ..kernels.feature_maps import FeatureMap, Mapped
from ._linear_chunks import finite, with_one
from ._linear_function import Job, again, uncast

FEATURES = 2**17
"""Features worked on at a time: beside what becomes of them they lie in a core's own cache."""
LARGEST_SHARE = 1e15
"""Of one over a row's sum: beyond it, what was too small for a float may have mattered."""


@dataclass(frozen=True)
class Result:
    """The output (b, h, n, d_v), the row's factor (b, h, n, 1), and for each head of the keys Σ_j [v_j, 1]ᵀ φ(k_j)
    (b, h_k, d_v + 1, f) with its unit (b, h_k, 1, 1)."""

    out: Tensor
    share: Tensor
    total: Tensor
    unit: Tensor


def attend(job: Job, tensors: tuple[Tensor | None, ...], recorded: bool) -> Tensor | None:
    """The output, with its gradients if they are `recorded`; None where this is not the way to it."""
    q, k, v, bias, one, *_ = tensors
    assert q is not None and k is not None and v is not None
    whole = q.shape[:2] == (job.batch, job.heads) and k.shape[:2] == v.shape[:2] == (job.batch, k.shape[1])
    if job.mapping is None or job.layout.causal or bias is not None or one is not None or not whole:
        return None
    with torch.no_grad():
        found = run(job, job.mapping, q, k, v)
    if found is None or not recorded:
        return None if found is None else found.out
    return PlainLinear.apply(job, job.mapping, found, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def run(job: Job, mapping: FeatureMap, q: Tensor, k: Tensor, v: Tensor) -> Result | None:
    """None where a feature or a row's sum has left the range in which features may be taken as they are."""
    wide, heads, width = job.wide, k.shape[1], job.width
    out, share = (q.new_empty(*q.shape[:-1], w, dtype=wide) for w in (width, 1))
    total = q.new_zeros(job.batch, heads, width + 1, job.features, dtype=wide)
    unit = q.new_full((job.batch, heads, 1, 1), -torch.inf, dtype=wide)
    for b, g, group in _heads(job, heads):
        for span in _spans(k, job.features):
            mapped = mapping.features(k[b, g, span].to(wide))
            if mapped is None:
                return None
            _absorb(total[b, g], unit[b, g], mapped, v[b, g, span].to(wide))
        for h, span in itertools.product(group, _spans(q, job.features)):
            mapped = mapping.features(q[b, h, span].to(wide))
            if mapped is None:
                return None
            sums = product(mapped.values, total[b, g])
            torch.reciprocal(sums[:, -1:], out=share[b, h, span])
            torch.mul(sums[:, :-1], share[b, h, span], out=out[b, h, span])
    if not bool(share.abs().amax() < LARGEST_SHARE):
        return None
    return Result(out, share, total, unit)


class PlainLinear(torch.autograd.Function):
    """What `run` found, with its gradients."""

    @staticmethod
    def forward(ctx: Any, job: Job, mapping: FeatureMap, found: Result, *tensors: Tensor | None) -> Tensor:
        # The output only as a saved tensor: a context that holds it otherwise is held by it, and neither is ever freed.
        ctx.job, ctx.mapping, ctx.rest = job, mapping, (found.share, found.total, found.unit)
        # The buffers for `again`, which calls the kernel: one written to since is then an error.
        ctx.save_for_backward(*tensors, *(x for _, x in job.buffers), found.out)
        return found.out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        tensors, out = saved[: len(needed)], saved[-1]
        with uncast(out):
            if torch.is_grad_enabled():
                return None, None, None, *again(ctx.job, tensors, needed, grads[0])
            pulled = _pull(ctx.job, ctx.mapping, tensors, grads[0], Result(out, *ctx.rest))
        return None, None, None, *(x if need else None for x, need in zip(pulled, needed, strict=True))


def _pull(
    job: Job, mapping: FeatureMap, tensors: tuple[Tensor, ...], grad: Tensor, found: Result
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, *_ = tensors
    wide = job.wide
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for b, g, group in _heads(job, k.shape[1]):
        total, unit = found.total[b, g], found.unit[b, g]
        # To the keys, the sum of the rows Σ_i [G_i]ᵀ φ(q_i) is what the sum of the keys is to the queries.
        rows = torch.zeros_like(total)
        for h, span in itertools.product(group, _spans(q, job.features)):
            x = q[b, h, span].to(wide)
            mapped = _mapped(mapping, x)
            given = _grad_sums(grad[b, h, span], found.out[b, h, span], found.share[b, h, span])
            rows += product(given.mT, mapped.values.mT)
            mapping.pull(x, mapped.values, product(given, total.mT), d_q[b, h, span])
        for span in _spans(k, job.features):
            x, value = k[b, g, span].to(wide), v[b, g, span].to(wide)
            mapped = _mapped(mapping, x)
            if mapped.log_scale is None:
                d_v[b, g, span] = product(mapped.values, rows[:-1])
                d_values = product(value, rows[:-1].mT, rows[-1])
            else:
                weight = (mapped.log_scale - unit).exp_()
                torch.mul(product(mapped.values, rows[:-1]), weight, out=d_v[b, g, span])
                d_values = product(with_one(value, weight), rows.mT)
            mapping.pull(x, mapped.values, d_values, d_k[b, g, span])
    return d_q, d_k, d_v, None, None


def _absorb(total: Tensor, unit: Tensor, mapped: Mapped, value: Tensor) -> None:
    """Add some keys to the sums (d_v + 1, f), whose unit (1, 1) is the largest log scale so far."""
    values, log_scale = mapped
    if log_scale is None:
        unit.zero_()
        total[:-1] += product(value.mT, values.mT)
        total[-1] += values.sum(dim=0)
        return
    largest = torch.maximum(unit, log_scale.amax(dim=0, keepdim=True))
    total *= (unit - finite(largest)).exp_()
    unit.copy_(largest)
    total += product(with_one(value, (log_scale - largest).exp_()).mT, values.mT)


def _grad_sums(grad: Tensor, out: Tensor, share: Tensor) -> Tensor:
    """The gradients of some rows' numerators and sums, (tokens, d_v + 1)."""
    both = out.new_empty(len(grad), grad.shape[-1] + 1)
    torch.mul(grad, share, out=both[:, :-1])
    torch.mul((grad * out).sum(dim=-1, keepdim=True).neg_(), share, out=both[:, -1:])
    return both


def _mapped(mapping: FeatureMap, x: Tensor) -> Mapped:
    mapped = mapping.features(x)
    assert mapped is not None, "they were in range when the output was computed"
    return mapped


def _heads(job: Job, heads: int) -> Iterator[tuple[int, int, range]]:
    """Every head of the keys, with the heads of the queries that read it."""
    group = job.heads // heads
    for b, g in itertools.product(range(job.batch), range(heads)):
        yield b, g, range(g * group, (g + 1) * group)


def _spans(x: Tensor, features: int) -> list[slice]:
    step = max(256, FEATURES // features)
    return [slice(start, start + step) for start in range(0, x.shape[-2], step)]
