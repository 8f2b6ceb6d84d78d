"""The tiled engine against the reference and against plain loops: values and gradients, whatever the tiles."""

import copy
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import Tiled, _tile

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, entmax, inputs, sigmoid

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
TILES = {"one head": Tiled(3, 4, compile=False), "many heads": Tiled(4, 24, compile=False)}
"""A tile of the first has one head; of the second, with 13 keys, one and a half."""


class Own(mk.MatchKernel):
    """A reader's own, with a parameter for each head inside match, and one of another shape."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        steep = torch.linspace(0.5, 1.5, heads, dtype=torch.float64)[:, None, None]
        self.steep = torch.nn.Parameter(steep if heads > 1 else steep[0, 0, 0])
        self.level = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -self.level * torch.log1p(self.steep * mk.squared_distance(q, k))


class LeadingOne(Own):
    """Its parameter has a dimension for the batch."""

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -self.level * torch.log1p(self.steep[None] * mk.squared_distance(q, k))


class Table(mk.MatchKernel):
    """Integers in its encodings: places in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(draw(5, 5, seed=9))

    def encode_query(self, q: Tensor, position: Tensor) -> Any:
        return q, (position % 5).expand(q.shape[:-1]).unsqueeze(-1), (position > 3).expand(q.shape[:-1]).unsqueeze(-1)

    def encode_key(self, k: Tensor, position: Tensor) -> Any:
        return k, (position % 5).expand(k.shape[:-1]).unsqueeze(-1)

    def match(self, q: Any, k: Any) -> Tensor:
        return torch.where(q[2], q[0] @ k[0].mT, 0.5) + self.table[q[1], k[1].mT]


def _learned(*entries: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(entries, dtype=torch.float64))


def _kernels() -> dict[str, mk.MatchKernel]:
    g = torch.Generator().manual_seed(0)
    kernels = {
        "additive": mk.Additive(4, 6, generator=g),
        "additive, odd": mk.Additive(4, 5, generator=g),
        "laplacian": mk.Laplacian(_learned(1.5, 3.0)),
        "rational": mk.RationalQuadratic(2.5, 0.7),
        "rational, learned": mk.RationalQuadratic(_learned(0.6, 1.5), _learned(0.8, 1.7)),
        "gaussian": mk.Gaussian(_learned(0.8, 1.7)),
        "scaled dot": mk.ScaledDot(),
        "softcap": mk.Softcap(mk.ScaledDot() + mk.Laplacian(2.0), _learned(1.5, 3.0)),
        "multiple": _learned(0.7, -1.2) * (mk.Additive(4, 4, generator=g) + 0.5 * mk.Laplacian(2.0)),
        "sum of everything": mk.Softcap(0.3 * mk.RationalQuadratic(), 2.0) + mk.ScaledDot() + Own(),
        "own": Own(),
        "own, in front": LeadingOne(),
        "table": Table(),
        "relative bias": mk.ScaledDot() + mk.RelativeBias(2, 8, 6, generator=g),
        "mixture": mk.mixture(mk.Dot(), mk.Gaussian(), log_weights=_learned(0.1, -0.4)),
    }
    return {name: kernel.double() for name, kernel in kernels.items()}


KERNELS = _kernels()
WITHOUT_A_FORM = ("sum of everything", "own", "own, in front", "table", "relative bias", "mixture")
NORMALIZERS: dict[str, mk.Normalizer] = {
    "softmax": mk.Softmax(),
    "learned softmax": mk.Softmax(_learned(0.6, 1.7)),
    "learned sinks": mk.SinkSoftmax(_learned(0.5, -1.0)),
    "learned scalable": mk.ScalableSoftmax(_learned(0.5, 1.5)),
    "sigmoid": mk.Sigmoid(),
    "learned sigmoid": mk.Sigmoid(_learned(-1.0, 0.5)),
    "sparsemax": mk.Sparsemax(),
    "learned entmax": mk.Entmax(_learned(1.25, 1.75)),
}


