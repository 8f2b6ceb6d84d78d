"""The additive score: a small network looks at query and key together."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .additive_tiles import lift
from .base import Fact, MatchKernel, ScoreFact
from .encoding import Encoding
from .tiles import Tiles


class Additive(MatchKernel):
    """A hidden layer over the sum of projected query and key, and one number read from it.

    s_ij = vᵀ tanh(W_qᵀ q_i + W_kᵀ k_j),  W_q (dim, hidden), W_k (key_dim, hidden), v (hidden)

    q (…, n, dim), k (…, m, key_dim) → scores (…, n, m), between −Σ|v| and Σ|v|. `key_dim` defaults to `dim`. Entries
    of the matrices start normal with standard deviation 1/√dim and 1/√key_dim, those of v with 1/√hidden, so that
    inputs of unit variance give scores of order one; draw others with `reset_parameters(generator)`. There is no bias:
    Bahdanau's has none either. hidden · (dim + key_dim + 1) parameters.
    Written out, a score takes 3 · hidden operations and a tanh for each of them, and n · m · hidden numbers in memory.
    Tiles take tanh(a + b) = 1 − 2 / (1 + e^{2a} e^{2b}), whose two exponentials are taken once per token.
    Symmetric only if W_q = W_k, and even then neither s nor eˢ is positive definite: with one hidden unit, weights 1
    and points 0.1 and 1, tanh 0.2 + tanh 2 = 1.16 is less than 2 tanh 1.1 = 1.60, so the 2 × 2 table of eˢ has a
    negative determinant. ValueError for a dimension below 1 or an input of another width.
    Source: Bahdanau, Cho & Bengio 2015, appendix A.1.2.
    """

    symmetric: Fact = False
    translation_invariant: Fact = False
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = False
    positive_definite: Fact = False

    def __init__(
        self, dim: int, hidden: int, key_dim: int | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        key_dim = dim if key_dim is None else key_dim
        for name, value in {"dim": dim, "hidden": hidden, "key_dim": key_dim}.items():
            if value < 1:
                raise ValueError(f"Additive({name}=…): expected at least 1, got {value}")
        self.dim, self.hidden, self.key_dim = dim, hidden, key_dim
        self.query_weight = nn.Parameter(torch.empty(dim, hidden))
        self.key_weight = nn.Parameter(torch.empty(key_dim, hidden))
        self.v = nn.Parameter(torch.empty(hidden))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew, from `generator` or torch's own."""
        with torch.no_grad():
            self.query_weight.normal_(0.0, 1.0 / math.sqrt(self.dim), generator=generator)
            self.key_weight.normal_(0.0, 1.0 / math.sqrt(self.key_dim), generator=generator)
            self.v.normal_(0.0, 1.0 / math.sqrt(self.hidden), generator=generator)

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        """The projected query, and v, which rides beside it so that `match` has no parameter of its own."""
        projected = _project("q", q, self.query_weight)
        return projected, self.v.to(projected.dtype).expand(*projected.shape[:-1], -1)

    def encode_key(self, k: Tensor, position: Tensor) -> Encoding:
        return _project("k", k, self.key_weight)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        assert isinstance(q, tuple) and isinstance(k, Tensor)
        a, v = q
        assert isinstance(a, Tensor) and isinstance(v, Tensor)
        return (torch.tanh(a.unsqueeze(-2) + k.unsqueeze(-3)) * v.unsqueeze(-2)).sum(-1)

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        assert isinstance(q, tuple) and isinstance(k, Tensor)
        a, v = q
        assert isinstance(a, Tensor) and isinstance(v, Tensor)
        return lift(a, v, k)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """A sum, a tanh, a product and a sum for each hidden unit, each counted once."""
        return 4 * self.hidden

    def extra_repr(self) -> str:
        shape = f"{self.dim}, {self.hidden}"
        return shape if self.key_dim == self.dim else f"{shape}, key_dim={self.key_dim}"


def _project(name: str, x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but this Additive expects a last dimension of {weight.shape[0]}"
        )
    wide = torch.promote_types(x.dtype, weight.dtype)
    return x.to(wide) @ weight.to(wide)

