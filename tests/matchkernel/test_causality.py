"""Perturb the future, over every causal method: what comes later changes nothing before it.

Each method runs on a text, and again with the queries, keys and values from some token on replaced: by other numbers,
and by numbers a thousand times as large, which a stabiliser over all keys would notice. By NaN too, in a call that
hides them as padding: a NaN that some query sees is in the sums, where 0 · NaN is NaN, as in torch's own attention.
Methods that cannot keep an order are to refuse it, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import matchkernel as mk
from matchkernel.engines import Engine, Fused, Linear, Reference, Tiled

sys.path.insert(0, str(Path(__file__).parent))
import kernels_under_test

Tensor = torch.Tensor
Method = Callable[..., Tensor]
"""From q, k, v, and what else `attend` takes, to the causal output."""
N = 37
CUTS = (1, 19)
"""Where the future begins: after the first token, and within a block or a chunk."""
ROUNDING = 1e-12
"""A tile may choose its arithmetic by all of its keys: the last digits of a double, and no more."""


def text(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (2 heads, N tokens, width 6)."""
    q, k, v = torch.randn(3, 2, N, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q, k, v


FUTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "other numbers": lambda x: x.flip(-2) - 0.5,
    "large numbers": lambda x: 1000.0 * x.flip(-1),
}