def _masks(n: int, m: int) -> dict[str, dict[str, Any]]:
    pairs = draw(2, 2, n, m, seed=8) > -0.3
    pairs[:, :, n // 2] = False
    bias = draw(2, n, m, seed=6)
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": 3},
        "causal window": {"causal": True, "window": 4},
        "two sides": {"window": (4, 1)},
        "keys": {"mask": draw(2, 1, 1, m, seed=7) > -0.3, "causal": True},
        "rows": {"mask": draw(n, 1, seed=7) > 0.0},
        "pairs": {"mask": pairs},
        "pairs of one head, causal": {"mask": pairs[:, :1], "causal": True},
        "added": {"mask": bias.masked_fill(bias > 1, -INF), "causal": True},
        "added to keys": {"mask": draw(2, 1, 1, m, seed=5)},
        "own positions": {
            "query_position": (torch.arange(n * 2).reshape(2, 1, n) * 7) % (m + 4) - 2,
            "key_position": (torch.arange(m) * 5) % m,
            "causal": True,
            "window": (6, None),
        },
    }


MASKS = tuple(_masks(2, 3))


def _all(
    qkv: tuple[Tensor, ...],
    kernel: mk.MatchKernel,
    engine: Any,
    normalizer: mk.Normalizer | None = None,
    upstream: torch.dtype = torch.float64,
    **setting: Any,
) -> list[Tensor]:
    """The output, and the gradients of q, k, v, the mask and every parameter."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    parameters = [*kernel.parameters(), *([] if normalizer is None else normalizer.parameters())]
    mask = setting.get("mask")
    if mask is not None and mask.is_floating_point():
        setting["mask"] = mask = mask.detach().clone().requires_grad_()
        leaves.append(mask)
    out = mk.attend(*leaves[:3], kernel, normalizer=normalizer, engine=engine, **setting)
    asked = [*leaves, *parameters]
    grad = draw(*out.shape, seed=11, dtype=upstream).to(out.dtype)
    grads = torch.autograd.grad(out, asked, grad, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(asked, grads, strict=True))]


def _agree(qkv: tuple[Tensor, ...], kernel: mk.MatchKernel, engine: Any, **setting: Any) -> None:
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if qkv[0].dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-4}
    truth = _all(qkv, kernel, "reference", **setting)
    ours = _all(qkv, kernel, engine, **setting)
    for index, (x, y) in enumerate(zip(ours, truth, strict=True)):
        assert x.dtype == y.dtype
        assert_close(x, y, **tolerance, msg=lambda text, index=index: f"result {index}: {text}")


def _cases() -> Iterator[tuple[str, str, str, str, int, int]]:
    """Every kernel with every mask and every normaliser once at least, lengths around the edges of tiles."""
    lengths = [(5, 13), (3, 4), (4, 8), (9, 9), (8, 3), (1, 5), (7, 12), (6, 1)]
    tiles, number = list(TILES), 0
    for shift, kernel in enumerate(KERNELS):
        for step, normalizer in enumerate(NORMALIZERS):
            mask = MASKS[(shift + step) % len(MASKS)]
            yield kernel, normalizer, mask, tiles[number % 2], *lengths[(number + shift) % len(lengths)]
            number += 1
    for step, mask in enumerate(MASKS):
        for kernel in ("additive", "own"):
            yield kernel, "softmax", mask, tiles[step % 2], *lengths[step % 3 * 3]


@pytest.mark.parametrize(("kernel", "normalizer", "mask", "tiles", "n", "m"), list(_cases()))
def test_values_and_gradients_are_the_references(
    kernel: str, normalizer: str, mask: str, tiles: str, n: int, m: int
) -> None:
    qkv = inputs(2, 2, n=n, m=m)
    _agree(qkv, KERNELS[kernel], TILES[tiles], normalizer=NORMALIZERS[normalizer], **_masks(n, m)[mask])


def test_which_kernels_ship_a_form() -> None:
    q, k, _ = inputs(2, 2)
    for name, kernel in KERNELS.items():
        own = kernel.tiles(*kernel.encode(q, k, torch.arange(2, 7), torch.arange(7)))
        assert (own is None) == (name in WITHOUT_A_FORM), f"{name}: {own}"


# Independent of the reference.


def _additive(kernel: mk.Additive) -> Any:
    of_query, of_key, v = (x.tolist() for x in (kernel.query_weight, kernel.key_weight, kernel.v))

    def score(q: list[float], k: list[float]) -> float:
        return sum(
            c * math.tanh(sum(x * row[h] for x, row in zip([*q, *k], [*of_query, *of_key], strict=True)))
            for h, c in enumerate(v)
        )

    return score


def _laplacian(q: list[float], k: list[float]) -> float:
    return -sum(abs(a - b) for a, b in zip(q, k, strict=True)) / 2.0


def _rational(q: list[float], k: list[float]) -> float:
    return -2.5 * math.log(1.0 + sum((a - b) ** 2 for a, b in zip(q, k, strict=True)) / (2 * 2.5 * 0.7**2))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    ("kernel", "score"),
    [
        (KERNELS["additive"], _additive(KERNELS["additive"])),  # type: ignore[arg-type]
        (mk.Laplacian(2.0), _laplacian),
        (KERNELS["rational"], _rational),
        (mk.Softcap(mk.Laplacian(2.0), 1.5), lambda q, k: 1.5 * math.tanh(_laplacian(q, k) / 1.5)),
    ],
    ids=["additive", "laplacian", "rational", "softcap"],
)
def test_plain_loops_agree(kernel: mk.MatchKernel, score: Any, tiles: str) -> None:
    q, k, v = inputs(n=9, m=11)
    engine = TILES[tiles]
    bias = draw(9, 11, seed=4)
    for setting, ours in (
        ({"allowed": lambda i, j: j <= i + 2}, {"causal": True}),
        ({"allowed": lambda i, j: -3 < j - i - 2 <= 0}, {"causal": True, "window": 3}),
        ({"allowed": lambda i, j: -4 <= j - i - 2 <= 1}, {"window": (4, 1)}),
        ({"bias": lambda i, j: float(bias[i, j]), "sink": 0.3}, {"mask": bias, "normalizer": mk.SinkSoftmax(0.3)}),
        ({"factor": lambda keys: math.log(keys)}, {"normalizer": mk.ScalableSoftmax()}),
        ({"normalize": sigmoid(), "allowed": lambda i, j: j <= i + 2}, {"causal": True, "normalizer": mk.Sigmoid()}),
        ({"normalize": entmax(1.5)}, {"normalizer": mk.Entmax()}),
    ):  # fmt: skip
        assert_close(mk.attend(q, k, v, kernel, engine=engine, **ours), by_loop(q, k, v, score, **setting))


# Shapes.


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_tile_may_end_inside_a_group_of_heads(heads: int, together: int) -> None:
    q, k, v = draw(2, 6, 5, 4), draw(2, heads, 7, 4, seed=1), draw(2, heads, 7, 3, seed=2)
    for kernel, engine in ((KERNELS["additive"], Tiled(5, 7 * together)), (Own(6), Tiled(2, 3))):
        engine = Tiled(engine.queries, engine.keys, compile=False)
        _agree((q, k, v), kernel, engine, causal=True)
    with torch.no_grad():
        out = mk.attend(q, k, v, 0.3 * mk.Dot(), engine=Tiled(5, 7 * together, compile=False))
    for h in range(6):
        own = h // (6 // heads)
        alone = mk.attend(q[:, h], k[:, own], v[:, own], 0.3 * mk.Dot(), engine="reference")
        assert_close(out[:, h], alone)


LEADS = {
    "one head of queries": ((2, 1), (2, 3), (2, 3)),
    "no heads of queries": ((), (2, 3), (2, 3)),
    "one head of keys": ((2, 3), (2, 1), (2, 1)),
    "no heads of keys": ((2, 3), (), ()),
    "heads of values only": ((2, 1), (2, 1), (2, 3)),
    "a batch of keys": ((1, 3), (2, 3), (2, 3)),
    "a batch of queries": ((2, 3), (1, 3), (1, 3)),
    "crossed": ((2, 1), (1, 3), (1, 1)),
    "three in front": ((2, 1, 3), (1, 2, 3), (2, 2, 3)),
    "nothing in front": ((), (), ()),
    "heads alone": ((3,), (3,), (3,)),
}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_leading_dimensions_broadcast(lead: str, dtype: torch.dtype) -> None:
    """In float32 too: products of one head have another kernel there."""
    of_q, of_k, of_v = LEADS[lead]
    qkv = draw(*of_q, 5, 4, dtype=dtype), draw(*of_k, 7, 4, seed=1, dtype=dtype), draw(*of_v, 7, 3, seed=2, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    for kernel in (mk.Additive(4, 6, generator=g), mk.RationalQuadratic(), mk.Laplacian(2.0), mk.ScaledDot(), Own(1)):
        for engine in (Tiled(3, 4, compile=False), Tiled(5, 24, compile=False)):
            _agree(qkv, kernel.to(dtype), engine, causal=True)


def test_values_for_each_head_where_only_the_keys_have_heads() -> None:
    per_head = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    q, k, v = draw(5, 4), draw(3, 7, 4, seed=1), draw(3, 7, 3, seed=2)
    for normalizer in (mk.Softmax, mk.SinkSoftmax, mk.ScalableSoftmax, mk.Sigmoid):
        _agree((q, k, v), KERNELS["additive"], TILES["one head"], normalizer=normalizer(per_head))


def test_strides_do_not_matter() -> None:
    q, k, v = inputs(2, 2, n=6, m=9)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    for kernel in (KERNELS["additive"], KERNELS["rational"], Own()):
        for x, y in zip(
            _all(strided, kernel, TILES["one head"], causal=True), _all((q, k, v), kernel, "reference", causal=True),
            strict=True,
        ):  # fmt: skip
            assert_close(x, y)
        expanded = tuple(x[:1, :1].expand_as(x) for x in (q, k, v))
        _agree(expanded, kernel, TILES["many heads"], mask=draw(6, 1, seed=3).expand(6, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["own", "rational, learned", "multiple"])
def test_parameters_may_be_wider_than_the_inputs(kernel: str, dtype: torch.dtype) -> None:
    """Kernels and normalisers of float64 on inputs of float32, which must neither fail nor round to the half."""
    qkv = inputs(2, 2, n=5, m=9, dtype=dtype)
    narrow = torch.tensor([0.6, 1.7], dtype=torch.float32)
    for normalizer in (*NORMALIZERS.values(), mk.Softmax(narrow), mk.Entmax(narrow + 1.0)):
        _agree(qkv, KERNELS[kernel], TILES["one head"], normalizer=normalizer)


# Derivatives.


@pytest.mark.parametrize("normalizer", ["softmax", "learned sinks", "sigmoid", "learned entmax"])
@pytest.mark.parametrize("kernel", ["additive", "own", "rational, learned", "mixture", "softcap"])
def test_derivatives_are_those_of_finite_differences(kernel: str, normalizer: str) -> None:
    """Parameters are arguments, and gone from the kernel when the backward pass comes."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.normalizer = KERNELS[kernel], NORMALIZERS[normalizer]

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return mk.attend(
                q, k, v, self.kernel, normalizer=self.normalizer, causal=True, engine=Tiled(2, 3, compile=False)
            )

    module = Attend()
    names, values = zip(*module.named_parameters(), strict=True)
    arguments = [x.detach().clone().requires_grad_() for x in (*inputs(1, 2, n=3, m=4), *values)]

    def run(*tensors: Tensor) -> Tensor:
        bound = dict(zip(names, (x * 1.01 for x in tensors[3:]), strict=True))
        return torch.func.functional_call(module, bound, tensors[:3])

    torch.autograd.gradcheck(run, arguments, fast_mode=True)
    torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    q, k, v = inputs(2, 2)
    for kernel in (mk.Laplacian(2.0), mk.Softcap(mk.Dot(), 3.0), KERNELS["own"]):
        for normalizer in (mk.Softmax(), mk.Sparsemax()):
            for index in range(3):
                truth, ours = (
                    _one_gradient([q, k, v], index, kernel, normalizer, engine)
                    for engine in ("reference", TILES["one head"])
                )
                assert_close(ours, truth)
    with torch.no_grad():
        assert not mk.attend(q.requires_grad_(), k, v, mk.Laplacian(), engine="tiled").requires_grad
    with torch.inference_mode():
        for normalizer in (mk.Softmax(), mk.Sparsemax()):
            mk.attend(q, k, v, KERNELS["own"], engine="tiled", normalizer=normalizer)


