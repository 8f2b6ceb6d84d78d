"""Many heads side by side: project the tokens, let each head match them by its kernel, and put the answers together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from ._torch_layout import from_torch_layout, to_torch_layout
from ._validate import build_problem
from .attention import attend, check_engine
from .cache import KeyValueCache
from .engines import Engine, Reference
from .kernels import MatchKernel, ScaledDot
from .masks import check_mask
from .normalizers import Normalizer, Softmax
from .shapes import broadcast, split

_REFERENCE = Reference()
_CAST = {torch.float32, torch.float16, torch.bfloat16}
"""What autocast makes one of."""
_TORCH_NAMES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
Part = TypeVar("Part", bound=nn.Module)


class MultiHeadAttention(nn.Module):
    """Attention in several heads, each of which may match by a kernel of its own. Batch first.

    head_h = attend(X W_Q,h, Y W_K,g, Y W_V,g, kernel_h),  output = [head_1 … head_heads] W_O + b_O

    X are the query's tokens and Y the key's, which are X in self-attention; g = h // (heads // kv_heads).

    Args:
        embed_dim: width of the query's tokens and of the output.
        heads: how many query heads.
        kernel: a `MatchKernel` for all heads, whose parameters may hold one entry per head; or a list of them, one per
            head. Heads that a list gives the same object run together in one call, and an entry per head is then one
            for each of those. `ScaledDot()` by default.
        kv_heads: how many heads of keys and values; each serves heads // kv_heads query heads. `heads` by default.
        head_dim: width of one head's query and key, which is what its kernel sees. embed_dim // heads by default.
        value_dim: width of one head's value, and so of its answer. head_dim by default.
        key_dim: width of the tokens that keys and values are made of, for cross-attention; a pair (of the key's, of the
            value's) where they differ, torch's kdim and vdim. embed_dim by default.
        bias: whether the four projections add a learned vector.
        normalizer: one for all heads, whose tensors of shape (heads,) hold one entry per head, also beside a list of
            kernels. `Softmax()` by default.
        dropout: probability of dropping a weight in training, the others scaled up; nothing is dropped in eval.
        engine: who computes it, as in `attend`; one that is a torch module (`Linformer`) becomes part of the layer, and
            its parameters learn with it. "auto" by default.
        generator: for the first weights; torch's own by default.

    Projections are `q_proj`, `k_proj`, `v_proj` and `out_proj`, each an `nn.Linear`; heads lie side by side in their
    rows, as in torch's module. They start as there: the first three uniform within √(6 / (fan_in + fan_out)) (Xavier),
    where those of self-attention count as one matrix; `out_proj` uniform within 1/√fan_in; biases zero.

    Cost: 2 · tokens · (entries of the projections) operations, and `attend` for heads · n · m pairs. Beside a list of
    kernels, keys that several heads share are copied for each.
    ValueError for counts below 1, heads that do not divide, a list of kernels that is not one per head; TypeError for
    what is no kernel or normaliser.
    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (GQA) for kv_heads.
    """

    kernel: MatchKernel | nn.ModuleList
    normalizer: Normalizer
    engine: str | Engine

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        *,
        kernel: MatchKernel | Sequence[MatchKernel] | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        key_dim: int | tuple[int, int] | None = None,
        bias: bool = True,
        normalizer: Normalizer | None = None,
        dropout: float = 0.0,
        engine: str | Engine = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = embed_dim if key_dim is None else key_dim
        if isinstance(key_dim, tuple) and len(key_dim) != 2:
            raise ValueError(f"key_dim={key_dim}: expected one width, or the key's and the value's")
        of_key, of_value = key_dim if isinstance(key_dim, tuple) else (key_dim, key_dim)
        _check_counts(embed_dim=embed_dim, heads=heads, kv_heads=kv_heads, key_dim=of_key)
        _check_counts(key_dim=of_value)
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")
        if head_dim is None and embed_dim % heads:
            raise ValueError(f"embed_dim={embed_dim} does not divide among heads={heads}: pass head_dim")
        head_dim = embed_dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        _check_counts(head_dim=head_dim, value_dim=value_dim)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}: expected a probability from 0 up to, not including, 1")
        self.embed_dim, self.heads, self.kv_heads = embed_dim, heads, kv_heads
        self.head_dim, self.value_dim, self.dropout = head_dim, value_dim, float(dropout)
        self.q_proj = _linear(embed_dim, heads * head_dim, bias)
        self.k_proj = _linear(of_key, kv_heads * head_dim, bias)
        self.v_proj = _linear(of_value, kv_heads * value_dim, bias)
        self.out_proj = _linear(heads * value_dim, embed_dim, bias)
        self.kernel = _one_or_each(ScaledDot() if kernel is None else kernel, heads)
        self.normalizer = Softmax() if normalizer is None else normalizer
        _check_normalizer(self.normalizer)
        check_engine(engine)
        self.engine = engine
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the projections anew, from `generator` or torch's own; what kernel, normaliser and engine hold stays."""
        inward = (self.q_proj, self.k_proj, self.v_proj)
        as_one = all(projection.in_features == self.embed_dim for projection in inward)
        rows = sum(projection.out_features for projection in inward)
        with torch.no_grad():
            for projection in inward:
                bound = math.sqrt(6.0 / (projection.in_features + (rows if as_one else projection.out_features)))
                projection.weight.uniform_(-bound, bound, generator=generator)
            bound = 1.0 / math.sqrt(self.out_proj.in_features)
            self.out_proj.weight.uniform_(-bound, bound, generator=generator)
            for projection in (*inward, self.out_proj):
                if projection.bias is not None:
                    projection.bias.zero_()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        cache: KeyValueCache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Every query's answer, (batch, n, embed_dim); with `need_weights`, and the weights that made it.

        Args:
            query: (batch, n, embed_dim), or with any other leading dimensions.
            key, value: (batch, m, key_dim) for cross-attention. The key is the query by default, the value the key.
            mask: (n, m), or (batch, heads, n, m) with 1 where shared. Bool: True = may attend. Floating: added to the
                score. torch's module has it the other way round, so that its masks are converted:
                `mask=~attn_mask`; `from_key_padding(key_padding_mask)`; both, joined by `&`; one per batch and head,
                `~attn_mask.unflatten(0, (batch, heads))`. A float `attn_mask` means the same in both.
                `from_key_padding` and others are in `matchkernel.masks`.
            causal, window: as in `attend`: the last query is in line with the last key.
            cache: of this layer and batch, in self-attention. Keys and values of the tokens before are taken from it,
                and those of the query's added to it; m then counts both. With `causal=True`, reading a text in pieces
                of any length gives what reading it at once does, positions and windows included.
            need_weights: also return the weights (batch, heads, n, m), not averaged over the heads as torch's are; in
                training those that dropout left and scaled. The output is made of these very numbers. O(nm) memory.
                ValueError for an engine that is not exact, which has no such table.

        Raises:
            TypeError, ValueError: naming the argument, its shape or dtype and what was expected. The cache is then as
            it was before.

        A query that may attend to nothing gets `out_proj.bias` (torch's module: NaN). Dropout forms the n × m table.
        """
        key, value, lead = self._check(query, key, value, cache)
        _check_normalizer(self.normalizer)
        check_engine(self.engine)
        if need_weights and not isinstance(self.engine, str) and not self.engine.exact:
            raise ValueError(f"need_weights: engine={self.engine!r} is not exact, and has no table of weights")
        q = split(self.q_proj(query), -1, (self.heads, self.head_dim)).transpose(-2, -3)
        k = split(self.k_proj(key), -1, (self.kv_heads, self.head_dim)).transpose(-2, -3)
        v = split(self.v_proj(value), -1, (self.kv_heads, self.value_dim)).transpose(-2, -3)
        if cache is not None:
            k, v = cache.joined(k, v)
            if cache.layer is not None and cache.layer is not self:
                raise ValueError("cache: another layer has filled it; each layer needs one of its own")
        if mask is not None:
            check_mask(mask, torch.Size((*lead, self.heads, q.shape[-2], k.shape[-2])))
            if 2 < mask.dim() != len(lead) + 3:
                raise ValueError(
                    f"mask has shape {tuple(mask.shape)}: expected (n, m), or {len(lead) + 3} dimensions with the "
                    "heads at -3; one mask per sequence is mask[:, None], one per head mask[None]"
                )
        dropout = self.dropout if self.training else 0.0
        answers, tables, order = [], [], []
        for at, kernel in self._shares():
            q_at, k_at, v_at, mask_at, normalizer = q, k, v, mask, self.normalizer
            if len(at) < self.heads:
                group = [head // (self.heads // self.kv_heads) for head in at]
                q_at, k_at, v_at = q[..., at, :, :], k[..., group, :, :], v[..., group, :, :]
                if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
                    mask_at = mask[..., at, :, :]
                normalizer = _for_heads(self.normalizer, at, self.heads)
            if need_weights:
                problem = build_problem(
                    q_at, k_at, v_at, kernel, mask=mask_at, causal=causal, window=window, normalizer=normalizer,
                    query_position=None, key_position=None,
                )  # fmt: skip
                table = nn.functional.dropout(_REFERENCE.weights(problem), dropout)
                # Values that nobody may attend to are hidden: a NaN there times a weight of 0 would be NaN.
                shown = problem.hide()[2]
                answers.append(table @ shown.repeat_interleave(problem.groups, dim=-3))
                tables.append(table)
            else:
                answers.append(attend(
                    q_at, k_at, v_at, kernel, mask=mask_at, causal=causal, window=window, normalizer=normalizer,
                    dropout=dropout, engine=self.engine,
                ))  # fmt: skip
            order += at
        output: Tensor = self.out_proj(_in_order(answers, order).transpose(-2, -3).flatten(-2))
        if cache is not None:
            # Last, so that a call that raised has left no trace.
            cache.keys, cache.values, cache.layer = k, v, self
        return (output, _in_order(tables, order)) if need_weights else output

    def _shares(self) -> list[tuple[list[int], MatchKernel]]:
        """The heads of each kernel, together."""
        if isinstance(self.kernel, MatchKernel):
            return [(list(range(self.heads)), self.kernel)]
        # Again, since another one may have been put in.
        _check_list(self.kernel, self.heads)
        shares: list[tuple[list[int], MatchKernel]] = []
        for head, kernel in enumerate(self.kernel):
            assert isinstance(kernel, MatchKernel)
            for at, other in shares:
                if kernel is other:
                    at.append(head)
                    break
            else:
                shares.append(([head], kernel))
        return shares

    def _check(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, torch.Size]:
        """Key and value with their defaults, and the leading dimensions of the output."""
        if key is None and value is not None:
            raise ValueError("value: expected a key to go with it")
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                raise TypeError(f"cache: expected a KeyValueCache, got {cache!r}{_hint(cache)}")
            if not (key is None or key is query) or not (value is None or value is query):
                raise ValueError(
                    "cache: it adds the query's own tokens to those before; expected no other key or value"
                )
        given = {"query": query, "key": query if key is None else key}
        given["value"] = given["key"] if value is None else value
        dtype = self.q_proj.weight.dtype
        for (name, x), projection in zip(given.items(), (self.q_proj, self.k_proj, self.v_proj), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
            if x.dim() < 2 or x.shape[-1] != projection.in_features:
                by_default = "" if name == "query" or x is not query else " (the query, where none is given)"
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}{by_default}: expected (batch, tokens, {projection.in_features})"
                )
            if x.dtype != dtype and not (torch.is_autocast_enabled(x.device.type) and {x.dtype, dtype} <= _CAST):
                raise TypeError(f"{name} has dtype {x.dtype}: expected the layer's, {dtype}")
        lead = broadcast(*(x.shape[:-2] for x in given.values()))
        if lead is None:
            raise ValueError(f"{_shapes(given)}: expected the same batch")
        if given["key"].shape[-2] != given["value"].shape[-2]:
            raise ValueError(f"{_shapes(given)}: expected as many values as keys at dimension -2")
        return given["key"], given["value"], lead

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """A layer with the weights of torch's module, copied: the same output to rounding, and the same gradients.

        Both of torch's layouts are read: one `in_proj_weight`, or one weight each where kdim or vdim differ from
        embed_dim. Dtype, device, dropout and training mode come along, and every weight learns. `batch_first` is no
        weight: this layer is always batch first, so that inputs of a module that is not must be transposed. Put another
        kernel in with `layer.kernel = …`.
        ValueError for what this layer has no place for: add_bias_kv and add_zero_attn. TypeError for another module.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module: expected a torch.nn.MultiheadAttention, got {type(module).__name__}")
        for name, is_on in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
            if is_on:
                raise ValueError(
                    f"module has {name}=True, a key of no token, which MultiHeadAttention has no place for"
                )
        with torch.device("meta"):
            layer = cls(
                module.embed_dim,
                module.num_heads,
                key_dim=(module.kdim, module.vdim),
                bias=module.in_proj_bias is not None,
                dropout=module.dropout,
            )
        # Not its state_dict, which holds other names where a weight is parametrized.
        weights = [*_TORCH_NAMES, "out_proj.weight", "out_proj.bias"]
        held = {name: attrgetter(name)(module) for name in weights}
        state = {name: x.detach() for name, x in held.items() if x is not None}
        layer.load_state_dict(from_torch_layout(state), assign=True)
        return layer.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """torch's module with these weights, copied, batch first; see `from_torch`.

        ValueError for what torch's module cannot hold: another kernel than `ScaledDot()`, another normaliser than
        `Softmax()`, an engine that is an object, fewer kv_heads than heads, heads · head_dim or heads · value_dim other
        than embed_dim.
        """
        for _, kernel in self._shares():
            if type(kernel) is not ScaledDot:
                raise ValueError(f"kernel {kernel!r}: torch.nn.MultiheadAttention has ScaledDot() alone")
        normalizer = self.normalizer
        if type(normalizer) is not Softmax or isinstance(normalizer.temperature, Tensor) or normalizer.temperature != 1:
            raise ValueError(f"normalizer {normalizer!r}: torch.nn.MultiheadAttention has Softmax() alone")
        if not isinstance(self.engine, str):
            raise ValueError(f"engine {self.engine!r}: torch.nn.MultiheadAttention has no place for one")
        if self.kv_heads != self.heads:
            raise ValueError(f"kv_heads={self.kv_heads}: torch.nn.MultiheadAttention has one for each of {self.heads}")
        for name, width in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if self.heads * width != self.embed_dim:
                raise ValueError(f"{name}={width}: torch.nn.MultiheadAttention has embed_dim / heads alone")
        module = nn.MultiheadAttention(
            self.embed_dim,
            self.heads,
            dropout=self.dropout,
            bias=self.q_proj.bias is not None,
            kdim=self.k_proj.in_features,
            vdim=self.v_proj.in_features,
            batch_first=True,
            device="meta",
        )
        packed = module.in_proj_weight is not None
        module.load_state_dict(to_torch_layout(self.state_dict(), packed=packed), assign=True)
        return module.train(self.training)

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        value = "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        # A module is shown among the parts of the layer.
        named = self.engine != "auto" and not isinstance(self.engine, nn.Module)
        engine = f", engine={self.engine!r}" if named else ""
        return f"{self.embed_dim}, heads={self.heads}{grouped}, head_dim={self.head_dim}{value}{dropout}{engine}"


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}: expected an integer of at least 1")


def _linear(width: int, out: int, bias: bool) -> nn.Linear:
    """A projection whose numbers are not drawn yet: the layer draws them all, from one generator."""
    device = torch.get_default_device()
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=bias, device=device)  # type: ignore[no-untyped-call]
    return linear


