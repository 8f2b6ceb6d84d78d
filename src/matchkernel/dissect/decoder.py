"""A Llama decoder in plain torch, with its attention step open."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from ..kernels import MatchKernel, Rotary
from ..normalizers import Normalizer
from .architecture import Architecture
from .head import Head
from .model import Block, Model, batches
from .reading import CausalReading
from .step import Intervene, Mask, Place, Position, Step, Window
from .tokens import Tokens

ROWS = 256
"""Tokens whose logits are held at a time where only losses are wanted: 48 MiB for a vocabulary of 49,152."""


class Pieces(Protocol):
    """What a decoder asks of its tokenizer."""

    marks: frozenset[int]
    """The pieces that are no text; writing one ends a completion."""

    def __call__(self, text: str) -> Tokens: ...

    def from_ids(self, ids: Sequence[int]) -> Tokens: ...

    def join(self, ids: Iterable[int]) -> str: ...


class DecoderLayer(Block):
    """x ← x + attention(norm(x)); x ← x + feed-forward(norm(x)): the norm comes before, and the sum is never normed."""

    def __init__(self, size: Architecture) -> None:
        super().__init__(size, bias=False)
        self.attention_norm = nn.RMSNorm(size.d_model, eps=size.norm_eps)
        self.feedforward_norm = nn.RMSNorm(size.d_model, eps=size.norm_eps)
        self.gate = nn.Linear(size.d_model, size.d_feedforward, bias=False)
        self.up = nn.Linear(size.d_model, size.d_feedforward, bias=False)
        self.down = nn.Linear(size.d_feedforward, size.d_model, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        normed: Tensor = self.attention_norm(x)
        return normed

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.feedforward_norm(x)
        out: Tensor = x + self.down(silu(self.gate(normed)) * self.up(normed))
        return out


class Decoder(Model):
    """A trained Llama decoder. Its weights are frozen; any match kernel can be put in its attention step.

    Every token attends to itself and to those before it. Queries and keys are rotated by their positions before they
    meet, so a kernel that is put in the step gets them rotated, and need not look at positions itself.

    Args:
        size: its sizes, kept as `.size`.
        pieces: its tokenizer.
        rotation: turns its queries and keys, kept as `.rotation`.
    """

    def __init__(self, size: Architecture, pieces: Pieces, rotation: Rotary) -> None:
        super().__init__(size, pieces, rotation)
        self._pieces = pieces
        self.words = nn.Embedding(size.vocabulary, size.d_model)
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model, eps=size.norm_eps)
        self._freeze()

    def from_ids(self, ids: Sequence[int] | Tensor) -> Tokens:
        """A text given by its pieces' numbers, for texts that are no language: random tokens, a sequence twice.

        Raises:
            ValueError: a number outside the vocabulary, no number at all, or more than the model has positions.
            TypeError: what is no integer.
        """
        if isinstance(ids, Tensor) and ids.dim() != 1:
            raise ValueError(f"ids has shape {tuple(ids.shape)}: expected one number for each piece")
        numbers = [operator.index(each) for each in ids]
        self._check_ids(numbers)
        tokens = self._pieces.from_ids(numbers)
        self._check_length(tokens)
        return tokens

    def read(
        self,
        text: str | Tokens,
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        window: Window = None,
        position: Position | None = None,
        differentiable: bool = False,
    ) -> CausalReading:
        """Read one text and keep everything that was computed.

        Args:
            text: the text, or the result of `tokenize` or `from_ids`.
            kernel, normalizer: what stands in the attention step in place of `ScaledDot()` and `Softmax()`: one for
                every head, or a dict with layers or (layer, head) as keys, the rest staying as trained.
            heads: heads put in the place of the model's own, `{(layer, head): Head}`. Only what decides who attends to
                whom is theirs (W_Q, W_K, b_Q, b_K, scale, rotation); values and output stay the model's. No kernel
                beside one.
            intervene: a hook (layer, q, k, v) -> (q, k, v), run just before the attention step, after the rotation;
                each is (heads, n, d_head), and so must be what it returns. Of a replaced head only v is to change.
            mask, window: as in `matchkernel.attend`, in every layer, on top of the causal order. A mask is a tensor
                that broadcasts to (heads, n, n), or a function from the `Tokens` to one. A window that also keeps the
                first tokens is a mask.
            position: the places that the rotation uses, (n,), or a function from the `Tokens` to them; 0 … n−1 unless
                given. Zeros take the rotation away. Causal order and windows do not look at it.
            differentiable: keep the graph, so that gradients reach the kernel's parameters and what the hook uses.

        Returns:
            A `CausalReading`. The tables of weights and scores take 2 · layers · heads · n² numbers, the vectors
            6 · layers · n · d_model and the logits n · vocabulary: for SmolLM2 284 MiB at 256 tokens and 838 MiB at
            512. `losses` keeps none of them.
        """
        tokens = self._given(text)
        step = Step(self.size, kernel, normalizer, heads, intervene, mask, True, window, position)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            fields = self._trace(tokens, step)
            logits = self._logits(fields["hidden"][-1])
            losses = cross_entropy(logits[:-1], tokens.ids[1:].to(logits.device), reduction="none")
            return CausalReading(**fields, logits=logits, losses=losses)

    def losses(
        self,
        texts: Sequence[str | Tokens],
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        window: Window = None,
        position: Position | None = None,
        differentiable: bool = False,
        batch: int = 8,
    ) -> list[Tensor]:
        """How much each token surprises the model: −log of its probability after those before it, in nats.

        Texts of equal length run together, up to `batch` at a time, and nothing is padded. No table of weights is made
        where the engine needs none.

        Args:
            texts: strings, or results of `tokenize` or `from_ids`. The other arguments are those of `read`.

        Returns:
            For each text (n − 1,): the losses of its tokens 1 … n − 1. The first has nothing before it.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings; for one text write [text]")
        read = [self._given(text) for text in texts]
        step = Step(self.size, kernel, normalizer, heads, intervene, mask, True, window, position)
        found: dict[int, Tensor] = {}
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            for group in batches(read, batch):
                x = self._run([read[index] for index in group], step)[:, :-1]
                follow = torch.stack([read[index].ids[1:] for index in group]).to(x.device)
                found.update(zip(group, self._surprise(x.flatten(0, 1), follow.flatten()).view_as(follow), strict=True))
        return [found[index] for index in range(len(read))]

    def loss(
        self,
        texts: Sequence[str | Tokens],
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        window: Window = None,
        position: Position | None = None,
        batch: int = 8,
    ) -> float:
        """The mean of `losses` over all tokens of all texts, in nats per token; its exponential is the perplexity.

        Raises:
            ValueError: no text has a second token.
        """
        losses = self.losses(
            texts, kernel, normalizer, heads=heads, intervene=intervene, mask=mask, window=window, position=position,
            batch=batch,
        )  # fmt: skip
        count = sum(len(text) for text in losses)
        if not count:
            raise ValueError("texts: the loss is that of the second token and those after it; no text has two tokens")
        return sum(float(text.double().sum()) for text in losses) / count

    def complete(
        self,
        text: str | Tokens,
        tokens: int = 16,
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        window: Window = None,
        position: Position | None = None,
    ) -> str:
        """What the model writes after a text, always its most probable token: at most `tokens` of them.

        It stops before a mark such as ``<|im_end|>``. The other arguments are those of `read`; a mask and a position
        have to be functions, since the text grows. Each token reads the whole text again: no keys are kept.

        Returns:
            The new text only.

        Raises:
            ValueError: tokens below 1, or a text that outgrows the model's positions.
        """
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: expected at least 1")
        read = self._given(text)
        step = Step(self.size, kernel, normalizer, heads, intervene, mask, True, window, position)
        start, ids = len(read), read.ids.tolist()
        with torch.no_grad():
            for _ in range(tokens):
                best = int(self._logits(self._run([read], step)[0, -1]).argmax())
                if best in self._pieces.marks:
                    break
                ids.append(best)
                read = self.from_ids(ids)
        return self._pieces.join(ids[start:])

    def _embed(self, texts: list[Tokens]) -> Tensor:
        embedded: Tensor = self.words(torch.stack([tokens.ids for tokens in texts]).to(self.words.weight.device))
        return embedded

    def _logits(self, hidden: Tensor) -> Tensor:
        """(…, d_model) → (…, vocabulary): the last norm, then the match with every word's vector."""
        logits: Tensor = self.norm(hidden) @ self.words.weight.T
        return logits

    def _surprise(self, hidden: Tensor, follow: Tensor) -> Tensor:
        """(tokens, d_model) and the numbers of those that follow → (tokens,), without all logits at once."""
        parts = [slice(at, at + ROWS) for at in range(0, len(follow), ROWS)] or [slice(0)]
        return torch.cat([
            cross_entropy(self._logits(hidden[part]), follow[part], reduction="none") for part in parts
        ])  # fmt: skip
