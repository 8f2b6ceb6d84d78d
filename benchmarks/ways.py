"""Every kernel of the table, as each library and each formula computes it, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import peers
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import matchkernel as mk

Tensor = torch.Tensor
BATCH, HEADS, WIDTH = 2, 4, 64
SIGMA = 8.0
"""√d: a distance of two random tokens, divided by it, is of the size of a scaled dot product."""
LIMIT = 5.0


@dataclass(frozen=True)
class Inputs:
    """q, k, v (2, 4, n, 64), and the gradient that reaches the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    causal: bool

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v]

    @staticmethod
    def draw(n: int, causal: bool = False, device: str = "cpu", batch: int = BATCH) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        q, k, v, upstream = (torch.randn(batch, HEADS, n, WIDTH, generator=generator).to(device) for _ in range(4))
        return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), upstream, causal)


@dataclass(frozen=True)
class Way:
    """A call that computes attention, and what it is differentiated by: q, k, v first, then parameters."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]


_NUMBERS = count()

Build = Callable[[Inputs], Way]
"""Makes a way, or raises peers.Missing."""


@dataclass(frozen=True)
class Subject:
    """One kernel, written three times: the library's, in plain torch, and as a formula for KeOps."""

    kernel: mk.MatchKernel
    score: Callable[..., Tensor]
    """(q, k, *parameters) → (…, n, m)."""
    keops: Callable[..., Any] | None = None
    """(q, k, *parameters) → KeOps' symbolic score of all pairs; see `rows` and `columns`."""
    others: dict[str, Build] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.kernel.parameters())

    def ways(self) -> dict[str, Build]:
        found: dict[str, Build] = {
            "matchkernel": lambda inputs: ours(inputs, self.kernel),
            "fused dot": fused_dot,
            "naive": lambda inputs: naive(inputs, self.score, self.parameters),
            "naive, compiled": lambda inputs: compiled(inputs, self.score, self.parameters),
        }
        if self.keops is not None:
            found["KeOps"] = lambda inputs: with_keops(inputs, self.keops, self.parameters)
        return found | self.others


# ---- the library and torch's own call -------------------------------------------------------------------------------


def ours(inputs: Inputs, kernel: mk.MatchKernel, engine: Any = "auto") -> Way:
    q, k, v = inputs.leaves
    kernel.to(q.device)
    call = partial(mk.attend, q, k, v, kernel, causal=inputs.causal, engine=engine)
    return Way(call, [q, k, v, *kernel.parameters()])


def fused_dot(inputs: Inputs) -> Way:
    q, k, v = inputs.leaves
    return Way(lambda: sdpa(q, k, v, is_causal=inputs.causal), [q, k, v])


def dense_dot(inputs: Inputs) -> Way:
    return naive(inputs, lambda q, k: q @ k.mT / WIDTH**0.5, [])


def dense(score: Callable[..., Tensor]) -> FunctionType:
    def attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return torch.softmax(score(q, k, *parameters), -1) @ v

    assert isinstance(attention, FunctionType)
    return attention


def naive(inputs: Inputs, score: Callable[..., Tensor], parameters: list[Tensor]) -> Way:
    """The formula as one writes it, on the whole table."""
    everything = [*inputs.leaves, *parameters]
    attention = dense(score)
    return Way(lambda: attention(*everything), everything)


# ---- peers ----------------------------------------------------------------------------------------------------------


def with_keops(inputs: Inputs, score: Callable[..., Any], parameters: list[Tensor]) -> Way:
    """All pairs reduced by one compiled formula, heads as batch dimensions."""
    peers.keops()

    def call() -> Tensor:
        q, k, v = inputs.leaves
        out: Tensor = score(q, k, *parameters).sumsoftmaxweight(columns(v), dim=q.dim() - 1)
        return out

    return Way(call, [*inputs.leaves, *parameters])


def rows(q: Tensor) -> Any:
    """(…, n, d) as KeOps' symbol for what changes from row to row of the table."""
    return peers.keops().LazyTensor(q.unsqueeze(-2))


def columns(k: Tensor) -> Any:
    return peers.keops().LazyTensor(k.unsqueeze(-3))


def keops_tanh(x: Any) -> Any:
    """KeOps has none of its own."""
    return 1.0 - 2.0 / (1.0 + (2.0 * x).exp())


