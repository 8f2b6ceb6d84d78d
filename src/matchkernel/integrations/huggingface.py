"""Any match kernel in a transformers model: one call registers it, and a model asks for it by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attend, check_engine, weights
from ..engines import Engine
from ..kernels import Dot, MatchKernel, ScaledDot, Softcap
from ..normalizers import Normalizer, SinkSoftmax

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "matchkernel.integrations.huggingface needs transformers: pip install 'transformers>=5.24'"
    ) from error

Kernels = MatchKernel | Mapping[int, MatchKernel | None] | Sequence[MatchKernel | None] | nn.ModuleList

_OURS: set[str] = set()
# What some models hand to an attention function of their own, and what changes the result.
_UNKNOWN = ("sinks", "indices", "block_indices")


def register(
    name: str,
    kernel: Kernels | None = None,
    *,
    normalizer: Normalizer | None = None,
    engine: str | Engine = "auto",
) -> None:
    """Make `name` an attention implementation of transformers that runs on a match kernel.

    out_i = Σ_j α_ij v_j,  α_i = normalizer(s_i),  s_ij = kernel(q_i, k_j), q and k as the model hands them over

    After `register("gaussian", mk.Gaussian(2.0))` a model takes it with
    `AutoModel.from_pretrained(…, attn_implementation="gaussian")` or `model.set_attn_implementation("gaussian")`. What
    is given here replaces the model's own; what is left out stays the model's.

    Args:
        name: what models ask for. Registering it again replaces what it stood for, in models that already run too.
            transformers' own names, and names that it reads a meaning into ("flash", "/", "|"), are refused.
        kernel: one MatchKernel for every layer, or one per layer, by the layer's index: a list, an nn.ModuleList or a
            dict, which must name every layer, with None for the model's own score. A kernel is used as it is: the
            model's `scaling` and `softcap` belong to the score that it replaces. None (the default) is the model's own
            score: q·k times the model's `scaling`, or over √d where it gives none, through its softcap if it has one.
        normalizer: `Softmax()` by default, or `SinkSoftmax` with the model's logits where it passes sinks (`s_aux`).
        engine: as in `attend`.

    Masks, causal order, windows, relative biases, dropout while training and grouped heads stay the model's. With
    rotary models q and k are already rotated. Positions are places in the sequence, a cache included; padding on the
    left shifts queries and keys alike. Layers of an encoder-decoder share a kernel between self- and cross-attention.
    `output_attentions=True` in the call of the model returns the weights, dense and without dropout; in a config
    transformers itself refuses it for everything but "eager". A query that may attend to nothing gets zeros.

    The kernel stays yours: it is not among the model's parameters. `model.match_kernel = kernel` makes it one of its
    modules, after which `model.parameters()`, `model.to(…)` and `model.state_dict()` include it (an nn.ModuleList where
    each layer has its own).

    Raises:
        ImportError, when this module is imported without transformers.
        TypeError, ValueError: for a name, kernel, normalizer or engine that cannot be used. While the model runs,
            ValueError for a layer without a kernel, and for a model that hands over what is not understood: sinks per
            token, or the block indices of sparse attention.

    Cost: as `attend`; a mask is a table of booleans (batch, 1, n, m) unless it is plain causal order or padding of an
    encoder, as with transformers' own "sdpa".
    """
    _check_name(name)
    _check_kernels(kernel)
    if normalizer is not None and not isinstance(normalizer, Normalizer):
        raise TypeError(f"normalizer: expected a Normalizer, got {normalizer!r}")
    check_engine(engine)
    AttentionInterface.register(name, _attention(name, kernel, normalizer, engine))
    AttentionMaskInterface.register(name, _mask)
    _OURS.add(name)


def _attention(
    name: str, kernels: Kernels | None, normalizer: Normalizer | None, engine: str | Engine
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        output_attentions: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' attention function: (batch, heads, tokens, width) in, (batch, tokens, heads, width) out."""
        for unknown in _UNKNOWN:
            if others.get(unknown) is not None:
                raise ValueError(
                    f"{type(module).__name__} hands its attention {unknown}=…, which attn_implementation={name!r} "
                    "does not know how to read: keep this model's own implementation"
                )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and attention_mask is None and 1 < query.shape[-2] < key.shape[-2]:
            # transformers leaves out the mask of a cache that holds nothing yet but has room: the rest is unwritten.
            written = query.shape[-2]
            key, value = key[..., :written, :], value[..., :written, :]
            position_bias = None if position_bias is None else position_bias[..., :written]
        kernel = _of_layer(kernels, module)
        setting: dict[str, Any] = {
            "kernel": _own_kernel(scaling, softcap) if kernel is None else kernel,
            "normalizer": SinkSoftmax(s_aux) if normalizer is None and s_aux is not None else normalizer,
            "query_position": _query_position(attention_mask, query, key) if causal else None,
            "mask": _with_bias(_permitted(attention_mask), position_bias),
            # A mask holds the whole order already.
            "causal": causal and attention_mask is None,
        }
        out = attend(query, key, value, dropout=dropout, engine=engine, **setting)
        table = weights(query, key, **setting) if output_attentions else None
        return out.transpose(1, 2).contiguous(), table

    return attention


