"""How a token changes the state of linear attention: it decays, it is gated, it is corrected."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .engines._torch_private import transforming
from .kernels.values import HeadValue, as_factor, hold, show
from .shapes import broadcast
from .state_chunks import delta_chunk, feature_chunk, scalar_chunk


class StateUpdate:
    """What `linear_attention(update=…)` takes: `Decay`, `Gates`, `DeltaRule` or `GatedDeltaRule`.

    `corrects` says that a token writes what the memory had wrong, and not its value: outputs are then no averages, and
    there is no sum of weights to divide by.
    """

    corrects: bool = False

    def per_token(self, k: Tensor) -> tuple[Tensor, ...]:
        """What the update says of each token of the features k (…, n, f): log gates (…, n, 1 | f), and then a step."""
        raise NotImplementedError

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, said: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of c tokens and the state after them; `said` is `per_token` of these tokens."""
        (gate,) = said
        return scalar_chunk(q, k, v, gate, state)


class Sum(StateUpdate):
    """Nothing is forgotten: S_t = S_{t−1} + k_tᵀ v_t."""

    def per_token(self, k: Tensor) -> tuple[Tensor, ...]:
        return (k.new_zeros(k.shape[-2], 1),)


class Decay(StateUpdate, nn.Module):
    """The memory fades at a constant rate.

    S_t = γ S_{t−1} + k_tᵀ v_t,  so that o_i = Σ_{j≤i} γ^{i−j} (q_i · k_j) v_j

    `rate` γ, what is left after one more token, in (0, 1]: a number, a tensor with one entry per head of the keys, or
    an `nn.Parameter`. 1 is the plain sum. γ^{i−j} = e^{−slope (i − j)} with slope = −log γ: ALiBi's penalty, on
    a kernel whose weight is given by features.
    TypeError or ValueError for a rate of another kind, or outside (0, 1].
    Source: Sun et al. 2023 (RetNet), section 2.1, chunks included.
    """

    rate: HeadValue

    def __init__(self, rate: HeadValue) -> None:
        super().__init__()
        hold(self, "rate", rate, positive=True)
        self._require()

    def per_token(self, k: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.rate, nn.Parameter):
            self._require()  # It may have been trained out of its range.
        rate = as_factor(self.rate, k)
        gate = (rate if isinstance(rate, Tensor) else k.new_tensor(rate, dtype=torch.float64)).log().to(k.dtype)
        return (gate.expand(*gate.shape[:-2], k.shape[-2], 1),)

    def _require(self) -> None:
        rate = torch.as_tensor(self.rate).detach()
        if not _unseen(rate) and not bool(((rate > 0.0) & (rate <= 1.0)).all()):
            raise ValueError(f"Decay(rate=…): expected rates above 0 and at most 1, got {rate.tolist()}")

    def extra_repr(self) -> str:
        return show(self.rate)


class Gates(StateUpdate):
    """Each token says, feature by feature, how much of the memory stays.

    S_t = diag(e^{g_t}) S_{t−1} + k_tᵀ v_t

    `log_gate` g (…, n, f) or (…, n, 1), at most 0, for the n tokens of one call and the f features of the keys; 0
    keeps, −inf forgets. Computed in float32 or wider; as strong as you like, since no exponent above 0 is ever taken.
    TypeError or ValueError for what is not floating point, does not fit the keys, or is above 0.
    Source: Yang et al. 2024 (Gated Linear Attention), section 4; their secondary chunks, halved all the way.
    """

    def __init__(self, log_gate: Tensor) -> None:
        self.log_gate = _gate("Gates", log_gate, "(…, n, f)", 2)

    def per_token(self, k: Tensor) -> tuple[Tensor, ...]:
        gate = self.log_gate
        _require_fit("Gates(log_gate=…)", gate, k, (k.shape[-2:], torch.Size((k.shape[-2], 1))))
        return (gate.to(k.dtype),)

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, said: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        (gate,) = said
        # One gate for all features is what one table of decays does at once.
        return (scalar_chunk if gate.shape[-1] == 1 else feature_chunk)(q, k, v, gate, state)

    def __repr__(self) -> str:
        return f"Gates({tuple(self.log_gate.shape)})"


