"""The tests that every match kernel passes, a reader's own included: subclass `KernelContract`, or `check(kernel)`."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from ._validate import build_problem
from .attention import _BY_NAME, attend, scores, weights
from .engines import Engine, Tiled
from .kernels.base import MatchKernel
from .kernels.encoding import Encoding, leaves
from .kernels.feature_base import FeatureKernel, why_no_score
from .normalizers import Entmax, Normalizer, ScalableSoftmax, Sigmoid, SinkSoftmax, Softmax, Sparsemax

NAN = float("nan")
TINY = 1e-300
FEW = Tiled(queries=3, keys=4, compile=False)
"""Tiles so small that seven tokens have edges between them."""
Inputs = tuple[Tensor, Tensor, Tensor]


class KernelContract:
    """A pytest base class: subclass it, define `make_kernel`, and every test below runs on your kernel.

    class TestCauchy(KernelContract):
        def make_kernel(self):
            return Cauchy()

    `query_dim`, `key_dim` and `heads` say what inputs the kernel takes; `smooth` = False leaves out second
    derivatives for a kernel that has none. Parameters should be random, not at a symmetric point: the facts are
    tested as they stand. What is asked of scores is asked of κ where a feature kernel is signed and has no score, and
    then under `Softmax()` and `SinkSoftmax` alone.
    """

    query_dim = 6
    key_dim = 6
    heads = 2
    smooth = True

    def make_kernel(self) -> MatchKernel:
        """A new kernel, the same every time."""
        raise NotImplementedError(f"{type(self).__name__} must define make_kernel()")

    # What the tests are made of.

    def double_kernel(self) -> MatchKernel:
        return self.make_kernel().double()

    def draw(self, n: int = 7, m: int = 7, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Inputs:
        """q (2, heads, n, query_dim), k (2, heads, m, key_dim), v (2, heads, m, 5)."""
        generator = torch.Generator().manual_seed(seed)
        sizes = ((n, self.query_dim), (m, self.key_dim), (m, 5))
        q, k, v = (torch.randn(2, self.heads, *size, generator=generator, dtype=torch.float64) for size in sizes)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def normalizers(self) -> list[Normalizer]:
        every = [Softmax(), Softmax(0.7), SinkSoftmax(0.3), ScalableSoftmax(0.6), Sigmoid(), Sparsemax(), Entmax()]
        scored = why_no_score(self.make_kernel()) is None
        return [normalizer for normalizer in every if scored or normalizer.proportional]

    def settings(self, n: int, m: int) -> Iterator[dict[str, Any]]:
        """Every kind of mask, alone and with causal order."""
        generator = torch.Generator().manual_seed(1)
        keys = torch.rand(2, 1, 1, m, generator=generator) > 0.4
        pairs = torch.rand(2, self.heads, n, m, generator=generator) > 0.5
        bias = torch.randn(n, m, generator=generator)
        yield {}
        yield {"causal": True}
        yield {"window": 3}
        yield {"causal": True, "window": 3}
        yield {"window": (2, 1)}
        yield {"mask": keys}
        yield {"mask": pairs}
        yield {"mask": bias}
        yield {"mask": keys, "causal": True}
        yield {"mask": bias.masked_fill(bias > 1, float("-inf")), "causal": True}

    def engines(self, q: Tensor, k: Tensor, v: Tensor, kernel: MatchKernel, **setting: Any) -> list[str | Engine]:
        """The engines that do not refuse this call; with few keys, tiles that are smaller still."""
        blank: dict[str, Any] = {"causal": False}
        blank |= dict.fromkeys(("mask", "window", "normalizer", "query_position", "key_position"))
        problem = build_problem(q, k, v, kernel, **(blank | setting))
        every: list[tuple[str | Engine, Engine]] = list(_BY_NAME.items())
        if problem.visibility.keys <= 12:
            every.append((FEW, FEW))
        return [name for name, engine in every if engine.refuse(problem) is None]

    # Values.

    def test_scores_are_those_of_single_pairs(self) -> None:
        kernel, (q, k, _) = self.double_kernel(), self.draw(4, 5)
        table = _table(q, k, kernel)
        assert table.shape == (2, self.heads, 4, 5), f"scores of shape {tuple(table.shape)}"
        for i in range(4):
            for j in range(5):
                pair = _table(
                    q[..., i : i + 1, :],
                    k[..., j : j + 1, :],
                    kernel,
                    query_position=torch.tensor([i + 1]),
                    key_position=torch.tensor([j]),
                )
                assert_close(pair[..., 0, 0], table[..., i, j], msg=f"pair ({i}, {j}) is not the table's entry")

    def test_batch_is_a_loop(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        batched = attend(q, k, v, kernel, causal=True)
        for b in range(2):
            assert_close(attend(q[b], k[b], v[b], kernel, causal=True), batched[b])

    def test_engines_agree_in_value_and_gradient(self) -> None:
        """Every kind of mask with every normaliser on a square, and each of the pairs at one other shape."""
        shapes = ((3, 9), (9, 3), (1, 5), (5, 1), (65, 65))
        for a, normalizer in enumerate(self.normalizers()):
            for b, setting in enumerate(self.settings(7, 7)):
                self._agree(7, 7, setting, normalizer)
                n, m = shapes[(a + b) % len(shapes)]
                self._agree(n, m, list(self.settings(n, m))[b], normalizer)

    def _agree(self, n: int, m: int, setting: dict[str, Any], normalizer: Normalizer) -> None:
        q, k, v = self.draw(n, m)
        names = self.engines(q, k, v, self.double_kernel(), normalizer=normalizer, **setting)
        results: dict[str | Engine, list[Tensor]] = {}
        for name in names:
            kernel = self.double_kernel()
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            call = {"normalizer": normalizer, "engine": name, **setting}
            out = _attend_to(leaves, kernel, **call)
            out.sin().sum().backward()  # type: ignore[no-untyped-call]
            results[name] = [out.detach(), *(_gradient(x) for x in [*leaves, *kernel.parameters()])]
        for name in names:
            for ours, truth in zip(results[name], results["reference"], strict=True):
                where = f"{name}, {normalizer!r}, {list(setting)}, n = {n}, m = {m}"
                assert torch.allclose(ours, truth, rtol=1e-9, atol=1e-9), (
                    f"{where}: off by {(ours - truth).abs().max()}"
                )

    def test_output_is_the_weights_times_the_values(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        for setting in self.settings(7, 7):
            for normalizer in self.normalizers():
                table = weights(q, k, kernel, normalizer=normalizer, **setting)
                out = attend(q, k, v, kernel, normalizer=normalizer, **setting)
                assert_close(table @ v, out)

    def test_grouped_heads_are_repeated_heads(self) -> None:
        if self.heads % 2:
            return
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        k, v = k[:, ::2], v[:, ::2]
        repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
        for setting in self.settings(7, 7):
            grouped = attend(q, k, v, kernel, **setting)
            assert_close(grouped, _attend_to([q, *repeated], kernel, **setting))

    def test_strides_do_not_matter(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        strided = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
        assert_close(_attend_to(strided, kernel), attend(q, k, v, kernel))
        expanded = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
        copied = [x.contiguous() for x in expanded]
        assert_close(_attend_to(expanded, kernel, causal=True), _attend_to(copied, kernel, causal=True))

    def test_inputs_are_not_written_to(self) -> None:
        kernel, inputs = self.double_kernel(), self.draw()
        before = [x.clone() for x in inputs]
        state = copy.deepcopy(kernel.state_dict())
        for setting in self.settings(7, 7):
            _attend_to(inputs, kernel, **setting)
        for x, old in zip(inputs, before, strict=True):
            assert torch.equal(x, old), "an input was written to"
        assert all(torch.equal(value, state[name]) for name, value in kernel.state_dict().items())

    def test_low_precision_is_as_good_as_plain_arithmetic(self) -> None:
        """No worse than the same formula carried out in the low type, step by step, with a step of rounding on top."""
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = self.draw(33, 33, dtype=dtype)
            truth = attend(q.double(), k.double(), v.double(), self.double_kernel(), engine="reference")
            low = self.make_kernel().to(dtype)
            plain = _plain_weights(q, k, low) @ v
            budget = (plain.double() - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
            for name in self.engines(q, k, v, self.make_kernel()):
                out = attend(q, k, v, self.make_kernel(), engine=name)
                assert out.dtype == dtype
                error = (out.double() - truth).abs().max()
                assert error <= 1.5 * budget, f"{name} in {dtype}: error {error:.2g}, budget {budget:.2g}"

    # Masks.

    def test_the_future_is_not_seen(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        for normalizer in self.normalizers():
            for name in self.engines(q, k, v, kernel, causal=True, normalizer=normalizer):
                before = attend(q, k, v, kernel, causal=True, normalizer=normalizer, engine=name)
                digit = 1e-14 * max(1.0, _rounded(q, k, v, kernel, normalizer))
                for i in range(6):
                    changed_k, changed_v = k.clone(), v.clone()
                    changed_k[..., i + 1 :, :] += 3.0
                    changed_v[..., i + 1 :, :] -= 2.0
                    after = attend(q, changed_k, changed_v, kernel, causal=True, normalizer=normalizer, engine=name)
                    change = float((after - before)[..., : i + 1, :].detach().abs().max())
                    # A tile may choose its arithmetic by all of its keys: a rounding of the last digit, and no more.
                    assert change <= (0.0 if name in ("reference", "fused") else digit), f"{name}: the future leaks"

    def test_a_forbidden_key_is_a_dropped_key(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        keep = torch.tensor([0, 2, 3, 6])
        allowed = torch.zeros(7, dtype=torch.bool)
        allowed[keep] = True
        position = torch.arange(7)
        for normalizer in self.normalizers():
            masked = attend(q, k, v, kernel, mask=allowed, normalizer=normalizer)
            dropped = attend(
                q, k[..., keep, :], v[..., keep, :], kernel,
                query_position=position, key_position=position[keep], normalizer=normalizer,
            )  # fmt: skip
            assert_close(masked, dropped)

    def test_hidden_nan_stays_hidden(self) -> None:
        q, k, v = self.draw()
        by_row, by_key = torch.ones(7, 7, dtype=torch.bool), torch.arange(7) < 5
        by_row[:, 5:], by_row[6] = False, False
        for normalizer, mask in itertools.product(self.normalizers(), (by_row, by_key)):
            # Some engines take no mask that has a row per query, and only such a mask hides a query.
            hidden = mask is by_row
            for name in self.engines(q, k, v, self.double_kernel(), mask=mask, normalizer=normalizer):
                kernel = self.double_kernel()
                leaves = [x.clone() for x in (q, k, v)]
                leaves[1][..., 5:, :], leaves[2][..., 5:, :] = NAN, NAN
                if hidden:
                    leaves[0][..., 6, :] = NAN
                for x in leaves:
                    x.requires_grad_()
                out = _attend_to(leaves, kernel, mask=mask, normalizer=normalizer, engine=name)
                out.square().sum().backward()  # type: ignore[no-untyped-call]
                truth = attend(
                    q[..., :6, :], k[..., :5, :], v[..., :5, :], kernel, normalizer=normalizer,
                    query_position=torch.arange(6), key_position=torch.arange(5),
                )  # fmt: skip
                assert_close(out[..., :6, :], truth)
                for x in leaves:
                    assert x.grad is not None and bool(x.grad.isfinite().all()), f"{name}: NaN in a gradient"
                assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in kernel.parameters())
                if hidden:
                    assert bool((out[..., 6, :] == 0).all()), f"{name}: a query without keys must get zeros"
                    assert leaves[0].grad is not None and bool((leaves[0].grad[..., 6, :] == 0).all())

    def test_nothing_to_attend_to_gives_zeros(self) -> None:
        for normalizer in self.normalizers():
            q, k, v = (x.requires_grad_() for x in self.draw())
            kernel = self.double_kernel()
            nothing = torch.zeros(7, 7, dtype=torch.bool)
            for name in self.engines(q, k, v, kernel, mask=nothing, normalizer=normalizer):
                out = attend(q, k, v, kernel, mask=nothing, normalizer=normalizer, engine=name)
                assert torch.equal(out, torch.zeros_like(out)), name
                for grad in torch.autograd.grad(out.sum(), (q, k, v)):
                    assert torch.equal(grad, torch.zeros_like(grad)), f"{name}: gradient where nothing was attended to"

    def test_empty_lengths(self) -> None:
        kernel = self.double_kernel()
        for n, m in ((0, 4), (4, 0), (0, 0)):
            q, k, v = self.draw(n, m)
            out = attend(q, k, v, kernel)
            assert out.shape == (2, self.heads, n, 5)
            assert torch.equal(out, torch.zeros_like(out))

    # Derivatives.

    def test_gradients_are_those_of_finite_differences(self) -> None:
        q, k, v = (x.requires_grad_() for x in self.draw(3, 4))
        kernel = self.double_kernel()
        parameters = dict(kernel.named_parameters())

        def run(name: str | Engine, *inputs: Tensor) -> Tensor:
            bound = {f"kernel.{key}": value for key, value in zip(parameters, inputs[3:], strict=True)}
            out: Tensor = torch.func.functional_call(_Attend(kernel, name), bound, inputs[:3])
            return out

        for name in self.engines(q, k, v, kernel, causal=True):
            inputs = (q, k, v, *parameters.values())
            # Fast: along random directions, not entry by entry, which would take a second for each engine.
            torch.autograd.gradcheck(lambda *x, name=name: run(name, *x), inputs, fast_mode=True)
            if self.smooth:
                torch.autograd.gradgradcheck(lambda *x, name=name: run(name, *x), inputs, fast_mode=True)

    def test_forward_mode_and_vmap(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        tangents = tuple(self.draw(seed=5))

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, kernel, causal=True)

        forward = torch.func.jvp(run, (q, k, v), tangents)[1]
        step = 1e-6
        plus, minus = ([x + sign * step * t for x, t in zip((q, k, v), tangents, strict=True)] for sign in (1, -1))
        assert_close(forward, (run(*plus) - run(*minus)) / (2 * step), rtol=1e-5, atol=1e-7)
        assert_close(torch.func.vmap(run)(q, k, v), run(q, k, v))

    def test_equal_points_and_zeros_have_finite_gradients(self) -> None:
        if self.query_dim != self.key_dim:
            return
        for value in (self.draw()[0], torch.zeros(2, self.heads, 7, self.query_dim, dtype=torch.float64)):
            q, k = value.clone().requires_grad_(), value.clone().requires_grad_()
            out = attend(q, k, self.draw()[2], self.double_kernel())
            grads = torch.autograd.grad(out.sin().sum(), (q, k), create_graph=self.smooth)
            assert all(bool(g.isfinite().all()) for g in grads), "NaN in a gradient at equal points"
            if self.smooth:
                second = torch.autograd.grad([g.sin().sum() for g in grads], (q, k))
                assert all(bool(g.isfinite().all()) for g in second), "NaN in a second derivative at equal points"

    def test_far_and_tiny_inputs_stay_finite(self) -> None:
        for dtype in (torch.float32, torch.float64):
            q, k, v = self.draw(dtype=dtype)
            kernel = self.make_kernel().to(dtype)
            for what, x, y in (("moved by 1e3", q + 1e3, k + 1e3), ("times 1e-30", q * 1e-30, k * 1e-30)):
                finite = bool(attend(x, y, v, kernel).isfinite().all())
                assert finite, f"in {dtype}, queries and keys {what} give an output that is not finite"

    # Facts and the module.

    def test_parameters_learn_and_state_returns(self) -> None:
        kernel, (q, k, v) = self.double_kernel(), self.draw()
        if list(kernel.parameters()):
            attend(q, k, v, kernel).sin().sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in kernel.named_parameters():
            assert parameter.grad is not None and bool((parameter.grad != 0).any()), f"{name} does not learn"
        other = self.double_kernel()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        other.load_state_dict(kernel.state_dict())
        assert torch.equal(_table(q, k, other), _table(q, k, kernel))
        assert type(kernel).__name__.lower() in repr(kernel).lower() or "+" in repr(kernel) or "*" in repr(kernel)

    def test_declared_facts(self) -> None:
        """True must hold on every sample (which proves nothing); False must be refuted by one."""
        kernel = self.double_kernel()
        kernel.requires_grad_(False)
        if self.query_dim == self.key_dim:
            points = [self._points(seed) for seed in range(5)]
            self._hold(kernel.symmetric, "symmetric", [_asymmetry(kernel, x) for x in points])
            self._hold(kernel.translation_invariant, "translation_invariant", [_moved(kernel, x) for x in points])
            if kernel.score_positive_definite == "conditionally":
                centred = [_negativity(_centre(scores(x, x, kernel))) for x in points]
                self._hold(True, "conditionally score_positive_definite", centred)
            elif kernel.score_positive_definite is not None:
                eigenvalues = [_negativity(scores(x, x, kernel)) for x in points]
                self._hold(kernel.score_positive_definite, "score_positive_definite", eigenvalues)
            weight = [_negativity(_relative_kappa(x, kernel)) for x in points]
            self._hold(kernel.positive_definite, "positive_definite", weight)
        q, k, _ = self.draw()
        here = _declared(q, k, kernel)
        there = _declared(q, k, kernel, query_position=torch.arange(7) + 11, key_position=torch.arange(7) + 11)
        self._hold(kernel.position_invariant, "position_invariant", [_apart(there, here)])

    # Feature kernels: what a weight that is an inner product owes beside. Nothing is asked of any other kernel.

    def test_features_are_those_of_single_tokens(self) -> None:
        """A stabiliser that another token has a part in would let the future reach the past."""
        kernel, (q, k, _) = self.double_kernel(), self.draw()
        if not isinstance(kernel, FeatureKernel):
            return
        position = torch.arange(7)
        for x, encode in ((q, kernel.encode_query), (k, kernel.encode_key)):
            together = leaves(encode(x, position))
            assert together[0].shape[-2] == 7, f"features of shape {tuple(together[0].shape)}"
            for i in range(7):
                alone = leaves(encode(x[..., i : i + 1, :], position[i : i + 1]))
                for ours, truth in zip(alone, together, strict=True):
                    assert_close(ours, truth[..., i : i + 1, :], msg=f"the features of token {i} depend on the others")

    def test_kappa_has_the_sign_that_it_declares(self) -> None:
        kernel = self.double_kernel()
        if not isinstance(kernel, FeatureKernel):
            return
        assert kernel.nonnegative or not kernel.positive, "what is positive is nonnegative"
        for seed in range(5):
            x, y = (x * (0.25, 0.5, 1.0, 2.0, 3.0)[seed] for x in self.draw(24, 24, seed=seed)[:2])
            encoded = kernel.encode(x, y, torch.arange(24), torch.arange(24))
            of_query, of_key = leaves(encoded[0])[0], leaves(encoded[1])[0]
            # As the features give it, before rounding below 0 is mended.
            product = of_query @ of_key.mT
            rounding = 1e-15 * (of_query.abs() @ of_key.abs().mT)
            if kernel.positive:
                assert bool((product > 0).all()), f"declared positive, but κ reaches {float(product.min()):.2g}"
            if kernel.nonnegative:
                assert bool((product >= -rounding).all()), f"declared nonnegative, but κ reaches {product.min():.2g}"

    def test_weights_are_shares_of_kappa(self) -> None:
        kernel, (q, k, _) = self.double_kernel(), self.draw()
        if not isinstance(kernel, FeatureKernel):
            return
        kappa = kernel.kappa(q, k)
        if kernel.nonnegative:
            assert_close(scores(q, k, kernel).exp(), kappa)
        for setting in self.settings(7, 7):
            # An added mask multiplies κ, and −inf takes it away.
            marks = scores(torch.zeros_like(q), torch.zeros_like(k), _Product(), **setting).exp()
            for normalizer, beside in ((Softmax(), 0.0), (SinkSoftmax(0.3), math.exp(0.3))):
                shares = kappa * marks
                total = shares.sum(-1, keepdim=True) + beside
                truth = torch.where(total == 0, 0.0, shares / torch.where(total == 0, 1.0, total))
                assert_close(weights(q, k, kernel, normalizer=normalizer, **setting), truth)

    def _points(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.heads, 24, self.query_dim, generator=generator, dtype=torch.float64)
        return x * (0.25, 0.5, 1.0, 2.0, 3.0)[seed]

    def _hold(self, fact: bool | None, name: str, violations: list[Tensor]) -> None:
        worst = float(torch.stack(violations).max())
        if fact is True:
            assert worst < 1e-9, f"declared {name}, violated by {worst:.2g} of the largest entry"
        if fact is False:
            assert worst > 1e-6, f"declared not {name}, and no sample shows it"


class _Product(MatchKernel):
    """q·k, asked of zeros: what is left is the mask."""

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        return leaves(q)[0] @ leaves(k)[0].mT


def _table(q: Tensor, k: Tensor, kernel: MatchKernel, **place: Any) -> Tensor:
    """The scores, or κ where a kernel has none."""
    if isinstance(kernel, FeatureKernel) and why_no_score(kernel) is not None:
        return kernel.kappa(q, k, place.get("query_position"), place.get("key_position"))
    return scores(q, k, kernel, **place)


def _declared(q: Tensor, k: Tensor, kernel: MatchKernel, **place: Any) -> Tensor:
    """What a kernel's facts speak of: κ, which is never −inf, for a feature kernel."""
    if isinstance(kernel, FeatureKernel):
        return kernel.kappa(q, k, place.get("query_position"), place.get("key_position"))
    return scores(q, k, kernel, **place)


