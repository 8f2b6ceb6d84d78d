"""One attention head, seen as the match kernel that it has learned."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class ScoreTerms(NamedTuple):
    """The four terms of a score with biases; they broadcast and add up to the head's scores."""

    content: Tensor
    """(n, m): x M x'ᵀ, the only term in which query and key meet."""
    query: Tensor
    """(n, 1): x W_Q b_Kᵀ, one number per row; softmax does not see it."""
    key: Tensor
    """(1, m): b_Q W_Kᵀ x'ᵀ, one number per column: how loud a key is, whoever asks."""
    constant: Tensor
    """(1, 1): b_Q·b_K; softmax does not see it."""

    @property
    def total(self) -> Tensor:
        """(n, m): the sum of the four."""
        return self.content + self.query + self.key + self.constant


@dataclass(frozen=True, eq=False)
class Head:
    """The weights of one head. Tokens are rows: q = x W_Q + b_Q, with x of shape (n, d_model).

    Attributes:
        layer, index: where it stands in the model, both from 0.
        W_Q, W_K, W_V: (d_model, d_head). W_O: (d_head, d_model), what the head's mix is multiplied by on its way out.
        b_Q, b_K, b_V: (d_head,).

    All are copies: writing to them does not change the model.
    """

    layer: int
    index: int
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor
    b_K: Tensor
    b_V: Tensor

    def __repr__(self) -> str:
        return f"Head(layer={self.layer}, index={self.index}, d_model={self.W_Q.shape[0]}, d_head={self.W_Q.shape[1]})"

    @property
    def M(self) -> Tensor:
        """(d_model, d_model): W_Q W_Kᵀ, the bilinear form x M x'ᵀ that the head scores with; rank at most d_head."""
        return self.W_Q @ self.W_K.T

    def query(self, x: Tensor) -> Tensor:
        """x W_Q + b_Q: (…, n, d_model) → (…, n, d_head)."""
        return x @ self.W_Q + self.b_Q

    def key(self, x: Tensor) -> Tensor:
        """x W_K + b_K: (…, n, d_model) → (…, n, d_head)."""
        return x @ self.W_K + self.b_K

    def value(self, x: Tensor) -> Tensor:
        """x W_V + b_V: (…, n, d_model) → (…, n, d_head)."""
        return x @ self.W_V + self.b_V

    def scores(
        self, x_q: Tensor, x_k: Tensor | None = None, *, biases: bool = True, scale: float | None = None
    ) -> Tensor:
        """The head's scores between two sets of tokens, before the softmax: scale · (x_q W_Q + b_Q)(x_k W_K + b_K)ᵀ.

        Args:
            x_q: (…, n, d_model), the inputs of this head's layer at the asking tokens.
            x_k: (…, m, d_model), the same at the tokens asked about; x_q unless given.
            biases: False leaves b_Q and b_K out: scale · x_q M x_kᵀ.
            scale: 1/√d_head unless given, as in the model; 1.0 gives the bare q·k.

        Returns:
            (…, n, m)
        """
        x_k = x_q if x_k is None else x_k
        q, k = (self.query(x_q), self.key(x_k)) if biases else (x_q @ self.W_Q, x_k @ self.W_K)
        return self._scale(scale) * (q @ k.mT)

    def terms(self, x_q: Tensor, x_k: Tensor | None = None, *, scale: float | None = None) -> ScoreTerms:
        """The four terms that `scores` is the sum of: (x W_Q + b_Q)·(x' W_K + b_K) multiplied out.

        Arguments as in `scores`; every term carries the same scale.
        """
        x_k = x_q if x_k is None else x_k
        c = self._scale(scale)
        return ScoreTerms(
            content=c * (x_q @ self.W_Q @ (x_k @ self.W_K).mT),
            query=c * (x_q @ self.W_Q @ self.b_K).unsqueeze(-1),
            key=c * (x_k @ self.W_K @ self.b_Q).unsqueeze(-2),
            constant=c * (self.b_Q @ self.b_K).reshape(1, 1),
        )

    def _scale(self, scale: float | None) -> float:
        return 1 / math.sqrt(self.W_Q.shape[1]) if scale is None else scale
