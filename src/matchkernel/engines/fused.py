"""The fused engine: any DotKernel through torch's scaled_dot_product_attention, O(n) memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.base import DotKernel, MatchKernel
from ..normalizers import SoftmaxFamily
from . import _torch_private
from ._fused_function import FusedAttention, PublicFusedAttention, private, public
from .problem import Cost, Problem, product_flops, traffic, zero_where_not


class Fused:
    """Encodes once per token, then makes one call of the fused kernel.

    Temperature and length scaling ride on the scale and the query. The sink's extra logit needs the log-sum-exp of each
    row, which comes with the fused result. The first derivative is fused as well; a second one recomputes densely.
    """

    name = "fused"
    exact = True

    def refuse(self, problem: Problem) -> str | None:
        q, v, normalizer = problem.q, problem.v, problem.normalizer
        if not isinstance(_form(problem), DotKernel):
            return f"{problem.kernel!r} is not a DotKernel: its score is not an inner product of encodings"
        if not isinstance(normalizer, SoftmaxFamily):
            return f"{type(normalizer).__name__} is not a softmax"
        if problem.dropout:
            return "dropout leaves torch's fused kernel"
        bias = problem.visibility.bias
        if bias is not None and bias.requires_grad:
            return "a mask that needs a gradient leaves torch's fused kernel"
        if 0 in (problem.pairs, q.shape[-1], v.shape[-1]):
            return "there is nothing to compute: a length or a width is 0"
        private = _torch_private.available(q.device) and not torch.compiler.is_compiling()
        if not private and type(normalizer).remainder is not SoftmaxFamily.remainder:
            return (
                f"{type(normalizer).__name__} needs each row's log-sum-exp, which only torch's private CPU call returns"
            )
        return None

    def declines(self, problem: Problem) -> str | None:
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        kernel, normalizer, place = _form(problem), problem.normalizer, problem.visibility
        assert isinstance(kernel, DotKernel)
        q, k, v = problem.hide()
        q, k = kernel.encode(q, k, place.query_position, place.key_position, up_to_row_shift=normalizer.shift_invariant)
        scale = kernel.scale(q.shape[-1])
        factor = normalizer.factor(place.visible if normalizer.counts_keys else None, q)
        if isinstance(factor, Tensor):
            q = (q * factor).to(q.dtype)
        else:
            scale = scale * factor
        if scale <= 0.0:
            # torch multiplies the −inf of its causal mask by the scale: a negative or zero one makes it +inf or NaN.
            q, scale = q * scale, 1.0
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = (_fold(x.to(dtype), problem) for x in (q, k, v))
        out, logsumexp = _attend(q, k, v, problem, scale)
        remainder = normalizer.remainder(_unfold(logsumexp, problem, 1)) if logsumexp is not None else None
        out = _unfold(out, problem, 2)
        if remainder is not None:
            out = out * remainder.unsqueeze(-1)
        out = out.to(problem.q.dtype)
        sees = place.query_sees
        return out if sees is None else zero_where_not(sees, out)

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, problem.q.element_size()
        mask, own_order = _bias(problem, problem.q.dtype)
        pairs = problem.pairs
        if own_order:
            # The rows that see anything end with the keys: m, m − 1, … of them. A dense mask saves nothing.
            rows = min(place.queries, place.keys)
            pairs = problem.batch.numel() * (rows * place.keys - rows * (rows - 1) // 2)
        width = max(problem.q.shape[-1], problem.v.shape[-1])
        rows = problem.batch.numel() * place.queries
        # Output and log-sum-exp, one copy of whatever was padded or encoded, and a dense mask where one is needed.
        held = rows * (width * size + 4) + (problem.q.numel() + problem.k.numel()) * size
        # A dense mask is built from tables of booleans: what position permits, what the mask permits, and both.
        held += 0 if mask is None else mask.numel() * (mask.element_size() + (3 if _forms_table(mask, problem) else 0))
        return Cost(product_flops(replace(problem, kernel=_form(problem)), pairs), traffic(problem), held)

    def reason(self, problem: Problem) -> str:
        table = _forms_table(_bias(problem, problem.q.dtype)[0], problem)
        how = ", through an n × m mask" if table else ""
        when = "" if isinstance(problem.kernel, DotKernel) else " where no key is later than its query"
        return f"{problem.kernel!r} is an inner product of encodings{when}, so torch's fused kernel computes it{how}"


def _form(problem: Problem) -> MatchKernel:
    """The kernel, or what it is where no query may attend to a later key."""
    place = problem.visibility
    no_later = place.causal or (place.window is not None and place.window[1] == 0)
    return problem.kernel.under_causal_order() if no_later else problem.kernel


def _attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float) -> tuple[Tensor, Tensor | None]:
    """Output and, from the private operators, log-sum-exp, for folded tensors."""
    n, m = problem.visibility.queries, problem.visibility.keys
    bias, causal = _bias(problem, q.dtype)
    if causal and n < m:
        return _after_a_past(q, k, v, scale)
    if causal and n > m:
        # The first n − m queries stand before every key: they see nothing.
        out, logsumexp = _call(q[..., n - m :, :], k, v, bias, True, scale)
        return pad(out, (0, 0, n - m, 0)), None if logsumexp is None else pad(logsumexp, (n - m, 0))
    return _call(q, k, v, bias, causal, scale)


def _after_a_past(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal order with more keys than queries: the past, which all of them see, and the square that ends the keys.

    torch aligns its causal flag to the start, so that one call would need an n × m mask. Two calls do not, and each
    row's log-sum-exp says how to weigh them.
    """
    past = k.shape[-2] - q.shape[-2]
    out_past, log_past = _call(q, k[..., :past, :], v[..., :past, :], None, False, scale)
    out_own, log_own = _call(q, k[..., past:, :], v[..., past:, :], None, True, scale)
    assert log_past is not None and log_own is not None
    share = torch.sigmoid(log_past - log_own).unsqueeze(-1)
    out = share * out_past + (1.0 - share) * out_own
    return out.to(out_own.dtype), torch.logaddexp(log_past, log_own)