def with_future(x: Tensor, cut: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([x[..., :cut, :], change(x[..., cut:, :])], dim=-2)


def moved(after: Tensor, before: Tensor, cut: int) -> float:
    """How far the rows before the cut have moved, as a share of the largest entry."""
    scale = before.abs().max()
    return ((after - before)[..., :cut, :].abs().max() / scale).item()


def assert_blind_to_the_future(method: Method, *, padding: bool = True, rounding: float = ROUNDING) -> None:
    """The method's rows before each cut are the same whatever comes after it, and not for being blind to all."""
    q, k, v = text()
    with torch.no_grad():
        before = method(q, k, v)
        assert before.shape == v.shape and before.isfinite().all()
        for cut in CUTS:
            for name, change in FUTURES.items():
                after = method(*(with_future(x, cut, change) for x in (q, k, v)))
                # Written so that a NaN fails.
                assert moved(after, before, cut) <= rounding, f"{name} from token {cut} on: the future leaks"
                assert not torch.equal(after[..., -1, :], before[..., -1, :]), f"{name}: the last row did not notice"
            if padding:
                k_nan, v_nan = (with_future(x, cut, lambda y: torch.full_like(y, float("nan"))) for x in (k, v))
                after = method(q, k_nan, v_nan, mask=torch.arange(N) < cut)
                assert moved(after, before, cut) <= rounding, f"NaN from token {cut} on: the future leaks"


# Kernels, normalisers and windows, each on every exact engine that runs them.

ENGINES: dict[str, Engine] = {
    "fused": Fused(),
    "tiled": Tiled(queries=8, keys=8, compile=False),
    "linear": Linear(chunk=8),
    "reference": Reference(),
}
KERNELS = {name: kernel.double() for name, kernel in kernels_under_test.make().items()}
NORMALIZERS = {
    repr(normalizer): normalizer
    for normalizer in (
        mk.Softmax(0.7),
        mk.SinkSoftmax(0.3),
        mk.ScalableSoftmax(0.4),
        mk.Sigmoid(),
        mk.Sparsemax(),
        mk.Entmax(1.5),
    )
}


def engines_for(kernel: mk.MatchKernel, normalizer: mk.Normalizer | None = None) -> Iterator[tuple[str, Engine]]:
    """The engines that run the kernel in causal order."""
    q, k, v = text()
    for name, engine in ENGINES.items():
        try:
            mk.explain(q, k, v, kernel, causal=True, normalizer=normalizer, engine=engine)
        except ValueError:
            continue
        yield name, engine


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_on_every_engine(name: str) -> None:
    kernel, ran = KERNELS[name], set()
    for engine_name, engine in engines_for(kernel):
        ran.add(engine_name)
        assert_blind_to_the_future(partial(mk.attend, kernel=kernel, causal=True, engine=engine))
    assert "reference" in ran
    assert ("fused" in ran) >= isinstance(kernel, mk.DotKernel)
    assert ("linear" in ran) >= isinstance(kernel, mk.FeatureKernel)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_normaliser_on_every_engine(name: str) -> None:
    normalizer, ran = NORMALIZERS[name], set()
    for kernel in (mk.ScaledDot(), mk.Laplacian(3.0), mk.EluFeatures()):
        for engine_name, engine in engines_for(kernel, normalizer):
            ran.add(engine_name)
            assert_blind_to_the_future(
                partial(mk.attend, kernel=kernel, causal=True, normalizer=normalizer, engine=engine)
            )
    assert "reference" in ran


@pytest.mark.parametrize("kernel", [mk.ScaledDot(), mk.Laplacian(3.0), mk.EluFeatures()], ids=repr)
def test_every_engine_within_a_window(kernel: mk.MatchKernel) -> None:
    for name, engine in engines_for(kernel):
        if name != "linear":
            assert_blind_to_the_future(partial(mk.attend, kernel=kernel, causal=True, window=5, engine=engine))


# Engines that choose what is seen.


def pattern() -> mk.BlockPattern:
    """Windows, the first block and random ones, on both sides of the diagonal."""
    return mk.BlockPattern.bigbird(
        N, 4, window=3, global_blocks=1, random=2, generator=torch.Generator().manual_seed(3)
    )


CHOOSING: dict[str, Callable[[], tuple[Engine, dict[str, object]]]] = {
    "window": lambda: (mk.Sparse(), {"window": 5}),
    "dilated window": lambda: (mk.Sparse(dilation=3), {"window": 4}),
    "window and first tokens": lambda: (mk.Sparse(sinks=2), {"window": 5}),
    "dilated, with first tokens": lambda: (mk.Sparse(dilation=2, sinks=3), {"window": 4, "kernel": mk.Gaussian(2.0)}),
    "blocks": lambda: (mk.Blocks(pattern()), {}),
    "blocks, another kernel": lambda: (mk.Blocks(pattern()), {"kernel": mk.Laplacian(3.0)}),
    "blocks, features": lambda: (mk.Blocks(pattern()), {"kernel": mk.EluFeatures()}),
    "top k": lambda: (mk.TopK(4), {}),
    "LSH": lambda: (mk.LSH(4, rounds=2, generator=torch.Generator().manual_seed(3)), {}),
    "LSH by signs": lambda: (mk.LSH(4, hash="sign", generator=torch.Generator().manual_seed(3)), {"window": 9}),
    "top k by a cheaper kernel": lambda: (mk.TopK(4, by=mk.Gaussian(1.0)), {"kernel": mk.Laplacian(3.0)}),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_what_is_chosen_is_not_chosen_by_the_future(name: str) -> None:
    engine, given = CHOOSING[name]()
    assert_blind_to_the_future(partial(mk.attend, causal=True, engine=engine, **given))


# Linear attention and what a token does to its state.


def updates() -> dict[str, Callable[[Tensor], mk.updates.StateUpdate | None]]:
    """From the keys, since a gate or a step is a function of the token: then the future changes it too."""
    return {
        "sum": lambda k: None,
        "decay": lambda k: mk.Decay(torch.tensor([0.9, 0.5])),
        "gates": lambda k: mk.Gates(-k.abs().clamp(max=4.0)),
        "one gate": lambda k: mk.Gates(-k.abs().clamp(max=4.0).mean(-1, keepdim=True)),
        "delta": lambda k: mk.DeltaRule(k[..., 0].sigmoid()),
        "gated delta": lambda k: mk.GatedDeltaRule(-k[..., 1].abs().clamp(max=4.0), k[..., 0].sigmoid()),
    }


FEATURES = [None, *(kernel for kernel in KERNELS.values() if isinstance(kernel, mk.FeatureKernel))]
CASES = [(name, kernel) for name in updates() for kernel in FEATURES if kernel is None or name != "gates"]
"""Gates by feature where the tokens themselves are the features."""


@pytest.mark.parametrize(("name", "kernel"), CASES, ids=repr)
def test_every_update_of_every_feature_kernel(name: str, kernel: mk.FeatureKernel | None) -> None:
    make_update = updates()[name]

    def method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Keys of unit length, as a delta rule wants them; without, it grows beyond all bounds.
        features = torch.nn.functional.normalize(k, dim=-1) if "delta" in name else k
        return mk.linear_attention(q, features, v, kernel, make_update(k), chunk=8)[0]

    assert_blind_to_the_future(method, padding=False)


# What cannot keep an order.


@pytest.mark.parametrize("engine", [mk.Nystrom(landmarks=8), mk.Linformer(N, 8).double()], ids=repr)
def test_what_mixes_the_sequence_refuses_an_order(engine: Engine) -> None:
    q, k, v = text()
    assert mk.attend(q, k, v, engine=engine).shape == v.shape
    for order, reason in (({"causal": True}, "the future would leak"), ({"window": 4}, "outside of a window")):
        with pytest.raises(ValueError, match=f"mixes tokens of the whole sequence, and .*{reason}"):
            mk.attend(q, k, v, engine=engine, **order)


def test_no_engine_is_forgotten() -> None:
    """Every public engine is in one of the lists above; the ring has processes of its own, in test_ring.py."""
    public = {name for name in mk.__all__ if isinstance(getattr(mk, name), type) and is_engine(getattr(mk, name))}
    tried = {type(engine).__name__ for engine in ENGINES.values()}
    tried |= {type(make_engine()[0]).__name__ for make_engine in CHOOSING.values()}
    assert public - tried == {"Nystrom", "Linformer", "Ring"}


def is_engine(cls: type) -> bool:
    return all(hasattr(cls, part) for part in ("refuse", "declines", "compiles", "run", "cost", "reason"))


# A test that must be able to fail.


@pytest.mark.parametrize("leak", ["a stabiliser over all keys", "sums over all keys", "one key too many", "a NaN"])
def test_a_leak_is_noticed(leak: str) -> None:
    def leaky(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = torch.ones(N, N, dtype=torch.bool).tril(1 if leak == "one key too many" else 0)
        if leak == "a NaN":
            return torch.where(seen, q @ k.mT, float("-inf")).softmax(-1) @ v
        if leak == "one key too many":
            return mk.attend(q, k, v, mask=seen)
        features = (k - k.amax() if leak == "a stabiliser over all keys" else k).exp()
        table = torch.where(seen, q.exp() @ features.mT, 0.0)
        total = table.sum(-1, keepdim=True) if leak != "sums over all keys" else q.exp() @ features.sum(-2, True).mT
        return table @ v / total

    with pytest.raises(AssertionError, match="the future leaks"):
        assert_blind_to_the_future(leaky)
