"""All kernels × engines × normalisers × masks × dtypes, and shapes drawn at random, against formulas written out.

`python tests/matchkernel/test_contract_random.py` prints how many cases there are.
"""

import copy
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import matchkernel as mk
from matchkernel._validate import build_problem
from matchkernel.attention import _BY_NAME
from matchkernel.engines import Engine, Tiled
from matchkernel.kernels.feature_base import why_no_score

sys.path.insert(0, str(Path(__file__).parent))
import kernels_under_test
from oracle import draw

Tensor = torch.Tensor
INF = float("inf")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KERNELS = kernels_under_test.make()
HEADS, WIDTH = 2, 6  # what every kernel of the list takes
ENGINES: dict[str, Engine] = {**_BY_NAME, "tiles of 5 × 7": Tiled(queries=5, keys=7, compile=False)}
"""The engines that `attend` knows, and the streaming one with tiles small enough to have many edges."""

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


# What the weights are, written out: from scores (…, n, m), what is added, and who may attend.

Formula = Callable[[Tensor, Tensor | float, Tensor], Tensor]


def _softmax(factor: Callable[[Tensor], Any], sink: Any = None) -> Formula:
    def weights(scores: Tensor, bias: Tensor | float, allowed: Tensor) -> Tensor:
        multiple = factor(allowed.sum(-1, keepdim=True))
        multiple = multiple.to(scores) if isinstance(multiple, Tensor) else multiple
        # A weight of 0 has no logarithm, and stays 0 whatever multiplies that.
        logits = torch.where(allowed & (scores != -INF), multiple * scores + bias, -INF)
        extra = torch.full_like(logits[..., :1], -INF) if sink is None else sink.to(scores).expand_as(logits[..., :1])
        logits = torch.cat([logits, extra], -1)
        top = logits.amax(-1, keepdim=True)
        powers = (logits - torch.where(top == -INF, 0.0, top)).exp()
        return powers[..., :-1] / powers.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)

    return weights


def _sigmoid(shift: Callable[[Tensor], Any]) -> Formula:
    def weights(scores: Tensor, bias: Tensor | float, allowed: Tensor) -> Tensor:
        added = shift(allowed.sum(-1, keepdim=True).clamp_min(1))
        logits = scores + bias + (added.to(scores) if isinstance(added, Tensor) else added)
        return torch.where(allowed, 1.0 / (1.0 + (-logits).exp()), 0.0)

    return weights


def _entmax(alpha: Any) -> Formula:
    def weights(scores: Tensor, bias: Tensor | float, allowed: Tensor) -> Tensor:
        """The threshold by halving; in half precision the search alone is done in float32."""
        power = alpha.double() if isinstance(alpha, Tensor) else alpha
        logits = torch.where(allowed, scores + bias, -INF)
        wide = (power - 1.0) * logits.double()
        high = wide.amax(-1, keepdim=True)
        wide, high = torch.where(high == -INF, -INF, wide), torch.where(high == -INF, 0.0, high)
        low = high - 1.0
        for _ in range(60):
            middle = (low + high) / 2
            enough = ((wide - middle).clamp_min(0.0) ** (1.0 / (power - 1.0))).sum(-1, keepdim=True) >= 1.0
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return ((wide - low).clamp_min(0.0) ** (1.0 / (power - 1.0))).to(scores.dtype)

    return weights


def _per_head(*entries: float) -> Tensor:
    return torch.tensor(entries)


def _learned(*entries: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(entries))


def _column(*entries: float) -> Tensor:
    return torch.tensor(entries)[:, None, None]


