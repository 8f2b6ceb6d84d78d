"""What the opened models have in common: layers whose attention step is open."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels import MatchKernel, Rotary
from ..normalizers import Normalizer
from .architecture import Architecture
from .head import Head
from .reading import Reading
from .step import Intervene, Mask, Place, Step, Window
from .tokens import Tokens

KEPT = ("inputs", "queries", "keys", "values", "scores", "weights", "mixed")
"""What a reading keeps of each layer, in this order."""


class Block(nn.Module, ABC):
    """One layer: its attention's projections, and what surrounds the attention step."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(self, size: Architecture, *, bias: bool) -> None:
        super().__init__()
        self.d_head = size.d_head
        self.group = size.heads // size.kv_heads
        self.query = nn.Linear(size.d_model, size.heads * size.d_head, bias=bias)
        self.key = nn.Linear(size.d_model, size.kv_heads * size.d_head, bias=bias)
        self.value = nn.Linear(size.d_model, size.kv_heads * size.d_head, bias=bias)
        self.output = nn.Linear(size.heads * size.d_head, size.d_model, bias=bias)

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """What the projections read, from the layer's input x (b, n, d_model)."""

    @abstractmethod
    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input x and what the heads hand on, (b, heads, n, d_head)."""

    def project(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, n, d_model) → q, k, v, each (b, heads, n, d_head); shared keys and values stand once for each head."""
        q, k, v = (
            part(inputs).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        return q, k, v


class Model(nn.Module, ABC):
    """A trained model. Its weights are frozen; any match kernel can be put in its attention step.

    Attributes:
        size: its `Architecture`: .layers .heads .kv_heads .d_model .d_head .positions …
        rotation: the `Rotary` that its queries and keys are turned by; None where positions enter otherwise.
    """

    layers: nn.ModuleList
    """The subclass fills it with a `Block` for each layer."""

    def __init__(self, size: Architecture, tokenize: Callable[[str], Tokens], rotation: Rotary | None = None) -> None:
        super().__init__()
        self.size = size
        self.rotation = rotation
        self._tokenize = tokenize

    def _freeze(self) -> None:
        self.requires_grad_(False)
        self.eval()

    def __repr__(self) -> str:
        s = self.size
        shared = "" if s.kv_heads == s.heads else f" that share {s.kv_heads} sets of keys and values"
        held = [*self.parameters(), *self.buffers()]
        mebibytes = sum(tensor.numel() * tensor.element_size() for tensor in held) / 2**20
        weight = self._block(0).query.weight
        return (
            f"{s.name}: {s.layers} layers of {s.heads} heads{shared}, d_model {s.d_model}, d_head {s.d_head}\n"
            f"  {self._count():,} parameters, {mebibytes:.1f} MiB in {str(weight.dtype).removeprefix('torch.')} "
            f"on {weight.device}\n"
            f"  from {s.source}\n"
            f"  licence {s.licence}"
        )

    def _count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def tokenize(self, text: str) -> Tokens:
        """Cut a text into pieces, with the marks that the model puts around a text. Nothing is cut off.

        Raises:
            TypeError: text is not a string.
            ValueError: no piece at all, more than the model has positions, or half of a character (a lone surrogate).
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {text[error.start]!r} at {error.start}") from error
        tokens = self._tokenize(text)
        self._check_length(tokens)
        return tokens

    def _check_length(self, tokens: Tokens) -> None:
        if not len(tokens):
            raise ValueError(f"the text is empty; {self.size.name} reads at least one token")
        if len(tokens) > self.size.positions:
            ends = zip(tokens.text[:: len(tokens) - 1], tokens.spans[:: len(tokens) - 1], strict=True)
            marks = [piece for piece, (start, end) in ends if start == end]
            included = f", {' and '.join(marks)} included" if marks else ""
            raise ValueError(
                f"the text has {len(tokens)} tokens{included}; {self.size.name} has {self.size.positions} positions"
            )

    def head(self, layer: int, head: int) -> Head:
        """One head's weights, both counted from 0. Raises IndexError outside the model."""
        s = self.size
        if not (0 <= layer < s.layers and 0 <= head < s.heads):
            raise IndexError(f"no head ({layer}, {head}): layers are 0…{s.layers - 1}, heads 0…{s.heads - 1}")
        block = self._block(layer)
        mine, shared = (slice(at * s.d_head, (at + 1) * s.d_head) for at in (head, head // block.group))

        # torch stores a linear map as (out, in): the transpose lets tokens be rows, and the copy keeps the model safe.
        def matrix(linear: nn.Linear, rows: slice) -> Tensor:
            return linear.weight[rows].T.clone(memory_format=torch.contiguous_format)

        def bias(linear: nn.Linear, rows: slice) -> Tensor:
            stored = cast(Tensor | None, linear.bias)
            return linear.weight.new_zeros(s.d_head) if stored is None else stored[rows].clone()

        return Head(
            layer, head,
            W_Q=matrix(block.query, mine), W_K=matrix(block.key, shared), W_V=matrix(block.value, shared),
            W_O=block.output.weight[:, mine].T.clone(memory_format=torch.contiguous_format),
            b_Q=bias(block.query, mine), b_K=bias(block.key, shared), b_V=bias(block.value, shared),
            scale=1 / math.sqrt(s.d_head), rotation=self.rotation,
        )  # fmt: skip

    def heads(self) -> Iterator[Head]:
        """Every head, layer by layer."""
        return (self.head(layer, head) for layer in range(self.size.layers) for head in range(self.size.heads))

    @abstractmethod
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
        differentiable: bool = False,
    ) -> Reading:
        """Read one text and keep everything that was computed; see `Encoder.read` and `Decoder.read`."""

    @abstractmethod
    def _embed(self, texts: list[Tokens]) -> Tensor:
        """The input of the first layer for texts of equal length: (b, n, d_model)."""

    def _given(self, text: str | Tokens) -> Tokens:
        if not isinstance(text, Tokens):
            return self.tokenize(text)
        self._check_length(text)
        self._check_ids(text.ids.tolist())
        return text

    def _check_ids(self, ids: list[int]) -> None:
        wrong = [number for number in ids if not 0 <= number < self.size.vocabulary]
        if wrong:
            raise ValueError(f"ids {wrong} are outside the vocabulary, 0…{self.size.vocabulary - 1}")

    def _meet(self, index: int, inputs: Tensor, step: Step, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of one layer, (b, heads, n, d_head) each, as they meet in the attention step."""
        q, k, v = self._block(index).project(inputs)
        if self.rotation is not None:
            q, k = self.rotation.encode_query(q, position), self.rotation.encode_key(k, position)
        return step.intervened(index, q, k, v)

    def _run(self, texts: list[Tokens], step: Step) -> Tensor:
        """Texts of equal length through the layers: (b, n, d_model)."""
        x = self._embed(texts)
        around = step.around(texts, x.device)
        for index in range(self.size.layers):
            block = self._block(index)
            inputs = block.inputs(x)
            q, k, v = self._meet(index, inputs, step, around.position)
            x = block.finish(x, step.attend(index, inputs, q, k, v, around))
        return x

    def _trace(self, tokens: Tokens, step: Step) -> dict[str, Any]:
        """One text through the layers: the fields of a `Reading`."""
        x = self._embed([tokens])
        around = step.around([tokens], x.device)
        hidden = [x]
        kept: dict[str, list[Tensor]] = {name: [] for name in KEPT}
        for index in range(self.size.layers):
            block = self._block(index)
            inputs = block.inputs(x)
            q, k, v = self._meet(index, inputs, step, around.position)
            weights = step.weights(index, inputs, q, k, around)
            mixed = weights @ v
            scores = step.scores(index, inputs, q, k, around)
            met = (inputs, *step.shown(index, q, k), v, scores, weights, mixed)
            for name, tensor in zip(KEPT, met, strict=True):
                kept[name].append(tensor)
            x = block.finish(x, mixed)
            hidden.append(x)
        return {"tokens": tokens, "hidden": torch.cat(hidden), **{name: _joined(parts) for name, parts in kept.items()}}

    def _block(self, index: int) -> Block:
        return cast(Block, self.layers[index])


def _joined(parts: list[Tensor]) -> Tensor:
    """The layers' tensors as one. The list is emptied: tables of all layers are not to be held twice."""
    joined = torch.cat(parts)
    parts.clear()
    return joined


def batches(texts: Sequence[Tokens], most: int) -> list[list[int]]:
    """Indices of texts of equal length, together but at most `most` of them. Nothing needs padding then."""
    if most < 1:
        raise ValueError(f"batch={most}: expected at least 1")
    by_length: dict[int, list[int]] = {}
    for index, tokens in enumerate(texts):
        by_length.setdefault(len(tokens), []).append(index)
    return [same[at : at + most] for same in by_length.values() for at in range(0, len(same), most)]
