"""A BERT encoder in plain torch, with its attention step open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

from ..kernels import MatchKernel
from ..normalizers import Normalizer
from .head import Head
from .reading import Reading
from .step import Intervene, Mask, Place, Step, Window
from .tokens import Tokens


@dataclass(frozen=True)
class Architecture:
    """The sizes of an encoder, and where its weights come from (for people, shown by repr)."""

    name: str
    layers: int
    heads: int
    d_model: int
    d_feedforward: int
    vocabulary: int
    positions: int
    norm_eps: float
    source: str
    licence: str

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads


class Layer(nn.Module):
    """x ← norm(x + attention(x)); x ← norm(x + feed-forward(x)): the norm comes after, as in the first transformer."""

    def __init__(self, size: Architecture) -> None:
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.d_model, size.d_model)
        self.key = nn.Linear(size.d_model, size.d_model)
        self.value = nn.Linear(size.d_model, size.d_model)
        self.output = nn.Linear(size.d_model, size.d_model)
        self.attention_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)
        self.up = nn.Linear(size.d_model, size.d_feedforward)
        self.down = nn.Linear(size.d_feedforward, size.d_model)
        self.feedforward_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (b, n, d_model) → q, k, v, each (b, heads, n, d_head)."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from its input x and what the heads hand on, (b, heads, n, d_head)."""
        x = self.attention_norm(x + self.output(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.feedforward_norm(x + self.down(gelu(self.up(x))))
        return out


class Encoder(nn.Module):
    """A trained BERT encoder. Its weights are frozen; any match kernel can be put in its attention step.

    Attributes:
        size: its `Architecture`: .layers .heads .d_model .d_head .positions …
    """

    def __init__(self, size: Architecture, tokenize: Callable[[str], Tokens]) -> None:
        super().__init__()
        self.size = size
        self._tokenize = tokenize
        self.words = nn.Embedding(size.vocabulary, size.d_model)
        self.positions = nn.Embedding(size.positions, size.d_model)
        self.segments = nn.Embedding(2, size.d_model)
        self.embedding_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.requires_grad_(False)
        self.eval()

    def __repr__(self) -> str:
        s = self.size
        count = sum(p.numel() for p in self.parameters())
        mebibytes = sum(p.numel() * p.element_size() for p in self.parameters()) / 2**20
        weight = self.words.weight
        dtype = str(weight.dtype).removeprefix("torch.")
        return (
            f"{s.name}: {s.layers} layers of {s.heads} heads, d_model {s.d_model}, d_head {s.d_head}\n"
            f"  {count:,} parameters, {mebibytes:.1f} MiB in {dtype} on {weight.device}\n"
            f"  from {s.source}\n"
            f"  licence {s.licence}"
        )

    def tokenize(self, text: str) -> Tokens:
        """Cut a text into pieces, [CLS] first and [SEP] last. Nothing is cut off.

        Raises:
            TypeError: text is not a string.
            ValueError: more pieces than the model has positions.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        tokens = self._tokenize(text)
        if len(tokens) > self.size.positions:
            raise ValueError(
                f"the text has {len(tokens)} tokens, [CLS] and [SEP] included; "
                f"{self.size.name} has {self.size.positions} positions"
            )
        return tokens

    def head(self, layer: int, head: int) -> Head:
        """One head's weights, both counted from 0. Raises IndexError outside the model."""
        if not (0 <= layer < self.size.layers and 0 <= head < self.size.heads):
            raise IndexError(
                f"no head ({layer}, {head}): layers are 0…{self.size.layers - 1}, heads 0…{self.size.heads - 1}"
            )
        block = self._layer(layer)
        rows = slice(head * self.size.d_head, (head + 1) * self.size.d_head)

        # torch stores a linear map as (out, in): the transpose lets tokens be rows, and the copy keeps the model safe.
        def matrix(linear: nn.Linear) -> Tensor:
            return linear.weight[rows].T.clone(memory_format=torch.contiguous_format)

        def bias(linear: nn.Linear) -> Tensor:
            return linear.bias[rows].clone()

        return Head(
            layer, head,
            W_Q=matrix(block.query), W_K=matrix(block.key), W_V=matrix(block.value),
            W_O=block.output.weight[:, rows].T.clone(memory_format=torch.contiguous_format),
            b_Q=bias(block.query), b_K=bias(block.key), b_V=bias(block.value),
        )  # fmt: skip

    def heads(self) -> Iterator[Head]:
        """Every head, layer by layer."""
        return (self.head(layer, head) for layer in range(self.size.layers) for head in range(self.size.heads))

    def read(
        self,
        text: str | Tokens,
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        causal: bool = False,
        window: Window = None,
        differentiable: bool = False,
    ) -> Reading:
        """Read one text and keep everything that was computed.

        Args:
            text: the text, or the result of `tokenize`.
            kernel, normalizer: what stands in the attention step in place of `ScaledDot()` and `Softmax()`: one for
                every head, or a dict with layers or (layer, head) as keys, the rest staying as trained.
            intervene: a hook (layer, q, k, v) -> (q, k, v), run just before the attention step; each is
                (heads, n, d_head), and so must be what it returns.
            mask, causal, window: as in `matchkernel.attend`, in every layer. A mask is a tensor that broadcasts to
                (heads, n, n), or a function from the `Tokens` to one.
            differentiable: keep the graph, so that gradients reach the kernel's parameters and what the hook uses.

        Returns:
            A `Reading`. The tables of weights and scores take 2 · layers · heads · n² numbers: 144 MiB at 512 tokens.
        """
        tokens = text if isinstance(text, Tokens) else self.tokenize(text)
        step = Step(self.size.layers, self.size.heads, kernel, normalizer, intervene, mask, causal, window)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            x = self._embed([tokens])
            visible = step.masks([tokens], x.device)
            hidden, kept = [x], []
            for index in range(self.size.layers):
                layer = self._layer(index)
                q, k, v = step.intervened(index, *layer.project(x))
                weights = step.weights(index, q, k, visible)
                mixed = weights @ v
                kept.append((q, k, v, step.scores(index, q, k, visible), weights, mixed))
                x = layer.finish(x, mixed)
                hidden.append(x)
            queries, keys, values, scores, tables, mixes = (torch.cat(parts) for parts in zip(*kept, strict=True))
            return Reading(tokens, torch.cat(hidden), queries, keys, values, scores, tables, mixes, _pool(x)[0])

    def embed(
        self,
        texts: Sequence[str | Tokens],
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        causal: bool = False,
        window: Window = None,
        differentiable: bool = False,
        batch: int = 64,
    ) -> Tensor:
        """Unit sentence vectors: the mean of the model's output over all tokens, scaled to length one.

        Texts of equal length run together, up to `batch` at a time. Nothing is padded, so no kernel, normaliser or hook
        ever meets a token that is not there, and a text's vector does not depend on its neighbours (beyond rounding).

        Args:
            texts: strings, or results of `tokenize`. The other arguments are those of `read`.

        Returns:
            (len(texts), d_model)
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings; for one text write [text]")
        read = [text if isinstance(text, Tokens) else self.tokenize(text) for text in texts]
        step = Step(self.size.layers, self.size.heads, kernel, normalizer, intervene, mask, causal, window)
        by_length: dict[int, list[int]] = {}
        for index, tokens in enumerate(read):
            by_length.setdefault(len(tokens), []).append(index)
        groups = [same[at : at + batch] for same in by_length.values() for at in range(0, len(same), batch)]
        if not groups:
            return self.words.weight.new_empty(0, self.size.d_model)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            vectors = torch.cat([_pool(self._run([read[i] for i in group], step)) for group in groups])
            order = {text: row for row, text in enumerate(i for group in groups for i in group)}
            return vectors[[order[text] for text in range(len(read))]]

    def _run(self, texts: list[Tokens], step: Step) -> Tensor:
        """Texts of equal length through the model: (b, n, d_model)."""
        x = self._embed(texts)
        visible = step.masks(texts, x.device)
        for index in range(self.size.layers):
            layer = self._layer(index)
            q, k, v = step.intervened(index, *layer.project(x))
            x = layer.finish(x, step.attend(index, q, k, v, visible))
        return x

    def _embed(self, texts: list[Tokens]) -> Tensor:
        """The input of the first layer: the sum of word, position and segment vectors, normalised."""
        ids = torch.stack([tokens.ids for tokens in texts]).to(self.words.weight.device)
        x = self.words(ids) + self.positions.weight[: ids.shape[1]] + self.segments.weight[0]
        normed: Tensor = self.embedding_norm(x)
        return normed

    def _layer(self, index: int) -> Layer:
        return cast(Layer, self.layers[index])


def _pool(hidden: Tensor) -> Tensor:
    """(b, n, d_model) → (b, d_model): mean over the tokens, then length one."""
    return normalize(hidden.mean(dim=1), dim=-1)
