"""The fused engine: any DotKernel through torch's scaled_dot_product_attention, O(n) memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.base import DotKernel
from . import _torch_private
from ._dot_softmax import additive, encoded, finished, form, four, merged, refuse, with_logsumexp
from ._fused_function import FusedAttention, PublicFusedAttention, private, public
from .problem import Cost, Problem, product_flops, traffic


class Fused:
    """Encodes once per token, then makes one call of the fused kernel.

    Temperature and length scaling ride on the scale and the query. The sink's extra logit needs the log-sum-exp of each
    row, which comes with the fused result. The first derivative is fused as well; a second one recomputes densely.
    """

    name = "fused"
    exact = True

    def refuse(self, problem: Problem) -> str | None:
        return refuse(problem)

    def declines(self, problem: Problem) -> str | None:
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        q, k, v, scale = encoded(problem)
        out, logsumexp = _attend(q, k, v, problem, scale)
        return finished(out, logsumexp, problem)

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
        return Cost(product_flops(replace(problem, kernel=form(problem)), pairs), traffic(problem), held)

    def reason(self, problem: Problem) -> str:
        table = _forms_table(_bias(problem, problem.q.dtype)[0], problem)
        how = ", through an n × m mask" if table else ""
        when = "" if isinstance(problem.kernel, DotKernel) else " where no key is later than its query"
        return f"{problem.kernel!r} is an inner product of encodings{when}, so torch's fused kernel computes it{how}"


def _attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scale: float) -> tuple[Tensor, Tensor | None]:
    """Output and, from the private operators, log-sum-exp, for folded tensors."""
    n, m = problem.visibility.queries, problem.visibility.keys
    bias, causal = _bias(problem, q.dtype)
    if causal and n < m:
        return _after_a_past(q, k, v, scale)
    if causal and n > m:
        # The first n − m queries stand before every key: they see nothing.
        out, logsumexp = call(q[..., n - m :, :], k, v, bias, True, scale)
        return pad(out, (0, 0, n - m, 0)), None if logsumexp is None else pad(logsumexp, (n - m, 0))
    return call(q, k, v, bias, causal, scale)


def _after_a_past(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal order with more keys than queries: the past, which all of them see, and the square that ends the keys.

    torch aligns its causal flag to the start, so that one call would need an n × m mask. Two calls do not, and each
    row's log-sum-exp says how to weigh them.
    """
    past = k.shape[-2] - q.shape[-2]
    out_past, log_past = call(q, k[..., :past, :], v[..., :past, :], None, False, scale)
    out_own, log_own = call(q, k[..., past:, :], v[..., past:, :], None, True, scale)
    assert log_past is not None and log_own is not None
    return merged(out_own, log_own, out_past, log_past)


def call(
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
    private = with_logsumexp(problem.q.device)
    own_order = n >= m or n == 1 or (private and place.mask is None)
    if place.plain_causal and own_order and (place.mask is None or (place.by_key and private)):
        bias = None if place.mask is None else additive(place.mask, problem, dtype)
        # A branch, so that a compiler that traces any n hands torch a bool and not a symbol.
        return (bias, True) if n > 1 else (bias, False)
    if place.allowed is None:
        return None, False
    if place.bias is None:
        return additive(place.allowed, problem, dtype), False
    if place.by_position is None:
        return additive(place.bias, problem, dtype), False
    return four(torch.where(place.by_position, place.bias.to(dtype), float("-inf")), problem), False


def _forms_table(bias: Tensor | None, problem: Problem) -> bool:
    return bias is not None and bias.shape[-2] > 1 and problem.visibility.queries > 1
