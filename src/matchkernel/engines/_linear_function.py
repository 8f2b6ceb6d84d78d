"""Linear attention whose feature maps are evaluated where they are used, with a backward that evaluates them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.encoding import leaves
from ..kernels.feature_base import FeatureKernel
from ..kernels.feature_maps import FeatureMap, Mapped
from ._linear_chunks import Backward, Head, Layout, Pull, Sums, backward, forward

LOST = 1e-30
"""A row's sum in units of the largest key so far, from which on what was too small for a float may have mattered."""


class Maps(nn.Module):
    """Both feature maps of a kernel, as one module whose parameters can be given from outside."""

    def __init__(self, kernel: FeatureKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, of_query: bool, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        encode = self.kernel.encode_query if of_query else self.kernel.encode_key
        values, log_scale = leaves(encode(x, position))
        return values, log_scale


@dataclass
class Job:
    """What the Function needs beside its tensors; `operands` of them, the parameters last."""

    maps: Maps
    names: tuple[str, ...]
    buffers: tuple[tuple[str, Tensor], ...]
    """Those of `maps` when the call was made."""
    positive: bool
    layout: Layout
    batch: int
    heads: int
    width: int
    features: int
    wide: torch.dtype
    query_position: Tensor
    key_position: Tensor
    """(batch | 1, heads | 1, tokens)"""
    mapping: FeatureMap | None
    """The map that the kernel ships, if any."""
    exactly: Callable[..., Tensor]
    """The same from the same tensors, in operations that differentiate to any order."""

    def call(self, of_query: bool, x: Tensor, position: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Features and log scales of tokens (…, h, tokens, d), with `parameters` in the place of the kernel's own."""
        bound = dict(zip(self.names, parameters, strict=True))
        # The backward calls again: a buffer that was replaced by then is not what the output was made of.
        now = dict(self.maps.named_buffers())
        bound.update((name, x) for name, x in self.buffers if now.get(name) is not x)
        if not bound:
            return self.maps(of_query, x, position)  # type: ignore[no-any-return]
        return torch.func.functional_call(self.maps, bound, (of_query, x, position))  # type: ignore[no-any-return]

    def plain(self, x: Tensor) -> Mapped | None:
        """The features of a segment (h, tokens, d) by the map that the kernel ships, if it does for such tokens."""
        return None if self.mapping is None else self.mapping.features(x.to(self.wide))

    def features_of(
        self, of_query: bool, x: Tensor, position: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same for a segment (h, tokens, d), in the dtype of sums."""
        values, log_scale = self.call(of_query, x, position, parameters)
        shape = (self.heads, x.shape[-2])
        return values.to(self.wide).expand(*shape, -1), log_scale.to(self.wide).expand(*shape, 1)

    def sample(self, tensors: Sequence[Tensor | None]) -> tuple[int, torch.dtype] | None:
        """How many features a token has and the dtype of sums, from one token; None where a segment will not do.

        A kernel that holds something for each batch entry returns more of them than it was given, and one that holds a
        tensor that needs a gradient and is no parameter would lose it.
        """
        q, k, _, bias, one, *parameters = tensors
        detached = [x.detach() for x in parameters if x is not None]
        dtype, found = self.wide, list[Tensor]()
        for of_query, x, position in ((True, q, self.query_position), (False, k, self.key_position)):
            assert x is not None
            token = _entry(x, 0, slice(0, 1), self.heads).detach()
            with torch.enable_grad():
                values, log_scale = self.call(of_query, token, placed(position, 0, slice(0, 1)), detached)
            if values.dim() != 3 or values.shape[0] not in (1, self.heads) or log_scale.shape[:-1] != values.shape[:-1]:
                return None
            if values.requires_grad or log_scale.requires_grad:
                return None
            dtype = torch.promote_types(torch.promote_types(dtype, values.dtype), log_scale.dtype)
            found.append(values)
        for x in (bias, one):
            dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
        self.maps.kernel.check_features(*found)
        features = found[0].shape[-1]
        return (features, dtype) if features else None


def uncast(like: Tensor) -> AbstractContextManager[None]:
    """Without autocast, which would narrow some of the operations that take part in a sum, and not others."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def bare(position: Tensor) -> Tensor:
    """Positions as they come by default, (tokens,), where all batch entries and heads share them."""
    return position.reshape(position.shape[-1:]) if position.shape[:-1].numel() == 1 else position


def placed(position: Tensor, b: int, tokens: slice) -> Tensor:
    """Some positions of a batch entry."""
    return bare(position[b if position.shape[0] > 1 else 0][:, tokens])


def _entry(x: Tensor, b: int, tokens: slice, heads: int) -> Tensor:
    """Some tokens of all heads of a batch entry of x (batch | 1, heads | fewer, tokens | 1, w)."""
    x = x[b if x.shape[0] > 1 else 0]
    x = x[:, tokens] if x.shape[1] > 1 else x
    if x.shape[0] == heads:
        return x
    return x.expand(heads, -1, -1) if x.shape[0] == 1 else x.repeat_interleave(heads // x.shape[0], dim=0)


def _put(into: Tensor, part: Tensor, b: int, tokens: slice) -> None:
    """Add a segment's share to `into`, whose shape is that of what `_entry` was given."""
    into = into[b if into.shape[0] > 1 else 0]
    if into.shape[1] == 1 and part.shape[1] > 1:
        part = part.sum(dim=1, keepdim=True)
    into = into[:, tokens] if into.shape[1] > 1 else into
    if into.shape[0] != part.shape[0]:
        part = part.view(into.shape[0], -1, *part.shape[1:]).sum(dim=1)
    into += part


class LinearAttention(torch.autograd.Function):
    """out (b, h, n, d_v) of q, k, v, what is added to the keys' log scales, what stands beside them, and parameters."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor | None) -> Tensor:
        ctx.job = job
        buffers = [x for _, x in job.buffers]
        ctx.buffers = len(buffers)
        out, kept = run(job, tensors, keep=True)
        ctx.lost = kept is None
        if kept is None:
            ctx.save_for_backward(*tensors, *buffers)
            return out
        share, beside, ctx.sums = kept
        ctx.save_for_backward(*tensors, *buffers, out, share, beside)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        saved = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 1
        tensors = saved[:count]
        with uncast(grads[0]):
            if torch.is_grad_enabled() or ctx.lost:
                return None, *again(job, tensors, ctx.needs_input_grad[1:], grads[0])
            out, share, beside = saved[count + ctx.buffers :]
            return None, *pull(job, tensors, ctx.needs_input_grad[1:], grads[0], out, share, beside, ctx.sums)


def again(
    job: Job, tensors: tuple[Tensor | None, ...], needed: tuple[bool, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by differentiable operations."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias of each, so that the same tensor handed in twice gets each share once.
        own = [
            None if x is None else x.view_as(x) if create else x.detach().requires_grad_(need)
            for x, need in zip(tensors, needed, strict=True)
        ]
        out = job.exactly(job, own)
        wanted = [x for x, need in zip(own, needed, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=create, allow_unused=True))
    return tuple(next(found) if need and x is not None else None for x, need in zip(own, needed, strict=True))


def run(
    job: Job, tensors: tuple[Tensor | None, ...], keep: bool
) -> tuple[Tensor, tuple[Tensor, Tensor | None, list[Sums]] | None]:
    """The output, and what the backward needs; None where a unit was too coarse for a row, and all was done exactly."""
    q, k, v, bias, one, *_ = tensors
    assert q is not None and k is not None and v is not None
    shape = (job.batch, job.heads, job.layout.queries)
    out, share = (q.new_empty(*shape, width, dtype=job.wide) for width in (job.width, 1))
    beside = None if one is None else torch.empty_like(share)
    kept: list[Sums] = []
    with torch.no_grad():
        for b in range(job.batch):
            head = _head(job, tensors, b, out, share, beside)
            sums = Sums.empty(out, job.heads, job.features, job.width, keep=keep, least=not job.positive)
            forward(head, job.layout, sums)
            kept.append(sums)
        if _lost(job, share, beside, kept, bias):
            return job.exactly(job, list(tensors)), None
    return out, (share, beside, kept)


def _lost(job: Job, share: Tensor, beside: Tensor | None, kept: list[Sums], bias: Tensor | None) -> bool:
    """Whether a row that sees a key has a sum so small, in the unit of its segment, that a float may have lost it."""
    if not job.positive:
        spread = torch.stack([sums.unit - sums.least for sums in kept if sums.least is not None])
        if not bool((spread > 30.0).any()):
            return False
    # A share of 0 is a sum of 0.
    small = (share == 0.0) | (share.abs() > 1.0 / LOST)
    if beside is not None:
        small &= beside == 0.0
    n, m = job.layout.queries, job.layout.keys
    if bias is None:
        sees = torch.arange(n, device=share.device) >= n - m if job.layout.causal else None
    else:
        seen = bias.squeeze(-1) != -torch.inf
        if job.layout.causal:
            count = torch.nn.functional.pad(seen.expand(*seen.shape[:-1], m).cumsum(-1), (1, 0))
            last = (torch.arange(n, device=share.device) + m - n + 1).clamp_min(0)
            sees = count.index_select(-1, last) > 0
        else:
            sees = seen.any(-1, keepdim=True)
    if sees is not None:
        small = small & sees.unsqueeze(-1)
    return bool(small.any())


def _head(job: Job, tensors: Any, b: int, out: Tensor, share: Tensor, beside: Tensor | None) -> Head:
    q, k, v, bias, one, *parameters = tensors
    heads = job.heads

    def query(tokens: slice) -> tuple[Tensor, Tensor | None]:
        values, log_scale = mapped(True, _entry(q, b, tokens, heads), placed(job.query_position, b, tokens))
        if one is None:
            return values, None
        rest = _entry(one, b, slice(0, 1), heads)
        return values, rest if log_scale is None else rest - log_scale

    def key(tokens: slice) -> tuple[Tensor, Tensor | None]:
        values, log_scale = mapped(False, _entry(k, b, tokens, heads), placed(job.key_position, b, tokens))
        if bias is None:
            return values, log_scale
        return _hide(values, log_scale, _entry(bias, b, tokens, heads))

    def mapped(of_query: bool, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
        return job.plain(x) or job.features_of(of_query, x, position, parameters)

    return Head(
        query, key, lambda tokens: _entry(v, b, tokens, heads).to(job.wide),
        out[b], share[b], None if beside is None else beside[b],
    )  # fmt: skip


def _hide(values: Tensor, log_scale: Tensor | None, added: Tensor) -> tuple[Tensor, Tensor]:
    """Features and log scales with a mask's share added, nothing where it is −∞."""
    hidden = added == -torch.inf
    scale = added if log_scale is None else torch.where(hidden, -torch.inf, log_scale + added)
    return values.masked_fill(hidden, 0.0), scale


def pull(
    job: Job,
    tensors: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    grad: Tensor,
    out: Tensor,
    share: Tensor,
    beside: Tensor | None,
    kept: list[Sums],
) -> tuple[Tensor | None, ...]:
    """The gradients of all tensors, segment by segment."""
    q, k, _, bias, _, *given_parameters = tensors
    parameters = [x for x in given_parameters if x is not None]
    assert q is not None and k is not None
    results = [
        None if x is None or not need else torch.zeros(x.shape, dtype=job.wide, device=x.device)
        for x, need in zip(tensors, needed, strict=True)
    ]
    d_q, d_k, d_v, d_bias, d_one, *d_parameters = results
    learned = [i for i, need in enumerate(needed[5:]) if need]
    for b in range(job.batch):
        head = _head(job, tensors, b, out, share, beside)

        def mapped(
            of_query: bool, x: Tensor, d_x: Tensor | None, position: Tensor, tokens: slice, b: int = b
        ) -> tuple[Tensor, Tensor | None, Pull]:
            part = _entry(x, b, tokens, job.heads)
            plain = job.plain(part)
            if plain is not None:

                def by_map(d_values: Tensor, _: Callable[[], Tensor] | None) -> None:
                    if d_x is not None:
                        assert job.mapping is not None
                        own = part.to(job.wide)
                        into = torch.empty_like(own, memory_format=torch.contiguous_format)
                        job.mapping.pull(own, plain.values, d_values, into)
                        _put(d_x, into, b, tokens)

                return plain.values, plain.log_scale, by_map
            with torch.enable_grad():
                leaf = part.detach().requires_grad_(d_x is not None)
                given = [p.detach().requires_grad_(i in learned) for i, p in enumerate(parameters)]
                values, log_scale = job.features_of(of_query, leaf, placed(position, b, tokens), given)

            def back(d_values: Tensor, d_log: Callable[[], Tensor] | None) -> None:
                ends = [(values, d_values)] if values.requires_grad else []
                if d_log is not None and log_scale.requires_grad:
                    ends.append((log_scale, d_log()))
                wanted = [*([leaf] if d_x is not None else []), *(given[i] for i in learned)]
                if not ends or not wanted:
                    return
                found = list(torch.autograd.grad([x for x, _ in ends], wanted, [g for _, g in ends], allow_unused=True))
                if d_x is not None:
                    first = found.pop(0)
                    if first is not None:
                        _put(d_x, first, b, tokens)
                for i, found_ in zip(learned, found, strict=True):
                    into = d_parameters[i]
                    if found_ is not None and into is not None:
                        into += found_

            return values.detach(), log_scale.detach(), back

        def query(tokens: slice, b: int = b, mapped: Any = mapped) -> tuple[Tensor, Pull]:
            values, _, back = mapped(True, q, d_q, job.query_position, tokens)

            def give(d_values: Tensor, d_rest: Callable[[], Tensor] | None) -> None:
                if d_rest is not None and d_one is not None:
                    _put(d_one, d_rest(), b, slice(0, 1))
                back(d_values, None if d_rest is None else lambda: -d_rest())

            return values, give

        def key(tokens: slice, b: int = b, mapped: Any = mapped) -> tuple[Tensor, Tensor | None, Pull]:
            values, log_scale, back = mapped(False, k, d_k, job.key_position, tokens)
            if bias is None:
                return values, log_scale, back
            added = _entry(bias, b, tokens, job.heads)
            hidden = added == -torch.inf
            values, log_scale = _hide(values, log_scale, added)

            def give(d_values: Tensor, d_log: Callable[[], Tensor] | None) -> None:
                def seen() -> Tensor:
                    assert d_log is not None
                    return d_log().masked_fill(hidden, 0.0)

                if d_bias is not None:
                    _put(d_bias, seen(), b, tokens)
                back(d_values.masked_fill(hidden, 0.0), seen)

            return values, log_scale, give

        def put_value(tokens: slice, d_value: Tensor, b: int = b) -> None:
            if d_v is not None:
                _put(d_v, d_value, b, tokens)

        def grad_of(tokens: slice, b: int = b) -> Tensor:
            return grad[b][:, tokens]

        backward(head, job.layout, kept[b], Backward(query, key, grad_of, put_value))
    return tuple(None if r is None or x is None else r.to(x.dtype) for r, x in zip(results, tensors, strict=True))