NORMALIZERS: dict[str, tuple[Callable[[], mk.Normalizer], Formula]] = {
    "softmax": (mk.Softmax, _softmax(lambda m: 1.0)),
    "cold softmax": (lambda: mk.Softmax(0.7), _softmax(lambda m: 1 / 0.7)),
    "softmax per head": (lambda: mk.Softmax(_per_head(0.5, 2.0)), _softmax(lambda m: 1 / _column(0.5, 2.0))),
    "learned softmax": (lambda: mk.Softmax(_learned(0.75)), _softmax(lambda m: 1 / 0.75)),
    "sink": (lambda: mk.SinkSoftmax(0.25), _softmax(lambda m: 1.0, torch.tensor(0.25))),
    "learned sinks": (lambda: mk.SinkSoftmax(_learned(0.5, -1.0)), _softmax(lambda m: 1.0, _column(0.5, -1.0))),
    "scalable": (lambda: mk.ScalableSoftmax(0.625), _softmax(lambda m: 0.625 * m.clamp_min(1).double().log())),
    "learned scalable": (
        lambda: mk.ScalableSoftmax(_learned(0.5, 1.5)),
        _softmax(lambda m: _column(0.5, 1.5).to(m.device) * m.clamp_min(1).double().log()),
    ),
    "sigmoid": (mk.Sigmoid, _sigmoid(lambda m: -m.double().log())),
    "learned sigmoid": (lambda: mk.Sigmoid(_learned(-1.0, 0.5)), _sigmoid(lambda m: _column(-1.0, 0.5))),
    "sparsemax": (mk.Sparsemax, _entmax(2.0)),
    "entmax": (mk.Entmax, _entmax(1.5)),
    "learned entmax": (lambda: mk.Entmax(_learned(1.25, 1.75)), _entmax(_column(1.25, 1.75))),
}
SINKS: dict[str, Any] = {"softmax": -INF, "sink": 0.25, "learned sinks": _column(0.5, -1.0)}
"""The normalisers that take a weight κ as it is, signed or not, and the logarithm of what is added to its sum."""
FOR_TWO_HEADS = {"softmax per head", "learned sinks", "learned scalable", "learned sigmoid", "learned entmax"}


def _shares(kappa: Tensor, bias: Tensor | float, allowed: Tensor, sink: Any) -> Tensor:
    """κ eᵇ over its sum and that of the sink; zeros where the sum is 0."""
    added, extra = (torch.as_tensor(x).to(kappa).exp() for x in (bias, sink))
    kappa = torch.where(allowed, kappa * added, 0.0)
    total = kappa.sum(-1, keepdim=True) + extra
    return torch.where(total == 0.0, 0.0, kappa / torch.where(total == 0.0, 1.0, total))


def _signed(kernel: str) -> bool:
    return why_no_score(KERNELS[kernel]) is not None


# Who may attend, written out.


def _masks(n: int, m: int, lead: tuple[int, ...], seed: int) -> dict[str, dict[str, Any]]:
    """Every kind of order and mask, for queries and keys of these lengths; `lead` ends with the heads."""
    generator = torch.Generator().manual_seed(seed)

    def chance(*shape: int, share: float = 0.6) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    bias = torch.randn(n, m, generator=generator)
    query_document = torch.randint(3, (n,), generator=generator)
    key_document = torch.randint(3, (m,), generator=generator)
    moved = torch.arange(m - n, m) + 40
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": 3},
        "causal window": {"causal": True, "window": 4},
        "window of two sides": {"window": (4, 1)},
        "window to the left": {"window": (2, 0)},
        "keys": {"mask": chance(*lead[:1], *(1,) * len(lead), m)},
        "keys of all": {"mask": chance(m), "causal": True},
        "pairs": {"mask": chance(*lead, n, m, share=0.4)},
        "pairs, causal": {"mask": chance(n, m), "causal": True},
        "added": {"mask": bias},
        "added for each head": {"mask": torch.randn(*lead[-1:], n, m, generator=generator).masked_fill(bias > 1, -INF)},
        "added, causal": {"mask": bias.masked_fill(bias > 1, -INF), "causal": True},
        "documents": {"mask": query_document[:, None] == key_document},
        "nothing": {"mask": torch.zeros(n, m, dtype=torch.bool)},
        "no rows for some": {"mask": chance(n, 1)},
        "positions": {"query_position": moved, "key_position": torch.arange(m) + 40, "causal": True, "window": 5},
        "mixed positions": {
            "query_position": torch.randint(-5, m + 5, (*lead[:1], *(1,) * (len(lead) - 1), n), generator=generator),
            "key_position": torch.randint(0, m + 1, (m,), generator=generator),
            "causal": True,
        },
    }  # fmt: skip