class GatedDeltaRule(StateUpdate):
    """The memory fades, and then each token corrects what is left of it.

    S_t = e^{g_t} (I − β_t k_tᵀ k_t) S_{t−1} + β_t k_tᵀ v_t

    `log_gate` g (…, n), at most 0, and `beta` β (…, n), for the n tokens of one call. Otherwise as `DeltaRule`, which
    is g = 0. TypeError or ValueError for what is not floating point, does not fit the keys, or is a gate above 0.
    Source: Yang, Kautz & Hatamizadeh 2025 (Gated Delta Networks), section 3.
    """

    corrects = True

    def __init__(self, log_gate: Tensor, beta: Tensor) -> None:
        self.log_gate = _gate(type(self).__name__, log_gate, "(…, n)", 1)
        self.beta = _floating(f"{type(self).__name__}(beta=…)", beta, "(…, n)", 1)

    def per_token(self, k: Tensor) -> tuple[Tensor, ...]:
        tokens = (torch.Size((k.shape[-2], 1)),)
        gate, beta = self.log_gate.unsqueeze(-1), self.beta.unsqueeze(-1)
        # beta first: a plain delta rule's gates are of its making.
        for name, x in (("beta", beta), ("log_gate", gate)):
            _require_fit(f"{type(self).__name__}({name}=…)", x, k, tokens, squeezed=True)
        return gate.to(k.dtype), beta.to(k.dtype)

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, said: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        gate, beta = said
        return delta_chunk(q, k, v, gate, beta, state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.beta.shape)})"


class DeltaRule(GatedDeltaRule):
    """Each token writes the difference between its value and what the memory would have said.

    S_t = S_{t−1} + β_t k_tᵀ (v_t − k_t S_{t−1}) = (I − β_t k_tᵀ k_t) S_{t−1} + β_t k_tᵀ v_t

    `beta` β (…, n), for the n tokens of one call. With β_t |k_t|² = 1 the pair just written is recalled exactly; with
    0 ≤ β_t |k_t|² ≤ 2 no step enlarges what the memory holds, and beyond it errors grow at each step. That is not
    checked: give keys unit length and β in [0, 1] or [0, 2]. A chunk is one triangular system and matrix products.
    TypeError or ValueError for a beta that is not floating point or does not fit the keys.
    Source: Schlag, Irie & Schmidhuber 2021, section 4.2; Yang et al. 2024 (DeltaNet), section 3, for the chunks.
    """

    def __init__(self, beta: Tensor) -> None:
        step = _floating("DeltaRule(beta=…)", beta, "(…, n)", 1)
        super().__init__(torch.zeros_like(step), step)


def _floating(owner: str, x: object, shape: str, dims: int) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{owner}: expected a floating-point tensor {shape}, got {got}")
    if x.dim() < dims:
        raise ValueError(f"{owner} has shape {tuple(x.shape)}: expected {shape}")
    return x


def _gate(owner: str, log_gate: object, shape: str, dims: int) -> Tensor:
    gate = _floating(f"{owner}(log_gate=…)", log_gate, shape, dims)
    # Written so that a NaN is refused too.
    if not _unseen(gate) and not bool((gate <= 0.0).all()):
        raise ValueError(
            f"{owner}(log_gate=…): expected logarithms of gates, at most 0, got up to {gate.max().item():g}"
        )
    return gate


def _unseen(x: Tensor) -> bool:
    """Whether the numbers of x cannot be looked at now."""
    return torch.compiler.is_compiling() or transforming() or x.is_meta


def _require_fit(owner: str, x: Tensor, k: Tensor, allowed: tuple[torch.Size, ...], *, squeezed: bool = False) -> None:
    """x has one of the shapes allowed behind leading dimensions that broadcast with those of k."""
    if x.shape[-2:] not in allowed or broadcast(x.shape[:-2], k.shape[:-2]) is None:
        shape, want = tuple(x.shape), tuple(k.shape)
        if squeezed:
            shape, want = shape[:-1], want[:-1]
        raise ValueError(f"{owner} has shape {shape}: expected {want}, to fit keys of features {tuple(k.shape)}")