def _call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    if torch.compiler.is_compiling():
        return public(q, k, v, bias, causal, scale), None
    if _torch_private.available(q.device):
        if not _torch_private.differentiated(q, k, v):
            # An autograd Function costs a quarter of a millisecond when caches are cold.
            return private(q, k, v, bias, causal, scale)
        out, logsumexp = FusedAttention.apply(q, k, v, bias, causal, scale)  # type: ignore[no-untyped-call]
        return out, logsumexp
    return PublicFusedAttention.apply(q, k, v, bias, causal, scale), None  # type: ignore[no-untyped-call]


def _bias(problem: Problem, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A float mask in the shape that the fused kernel takes, and whether its own causal order is used."""
    place = problem.visibility
    n, m = place.queries, place.keys
    # torch's causal flag is aligned to the start, ours to the end: they agree on a square, and one last query sees all.
    private = _torch_private.available(problem.q.device) and not torch.compiler.is_compiling()
    own_order = n >= m or n == 1 or (private and place.mask is None)
    if place.plain_causal and own_order and (place.mask is None or (place.by_key and private)):
        bias = None if place.mask is None else _additive(place.mask, problem, dtype)
        # A branch, so that a compiler that traces any n hands torch a bool and not a symbol.
        return (bias, True) if n > 1 else (bias, False)
    if place.allowed is None:
        return None, False
    if place.bias is None:
        return _additive(place.allowed, problem, dtype), False
    if place.by_position is None:
        return _additive(place.bias, problem, dtype), False
    return _four(torch.where(place.by_position, place.bias.to(dtype), float("-inf")), problem), False


def _forms_table(bias: Tensor | None, problem: Problem) -> bool:
    return bias is not None and bias.shape[-2] > 1 and problem.visibility.queries > 1


def _additive(mask: Tensor, problem: Problem, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return _four(mask.detach().to(dtype), problem)
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return _four(torch.where(mask, zeros, float("-inf")), problem)


def _four(bias: Tensor, problem: Problem) -> Tensor:
    """The mask (…, n | 1, m) with exactly two leading dimensions, as the folded tensors have."""
    bias = (
        bias.expand(*bias.shape[:-1], problem.visibility.keys) if bias.dim() else bias.expand(problem.visibility.keys)
    )
    bias = bias[(None,) * max(0, 4 - bias.dim())]
    lead = bias.shape[:-3]
    target = problem.batch[:-1]
    return (bias if lead.numel() == 1 else bias.expand(*target, *bias.shape[-3:])).reshape(-1, *bias.shape[-3:])


def _fold(x: Tensor, problem: Problem) -> Tensor:
    """(…, heads, tokens, width) → (batch, heads, tokens, width), rows contiguous."""
    batch = problem.batch
    heads = batch[-1] if batch else 1
    if problem.groups > 1 and x.dim() >= 3 and x.shape[-3] == heads // problem.groups:
        heads = x.shape[-3]
    x = x.expand(*batch[:-1], heads, *x.shape[-2:])
    x = x[None] if x.dim() == 3 else x.flatten(0, -4)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfold(x: Tensor, problem: Problem, trailing: int) -> Tensor:
    return x.reshape(*problem.batch, *x.shape[x.dim() - trailing :])
