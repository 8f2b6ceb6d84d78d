"""Causal linear attention with its state: read a text in chunks, then go on token by token from what is left of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._validate import check_tensors, leading
from .kernels.encoding import leaves
from .kernels.feature_base import FeatureKernel
from .shapes import broadcast, split
from .state_chunks import between
from .updates import StateUpdate, Sum

_LEAST = -1e30
"""The log scale of a state to which nothing has been written, in a type of any width, and still a number."""


@dataclass(frozen=True, eq=False)
class LinearState:
    """All that causal linear attention keeps of the tokens it has read: of a size that does not depend on their number.

    S = memory · e^log_scale,  z = total · e^log_scale

    `memory` (…, f, d_v) is Σ_j φ(k_j)ᵀ v_j as its update has it, `total` (…, f) the same sum without values, by which
    outputs are normalised, None for a delta rule; `log_scale` (…), without a gradient, keeps both within the range of
    a float. float32, or wider where the inputs are. `tokens` is how many have been read: the position of the next one.
    With gradients on, a state carries the graph of its past: `detach()` cuts it.
    """

    memory: Tensor
    total: Tensor | None
    log_scale: Tensor
    tokens: int = 0

    def detach(self) -> LinearState:
        """The same state, without the graph of what has been read."""
        total = None if self.total is None else self.total.detach()
        return LinearState(self.memory.detach(), total, self.log_scale.detach(), self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        parts = [x for x in (self.memory, self.total, self.log_scale) if x is not None]
        return sum(x.numel() * x.element_size() for x in parts)

    def __repr__(self) -> str:
        return f"LinearState(memory={tuple(self.memory.shape)}, tokens={self.tokens})"


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: FeatureKernel | None = None,
    update: StateUpdate | None = None,
    *,
    state: LinearState | None = None,
    normalized: bool | None = None,
    chunk: int = 64,
) -> tuple[Tensor, LinearState]:
    """Causal attention whose weight is an inner product of features, from a state and to a state.

    S_i = update(S_{i−1}, φ(k_i), v_i),  o_i = φ(q_i) S_i / (φ(q_i) · z_i),  z_i = Σ_{j≤i} φ(k_j), faded as S is

    Token i sees itself, the tokens before it in this call, and through `state` those of earlier calls. Reading a text
    at once, in pieces, or token by token gives the same: a call with n = 1 is the recurrence.

    Args:
        q: (…, n, d). k: (…, n, d_k). v: (…, n, d_v). One dtype; leading dimensions broadcast, and q may have a multiple
            of k's heads at dimension −3. There are as many queries as keys: they are the same tokens.
        kernel: a `FeatureKernel`, or None to take q and k as features themselves. Any scale, such as 1/√d, is theirs.
        update: what a token does to the state. None adds, S + kᵀv: with a kernel that is `attend(…, causal=True)`.
            `Decay`, `Gates`, `DeltaRule` and `GatedDeltaRule` fade and correct; they speak of this call's n tokens.
        state: what earlier calls have left, None for nothing. Its leading dimensions are those of k, v and the update.
        normalized: divide by the sum of the weights. By default where there is one, so not for a delta rule, which
            refuses True. With κ ≥ 0 the output is then an average of values; a sum of 0 gives zeros, and where κ has
            either sign it may come close to 0, and the output be as large as that makes it.
        chunk: how many tokens are taken at once, default 64: a chunk's table costs as much as reading the state where
            it is as long as there are features. It changes rounding and nothing else.

    Returns:
        The outputs (…, n, d_v) in the inputs' dtype, and the state after the last token. Gradients flow through both,
        and into `state`.

    Raises:
        TypeError, ValueError: naming the argument, its shape or dtype and what was expected.

    Cost: 2·n·(f + d_v)·chunk + 4·n·f·d_v operations for a sum, about as many again for a delta rule, and for gates by
    feature log₂(chunk) times the exponentials. O(n) memory where a gradient is taken, O(1) beside the inputs where not.
    Source: Katharopoulos et al. 2020, eq. 16–20, for the recurrence; Sun et al. 2023, section 2.1, for chunks.
    """
    check_tensors(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected as many queries as keys, the same tokens"
        )
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: expected an integer of at least 1")
    update = _checked(update)
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(f"state: expected a LinearState, got {type(state).__name__}")
    if normalized and update.corrects:
        raise ValueError(f"normalized=True: {update!r} corrects values, and leaves no sum of weights to divide by")
    normalized = not update.corrects if normalized is None else normalized
    batch, groups = leading(q, k, v)
    x, of_query, y, of_key = _features(q, k, kernel, 0 if state is None else state.tokens)
    said = update.per_token(y)
    lead = broadcast(y.shape[:-2], v.shape[:-2], *(part.shape[:-2] for part in said))
    if lead is None:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: they do not broadcast with the leading dimensions "
            f"of {update!r}"
        )
    memory, scale = _opened(state, update, lead, y, v)
    wide = memory.dtype
    values = v.to(wide)
    if not update.corrects:
        values = torch.cat([values, values.new_ones(()).expand(*values.shape[:-1], 1)], dim=-1)
    if groups > 1:
        x, of_query = (split(part, -3, (-1, groups)) for part in (x, of_query))
        y, of_key, values, memory = (part.unsqueeze(-3) for part in (y, of_key, values, memory))
        scale, said = scale.unsqueeze(-1), tuple(part.unsqueeze(-3) for part in said)
    rows = []
    # split, and not slices: the gradient of each slice would be as long as the text.
    parts = (x, of_query, y, of_key, values, *said) if k.shape[-2] else ()
    for pieces in zip(*(torch.split(part, chunk, dim=-2) for part in parts), strict=True):
        tokens, now = _Tokens(*pieces[:5]), pieces[5:]
        if update.corrects:
            out, memory = _corrected(update, now, tokens, memory)
        else:
            out, memory, scale = _summed(update, now, tokens, memory, scale, normalized=normalized)
        rows.append(out.to(q.dtype))
    if groups > 1:
        rows = [row.flatten(-4, -3) for row in rows]
        memory, scale = memory.squeeze(-3), scale.squeeze(-1)
    out = torch.cat(rows, dim=-2) if rows else q.new_zeros(*batch, 0, v.shape[-1])
    read = k.shape[-2] + (0 if state is None else state.tokens)
    if update.corrects:
        return out, LinearState(memory, None, scale, read)
    return out, LinearState(memory[..., :-1], memory[..., -1], scale, read)


def _checked(update: object) -> StateUpdate:
    if update is None:
        return Sum()
    if not isinstance(update, StateUpdate):
        hint = "; it is a class, so add parentheses" if isinstance(update, type) else ""
        raise TypeError(f"update: expected None, Decay, Gates, DeltaRule or GatedDeltaRule, got {update!r}{hint}")
    return update


def _features(q: Tensor, k: Tensor, kernel: FeatureKernel | None, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (…, n, f) and log scales (…, n, 1) of queries and keys, in float32 or wider."""
    if kernel is None:
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected equally many features")
        wide = torch.promote_types(q.dtype, torch.float32)
        nothing = q.new_zeros((), dtype=wide)
        return q.to(wide), nothing.expand(*q.shape[:-1], 1), k.to(wide), nothing.expand(*k.shape[:-1], 1)
    if not isinstance(kernel, FeatureKernel):
        hint = "; it is a class, so add parentheses" if isinstance(kernel, type) else ""
        raise TypeError(f"kernel: expected a FeatureKernel, whose weight has finite features, got {kernel!r}{hint}")
    position = torch.arange(first, first + k.shape[-2], device=k.device)
    (x, of_query), (y, of_key) = (leaves(part) for part in kernel.encode(q, k, position, position))
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{kernel!r} maps queries to {x.shape[-1]} features and keys to {y.shape[-1]}, expected equally many"
        )
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), of_query.to(wide), y.to(wide), of_key.to(wide)


