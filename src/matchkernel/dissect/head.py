"""One attention head, seen as the match kernel that it has learned."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Rotary
from .form import Form, form


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
    """The weights of one head. Tokens are rows: q = x W_Q + b_Q, with x of shape (n, d_model), `inputs` of a reading.

    Attributes:
        layer, index: where it stands in the model, both from 0.
        W_Q, W_K, W_V: (d_model, d_head). W_O: (d_head, d_model), what the head's mix is multiplied by on its way out.
            Heads that share keys and values hold the same W_K and W_V.
        b_Q, b_K, b_V: (d_head,); zeros where the model has none.
        scale: what multiplies q·k; 1/√d_head in the models.
        rotation: the `Rotary` that turns queries and keys by their positions, or None.

    All are copies: writing to them does not change the model. `dataclasses.replace(head, W_Q=…, W_K=…)` makes another,
    which `read(…, heads={(layer, index): head})` puts into the attention step. There W_Q and W_K may have any common
    width: a rotation turns every whole chunk of d_head columns and leaves what is beyond as it is.
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
    scale: float
    rotation: Rotary | None = None

    def __repr__(self) -> str:
        (d_model, width), d_head = self.W_Q.shape, self.W_V.shape[1]
        inner = "" if width == d_head else f", width={width}"
        return f"Head(layer={self.layer}, index={self.index}, d_model={d_model}, d_head={d_head}{inner})"

    @property
    def M(self) -> Tensor:
        """(d_model, d_model): W_Q W_Kᵀ, the bilinear form x M x'ᵀ that the head scores with; rank at most d_head.

        With a rotation it is the form between tokens at the same position.
        """
        return self.W_Q @ self.W_K.T

    def form(self, offset: int = 0) -> Form:
        """M by what does not depend on the basis inside the head: its spectrum, its symmetry, its rank.

        Args:
            offset: j − i in tokens, for a head with a rotation: the form W_Q R_Δ W_Kᵀ between tokens so far apart,
                the key's place less the query's; negative for a key further back.

        Raises:
            ValueError: an offset for a head without a rotation; a form that is zero or not finite.
        """
        return form(self, offset)

    def query(self, x: Tensor) -> Tensor:
        """x W_Q + b_Q: (…, n, d_model) → (…, n, d_head), before any rotation."""
        return x @ self.W_Q + self.b_Q

    def key(self, x: Tensor) -> Tensor:
        """x W_K + b_K: (…, n, d_model) → (…, n, d_head), before any rotation."""
        return x @ self.W_K + self.b_K

    def value(self, x: Tensor) -> Tensor:
        """x W_V + b_V: (…, n, d_model) → (…, n, d_head)."""
        return x @ self.W_V + self.b_V

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Queries or keys (…, n, width) turned to their positions (…, n); unchanged in a head without a rotation."""
        if self.rotation is None:
            return x
        chunks = x.shape[-1] // self.rotation.dim
        whole = chunks * self.rotation.dim
        apart = x[..., :whole].reshape(*x.shape[:-1], chunks, self.rotation.dim).transpose(-2, -3)
        turned = self.rotation.encode_query(apart, position.unsqueeze(-2)).transpose(-2, -3).flatten(-2)
        return torch.cat([turned, x[..., whole:]], -1)

    def scores(
        self,
        x_q: Tensor,
        x_k: Tensor | None = None,
        *,
        biases: bool = True,
        scale: float | None = None,
        query_position: Tensor | None = None,
        key_position: Tensor | None = None,
    ) -> Tensor:
        """The head's scores between two sets of tokens, before the softmax: scale · (x_q W_Q + b_Q)(x_k W_K + b_K)ᵀ.

        With a rotation R: scale · (R_i q_i) · (R_j k_j).

        Args:
            x_q: (…, n, d_model), the inputs of this head at the asking tokens: rows of `reading.inputs[layer]`.
            x_k: (…, m, d_model), the same at the tokens asked about; x_q unless given.
            biases: False leaves b_Q and b_K out: scale · x_q M x_kᵀ.
            scale: the head's own unless given; 1.0 gives the bare q·k.
            query_position, key_position: (…, n) and (…, m), where the tokens stand, for a head with a rotation;
                0 … n−1 for both unless given. Tokens out of two sets have no places by default: ValueError.

        Returns:
            (…, n, m)
        """
        q, k = self._pair(x_q, x_k, query_position, key_position, biases=biases)
        return self._scale(scale) * (q @ k.mT)

    def terms(
        self,
        x_q: Tensor,
        x_k: Tensor | None = None,
        *,
        scale: float | None = None,
        query_position: Tensor | None = None,
        key_position: Tensor | None = None,
    ) -> ScoreTerms:
        """The four terms that `scores` is the sum of: (x W_Q + b_Q)·(x' W_K + b_K) multiplied out.

        Arguments as in `scores`; every term carries the same scale. ValueError for biases under a rotation: they meet
        turned by both positions, and no term then belongs to a query or a key alone.
        """
        c = self._scale(scale)
        if self.rotation is not None and (self.b_Q.any() or self.b_K.any()):
            raise ValueError(f"{self!r} has biases and a rotation: its score does not split into these four terms")
        q, k = self._pair(x_q, x_k, query_position, key_position, biases=False)
        x_k = x_q if x_k is None else x_k
        return ScoreTerms(
            content=c * (q @ k.mT),
            query=c * (x_q @ self.W_Q @ self.b_K).unsqueeze(-1),
            key=c * (x_k @ self.W_K @ self.b_Q).unsqueeze(-2),
            constant=c * (self.b_Q @ self.b_K).reshape(1, 1),
        )

    def _pair(
        self,
        x_q: Tensor,
        x_k: Tensor | None,
        query_position: Tensor | None,
        key_position: Tensor | None,
        *,
        biases: bool,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, each turned to its place."""
        if self.rotation is not None and x_k is not None and (query_position is None or key_position is None):
            raise ValueError(
                "query_position and key_position: a head with a rotation needs both for two sets of tokens"
            )
        x_k = x_q if x_k is None else x_k
        q, k = (self.query(x_q), self.key(x_k)) if biases else (x_q @ self.W_Q, x_k @ self.W_K)
        if self.rotation is None:
            return q, k
        here, there = (
            torch.arange(x.shape[-2], device=x.device) if position is None else position
            for x, position in ((q, query_position), (k, key_position))
        )
        return self.rotate(q, here), self.rotate(k, there)

    def _scale(self, scale: float | None) -> float:
        return self.scale if scale is None else scale
