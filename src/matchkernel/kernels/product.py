"""Scores that one matrix product settles: functions of q·k, |q|² and |k|²."""

from __future__ import annotations

from torch import Tensor

from .base import MatchKernel
from .encoding import Encoding, leaves
from .pairs import anchored
from .product_tiles import CombineForm
from .tiles import Tiles


class ProductKernel(MatchKernel):
    """A kernel whose score is a function of q·k, |q|² and |k|² alone, entry by entry.

    s_ij = combine(q_i · k_j, |q_i|², |k_j|²)

    Subclass it and write `combine` instead of `match`. All distances and angles are such functions, and so are powers
    of the dot product. It streams at the price of a matrix product, which a `match` of one's own does not: that would
    have to be differentiated as it stands, for all heads at once.

        class Cauchy(mk.ProductKernel):
            def combine(self, product, query_square, key_square):
                return -torch.log1p((query_square + key_square - 2 * product).clamp_min(0))

    What it learns should be numbers that all heads share; with anything larger it streams as a `match` of one's own
    does (`per_head * kernel` is the way to a factor for each head). A kernel that declares `translation_invariant` has
    its inputs moved near the origin first, so that distances keep their digits. 2nmd operations, and those of
    `combine`.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "match" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} is a ProductKernel, whose match is made from combine(product, query_square, "
                "key_square): write that, or subclass MatchKernel to write another match"
            )

    def combine(self, product: Tensor, query_square: Tensor, key_square: Tensor) -> Tensor:
        """Scores (…, n, m), from q·k (…, n, m), |q|² (…, n, 1) and |k|² (…, 1, m); each entry from its own three."""
        raise NotImplementedError(f"{type(self).__name__} must define combine(product, query_square, key_square)")

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        if self.translation_invariant is True:
            q, k = anchored(q, k)
        return (q, q.square().sum(-1, keepdim=True)), (k, k.square().sum(-1, keepdim=True))

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        (x, of_query), (y, of_key) = leaves(q), leaves(k)
        return self.combine(x @ y.mT, of_query, of_key.mT)

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        if any(x.numel() > 1 for x in (*self.parameters(), *self.buffers())):
            return None
        return Tiles(CombineForm(self), q, k)