MASKS = tuple(_masks(2, 2, (1, 1), 0))


def _who(setting: dict[str, Any], n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Positions of queries and keys, who may attend, and what is added to the scores."""
    query, key = setting.get("query_position"), setting.get("key_position")
    query = torch.arange(m - n, m) if query is None else query
    key = torch.arange(m) if key is None else key
    ahead = key[..., None, :] - query[..., :, None]
    allowed = torch.ones_like(ahead, dtype=torch.bool)
    if setting.get("causal"):
        allowed = allowed & ~(ahead > 0)
    window = setting.get("window")
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window - 1, window - 1)
        allowed = allowed & ~(ahead < -left) & ~(ahead > right)
    mask = setting.get("mask")
    if mask is None:
        return query, key, allowed, 0.0
    if mask.dtype == torch.bool:
        return query, key, allowed & mask, 0.0
    return query, key, allowed & (mask > -INF), mask.clamp_min(-1e4)


@dataclass(frozen=True)
class Call:
    """One call of attention, and what it must give."""

    kernel: str
    normalizer: str
    mask: str
    setting: dict[str, Any]
    inputs: tuple[Tensor, Tensor, Tensor]

    def on(self, device: str, dtype: torch.dtype) -> "Call":
        setting = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.setting.items()}
        q, k, v = (x.to(device, dtype) for x in self.inputs)
        return Call(self.kernel, self.normalizer, self.mask, setting, (q, k, v))

    def modules(self, dtype: torch.dtype = torch.float64) -> tuple[mk.MatchKernel, mk.Normalizer]:
        device = self.inputs[0].device
        normalizer = NORMALIZERS[self.normalizer][0]()
        return copy.deepcopy(KERNELS[self.kernel]).to(device, dtype), normalizer.to(device, dtype)

    @torch.no_grad()
    def truth(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The formulas, step by step in `dtype`, from the inputs as they are."""
        q, k, v = (x.to(dtype) for x in self.inputs)
        if q.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]):
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
        query, key, allowed, bias = (
            x.to(q.device) if isinstance(x, Tensor) else x for x in _who(self.setting, q.shape[-2], k.shape[-2])
        )
        kernel = self.modules(dtype)[0]
        scores = _table(kernel, q, k, query, key).to(dtype)
        allowed = allowed.expand(torch.broadcast_shapes(allowed.shape, scores.shape))
        bias = bias.to(dtype) if isinstance(bias, Tensor) else bias
        if not scores.numel():
            return scores.expand(*allowed.shape[:-1], k.shape[-2]) @ v
        if _signed(self.kernel):
            return _shares(scores, bias, allowed, SINKS[self.normalizer]) @ v
        return NORMALIZERS[self.normalizer][1](scores, bias, allowed) @ v

    def run(self, engine: Engine, *, derivatives: bool = False) -> list[Tensor]:
        """The output, and the gradients of q, k, v and of all that is learned."""
        kernel, normalizer = self.modules(torch.float64 if self.inputs[0].dtype == torch.float64 else torch.float32)
        q, k, v = (x.detach().requires_grad_(derivatives) for x in self.inputs)
        out = engine.run(_problem(q, k, v, kernel, normalizer, self.setting))
        if not derivatives:
            return [out.detach()]
        leaves = [q, k, v, *kernel.parameters(), *normalizer.parameters()]
        down = draw(*out.shape, seed=17).to(out)
        grads = torch.autograd.grad(out, leaves, down, allow_unused=True)
        return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]

    def refusal(self, engine: Engine) -> str | None:
        return engine.refuse(_problem(*self.inputs, *self.modules(), self.setting))

    @property
    def has_weights(self) -> bool:
        return self.normalizer in SINKS or not _signed(self.kernel)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in self.inputs)
        return f"{self.kernel} × {self.normalizer} × {self.mask}, {shapes}, {self.inputs[0].dtype}"