def _relative_kappa(x: Tensor, kernel: MatchKernel) -> Tensor:
    """κ of all pairs of x, over a factor that changes no sign and keeps it in range."""
    if isinstance(kernel, FeatureKernel):
        kappa = kernel.kappa(x, x)
        return kappa / kappa.abs().amax((-2, -1), keepdim=True).clamp_min(TINY)
    table = scores(x, x, kernel)
    return (table - table.amax((-2, -1), keepdim=True)).exp()


def _plain_weights(q: Tensor, k: Tensor, kernel: MatchKernel) -> Tensor:
    """A softmax of the scores, or κ over its sum where not all have one, each step in the type of q."""
    if isinstance(kernel, FeatureKernel) and not kernel.positive:
        kappa = kernel.kappa(q, k).to(q.dtype)
        total = kappa.sum(-1, keepdim=True)
        return torch.where(total == 0, 0.0, kappa / torch.where(total == 0, 1.0, total))
    weights: Tensor = kernel(q, k).to(q.dtype).softmax(-1)
    return weights


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _attend_to(inputs: Sequence[Tensor], kernel: MatchKernel, **setting: Any) -> Tensor:
    q, k, v = inputs
    return attend(q, k, v, kernel, **setting)


class _Attend(torch.nn.Module):
    def __init__(self, kernel: MatchKernel, engine: str | Engine) -> None:
        super().__init__()
        self.kernel, self.engine = kernel, engine

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.kernel, causal=True, engine=self.engine)


