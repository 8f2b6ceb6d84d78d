"""The Linformer engine: keys and values projected along the sequence by learned matrices."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..kernels.base import DotKernel
from ..kernels.dot import Dot
from ..masks import Visibility
from ._padding import run_within, why_not_padding
from .problem import NOTHING_TO_COMPUTE, Cost, Problem, traffic, zero_where_not


class Linformer(nn.Module):
    """Keys and values mixed along the sequence into `rank` of each: another model, O((n + m) · rank), and learned.

    out = softmax(S Eᵀ) (F v),  S = the kernel's scores (n, m),  E, F (rank, m) learned

    S is not formed: the score of a `DotKernel` is linear in the key's encoding, so that S Eᵀ = scale · q' (E k')ᵀ with
    the encodings q', k'. For a dot product this is E k; under `Rotary` keys turn before they are mixed.

    Args:
        length: the most keys. E and F have a column for each place, and a shorter sequence uses the first m of them.
            ValueError for a longer one: nothing was learned about those places.
        rank: how many mixed keys. 128 or 256 in the paper, for length 512.
        heads: None (default) for one E and F for all heads, or a number for one of each per head of keys.
        shared: True for F = E (the paper's key-value sharing). False by default.
        generator: for the first entries; torch's own by default.

    Parameters `E` and `F` (rank, length) or (heads, rank, length), `F` None where shared; both start normal with mean 0
    and standard deviation 1/√length, so that mixing `length` independent keys keeps their variance. It is a torch
    module: give it to an optimiser, or to `MultiHeadAttention(engine=…)`, which then owns it.

    Approximate in the sense that it is not the attention it replaces; an error against it is measured before training,
    and after training the model is judged as its own. Any normaliser that does not count keys.
    Masks over the keys: a key that nobody may attend to is mixed in with 0, and a query that sees nothing gets zeros.
    Refused: causal order and windows, since every mixed key holds the future; float masks, and masks that differ from
    query to query; kernels that are no `DotKernel`; dropout. Half types are computed in float32.
    Cost: 2 · rank · m · (d + d_v) operations for each head of keys, and attention of n queries over rank keys.
    Source: Wang et al. 2020 (Linformer), section 4.
    """

    name = "linformer"
    exact = False
    E: nn.Parameter
    F: nn.Parameter | None

    def __init__(
        self,
        length: int,
        rank: int,
        *,
        heads: int | None = None,
        shared: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("length", length), ("rank", rank), ("heads", heads)):
            if name == "heads" and count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"Linformer({name}={count!r}): expected an integer of at least 1")
        self.length, self.rank, self.heads, self.shared = length, rank, heads, shared
        shape = (rank, length) if heads is None else (heads, rank, length)
        self.E = nn.Parameter(torch.empty(shape))
        self.register_parameter("F", None if shared else nn.Parameter(torch.empty(shape)))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw E and F anew, from `generator` or torch's own."""
        with torch.no_grad():
            for matrix in self.parameters():
                matrix.normal_(0.0, self.length**-0.5, generator=generator)

    def refuse(self, problem: Problem) -> str | None:
        k, normalizer = problem.k, problem.normalizer
        if (reason := why_not_padding(problem, "a mixed key")) is not None:
            return reason
        if problem.visibility.bias is not None:
            return "a float mask adds to scores of single keys, and only mixed ones are scored"
        if not isinstance(problem.kernel, DotKernel):
            return f"{problem.kernel!r} is not a DotKernel: its scores are not linear in an encoding of the key"
        if normalizer.counts_keys:
            return f"{type(normalizer).__name__} counts keys, and mixed ones are none"
        if problem.dropout:
            return "dropout would drop mixed keys, which are no keys"
        if 0 in (problem.pairs, problem.q.shape[-1], problem.v.shape[-1]):
            return NOTHING_TO_COMPUTE
        if k.shape[-2] > self.length:
            return f"k has shape {tuple(k.shape)}: expected at most {self.length} keys, which E and F have columns for"
        for name, x in (("k", k), ("v", problem.v)):
            if self.heads is not None and (x.dim() < 3 or x.shape[-3] != self.heads):
                return (
                    f"{name} has shape {tuple(x.shape)}: expected {self.heads} heads at dimension -3, as E and F have"
                )
        return None

    def declines(self, problem: Problem) -> str | None:
        return "it is another model"

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        kernel, place = problem.kernel, problem.visibility
        assert isinstance(kernel, DotKernel)
        wide = torch.promote_types(problem.wide, self.E.dtype)
        q, k, v = (x.to(wide) for x in problem.hide())
        # The whole score: a term of the query alone does not cancel where the rows of E do not sum to one number.
        q, k = kernel.encode(q, k, place.query_position, place.key_position)
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), wide)
        q, k, v, E = q.to(dtype) * kernel.scale(q.shape[-1]), k.to(dtype), v.to(dtype), self.E.to(dtype)
        F = E if self.F is None else self.F.to(dtype)
        groups, sees, seen = problem.groups, place.query_sees, place.key_seen
        if seen is not None:
            if groups > 1:
                # Heads that share their keys may see different ones.
                k, v = (x.repeat_interleave(groups, dim=-3) for x in (k, v))
                E, F = (x if x.dim() == 2 else x.repeat_interleave(groups, dim=0) for x in (E, F))
                groups = 1
            # An encoding of zeros need not be zero.
            k, v = zero_where_not(seen, k), zero_where_not(seen, v)
        free = Visibility(
            place.queries, self.rank, None, False, None, place.query_position,
            torch.arange(self.rank, device=q.device), False,
        )  # fmt: skip
        k, v = E[..., : place.keys] @ k, F[..., : place.keys] @ v
        mixed = replace(problem, q=q, k=k, v=v, kernel=Dot(), visibility=free, groups=groups)
        out = run_within(mixed).to(problem.q.dtype)
        return out if sees is None else zero_where_not(sees, out)

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, torch.finfo(problem.wide).bits // 8
        width, value = problem.k.shape[-1], problem.v.shape[-1]
        tokens = problem.k.numel() // width
        rows = problem.batch.numel() * place.queries
        flops = 2 * self.rank * tokens * (width + value) + rows * self.rank * 2 * (width + value)
        held = rows * (width + value + 1) + tokens // place.keys * self.rank * (width + value)
        return Cost(flops, traffic(problem) + 2 * self.E.numel() * size, held * size)

    def reason(self, problem: Problem) -> str:
        return f"{problem.visibility.keys} keys are mixed into {self.rank}, by learned matrices"

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f", heads={self.heads}"
        return f"length={self.length}, rank={self.rank}{heads}{', shared=True' if self.shared else ''}"