def _table(kernel: mk.MatchKernel, q: Tensor, k: Tensor, *position: Tensor) -> Tensor:
    """The scores, or κ where it may be negative."""
    if why_no_score(kernel) is None:
        scores: Tensor = kernel(q, k, *position)
        return scores
    assert isinstance(kernel, mk.FeatureKernel)
    return kernel.kappa(q, k, *position)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, kernel: mk.MatchKernel, normalizer: mk.Normalizer, setting: dict[str, Any]
) -> Any:
    blank: dict[str, Any] = {"causal": False}
    blank |= dict.fromkeys(("mask", "window", "query_position", "key_position"))
    return build_problem(q, k, v, kernel, normalizer=normalizer, **(blank | setting))


def _hold_to_the_formulas(call: Call, *, derivatives: bool) -> int:
    """Every engine that takes the call, in value against the formulas and in gradient against the reference."""
    if not call.has_weights:
        for name, engine in ENGINES.items():
            assert call.refusal(engine) is not None, f"{name} runs a call that has no weights: {call}"
        return 0
    double = call.on(call.inputs[0].device.type, torch.float64)
    truth, dtype = double.truth(), call.inputs[0].dtype
    plain = 0.0
    if dtype != torch.float64:
        # What rounding each step to this dtype costs. Half precision is computed in float32 and may cost twice that. In
        # float32 itself, which of two orders of the same steps is nearer is chance: a factor of four was seen.
        plain = (
            (8.0 if dtype == torch.float32 else 2.0) * float((call.truth(dtype).double() - truth).abs().amax())
            if truth.numel()
            else 0.0
        )
    unit = torch.finfo(dtype).eps * float(truth.abs().amax() if truth.numel() else 0.0)
    taken = {name: engine for name, engine in ENGINES.items() if call.refusal(engine) is None}
    assert "reference" in taken
    wanted = call.run(ENGINES["reference"], derivatives=True)[1:] if derivatives else []
    for name, engine in taken.items():
        out, *grads = call.run(engine, derivatives=derivatives)
        assert out.dtype == dtype and out.shape == truth.shape, f"{name}: {out.dtype}, {tuple(out.shape)}: {call}"
        if not truth.numel():
            continue
        error = float((out.double() - truth).abs().amax())
        budget = 1e-9 * (1.0 + float(truth.abs().amax())) if dtype == torch.float64 else plain + 2.0 * unit
        assert error <= budget, f"{name}: error {error:.2g}, budget {budget:.2g}: {call}"
        for ours, theirs in zip(grads, wanted, strict=True):
            off = float((ours - theirs).abs().amax()) if theirs.numel() else 0.0
            within = 1e-9 * (1.0 + float(theirs.abs().amax() if theirs.numel() else 0.0))
            assert off <= within, f"{name}: a gradient is off by {off:.2g}: {call}"
    return len(taken)


# The product, at one shape with many tiles.