def _one_gradient(
    qkv: list[Tensor], index: int, kernel: mk.MatchKernel, normalizer: mk.Normalizer, engine: Any
) -> Tensor:
    qkv = [x.detach().clone() for x in qkv]
    qkv[index].requires_grad_()
    out = mk.attend(*qkv, kernel, normalizer=normalizer, engine=engine)
    return torch.autograd.grad(out.sin().sum(), qkv[index])[0]


def test_two_backward_passes_of_one_output_agree() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 2))
    out = mk.attend(q, k, v, KERNELS["additive"], engine="tiled")
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# What it refuses, and who runs then.


@pytest.mark.parametrize("kernel", ["additive", "own"])
def test_transforms_and_dropout_are_refused_and_go_to_the_reference(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matchkernel.engines.tiled.FEW", 0)
    q, k, v = inputs(2, 2)
    told = mk.explain(q, k, v, KERNELS[kernel])
    assert told.engine == "tiled" and "keys stream past tiles of queries, as plain operations" in told.reason

    def attend(engine: Any) -> Any:
        return lambda q, k, v: mk.attend(q, k, v, KERNELS[kernel], engine=engine)

    plain = attend("reference")(q, k, v)
    for engine in ("tiled", Tiled(2, 3)):
        with pytest.raises(ValueError, match="cannot run this call: vmap, jvp and the other function transforms"):
            torch.func.vmap(attend(engine))(q, k, v)
        with pytest.raises(ValueError, match="cannot run this call: vmap, jvp"):
            torch.func.jvp(attend(engine), (q, k, v), (q, k, v))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="cannot run this call: vmap, jvp"):
            attend(engine)(torch.autograd.forward_ad.make_dual(q, q), k, v)
        with pytest.raises(ValueError, match="cannot run this call: dropout would have to draw the same weights"):
            mk.attend(q, k, v, KERNELS[kernel], dropout=0.1, engine=engine)
    assert_close(torch.func.vmap(attend("auto"))(q, k, v), plain)
    assert_close(torch.func.jvp(attend("auto"), (q, k, v), (q, k, v))[0], plain)
    told = mk.explain(q, k, v, KERNELS[kernel], dropout=0.1)
    assert told.engine == "reference" and "not tiled (dropout would have to draw" in told.reason


