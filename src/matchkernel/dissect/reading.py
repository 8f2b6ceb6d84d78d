"""Everything that was computed while a model read one text."""

from dataclasses import dataclass

from torch import Tensor

from .tokens import Tokens


@dataclass(frozen=True, eq=False)
class Reading:
    """One text's way through a model. L layers, h heads, n tokens, widths d_model and d_head = d_model / h.

    Attributes:
        tokens: the text and its pieces.
        hidden: (L + 1, n, d_model), hidden[l] is the input of layer l and hidden[L] the output.
        queries, keys, values: (L, h, n, d_head), as they met in the attention step (after `intervene`).
        scores: (L, h, n, n), before the softmax: q·k/√d_head unless another kernel stood in the step;
            -inf where a mask forbids. Rows are queries, columns are keys.
        weights: (L, h, n, n), after the softmax (or the normaliser in its place).
        mixed: (L, h, n, d_head), weights times values: what each head hands on.
        sentence: (d_model,), the unit sentence vector: the mean of the output over all tokens, at length one.
    """

    tokens: Tokens
    hidden: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    weights: Tensor
    mixed: Tensor
    sentence: Tensor

    def __repr__(self) -> str:
        layers, heads, n, _ = self.scores.shape
        return f"Reading({n} tokens, {layers} layers of {heads} heads: {' '.join(self.tokens.text)})"
