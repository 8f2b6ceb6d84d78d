"""Everything that was computed while a model read one text."""

from dataclasses import dataclass

from torch import Tensor

from .tokens import Tokens


@dataclass(frozen=True, eq=False)
class Reading:
    """One text's way through a model. L layers, h heads, n tokens, widths d_model and d_head.

    Attributes:
        tokens: the text and its pieces.
        hidden: (L + 1, n, d_model), hidden[l] is the input of layer l and hidden[L] the output of the last.
        inputs: (L, n, d_model), what the heads of layer l multiply by W_Q, W_K and W_V: hidden[l] in an encoder, its
            norm in a decoder.
        queries, keys, values: (L, h, n, d_head), as they met in the attention step: in a decoder rotated, with shared
            keys and values repeated for each head; after `intervene`. NaN in the queries and keys of a head that
            `heads` replaced: its own may have another width, `heads[l, h].query(inputs[l])` has them.
        scores: (L, h, n, n), before the softmax: q·k/√d_head unless something else stood in the step;
            -inf where a mask forbids. Rows are queries, columns are keys.
        weights: (L, h, n, n), after the softmax (or the normaliser in its place).
        mixed: (L, h, n, d_head), weights times values: what each head hands on.
    """

    tokens: Tokens
    hidden: Tensor
    inputs: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    weights: Tensor
    mixed: Tensor

    def __repr__(self) -> str:
        layers, heads, n, _ = self.scores.shape
        return f"Reading({n} tokens, {layers} layers of {heads} heads: {' '.join(self.tokens.text)})"


@dataclass(frozen=True, eq=False, repr=False)
class SentenceReading(Reading):
    """A text's way through an encoder: a `Reading` with the sentence's vector.

    Attributes:
        sentence: (d_model,), the unit sentence vector: the mean of the output over all tokens, at length one.
    """

    sentence: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class CausalReading(Reading):
    """A text's way through a decoder: a `Reading` with what the model expects next.

    Attributes:
        logits: (n, vocabulary), row i the scores of the token at place i + 1, before the softmax.
        losses: (n − 1,), −log of the probability that the model gave to tokens 1 … n − 1, in nats.
    """

    logits: Tensor
    losses: Tensor