def check(
    kernel: MatchKernel, *, query_dim: int = 6, key_dim: int | None = None, heads: int = 2, smooth: bool = True
) -> int:
    """Run the whole contract on one kernel, outside pytest; returns how many tests ran, raises at the first that fails.

    `query_dim`, `key_dim` and `heads` are the widths and heads that the kernel takes; `smooth` = False leaves out
    second derivatives. The kernel is copied, never changed.
    """
    contract = KernelContract()
    contract.query_dim, contract.key_dim = query_dim, query_dim if key_dim is None else key_dim
    contract.heads, contract.smooth = heads, smooth
    contract.make_kernel = lambda: copy.deepcopy(kernel)  # type: ignore[method-assign]
    tests = [name for name in dir(KernelContract) if name.startswith("test_")]
    for name in tests:
        getattr(contract, name)()
    return len(tests)


def _asymmetry(kernel: MatchKernel, x: Tensor) -> Tensor:
    # One position for all, so that only the content is swapped.
    position = torch.zeros(x.shape[-2])
    table = _declared(x, x, kernel, query_position=position, key_position=position)
    return _apart(table.mT, table)


def _moved(kernel: MatchKernel, x: Tensor) -> Tensor:
    here, there = _declared(x, x, kernel), _declared(x + 1.7, x + 1.7, kernel)
    return _apart(there, here)


