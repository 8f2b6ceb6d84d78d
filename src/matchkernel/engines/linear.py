"""The linear engine: any FeatureKernel in time and memory that grow with n, by sums over features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.encoding import leaves
from ..kernels.feature_base import FeatureKernel
from ..normalizers import SoftmaxFamily
from . import _linear_exact, _torch_private
from ._encoding import four
from ._linear_exact import Operands
from .problem import Cost, Problem, traffic, zero_where_not

FEW, MANY = 2**16, 2**19
"""Scores of one batch entry, and of all, up to which "auto" leaves a problem to the reference, as `tiled` does."""


@dataclass(frozen=True)
class Linear:
    """Sums keys and values over features once, and lets every query read the sums: no table, forward or backward.

    out_i = φ(q_i) S_i / φ(q_i) z_i,  S_i = Σ_j φ(k_j)ᵀ v_j,  z_i = Σ_j φ(k_j), over the keys j that query i may see

    chunk: how many tokens of a causal call meet each other as a small table, the rest coming from the sums; 128 by
    default, about as many as features, where both cost alike.

    Exact. Sums are float32 for half-precision inputs. A kernel's log scales are measured from the largest so far, of
    keys that a query may see, so that no later key changes an earlier row and none overflows.
    Cost: O((n + m) f d_v) time and O((n + m)(f + d_v)) memory for f features.
    Source: Katharopoulos et al. 2020, eq. 6 and 9; the chunks are those of Hua et al. 2022 (FLASH), section 3.2.
    """

    chunk: int = 128

    name = "linear"
    exact = True

    def __post_init__(self) -> None:
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"Linear(chunk={self.chunk!r}): expected an integer of at least 1")

    def concerns(self, problem: Problem) -> bool:
        """Whether "auto" asks at all."""
        return isinstance(problem.kernel, FeatureKernel)

    def refuse(self, problem: Problem) -> str | None:
        place, normalizer = problem.visibility, problem.normalizer
        if not isinstance(problem.kernel, FeatureKernel):
            return f"{problem.kernel!r} is not a FeatureKernel: its weight is no inner product of finite features"
        if not (isinstance(normalizer, SoftmaxFamily) and normalizer.proportional):
            return f"the weights of {normalizer!r} are not proportional to κ"
        if problem.dropout:
            return "dropout draws for each weight, and no table of them is formed"
        if place.window is not None:
            return "a window takes keys out of the sums again"
        if not place.by_key:
            return "the mask has a row per query, and the sums are the same for all"
        if place.causal and not place.aligned:
            return "causal order by positions of one's own is no order of the rows"
        if torch.compiler.is_compiling():
            return "its loops are not for torch.compile to unroll"
        if _torch_private.transforming():
            return "vmap, jvp and the other function transforms need plain operations"
        if 0 in (problem.pairs, problem.v.shape[-1], problem.q.shape[-1], problem.k.shape[-1]):
            return "there is nothing to compute: a length or a width is 0"
        return None

    def declines(self, problem: Problem) -> str | None:
        entries = max(1, problem.batch[:-1].numel())
        if problem.pairs <= FEW * entries and problem.pairs <= MANY:
            return f"the whole table has only {problem.pairs} scores"
        features = _features(problem)
        if features is not None and self._flops(problem, features) > _table_flops(problem, features):
            return f"sums over {features} features cost more operations than the table"
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        place = problem.visibility
        operands, positive = _operands(problem)
        out = _linear_exact.attend(operands, causal=place.causal, chunk=self.chunk, positive=positive)
        out = out.expand(problem.batch[:-1].numel(), problem.batch[-1] if problem.batch else 1, *out.shape[-2:])
        out = out.reshape(*problem.batch, *out.shape[-2:]).to(problem.q.dtype)
        sees = place.query_sees
        return out if sees is None else zero_where_not(sees, out)

    def _flops(self, problem: Problem, features: int) -> int:
        """Two operations for each number of the state and token that is summed or read, and those of the squares."""
        place, heads, width = problem.visibility, problem.batch.numel(), problem.v.shape[-1] + 1
        n, m = place.queries, place.keys
        flops = 2 * (n + m) * features * width
        if place.causal:
            flops += 2 * min(n, m) * min(self.chunk, n, m) * (features + width)
        return heads * flops

    def cost(self, problem: Problem) -> Cost:
        features = _features(problem)
        flops = None if features is None else self._flops(problem, features)
        held = (
            problem.batch.numel()
            * (problem.visibility.queries + problem.visibility.keys)
            * ((features or problem.q.shape[-1]) + problem.v.shape[-1] + 1)
        )
        return Cost(flops, traffic(problem), held * torch.finfo(problem.wide).bits // 8)

    def reason(self, problem: Problem) -> str:
        how = f"in chunks of {self.chunk}" if problem.visibility.causal else "once for all queries"
        return f"{problem.kernel!r} has finite features, so keys and values are summed over them, {how}"


def _operands(problem: Problem) -> tuple[Operands, bool]:
    """Features, scales and values of the whole problem."""
    kernel, place, batch = problem.kernel, problem.visibility, problem.batch
    assert isinstance(kernel, FeatureKernel) and isinstance(problem.normalizer, SoftmaxFamily)
    q, k, v = (x.to(problem.wide) for x in problem.hide())
    if problem.groups > 1:
        k, v = (x.repeat_interleave(problem.groups, dim=-3) for x in (k, v))
    query, key = kernel.encode(q, k, place.query_position, place.key_position)
    (x, of_query), (y, of_key) = leaves(query), leaves(key)
    kernel.check_features(x, y)
    if place.bias is not None:
        of_key = of_key + place.bias.mT.to(of_key.dtype)
    if place.by_mask is not None:
        seen = place.by_mask.mT
        of_key = torch.where(seen, of_key, float("-inf"))
        y = torch.where(seen, y, 0.0)
    one = problem.normalizer.beside(of_query)
    rest = None if one is None else one - of_query
    tensors = [x, y, of_key, v, *([] if rest is None else [rest])]
    dtype = problem.wide
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    x, y, of_key, v = (four(tensor.to(dtype), batch) for tensor in tensors[:4])
    rest = None if rest is None else four(rest.to(dtype), batch)
    m = place.keys
    of_key = of_key.expand(*of_key.shape[:2], m, 1)
    return Operands(x, y, of_key, v, rest), kernel.positive


def _features(problem: Problem) -> int | None:
    assert isinstance(problem.kernel, FeatureKernel)
    return problem.kernel.feature_count(problem.k.shape[-1])


def _table_flops(problem: Problem, features: int) -> int:
    return 2 * problem.pairs * (features + problem.v.shape[-1])