def _at(kernel: str, normalizer: str, mask: str, seed: int, *, n: int = 9, m: int = 12, groups: int = 1) -> Call:
    q = draw(2, HEADS, n, WIDTH, seed=seed)
    k = draw(2, HEADS // groups, m, WIDTH, seed=seed + 1)
    v = draw(2, HEADS // groups, m, 5, seed=seed + 2)
    return Call(kernel, normalizer, mask, _masks(n, m, (2, HEADS), seed)[mask], (q, k, v))


PARTS = 8


def _product(kernel: str, parts: Iterable[int]) -> Iterator[tuple[Call, torch.dtype]]:
    """Normalisers × masks × dtypes for one kernel, in eight parts; in each, every pair of kernel and these occurs."""
    number = list(KERNELS).index(kernel)
    for (a, normalizer), (b, mask), (c, dtype) in itertools.product(
        enumerate(NORMALIZERS), enumerate(MASKS), enumerate(DTYPES)
    ):
        if (number + a + b + c) % PARTS in parts:
            yield _at(kernel, normalizer, mask, seed=number + a + b, groups=1 + (a + b) % 2), dtype


def _check_product(kernel: str, device: str, parts: Iterable[int]) -> None:
    for call, dtype in _product(kernel, parts):
        _hold_to_the_formulas(call.on(device, dtype), derivatives=dtype == torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_normaliser_with_every_mask_on_every_engine(kernel: str, device: str) -> None:
    """An eighth of the whole product; `make test-slow` adds the rest."""
    _check_product(kernel, device, [0])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_normaliser_with_every_mask_on_every_engine_in_every_dtype(kernel: str, device: str) -> None:
    _check_product(kernel, device, range(1, PARTS))


# Shapes drawn at random.

LENGTHS = st.one_of(st.integers(0, 24), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129]))


def _takes(kernel: mk.MatchKernel, heads: int, width: int) -> bool:
    try:
        _table(kernel, draw(heads, 2, width), draw(heads, 3, width))
    except ValueError:
        return False
    return True


WIDTHS = {
    name: [width for width in (1, 2, 3, 5, WIDTH, 8, 17) if _takes(copy.deepcopy(kernel).double(), HEADS, width)]
    for name, kernel in KERNELS.items()
}
ANY_HEADS = {name for name, kernel in KERNELS.items() if _takes(copy.deepcopy(kernel).double(), 3, WIDTH)}


@st.composite
def calls(draw_from: st.DrawFn) -> Call:
    """Any kernel, normaliser and mask, with the lengths, heads, groups, widths and strides that they take."""
    kernel = draw_from(st.sampled_from(list(KERNELS)))
    normalizer = draw_from(st.sampled_from(list(NORMALIZERS)))
    mask = draw_from(st.sampled_from(MASKS))
    n, m = draw_from(LENGTHS), draw_from(LENGTHS)
    free = kernel in ANY_HEADS and normalizer not in FOR_TWO_HEADS
    heads = draw_from(st.sampled_from([1, 2, 3, 4, 6])) if free else HEADS
    groups = draw_from(st.sampled_from([g for g in (1, 2, 3, 6) if heads % g == 0]))
    width = draw_from(st.sampled_from(WIDTHS[kernel]))
    lead = draw_from(st.sampled_from([(), (1,), (2,), (2, 1)]))
    seed = draw_from(st.integers(0, 2**16))
    key_lead = (1,) * len(lead) if draw_from(st.booleans()) else lead
    scale = draw_from(st.sampled_from([0.0, 1e-3, 1.0, 5.0]))
    q = scale * draw(*lead, heads, n, width, seed=seed)
    k = draw(*key_lead, heads // groups, m, width, seed=seed + 1)
    v = draw(*key_lead, heads // groups, m, draw_from(st.sampled_from([0, 1, 4, 9])), seed=seed + 2)
    layout = draw_from(st.sampled_from(["as drawn", "transposed", "every other", "expanded"]))
    q, k, v = (_laid_out(x, layout) for x in (q, k, v))
    return Call(kernel, normalizer, mask, _masks(n, m, (*lead, heads), seed)[mask], (q, k, v))


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another place; expanded, the first of the leading dimension for all."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "every other":
        return torch.stack([x, torch.full_like(x, float("nan"))], -2).flatten(-3, -2)[..., ::2, :]
    return x[:1].expand_as(x) if layout == "expanded" else x


def _check_a_call(call: Call) -> None:
    _hold_to_the_formulas(call, derivatives=True)
    kernel, normalizer = call.modules()
    for name, engine in _BY_NAME.items():
        refusal = call.refusal(engine)
        if refusal is not None:
            with pytest.raises(ValueError, match=re.escape(f"engine={name!r} cannot run this call: {refusal}")):
                mk.attend(*call.inputs, kernel, normalizer=normalizer, engine=name, **call.setting)
    if not call.has_weights:
        for ask in (mk.attend, mk.explain):
            with pytest.raises(ValueError, match=r"no engine can run this call: .* is signed"):
                ask(*call.inputs, kernel, normalizer=normalizer, **call.setting)
        return
    chosen = mk.attend(*call.inputs, kernel, normalizer=normalizer, **call.setting)
    assert_close(chosen, call.truth(), rtol=1e-9, atol=1e-9)
    mk.explain(*call.inputs, kernel, normalizer=normalizer, **call.setting)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(calls())
def test_any_call_is_what_the_formulas_say(call: Call) -> None:
    _check_a_call(call)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_very_many_calls_are_what_the_formulas_say(call: Call) -> None:
    _check_a_call(call)


def test_the_formulas_are_right_for_one_row() -> None:
    """The formulas above against numbers worked out by hand: scores 0, log 2 and log 3, the last one forbidden."""
    scores = torch.tensor([[0.0, math.log(2.0), math.log(3.0)]], dtype=torch.float64)
    allowed = torch.tensor([[True, True, False]])
    expected = {
        "softmax": [1 / 3, 2 / 3, 0.0],
        "sink": [1 / (3 + math.exp(0.25)), 2 / (3 + math.exp(0.25)), 0.0],
        "scalable": [1 / (1 + 2 ** (0.625 * math.log(2))), 1 - 1 / (1 + 2 ** (0.625 * math.log(2))), 0.0],
        "sigmoid": [1 / 3, 1 / 2, 0.0],
        "sparsemax": [(1 - math.log(2)) / 2, (1 + math.log(2)) / 2, 0.0],
    }
    for name, row in expected.items():
        assert_close(NORMALIZERS[name][1](scores, 0.0, allowed), torch.tensor([row], dtype=torch.float64))


# Transforms, second derivatives, compiled graphs.

BUILT = {type(kernel).__name__: name for name, kernel in KERNELS.items()}
"""A kernel of each class, the last of the list."""


def _paired(kernels: Iterable[str], each: int) -> list[tuple[str, str]]:
    """Every kernel with `each` normalisers in turn, so that all of those occur that it goes with."""
    pairs = []
    for i, kernel in enumerate(kernels):
        names = list(SINKS if _signed(kernel) else NORMALIZERS)
        pairs += [(kernel, names[(each * i + step) % len(names)]) for step in range(each)]
    return pairs


@pytest.mark.parametrize(("kernel", "normalizer"), _paired(BUILT.values(), 3))
def test_vmap_is_a_loop_and_jvp_the_derivative(kernel: str, normalizer: str) -> None:
    call = _at(kernel, normalizer, "causal", seed=3, n=4, m=5)
    made, weigh = call.modules()

    def attend(q: Tensor, k: Tensor, v: Tensor, engine: str = "auto") -> Tensor:
        return mk.attend(q, k, v, made, normalizer=weigh, causal=True, engine=engine)

    q, k, v = call.inputs
    for dims in ((0, 0, 0), (0, None, None), (None, 0, 0)):
        given_ = [x if dim == 0 else x[1] for x, dim in zip((q, k, v), dims, strict=True)]
        loop = [attend(*(x[i] if dim == 0 else x for x, dim in zip(given_, dims, strict=True))) for i in range(2)]
        assert_close(torch.func.vmap(attend, in_dims=dims)(*given_), torch.stack(loop))
    tangents = tuple(draw(*x.shape, seed=30 + i) for i, x in enumerate((q, k, v)))
    forward = torch.func.jvp(attend, (q, k, v), tangents)[1]
    # Forward mode, against backward mode differentiated by what it was given.
    backward = torch.autograd.functional.jvp(lambda *x: attend(*x, engine="reference"), (q, k, v), tangents)[1]
    assert_close(forward, backward)


ROUGH = ("Laplacian", "Distance", "RelativeBias", "ALiBi")
"""Linear in pieces: no second derivative to check, or none at all."""


@pytest.mark.parametrize(
    ("kernel", "normalizer"), _paired([name for kind, name in BUILT.items() if kind not in ROUGH], 3)
)
def test_second_derivatives_on_every_engine(kernel: str, normalizer: str) -> None:
    call = _at(kernel, normalizer, "causal", seed=5, n=3, m=4)
    made, weigh = call.modules()
    learned = [*made.parameters(), *weigh.parameters()]
    q, k, v = (x[:1].requires_grad_() for x in call.inputs)
    for engine in ENGINES.values():
        if call.refusal(engine) is not None:
            continue

        def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, engine: Engine = engine) -> Tensor:
            return engine.run(_problem(q, k, v, made, weigh, {"causal": True}))

        torch.autograd.gradcheck(run, (q, k, v, *learned), fast_mode=True)
        torch.autograd.gradgradcheck(run, (q, k, v, *learned), fast_mode=True)


def _check_compiled(kernel: str, normalizer: str) -> None:
    torch._dynamo.reset()
    first = _at(kernel, normalizer, "causal", seed=7)
    made, weigh = first.modules()
    learned = [*made.parameters(), *weigh.parameters()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mk.attend(q, k, v, made, normalizer=weigh, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for call in (first, _at(kernel, normalizer, "causal", seed=8, n=11, m=14)):
        results = []
        for function in (attend, compiled):
            leaves = [x.clone().requires_grad_() for x in call.inputs]
            out = function(*leaves)
            grads = torch.autograd.grad(out.sin().sum(), [*leaves, *learned], allow_unused=True)
            results.append([out.detach(), *(g for g in grads if g is not None)])
        for ours, plain in zip(*reversed(results), strict=True):
            assert_close(ours, plain, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("kernel", "normalizer"), _paired(BUILT.values(), 1))
def test_every_class_of_kernel_and_every_normaliser_compile_to_one_graph(kernel: str, normalizer: str) -> None:
    """Two lengths in a row, so that the second graph takes any."""
    _check_compiled(kernel, normalizer)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_with_every_normaliser_compiles_to_one_graph(kernel: str, normalizer: str) -> None:
    _check_compiled(kernel, normalizer)


def test_a_padded_grouped_call_compiles_to_one_graph() -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return mk.attend(q, k, v, mask=mask)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for m in (6, 9):
        q, k, v = draw(2, 4, m, 8, seed=1), draw(2, 2, m, 8, seed=2), draw(2, 2, m, 8, seed=3)
        mask = torch.arange(m) < torch.tensor([m, m - 3])[:, None, None, None]
        assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))


# What an engine refuses, it refuses by name and with the reason.


@pytest.mark.parametrize(
    ("engine", "given_", "says"),
    [
        ("fused", {"kernel": kernels_under_test.Cauchy()}, "is not a DotKernel"),
        ("fused", {"normalizer": mk.Sparsemax()}, "Sparsemax is not a softmax"),
        ("fused", {"normalizer": mk.Sigmoid()}, "Sigmoid is not a softmax"),
        ("fused", {"kernel": mk.ALiBi(2)}, "is not a DotKernel"),
        ("fused", {"dropout": 0.1}, "dropout"),
        ("fused", {"mask": torch.zeros(9, 12, dtype=torch.float64, requires_grad=True)}, "needs a gradient"),
        ("tiled", {"dropout": 0.1}, "dropout"),
    ],
)
def test_an_engine_asked_for_by_name_says_why_it_cannot(engine: str, given_: dict[str, Any], says: str) -> None:
    call = _at(next(iter(KERNELS)), "softmax", "none", seed=1)
    with pytest.raises(ValueError, match=f"engine='{engine}' cannot run this call: .*{says}"):
        mk.attend(*call.inputs, engine=engine, **given_)
    assert mk.explain(*call.inputs, **given_).engine != engine


if __name__ == "__main__":
    for title, parts in (("make test", [0]), ("with make test-slow", range(PARTS))):
        cases = [call.on("cpu", dtype) for kernel in KERNELS for call, dtype in _product(kernel, parts)]
        runs = sum(call.refusal(engine) is None for call in cases for engine in ENGINES.values())
        print(f"{title}: {len(cases)} calls, {runs} runs of an engine")
    print(f"{len(KERNELS)} kernels, {len(NORMALIZERS)} normalisers, {len(MASKS)} masks, {len(ENGINES)} engines")