def compiled(inputs: Inputs, score: Callable[..., Tensor], parameters: list[Tensor]) -> Way:
    """The same through torch.compile, which forms no n · m · d numbers on the way forward."""
    peers.compiler()
    everything = [*inputs.leaves, *parameters]
    attention = dense(score)
    # torch counts what it compiles of one piece of code, and stops at eight; each of these is a piece of its own.
    own_code = attention.__code__.replace(co_name=f"attention_{next(_NUMBERS)}")
    attention = torch.compile(
        FunctionType(own_code, attention.__globals__, None, None, attention.__closure__), fullgraph=True, dynamic=False
    )
    return Way(lambda: attention(*everything), everything)


def with_flex(inputs: Inputs, change: Callable[..., Tensor]) -> Way:
    """FlexAttention, compiled. On a CPU it has no backward."""
    peers.compiler()
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        # On a CPU it refuses inputs that want a gradient, even where none is taken.
        given = inputs.leaves if torch.is_grad_enabled() else [x.detach() for x in inputs.leaves]
        out: Tensor = compiled(*given, score_mod=change)
        return out

    return Way(call, inputs.leaves)


def with_x_transformers(inputs: Inputs, **settings: Any) -> Way:
    attend = peers.x_transformers().Attend(heads=HEADS, causal=inputs.causal, **settings)
    return Way(lambda: attend(*inputs.leaves)[0], inputs.leaves)


def with_cdist(inputs: Inputs, p: float, score: Callable[[Tensor], Tensor]) -> Way:
    q, k, v = inputs.leaves
    return Way(lambda: torch.softmax(score(torch.cdist(q, k, p=p)), -1) @ v, [q, k, v])


def with_d2l(inputs: Inputs, weights: list[Tensor]) -> Way:
    """d2l's AdditiveAttention, which takes one leading dimension, with the weights (d, h), (d, h) and (h,)."""
    module = peers.d2l().AdditiveAttention(weights[-1].numel(), 0.0).to(inputs.q)
    q, k, v = inputs.leaves

    def call() -> Tensor:
        out: Tensor = module(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None)
        return out.unflatten(0, q.shape[:2])

    with torch.no_grad():
        short = torch.zeros(1, 1, WIDTH).to(inputs.q)
        module(short, short, short, None)  # its layers take their shapes from the first call
        for own, given in zip((module.W_q, module.W_k, module.w_v), weights, strict=True):
            own.weight.copy_(given.reshape(-1, own.weight.shape[0]).mT)
    return Way(call, [q, k, v, *module.parameters()])


# ---- the kernels ----------------------------------------------------------------------------------------------------


def squared(q: Tensor, k: Tensor) -> Tensor:
    """|q − k|² through one matrix product."""
    return q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(-2) - 2.0 * (q @ k.mT)