def _mask(q_length: int, mask_function: Callable[..., Any], **place: Any) -> Tensor | None:
    """transformers' mask for "sdpa", bool with True = may attend; one row for all queries where they see the same."""
    if mask_function is not bidirectional_mask_function:
        return sdpa_mask(q_length=q_length, mask_function=mask_function, **place)
    row = sdpa_mask(q_length=1, mask_function=mask_function, **place)
    return None if row is None else row.expand(-1, -1, q_length, -1)


def _permitted(mask: Tensor | None) -> Tensor | None:
    """A mask as `attend` takes it: −inf for the most negative numbers, and one row where all rows are one."""
    if mask is None:
        return None
    if mask.is_floating_point():
        # A caller's own mask says "forbidden" with the least number of its dtype, or of the model's.
        mask = mask.masked_fill(mask <= torch.finfo(torch.float16).min, float("-inf"))
    return mask[..., :1, :] if mask.stride(-2) == 0 else mask


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias


def _query_position(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Where causal queries stand among the keys, if not at their end: a cache with room has unwritten keys behind them.

    A query is the last key that it may attend to itself.
    """
    if mask is None or mask.dtype != torch.bool or query.shape[-2] == key.shape[-2]:
        return None
    place = torch.arange(key.shape[-2], dtype=torch.int32, device=mask.device)
    return torch.where(mask, place, -1).amax(-1)


def _own_kernel(scaling: float | None, softcap: float | None) -> MatchKernel:
    """The score that the model itself would use."""
    kernel = ScaledDot() if scaling is None else scaling * Dot()
    return kernel if softcap is None else Softcap(kernel, softcap)


def _of_layer(kernels: Kernels | None, module: nn.Module) -> MatchKernel | None:
    if kernels is None or isinstance(kernels, MatchKernel):
        return kernels
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} does not say which layer it is: register one kernel for all layers")
    if (layer in kernels) if isinstance(kernels, Mapping) else (layer < len(kernels)):
        return kernels[layer]
    raise ValueError(
        f"layer {layer} has no kernel among the {len(kernels)} that were registered: None stands for the model's own"
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a string, got {name!r}")
    if "flash" in name or "/" in name or "|" in name:
        raise ValueError(f'name={name!r}: transformers reads a meaning into "flash", "/" and "|"')
    if name == "eager" or (name in ALL_ATTENTION_FUNCTIONS and name not in _OURS):
        raise ValueError(f"name={name!r} is taken by transformers: choose another")


def _check_kernels(kernels: object) -> None:
    if kernels is None or isinstance(kernels, MatchKernel):
        return
    if isinstance(kernels, Mapping):
        given = list(kernels.values())
        wrong = [layer for layer in kernels if isinstance(layer, bool) or not isinstance(layer, int)]
        if wrong:
            raise TypeError(f"kernel: expected layers by their index, got {wrong[0]!r}")
    elif isinstance(kernels, (Sequence, nn.ModuleList)) and not isinstance(kernels, str):
        given = list(kernels)
    else:
        given = [kernels]
    for kernel in given or [kernels]:
        if kernel is not None and not isinstance(kernel, MatchKernel):
            hint = "; it is a class, so add parentheses" if isinstance(kernel, type) else ""
            raise TypeError(f"kernel: expected a MatchKernel, or one for each layer, got {kernel!r}{hint}")