def _apart(there: Tensor, here: Tensor) -> Tensor:
    """How far two tables differ, relative to the largest entry; −inf in both is no difference."""
    largest = torch.where(here.isfinite(), here, 0.0).abs().max().clamp_min(TINY)
    return torch.where(there == here, 0.0, there - here).abs().max() / largest


def _negativity(gram: Tensor) -> Tensor:
    """How far below zero the spectrum reaches, or how asymmetric the matrix is, relative to its largest entry."""
    symmetric = (gram + gram.mT) / 2
    values = torch.linalg.eigvalsh(symmetric)
    largest = gram.abs().amax((-2, -1)).clamp_min(TINY)
    below = (-values[..., 0] / largest / gram.shape[-1]).max()
    return torch.maximum(below, ((gram - gram.mT).abs().amax((-2, -1)) / largest).max())


def _centre(gram: Tensor) -> Tensor:
    gram = gram - gram.mean(-1, keepdim=True)
    return gram - gram.mean(-2, keepdim=True)


def _rounded(q: Tensor, k: Tensor, v: Tensor, kernel: MatchKernel, normalizer: Normalizer) -> float:
    """The size of what a causal output is summed from, and rounded at: more than its own where signs cancel."""
    with torch.no_grad():
        table = weights(q, k, kernel, causal=True, normalizer=normalizer).abs()
        if isinstance(kernel, FeatureKernel):
            place = torch.arange(q.shape[-2])
            (x, _), (y, _) = (leaves(side) for side in kernel.encode(q, k, place, place))
            product = (x @ y.mT).abs()
            table = table * (x.abs() @ y.abs().mT) / product.clamp_min(torch.finfo(product.dtype).tiny)
        return float((table @ v.abs()).max())
