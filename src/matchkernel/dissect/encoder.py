"""A BERT encoder in plain torch, with its attention step open."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

from ..kernels import MatchKernel
from ..normalizers import Normalizer
from .architecture import Architecture
from .head import Head
from .model import Block, Model, batches
from .reading import SentenceReading
from .step import Intervene, Mask, Place, Step, Window
from .tokens import Tokens


class Layer(Block):
    """x ← norm(x + attention(x)); x ← norm(x + feed-forward(x)): the norm comes after, as in the first transformer."""

    def __init__(self, size: Architecture) -> None:
        super().__init__(size, bias=True)
        self.attention_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)
        self.up = nn.Linear(size.d_model, size.d_feedforward)
        self.down = nn.Linear(size.d_feedforward, size.d_model)
        self.feedforward_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.attention_norm(x + self.output(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.feedforward_norm(x + self.down(gelu(self.up(x))))
        return out


class Encoder(Model):
    """A trained BERT encoder. Its weights are frozen; any match kernel can be put in its attention step.

    Args:
        size: its sizes, kept as `.size`.
        tokenize: cuts a text into pieces, the marks at its ends included.
        words: a module from ids (b, n) to word vectors (b, n, d_model); an `nn.Embedding` by default.
    """

    def __init__(self, size: Architecture, tokenize: Callable[[str], Tokens], words: nn.Module | None = None) -> None:
        super().__init__(size, tokenize)
        self.words = nn.Embedding(size.vocabulary, size.d_model) if words is None else words
        self.positions = nn.Embedding(size.positions, size.d_model)
        self.segments = nn.Embedding(2, size.d_model)
        self.embedding_norm = nn.LayerNorm(size.d_model, eps=size.norm_eps)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self._freeze()

    def _count(self) -> int:
        # Word vectors that are computed from something smaller are no parameters of torch's, but they are the model's.
        computed = not any(True for _ in self.words.parameters())
        return super()._count() + computed * self.size.vocabulary * self.size.d_model

    def read(
        self,
        text: str | Tokens,
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
        intervene: Intervene | None = None,
        mask: Mask | None = None,
        causal: bool = False,
        window: Window = None,
        differentiable: bool = False,
    ) -> SentenceReading:
        """Read one text and keep everything that was computed.

        Args:
            text: the text, or the result of `tokenize`.
            kernel, normalizer: what stands in the attention step in place of `ScaledDot()` and `Softmax()`: one for
                every head, or a dict with layers or (layer, head) as keys, the rest staying as trained.
            heads: heads put in the place of the model's own, `{(layer, head): Head}`. Only what decides who attends to
                whom is theirs (W_Q, W_K, b_Q, b_K, scale); values and output stay the model's. No kernel beside one.
            intervene: a hook (layer, q, k, v) -> (q, k, v), run just before the attention step; each is
                (heads, n, d_head), and so must be what it returns. Of a replaced head only v is to change.
            mask, causal, window: as in `matchkernel.attend`, in every layer. A mask is a tensor that broadcasts to
                (heads, n, n), or a function from the `Tokens` to one.
            differentiable: keep the graph, so that gradients reach the kernel's parameters and what the hook uses.

        Returns:
            A `SentenceReading`. The tables of weights and scores take 2 · layers · heads · n² numbers:
            MiniLM's 144 MiB at 512 tokens.
        """
        tokens = self._given(text)
        step = Step(self.size, kernel, normalizer, heads, intervene, mask, causal, window)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            fields = self._trace(tokens, step)
            return SentenceReading(**fields, sentence=_pool(fields["hidden"][-1:])[0])

    def embed(
        self,
        texts: Sequence[str | Tokens],
        kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None,
        normalizer: Normalizer | Mapping[Place, Normalizer] | None = None,
        *,
        heads: Mapping[tuple[int, int], Head] | None = None,
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
        read = [self._given(text) for text in texts]
        step = Step(self.size, kernel, normalizer, heads, intervene, mask, causal, window)
        groups = batches(read, batch)
        if not groups:
            return self.positions.weight.new_empty(0, self.size.d_model)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            vectors = torch.cat([_pool(self._run([read[i] for i in group], step)) for group in groups])
            order = {text: row for row, text in enumerate(i for group in groups for i in group)}
            return vectors[[order[text] for text in range(len(read))]]

    def _embed(self, texts: list[Tokens]) -> Tensor:
        """The input of the first layer: the sum of word, position and segment vectors, normalised."""
        ids = torch.stack([tokens.ids for tokens in texts]).to(self.positions.weight.device)
        x = self.words(ids) + self.positions.weight[: ids.shape[1]] + self.segments.weight[0]
        normed: Tensor = self.embedding_norm(x)
        return normed


def _pool(hidden: Tensor) -> Tensor:
    """(b, n, d_model) → (b, d_model): mean over the tokens, then length one."""
    return normalize(hidden.mean(dim=1), dim=-1)