def _shapes(given: dict[str, Tensor]) -> str:
    return " and ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())


def _hint(given: object) -> str:
    return "; it is a class, so add parentheses" if isinstance(given, type) else ""


def _one_or_each(kernel: MatchKernel | Sequence[MatchKernel], heads: int) -> MatchKernel | nn.ModuleList:
    """One kernel for all heads, or a list of one per head."""
    if isinstance(kernel, MatchKernel):
        return kernel
    _check_list(kernel, heads)
    return nn.ModuleList(kernel)


def _check_list(kernel: object, heads: int) -> None:
    if not isinstance(kernel, (Sequence, nn.ModuleList)) or not all(isinstance(each, MatchKernel) for each in kernel):
        raise TypeError(
            f"kernel: expected a MatchKernel or a list of them, one per head, got {kernel!r}{_hint(kernel)}"
        )
    if len(kernel) != heads:
        raise ValueError(f"kernel: a list of {len(kernel)}, expected one for each of {heads} heads")


def _check_normalizer(normalizer: object) -> None:
    if not isinstance(normalizer, Normalizer):
        raise TypeError(f"normalizer: expected a Normalizer, got {normalizer!r}{_hint(normalizer)}")


def _for_heads(module: Part, at: list[int], heads: int) -> Part:
    """A normaliser for some of the heads: what holds one entry per head is cut to theirs, and still learns."""
    if all(x.shape != (heads,) for x in (*module.parameters(), *module.buffers())):
        return module
    # Not by copy.copy, which ends a compiled graph.
    cut: Part = object.__new__(type(module))
    cut.__dict__.update(module.__dict__)
    for held in ("_parameters", "_buffers"):
        tensors = module.__dict__[held].items()
        cut.__dict__[held] = {name: x[at] if x is not None and x.shape == (heads,) else x for name, x in tensors}
    cut.__dict__["_modules"] = {name: _for_heads(part, at, heads) for name, part in module.named_children()}
    return cut


def _in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    """Results of some heads each, (…, heads, ·, ·), as one, head by head; `order` says which heads they are."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=-3)[..., [order.index(head) for head in range(len(order))], :, :]
