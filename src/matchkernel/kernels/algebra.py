"""Sums and multiples of kernels. Scores add, so weights multiply; what is an inner product stays one."""

from __future__ import annotations

from torch import Tensor

from .base import DotKernel, Fact, MatchKernel, Parts, ScoreFact, concatenate
from .encoding import Encoding
from .tiles import Tiles
from .values import HeadValue, as_factor, as_number, hold, show
from .wrap_tiles import TimesForm, added, around, beside, carrying


def add(a: MatchKernel, b: MatchKernel) -> MatchKernel:
    """a + b."""
    if isinstance(a, DotKernel) and isinstance(b, DotKernel):
        return DotSum(a, b)
    return KernelSum(a, b)


def scale(kernel: MatchKernel, factor: HeadValue) -> MatchKernel:
    """factor · kernel."""
    return ScaledDotKernel(kernel, factor) if isinstance(kernel, DotKernel) else ScaledKernel(kernel, factor)


class KernelSum(MatchKernel):
    """s = s_a + s_b, for any two kernels."""

    def __init__(self, a: MatchKernel, b: MatchKernel) -> None:
        super().__init__()
        self.a, self.b = a, b
        _inherit_added_facts(self, a, b)

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        q_a, k_a = self.a.encode(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
        q_b, k_b = self.b.encode(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
        return (q_a, q_b), (k_a, k_b)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        return self.a.match(q[0], k[0]) + self.b.match(q[1], k[1])

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        return added(self.a.tiles(q[0], k[0]), self.b.tiles(q[1], k[1]))

    def under_causal_order(self) -> MatchKernel:
        a, b = self.a.under_causal_order(), self.b.under_causal_order()
        return self if a is self.a and b is self.b else add(a, b)

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        return _added_flops(self.a, self.b, query_width, key_width)

    def __repr__(self) -> str:
        return f"{self.a!r} + {self.b!r}"


class DotSum(DotKernel):
    """s = s_a + s_b, for two dot kernels: their encodings side by side, so still one inner product."""

    def __init__(self, a: DotKernel, b: DotKernel) -> None:
        super().__init__()
        self.a, self.b = a, b
        _inherit_added_facts(self, a, b)

    def encode_pair(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> Parts:
        both = []
        for kernel in (self.a, self.b):
            parts = kernel.encode_pair(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
            both.append(_times_query(kernel.scale(parts.q.shape[-1]), parts))
        a, b = both
        terms = [part.query_term for part in both if part.query_term is not None]
        return Parts(
            concatenate(a.q, b.q),
            concatenate(a.k, b.k),
            sum(terms[1:], terms[0]) if terms else None,
            _join(a.fine_q, b.fine_q),
            _join(a.fine_k, b.fine_k),
        )

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        return _added_flops(self.a, self.b, query_width, key_width)

    def __repr__(self) -> str:
        return f"{self.a!r} + {self.b!r}"


class ScaledKernel(MatchKernel):
    """s = c · s_a, for any kernel; c is a number, a tensor with one entry per head, or a parameter."""

    factor: HeadValue

    def __init__(self, kernel: MatchKernel, factor: HeadValue) -> None:
        super().__init__()
        self.kernel = kernel
        hold(self, "factor", factor)
        _inherit_scaled_facts(self, kernel, factor)

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        query, key = self.kernel.encode(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
        return carrying(query, self.factor, q), key

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        own, factor = beside(q, as_number(self.factor))
        return factor * self.kernel.match(own, k)

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        return around(self.kernel, q, k, as_number(self.factor), TimesForm)

    def under_causal_order(self) -> MatchKernel:
        kernel = self.kernel.under_causal_order()
        return self if kernel is self.kernel else scale(kernel, self.factor)

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        inner = self.kernel.flops_per_pair(query_width, key_width)
        return None if inner is None else inner + 1

    def __repr__(self) -> str:
        return _times(self.factor, self.kernel)


class ScaledDotKernel(DotKernel):
    """s = c · s_a, for a dot kernel: a number goes into the scale, a tensor into the query.

    Zero goes into the query too: a scale of 0 could not be divided out of a query term.
    """

    factor: HeadValue

    def __init__(self, kernel: DotKernel, factor: HeadValue) -> None:
        super().__init__()
        self.kernel = kernel
        hold(self, "factor", factor)
        _inherit_scaled_facts(self, kernel, factor)

    @property
    def _in_query(self) -> bool:
        return isinstance(self.factor, Tensor) or self.factor == 0.0

    def scale(self, width: int) -> float:
        if isinstance(self.factor, Tensor) or self._in_query:
            return self.kernel.scale(width)
        return self.kernel.scale(width) * self.factor

    def encode_pair(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> Parts:
        parts = self.kernel.encode_pair(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
        if parts.query_term is not None:
            term = parts.query_term.unsqueeze(-1)
            parts = parts._replace(query_term=(as_factor(self.factor, term) * term).squeeze(-1))
        return _times_query(self.factor, parts) if self._in_query else parts

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        return self.kernel.flops_per_pair(query_width, key_width)

    def __repr__(self) -> str:
        return _times(self.factor, self.kernel)


def _times_query(factor: HeadValue, parts: Parts) -> Parts:
    """The inner product times `factor`, which goes into all that the query has in it."""
    fine = parts.fine_q
    return parts._replace(
        q=(as_factor(factor, parts.q) * parts.q).to(parts.q.dtype),
        fine_q=None if fine is None else as_factor(factor, fine) * fine,
    )


def _join(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return concatenate(a, b) if a is not None and b is not None else a if b is None else b


def _added_flops(a: MatchKernel, b: MatchKernel, query_width: int, key_width: int) -> int | None:
    parts = [kernel.flops_per_pair(query_width, key_width) for kernel in (a, b)]
    counted = [part for part in parts if part is not None]
    return sum(counted) if len(counted) == 2 else None


def _times(factor: HeadValue, kernel: MatchKernel) -> str:
    inner = repr(kernel)
    return f"{show(factor)} * ({inner})" if isinstance(kernel, (KernelSum, DotSum)) else f"{show(factor)} * {inner}"


def _both(a: Fact, b: Fact) -> Fact:
    return True if a is True and b is True else None


def _sum_of_scores(a: ScoreFact, b: ScoreFact) -> ScoreFact:
    if a is True and b is True:
        return True
    return "conditionally" if {a, b} <= {True, "conditionally"} else None


def _inherit_added_facts(total: MatchKernel, a: MatchKernel, b: MatchKernel) -> None:
    total.symmetric = _both(a.symmetric, b.symmetric)
    total.translation_invariant = _both(a.translation_invariant, b.translation_invariant)
    total.position_invariant = _both(a.position_invariant, b.position_invariant)
    total.score_positive_definite = _sum_of_scores(a.score_positive_definite, b.score_positive_definite)
    # e^(a+b) = e^a e^b, and a product of positive definite kernels is positive definite (Schur).
    total.positive_definite = _both(a.positive_definite, b.positive_definite)


def _inherit_scaled_facts(scaled: MatchKernel, kernel: MatchKernel, factor: HeadValue) -> None:
    """What c · s keeps of s.

    By Schoenberg, e^{cs} is positive definite for all c > 0 just when s is conditionally so.
    """
    scaled.symmetric = True if kernel.symmetric is True else None
    scaled.translation_invariant = True if kernel.translation_invariant is True else None
    scaled.position_invariant = True if kernel.position_invariant is True else None
    if isinstance(factor, Tensor) or factor < 0:
        return
    scaled.score_positive_definite = kernel.score_positive_definite or None
    if kernel.score_positive_definite in (True, "conditionally"):
        scaled.positive_definite = True