def additive() -> Subject:
    kernel = mk.Additive(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def naive(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh((q @ w_q).unsqueeze(-2) + (k @ w_k).unsqueeze(-3)) * w).sum(-1)

    def plain(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor) -> Any:
        symbol = peers.keops().LazyTensor(w.reshape(1, 1, 1, 1, -1))
        return (symbol * keops_tanh(rows(q @ w_q) + columns(k @ w_k))).sum(-1)

    def identity(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor) -> Any:
        """tanh(a + b) = 1 − 2/(1 + e²ᵃe²ᵇ), inside the formula; the 1 is a constant, which a softmax does not see."""
        symbol = peers.keops().LazyTensor(w.reshape(1, 1, 1, 1, -1))
        return -2.0 * (symbol / (1.0 + rows(2.0 * q @ w_q).exp() * columns(2.0 * k @ w_k).exp())).sum(-1)

    def factored(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor) -> Any:
        """The same with e²ᵃ and e²ᵇ taken once per token, before KeOps sees them: what the library does, unguarded."""
        symbol = peers.keops().LazyTensor(w.reshape(1, 1, 1, 1, -1))
        return -2.0 * (symbol / (1.0 + rows((2.0 * q @ w_q).exp()) * columns((2.0 * k @ w_k).exp()))).sum(-1)

    def factored_score(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, w: Tensor) -> Tensor:
        left, right = (2.0 * q @ w_q).exp().unsqueeze(-2), (2.0 * k @ w_k).exp().unsqueeze(-3)
        return -2.0 * (w / (1.0 + left * right)).sum(-1)

    weights = list(kernel.parameters())
    return Subject(
        kernel,
        naive,
        plain,
        {
            "matchkernel, no compiler": lambda inputs: ours(inputs, kernel, mk.Tiled(compile=False)),
            "KeOps, identity": lambda inputs: with_keops(inputs, identity, weights),
            "KeOps, our factors": lambda inputs: with_keops(inputs, factored, weights),
            "compiled, our factors": lambda inputs: compiled(inputs, factored_score, weights),
            "d2l": lambda inputs: with_d2l(inputs, weights),
        },
    )


def laplacian() -> Subject:
    return Subject(
        mk.Laplacian(SIGMA),
        lambda q, k: (q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1) / -SIGMA,
        lambda q, k: (rows(q) - columns(k)).abs().sum(-1) / -SIGMA,
        {"cdist": lambda inputs: with_cdist(inputs, 1.0, lambda distance: distance / -SIGMA)},
    )


def rational_quadratic() -> Subject:
    return Subject(
        mk.RationalQuadratic(1.0, SIGMA),
        lambda q, k: -torch.log1p(squared(q, k) / (2.0 * SIGMA**2)),
        lambda q, k: -(1.0 + ((rows(q) - columns(k)) ** 2).sum(-1) / (2.0 * SIGMA**2)).log(),
        {"cdist": lambda inputs: with_cdist(inputs, 2.0, lambda distance: -(distance**2 / (2 * SIGMA**2)).log1p())},
    )


def gaussian() -> Subject:
    return Subject(
        mk.Gaussian(SIGMA),
        lambda q, k: squared(q, k) / (-2.0 * SIGMA**2),
        lambda q, k: ((rows(q) - columns(k)) ** 2).sum(-1) / (-2.0 * SIGMA**2),
        {
            "cdist": lambda inputs: with_cdist(inputs, 2.0, lambda distance: distance**2 / (-2.0 * SIGMA**2)),
            "x-transformers": lambda inputs: with_x_transformers(inputs, l2_distance=True, scale=0.5 / SIGMA**2),
        },
    )


def softcap() -> Subject:
    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return LIMIT * torch.tanh(score / LIMIT)

    return Subject(
        mk.Softcap(mk.ScaledDot(), LIMIT),
        lambda q, k: capped(q @ k.mT / WIDTH**0.5),
        lambda q, k: LIMIT * keops_tanh((rows(q) | columns(k)) / (LIMIT * WIDTH**0.5)),
        {
            "FlexAttention": lambda inputs: with_flex(inputs, capped),
            "x-transformers": lambda inputs: with_x_transformers(
                inputs, softclamp_logits=True, logit_softclamp_value=LIMIT
            ),
        },
    )


def bilinear() -> mk.MatchKernel:
    return mk.Bilinear(WIDTH, generator=torch.Generator().manual_seed(0))


# ---- a reader's own kernels: three lines each -----------------------------------------------------------------------


class Cauchy(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.log1p(mk.squared_distance(q, k))


class Quadratic(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return 0.01 * (1.0 + q @ k.mT).square()


class PseudoHuber(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -(1.0 + (q.unsqueeze(-2) - k.unsqueeze(-3)).square()).sqrt().sum(-1)


class CauchyProduct(mk.ProductKernel):
    def combine(self, product: Tensor, query_square: Tensor, key_square: Tensor) -> Tensor:
        return -torch.log1p((query_square + key_square - 2.0 * product).clamp_min(0.0))


class QuadraticProduct(mk.ProductKernel):
    def combine(self, product: Tensor, query_square: Tensor, key_square: Tensor) -> Tensor:
        return 0.01 * (1.0 + product).square()


def own(kernel: mk.MatchKernel, product: mk.ProductKernel | None = None) -> dict[str, Build]:
    """The library, from a match and from a function of products, and the match as it stands on the whole table."""
    found: dict[str, Build] = {
        "matchkernel": lambda inputs: ours(inputs, kernel),
        "dense": lambda inputs: naive(inputs, kernel.match, []),
        "fused dot": fused_dot,
    }
    if product is not None:
        found["matchkernel, ProductKernel"] = lambda inputs: ours(inputs, product)
    return found