def test_inside_a_graph_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matchkernel.engines.tiled.FEW", 0)
    q, k, v = inputs(2, 2, dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: mk.attend(q, k, v, mk.Laplacian()), backend="eager", fullgraph=True)
    assert_close(compiled(q, k, v), mk.attend(q, k, v, mk.Laplacian(), engine="reference"))
    named = torch.compile(lambda q, k, v: mk.attend(q, k, v, mk.Laplacian(), engine="tiled"), backend="eager")
    with pytest.raises(ValueError, match="its loops are not for torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named(q, k, v)


@pytest.mark.parametrize("empty", ["n", "m", "width"])
def test_nothing_to_compute_is_refused(empty: str) -> None:
    q, k, v = inputs(2, **{empty: 0})
    with pytest.raises(ValueError, match="there is nothing to compute: a length or a width is 0"):
        mk.attend(q, k, v, mk.Laplacian(), engine="tiled")
    assert torch.equal(mk.attend(q, k, v, mk.Laplacian()), torch.zeros(2, q.shape[-2], v.shape[-1]).double())


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_sizes_of_tiles_are_integers(size: Any) -> None:
    for name in ("queries", "keys"):
        with pytest.raises(ValueError, match=rf"Tiled\({name}={size!r}\): expected an integer of at least 1"):
            Tiled(**{name: size})


# NaN.


@pytest.mark.parametrize("normalizer", ["softmax", "learned sinks", "sigmoid", "sparsemax"])
@pytest.mark.parametrize("kernel", ["additive", "rational", "laplacian", "scaled dot", "own"])
def test_nan_is_seen_where_it_is_seen(kernel: str, normalizer: str) -> None:
    """Key 6 is seen by nobody, key 5 by the last two queries; query 2 sees nothing."""
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[:, 6] = allowed[:5, 5] = allowed[2] = False
    for value in (NAN, INF):
        q, k, v = inputs(1, 2, n=7, m=7)
        clean = _all((q, k, v), KERNELS[kernel], "reference", NORMALIZERS[normalizer], mask=allowed)
        k[..., 6, :], v[..., 6, :], q[..., 2, :] = value, value, value
        for engine in TILES.values():
            hidden = _all((q, k, v), KERNELS[kernel], engine, NORMALIZERS[normalizer], mask=allowed)
            for x, y in zip(hidden, clean, strict=True):
                assert_close(x, y)
        seen = k.clone()
        seen[..., 5, 0] = NAN
        out = mk.attend(q, seen, v, KERNELS[kernel], engine=engine, normalizer=NORMALIZERS[normalizer], mask=allowed)
        assert bool(out[..., 5:, :].isnan().any(-1).all()), "a NaN that is seen must show"
        assert_close(out[..., :5, :], clean[0][..., :5, :])


def test_the_order_of_positions_hides_nan_as_a_mask_does() -> None:
    q, k, v = inputs(1, 2, n=7, m=7)
    clean = mk.attend(q, k, v, KERNELS["additive"], causal=True, engine="reference")
    k[..., 6, :] = NAN
    out = mk.attend(q, k, v, KERNELS["additive"], causal=True, engine=TILES["one head"])
    assert_close(out[..., :6, :], clean[..., :6, :])
    assert bool(out[..., 6, :].isnan().all())


# Tiles that nobody needs.


def _count(monkeypatch: pytest.MonkeyPatch, **setting: Any) -> list[tuple[int, int, bool]]:
    """The queries and keys of each tile, and whether its positions are compared."""
    met: list[tuple[int, int, bool]] = []
    forward, backward = _tile.forward, _tile.backward

    def note(run: Any) -> Any:
        def noted(form: Any, normalizer: Any, query: Any, key: Any, v: Tensor, extras: Any, *rest: Any) -> Any:
            met.append((query.shape[-2], key.shape[-2], extras.limits is not None))
            return run(form, normalizer, query, key, v, extras, *rest)

        return noted

    monkeypatch.setattr(_tile, "forward", note(forward))
    monkeypatch.setattr(_tile, "backward", note(backward))
    q, k, v = (x.requires_grad_() for x in inputs(n=32, m=32))
    mk.attend(q, k, v, mk.Laplacian(), engine=Tiled(8, 8, compile=False), **setting).sum().backward()
    return met


@pytest.mark.parametrize(
    ("setting", "tiles", "partial"),
    [
        ({}, 16, 0),
        ({"causal": True}, 1 + 2 + 3 + 4, 4),
        # 8 keys to the left of each query: 1 tile for the first rows, and 15 keys in two tiles for the others.
        ({"causal": True, "window": 8}, 1 + 2 + 2 + 2, 7),
        ({"window": (0, 8)}, 2 + 2 + 2 + 1, 7),
        ({"causal": True, "query_position": torch.full((32,), -1)}, 0, 0),
    ],
)
def test_forbidden_tiles_are_left_out(
    setting: dict[str, Any], tiles: int, partial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = _count(monkeypatch, **setting)
    assert len(met) == 2 * tiles and sum(last for *_, last in met) == 2 * partial
    told = mk.explain(*inputs(n=32, m=32), mk.Laplacian(), engine=Tiled(8, 8, compile=False), **setting)
    pairs = sum(rows * keys for rows, keys, _ in met) // 2
    assert told.flops == pairs * (mk.Laplacian().flops_per_pair(4, 4) + 2 * 3)


# Precision.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["additive", "laplacian", "rational", "scaled dot", "own"])
def test_half_precision_rounds_once(kernel: str, dtype: torch.dtype) -> None:
    """Computed in float32: what is left is the rounding of the output, and of the gradients."""
    qkv = inputs(2, 2, n=9, m=31, dtype=dtype)
    exact = KERNELS[kernel]
    truth = _all(tuple(x.double() for x in qkv), exact, "reference", upstream=dtype, causal=True)
    ours = _all(qkv, copy.deepcopy(exact).float(), TILES["many heads"], causal=True)
    for x, y in zip(ours[:4], truth[:4], strict=True):
        assert x.dtype == dtype
        assert_close(x.double(), y, rtol=0.51 * torch.finfo(dtype).eps + 1e-4, atol=1e-5)


def test_large_scores_stay_exact() -> None:
    q, k, v = inputs(2, 2, n=9, m=31)
    for factor in (1e3, 1e-30):
        _agree((factor * q, k, v), KERNELS["scaled dot"], TILES["one head"], causal=True)
        _agree((factor * q, factor * k, v), KERNELS["laplacian"], TILES["one head"])


class _Column(mk.MatchKernel):
    """One score for all keys: the shape that broadcasting would hide."""

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return q.sum(-1, keepdim=True)


class _Number(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Any:
        return 0.0


TINY = mk.Tiled(queries=4, keys=3, compile=False)


@pytest.mark.parametrize("engine", ["reference", TINY], ids=["reference", "tiled"])
def test_what_a_match_returns_is_checked_by_every_engine(engine: Any) -> None:
    q = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"_Column\.match returned shape"):
        mk.attend(q, q, q, _Column(), engine=engine)
    with pytest.raises(TypeError, match=r"_Number\.match returned float"):
        mk.attend(q, q, q, _Number(), engine=engine)


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    outside = torch.tensor(0.5, requires_grad=True)

    class Closure(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            return outside * (q @ k.mT)

    q = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="no parameter of the kernel"):
        mk.attend(q, q, q, Closure(), engine=TINY)
    mk.attend(q, q, q, Closure(), engine="reference").sum().backward()
    assert outside.grad is not None and outside.grad.abs() > 0


def test_a_mask_of_minus_infinity_forbids_whatever_the_score() -> None:
    class Wild(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            scores = q @ k.mT
            return torch.where(scores > 1.0, float("inf"), scores)

    q = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.where(q @ q.mT > 1.0, float("-inf"), 0.25)
    bias[..., 0] = torch.where(bias[..., 0] == 0.25, 0.25, float("-inf"))
    truth = mk.attend(q, q, q, Wild(), mask=bias, engine="reference")
    assert truth.isfinite().all()
    assert_close(mk.attend(q, q, q, Wild(), mask=bias, engine=TINY), truth)


def test_a_table_that_lies_on_its_side_is_told_on_square_tiles() -> None:
    class Swapped(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            return k @ q.mT

    q, k = draw(2, 4, 32, 8, seed=1), draw(2, 4, 32, 8, seed=2)
    with pytest.raises(ValueError, match=r"Swapped\.match returned shape"):
        mk.attend(q, k, k, Swapped(), engine=mk.Tiled(queries=16, keys=16, compile=False))


def test_what_a_function_of_products_learns_may_differ_between_heads() -> None:
    class Scaled(mk.ProductKernel):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor([0.5, 2.0])[:, None, None])

        def combine(self, product: Tensor, query_square: Tensor, key_square: Tensor) -> Tensor:
            return self.factor * product

    kernel = Scaled().double()
    q, k, v = inputs(2, 2, n=9, m=7)
    ours = mk.attend(q, k, v, kernel, engine=TINY)
    per_head = torch.tensor([0.5, 2.0], dtype=torch.float64)
    assert_close(ours, mk.attend(q, k, v, per_head * mk.Dot(), engine="reference"))


def test_forms_that_cannot_be_overridden_say_so() -> None:
    with pytest.raises(TypeError, match="combine"):
        type("Own", (mk.ProductKernel,), {"match": lambda self, q, k: q @ k.mT})
    with pytest.raises(TypeError, match=r"scale\(width\)"):
        type("Own", (mk.DotKernel,), {"scale": 0.25})
    q = draw(3, 4)
    with pytest.raises(TypeError, match="it is a class, so add parentheses"):
        mk.attend(q, q, q, engine=mk.Tiled)  # type: ignore[arg-type]