def _opened(
    state: LinearState | None, update: StateUpdate, lead: torch.Size, y: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The memory (…, f, d_v), with the total as one more column where there is one, and its log scale (…)."""
    f, width = y.shape[-1], v.shape[-1]
    if state is None:
        memory = y.new_zeros(*lead, f, width if update.corrects else width + 1)
        return memory, y.new_full(lead, 0.0 if update.corrects else float("-inf"))
    expected = (*lead, f, width)
    # Not broadcast: a token without its axis would be taken for as many tokens as there are heads.
    if state.memory.shape != expected:
        raise ValueError(f"state has a memory of shape {tuple(state.memory.shape)}, expected {expected}")
    if state.memory.device != y.device:
        raise ValueError(f"state is on {state.memory.device} and k on {y.device}: expected one device")
    wide = torch.promote_types(state.memory.dtype, y.dtype)
    memory, scale = state.memory.to(wide), state.log_scale.to(wide).detach()
    if update.corrects:
        half = (scale / 2.0).exp()[..., None, None]
        return memory * half * half, torch.zeros_like(scale)
    if state.total is None:
        raise ValueError(f"state was left by a delta rule and has no total, which {update!r} needs")
    return torch.cat([memory, state.total.to(wide).unsqueeze(-1)], dim=-1), scale


class _Tokens(NamedTuple):
    """Features of queries and keys (…, c, f), their log scales (…, c, 1), and values (…, c, d_v) of a chunk."""

    q: Tensor
    of_query: Tensor
    k: Tensor
    of_key: Tensor
    v: Tensor


def _corrected(
    update: StateUpdate,
    said: tuple[Tensor, ...],
    x: _Tokens,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """A chunk of a rule that corrects: what a key's features are long decides what it does, so scales are applied."""
    return update.chunk(x.q * x.of_query.exp(), x.k * x.of_key.exp(), x.v, said, memory)


def _summed(
    update: StateUpdate,
    said: tuple[Tensor, ...],
    x: _Tokens,
    memory: Tensor,
    scale: Tensor,
    *,
    normalized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk of a rule that adds: outputs, and the state, told in units of e^frame so that no exponent is above 0."""
    (gate,) = said
    frame = _frame(gate, x.of_key, scale)
    first = scale[..., None, None].expand(*frame.shape[:-2], 1, 1)
    before = torch.cat([first, frame[..., :-1, :]], dim=-2)
    out, memory = update.chunk(x.q, x.k * (x.of_key - frame).exp(), x.v, (gate + (before - frame),), memory)
    out, total = out[..., :-1], out[..., -1:]
    if normalized:
        empty = total == 0.0
        out = torch.where(empty, 0.0, out / torch.where(empty, 1.0, total))
    else:
        half = ((x.of_query + frame) / 2.0).exp()
        out = out * half * half
    return out, memory, frame[..., -1, 0]


def _frame(gate: Tensor, log_scale: Tensor, before: Tensor) -> Tensor:
    """The logarithm of the largest key, faded as it is by then, that each token can see: (…, c, 1), without gradient.

    `before` (…) is that of the state. Of gates by feature the weakest counts. Only tokens up to its own set a token's
    frame: one for all tokens would let the future reach the past.
    """
    gate = gate.detach().amax(-1, keepdim=True)
    held = before[..., None, None] + gate.cumsum(-2)
    largest = (between(gate) + log_scale.detach().mT).amax(-1, keepdim=True)
    return torch.maximum(held, largest).clamp_min(_LEAST)
