"""Nyström and Linformer against formulas in numpy, where they are exact, and what they refuse."""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import Engine

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs
from peak import measurable, peaks

Tensor = torch.Tensor
Array = NDArray[np.float64]
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def _softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    table: Array = e / e.sum(axis=1, keepdims=True)
    return table


def _means(x: Array, count: int) -> tuple[Array, Array]:
    """Means over numpy's own even split, and how many each is made of."""
    parts = np.array_split(x, count)
    return np.stack([part.mean(axis=0) for part in parts]), np.array([len(part) for part in parts], dtype=np.float64)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, landmarks: int, *, factor: float | None = None, ridge: float = 0.0
) -> Tensor:
    """Xiong et al. 2021 for q (n, d), k (m, d), v (m, w) in numpy; segments weigh by their length."""
    queries, keys, values = (x.detach().double().numpy() for x in (q, k, v))
    factor = 1.0 / math.sqrt(q.shape[-1]) if factor is None else factor
    q_mark, _ = _means(queries, landmarks)
    k_mark, lengths = _means(keys, landmarks)
    first = _softmax(factor * queries @ k_mark.T + np.log(lengths))
    middle = _softmax(factor * q_mark @ k_mark.T + np.log(lengths))
    last = _softmax(factor * q_mark @ keys.T)
    u, sigma, vh = np.linalg.svd(middle)
    inverse = vh.T @ np.diag(sigma / (sigma**2 + ridge**2)) @ u.T
    return torch.from_numpy(first @ inverse @ last @ values)


@pytest.mark.parametrize(("n", "m", "landmarks"), [(12, 12, 4), (13, 11, 4), (10, 17, 3), (9, 8, 7), (6, 6, 1)])
def test_nystrom_is_its_formula(n: int, m: int, landmarks: int) -> None:
    q, k, v = inputs(2, 3, n=n, m=m)
    for engine in (mk.Nystrom(landmarks), mk.Nystrom(landmarks, ridge=0.3), mk.Nystrom(landmarks, ridge=0)):
        out = mk.attend(q, k, v, engine=engine)
        for b in range(2):
            for h in range(3):
                expected = by_formula(q[b, h], k[b, h], v[b, h], landmarks, ridge=engine.ridge)
                assert_close(out[b, h], expected, **TIGHT)
    assert mk.Nystrom().ridge == 0.03 and mk.Nystrom().landmarks == 64


def test_temperature_and_length_scale_all_three_tables() -> None:
    q, k, v = inputs(n=12, m=14)
    hot = mk.attend(q, k, v, mk.Dot(), normalizer=mk.Softmax(0.7), engine=mk.Nystrom(4, ridge=0))
    assert_close(hot, by_formula(q, k, v, 4, factor=1 / 0.7), **TIGHT)
    # The logarithm is that of the 14 keys, not of the landmarks.
    scalable = mk.attend(q, k, v, mk.Dot(), normalizer=mk.ScalableSoftmax(0.2), engine=mk.Nystrom(4, ridge=0))
    assert_close(scalable, by_formula(q, k, v, 4, factor=0.2 * math.log(14)), **TIGHT)


class Cauchy(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.log1p(mk.squared_distance(q, k))


KERNELS = [
    mk.ScaledDot(), mk.Gaussian(1.5), mk.Cosine(0.4), mk.ALiBi(2), mk.Rotary(4), mk.ScaledDot() + mk.ALiBi(2),
    mk.RelativeBias(2, generator=torch.Generator().manual_seed(1)).double(), mk.EluFeatures(), Cauchy(),
    mk.Additive(4, 5, generator=torch.Generator().manual_seed(1)).double(),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_any_kernel_by_its_tables(kernel: mk.MatchKernel) -> None:
    """Each table is that of the reference, between tokens and means that stand at mean positions."""
    q, k, v = inputs(3, 2, n=9, m=12)
    q_mark, k_mark = (
        torch.stack([x[..., 3 * i : 3 * i + 3, :].mean(-2) for i in range(3)], -2) for x in (q, k[..., :9, :])
    )
    q_at, k_at = torch.arange(3, 12), torch.arange(9)
    q_mean, k_mean = torch.tensor([4.0, 7.0, 10.0]), torch.tensor([1.0, 4.0, 7.0])
    k, v = k[..., :9, :], v[..., :9, :]
    first = mk.weights(q, k_mark, kernel, query_position=q_at, key_position=k_mean)
    middle = mk.weights(q_mark, k_mark, kernel, query_position=q_mean, key_position=k_mean)
    last = mk.weights(q_mark, k, kernel, query_position=q_mean, key_position=k_at)
    expected = first @ torch.linalg.pinv(middle, rtol=1e-13) @ last @ v
    out = mk.attend(q, k, v, kernel, engine=mk.Nystrom(3, ridge=0), query_position=q_at, key_position=k_at)
    assert_close(out, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_as_many_landmarks_as_tokens_are_exact(kernel: mk.MatchKernel) -> None:
    q, k, v = inputs(2, n=7, m=9)
    for landmarks in (7, 9, 20):
        assert_close(
            mk.attend(q, k, v, kernel, engine=mk.Nystrom(landmarks)), mk.attend(q, k, v, kernel, engine="reference")
        )
    assert "the whole table" in mk.explain(q, k, v, kernel, engine=mk.Nystrom(7)).reason


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize("n", [12, 14])
def test_segments_of_equal_tokens_are_exact(side: str, n: int) -> None:
    """If one side is constant on each segment, every row (or column) of the table is one of the landmarks'."""
    q, k, v = inputs(2, n=n, m=n)
    exact = mk.Nystrom(4, ridge=0)
    lengths = torch.tensor([len(part) for part in np.array_split(np.arange(n), 4)])
    if side == "queries":
        q = q[..., :4, :].repeat_interleave(lengths, dim=-2)
    else:
        k = k[..., :4, :].repeat_interleave(lengths, dim=-2)
    assert_close(mk.attend(q, k, v, engine=exact), mk.attend(q, k, v), **TIGHT)
    if side == "queries":
        # The other way round the segments are not constant, and it is not.
        assert (
            mk.attend(q.flip(-2)[..., 1:, :], k, v, engine=exact) - mk.attend(q.flip(-2)[..., 1:, :], k, v)
        ).norm() > 0.1


def test_smooth_inputs_come_near_and_random_ones_do_not() -> None:
    t = torch.linspace(0, 1, 256, dtype=torch.float64)[:, None]
    waves = [draw(2, 1, 8, seed=s) * torch.sin(2 * math.pi * s * t + draw(2, 1, 8, seed=s + 9)) for s in range(1, 4)]
    v = draw(256, 8, seed=5)
    errors = {}
    for name, (q, k) in {"smooth": torch.stack(waves).sum(0), "random": draw(2, 256, 8, seed=7)}.items():
        exact = mk.attend(q, k, v)
        out = {ridge: mk.attend(q, k, v, engine=mk.Nystrom(32, ridge=ridge)) for ridge in (0, 0.03)}
        errors[name] = [float((o - exact).norm() / exact.norm()) for o in out.values()]
    assert errors["smooth"][0] < 0.02 and errors["smooth"][1] < 0.1
    # On random tokens A is nearly singular; a ridge keeps it from making things worse than nothing.
    assert errors["random"][1] < errors["random"][0] and errors["random"][0] > 0.5


def test_order_inside_a_segment_and_of_segments_does_not_matter() -> None:
    q, k, v = inputs(n=12, m=12)
    out = mk.attend(q, k, v, engine=mk.Nystrom(4))
    inside = torch.tensor([2, 0, 1, 4, 5, 3, 8, 7, 6, 9, 11, 10])
    segments = torch.tensor([6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5])
    across = torch.tensor([3, 1, 2, 0, *range(4, 12)])
    for order in (inside, segments):
        assert_close(mk.attend(q, k[order], v[order], engine=mk.Nystrom(4)), out, **TIGHT)
        assert_close(mk.attend(q[order], k, v, engine=mk.Nystrom(4)), out[order], **TIGHT)
    # Exact attention does not know the order of its keys; this engine does, across segments.
    assert (mk.attend(q, k[across], v[across], engine=mk.Nystrom(4)) - out).abs().max() > 1e-3


@pytest.mark.parametrize("real", [11, 7, 3, 1])
@pytest.mark.parametrize("where", ["end", "start", "scattered"])
def test_padded_is_trimmed(real: int, where: str) -> None:
    """Masked keys leave the means and the segments, wherever they stand and whatever they hold."""
    q, k, v = inputs(2, 3, n=12, m=13)
    at = {"end": torch.arange(real), "start": torch.arange(13 - real, 13)}.get(where)
    at = torch.randperm(13, generator=torch.Generator().manual_seed(real))[:real].sort().values if at is None else at
    keep = torch.zeros(13, dtype=torch.bool).index_fill(0, at, True)
    dirty_k, dirty_v = (torch.where(keep[:, None], x, torch.nan) for x in (k, v))
    for kernel in (mk.ScaledDot(), mk.Gaussian(1.5), Cauchy(), mk.EluFeatures()):
        for normalizer in (mk.Softmax(), mk.ScalableSoftmax()):
            setting: dict[str, Any] = {"normalizer": normalizer, "engine": mk.Nystrom(4)}
            trimmed = mk.attend(q, k[..., at, :], v[..., at, :], kernel, **setting)
            for mask in (keep, torch.where(keep, 0.0, -torch.inf)):
                assert_close(mk.attend(q, dirty_k, dirty_v, kernel, mask=mask, **setting), trimmed, **TIGHT)


def test_padding_on_both_sides_and_per_sequence() -> None:
    q, k, v = inputs(3, 2, n=11, m=11)
    lengths = torch.tensor([11, 6, 0])
    real = torch.arange(11) < lengths[:, None]
    mask = real[:, None, :, None] & real[:, None, None, :]
    dirty = [torch.where(real[:, None, :, None], x, torch.nan).requires_grad_() for x in (q, k, v)]
    out = mk.attend(*dirty, mask=mask, engine=mk.Nystrom(4))
    for b, length in enumerate(lengths.tolist()):
        if length:
            whole = mk.attend(*(x[b, :, :length] for x in (q, k, v)), engine=mk.Nystrom(4))
            assert_close(out[b, :, :length], whole, **TIGHT)
        assert not out[b, :, length:].any()
    out.square().sum().backward()
    for x in dirty:
        assert x.grad is not None and x.grad.isfinite().all()
        assert not x.grad[~real[:, None].expand(3, 2, 11)].any()


@pytest.mark.parametrize(("queries", "keys"), [(2, 9), (9, 2), (3, 3), (5, 9)])
def test_few_of_either_side_among_padding_are_exact(queries: int, keys: int) -> None:
    """No more than the landmarks: the table itself, as where there is no padding."""
    q, k, v = inputs(2, n=11, m=13)
    mask = (torch.arange(11) % 5 < 4)[:, None] & (torch.arange(13) % 4 != 1)
    rows, columns = mask.any(1).nonzero().squeeze(-1)[:queries], mask.any(0).nonzero().squeeze(-1)[:keys]
    mask = torch.zeros(11, 13, dtype=torch.bool)
    mask[rows[:, None], columns] = True
    trimmed = q[..., rows, :], k[..., columns, :], v[..., columns, :]
    out = mk.attend(q, k, v, mask=mask, engine=mk.Nystrom(4))
    assert_close(out[..., rows, :], mk.attend(*trimmed, engine=mk.Nystrom(4)), **TIGHT)
    if min(queries, keys) <= 4:
        assert_close(out, mk.attend(q, k, v, mask=mask), **TIGHT)


def test_a_float_mask_over_the_keys_is_a_coordinate_of_theirs() -> None:
    """A key's number in the mask could as well be one more entry of the key, met by a 1 in every query."""
    q, k, v = inputs(2, n=12, m=14)
    bias = draw(14, seed=8)
    one, more = torch.ones(2, 12, 1, dtype=torch.float64), bias[:, None].expand(2, 14, 1)
    joined = mk.attend(torch.cat([q, one], -1), torch.cat([k, more], -1), v, mk.Dot(), engine=mk.Nystrom(4))
    assert_close(mk.attend(q, k, v, mk.Dot(), mask=bias, engine=mk.Nystrom(4)), joined, **TIGHT)
    bias = bias.requires_grad_()
    mk.attend(q, k, v, mk.Dot(), mask=bias, engine=mk.Nystrom(4)).sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0


@pytest.mark.parametrize(
    "engine", [mk.Nystrom(3), mk.Linformer(12, 3, generator=torch.Generator().manual_seed(0))], ids=repr
)
def test_batch_is_loop_and_groups_are_copies(engine: Engine) -> None:
    q, k, v = draw(2, 6, 10, 4, seed=1), draw(2, 2, 11, 4, seed=2), draw(2, 2, 11, 3, seed=3)
    per_head = torch.rand(2, 6, 1, 11, generator=torch.Generator().manual_seed(4)) > 0.3
    for mask in (None, per_head, per_head[:, :1], per_head[0, 0]):
        out = mk.attend(q, k, v, mask=mask, engine=engine)
        for b in range(2):
            for h in range(6):
                own = None if mask is None else mask.expand(2, 6, 1, 11)[b, h]
                alone = mk.attend(q[b, h], k[b, h // 3], v[b, h // 3], mask=own, engine=engine)
                assert_close(out[b, h], alone, **TIGHT)
    shared = mk.attend(q, k[0, 0], v[0, 0], mask=per_head, engine=engine)
    assert_close(shared[1, 4], mk.attend(q[1, 4], k[0, 0], v[0, 0], mask=per_head[1, 4], engine=engine), **TIGHT)


@pytest.mark.parametrize(
    "setting", [{}, {"mask": torch.arange(7) != 2}, {"kernel": Cauchy()}], ids=["plain", "mask", "Cauchy"]
)
@pytest.mark.parametrize("ridge", [0, 0.03])
def test_derivatives_of_nystrom(setting: dict[str, Any], ridge: float) -> None:
    leaves = [x.requires_grad_() for x in inputs(n=6, m=7, d=2, width=2)]

    def call(*args: Tensor) -> Tensor:
        return mk.attend(*args, engine=mk.Nystrom(2, ridge=ridge), **setting)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_derivatives_of_linformer() -> None:
    engine = mk.Linformer(8, 3, generator=torch.Generator().manual_seed(0)).double()
    leaves = [*(x.requires_grad_() for x in inputs(n=5, m=7, d=2, width=2)), *engine.parameters()]

    def call(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return mk.attend(q, k, v, mask=torch.arange(7) != 2, engine=engine)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, n=12, m=12, dtype=dtype)
    engines: list[Engine] = [mk.Nystrom(4), mk.Linformer(12, 4, generator=torch.Generator().manual_seed(0))]
    for engine in engines:
        out = mk.attend(q, k, v, engine=engine)
        wide = mk.attend(q.float(), k.float(), v.float(), engine=engine)
        assert out.dtype == dtype
        assert_close(out, wide.to(dtype), rtol=0, atol=0)


def test_float32_stays_near_float64() -> None:
    """On smooth inputs A is singular to rounding, which must not come back enlarged."""
    t = torch.linspace(0, 1, 512, dtype=torch.float64)[:, None]
    q, k = (torch.cat([torch.sin(3 * t + s), torch.cos(5 * t * s)], -1) for s in (1.0, 2.0))
    v = draw(512, 3, seed=1)
    exact = mk.attend(q, k, v)
    for landmarks in (16, 64):
        for ridge, most in ((0, 2e-3), (0.001, 2e-3), (0.03, 4e-2)):
            engine = mk.Nystrom(landmarks, ridge)
            out = mk.attend(q.float(), k.float(), v.float(), engine=engine).double()
            assert (out - exact).norm() / exact.norm() < most
            assert (out - mk.attend(q, k, v, engine=engine)).norm() / exact.norm() < (2e-3 if ridge == 0 else 2e-6)


def test_a_nan_that_is_seen_is_told_and_stays_in_its_sequence() -> None:
    q, k, v = inputs(2, n=9, m=9)
    k[1, 2, 0] = torch.nan
    out = mk.attend(q, k, v, engine=mk.Nystrom(3))
    assert out[1].isnan().all() and out[0].isfinite().all()


def test_without_a_ridge_only_rounding_is_left_out() -> None:
    """Two equal landmarks: rank 3 of 4, and the exact inverse of what is left."""
    q, k, v = inputs(n=12, m=12)
    k = torch.cat([k[:3], k[:3], k[6:]])
    q_mark, k_mark = (x.unflatten(0, (4, 3)).mean(1) for x in (q, k))
    u, s, vh = torch.linalg.svd(mk.weights(q_mark, k_mark))
    assert s[3] < 1e-12 < s[2]
    inverse = vh[:3].mT @ (u[:, :3] / s[:3]).mT
    expected = mk.weights(q, k_mark) @ inverse @ mk.weights(q_mark, k) @ v
    assert_close(mk.attend(q, k, v, engine=mk.Nystrom(4, ridge=0)), expected, **TIGHT)


@pytest.mark.parametrize(
    "kernel", [mk.ScaledDot(), mk.Gaussian(1.5), mk.Rotary(4), mk.Cosine(0.5) + mk.Dot()], ids=repr
)
@pytest.mark.parametrize("shared", [False, True])
def test_linformer_mixes_the_columns_of_the_scores(kernel: mk.MatchKernel, shared: bool) -> None:
    engine = mk.Linformer(9, 3, heads=2, shared=shared, generator=torch.Generator().manual_seed(0)).double()
    q, k, v = inputs(2, 2, n=5, m=7)
    F = engine.E if engine.F is None else engine.F
    assert (engine.F is None) == shared and engine.E.shape == (2, 3, 9)
    expected = (mk.scores(q, k, kernel) @ engine.E[..., :7].mT).softmax(-1) @ (F[..., :7] @ v)
    assert_close(mk.attend(q, k, v, kernel, engine=engine), expected, **TIGHT)
    keep = torch.arange(7) != 3
    at = keep.nonzero().squeeze(-1)
    scores = mk.scores(q, k, kernel)[..., at] @ engine.E[..., at].mT
    dirty_k, dirty_v = (torch.where(keep[:, None], x, torch.nan) for x in (k, v))
    masked = mk.attend(q, dirty_k, dirty_v, kernel, mask=keep, engine=engine)
    assert_close(masked, scores.softmax(-1) @ (F[..., at] @ v[..., at, :]), **TIGHT)
    rows = torch.arange(5) != 1
    some = mk.attend(q, dirty_k, dirty_v, kernel, mask=rows[:, None] & keep, engine=engine)
    assert_close(some, torch.where(rows[:, None], masked, 0.0), **TIGHT)
    nobody = mk.attend(q, k, v, kernel, mask=torch.zeros(7, dtype=torch.bool), engine=engine)
    assert not nobody.any()


def test_linformer_knows_places_and_shorter_sequences() -> None:
    engine = mk.Linformer(9, 4, generator=torch.Generator().manual_seed(0)).double()
    q, k, v = inputs(n=5, m=7)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 2), value=torch.nan) for x in (k, v)]
    short = mk.attend(q, k, v, engine=engine)
    assert_close(mk.attend(q, *padded, mask=torch.arange(9) < 7, engine=engine), short, **TIGHT)
    assert (mk.attend(q, k.flip(0), v.flip(0), engine=engine) - short).abs().max() > 1e-3
    # The identity in place of E and F is attention itself.
    whole = mk.Linformer(7, 7, shared=True).double()
    with torch.no_grad():
        whole.E.copy_(torch.eye(7))
    assert_close(mk.attend(q, k, v, engine=whole), mk.attend(q, k, v), **TIGHT)


def test_linformer_starts_with_the_variance_of_its_keys() -> None:
    engine = mk.Linformer(400, 50, generator=torch.Generator().manual_seed(0))
    assert engine.F is not None
    for matrix in (engine.E, engine.F):
        assert abs(matrix.std().item() * 20 - 1) < 0.02 and abs(matrix.mean().item()) < 1e-3
    assert (engine.E - engine.F).abs().max() > 0.05
    again = mk.Linformer(400, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.E, engine.E)
    again.reset_parameters(torch.Generator().manual_seed(1))
    assert not torch.equal(again.E, engine.E)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"causal": True}, "the future would leak"),
        ({"window": 3}, "outside of a window"),
        ({"mask": torch.arange(6)[:, None] > torch.arange(7)}, "permits different keys to different ones"),
        ({"mask": draw(6, 7)}, "adds to the scores of each query"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_both_refuse(setting: dict[str, Any], reason: str) -> None:
    q, k, v = inputs(2, n=6, m=7)
    engines: list[Engine] = [mk.Nystrom(2), mk.Linformer(7, 3)]
    for engine in engines:
        for call in (mk.attend, mk.explain):
            with pytest.raises(ValueError, match=f"cannot run this call: .*{reason}"):
                call(q, k, v, engine=engine, **setting)


@pytest.mark.parametrize(
    ("engine", "setting", "reason"),
    [
        (mk.Nystrom(2), {"normalizer": mk.SinkSoftmax()}, "SinkSoftmax needs the sum of each row"),
        (mk.Nystrom(2), {"normalizer": mk.Sparsemax()}, "Sparsemax is not a softmax"),
        (mk.Nystrom(2), {"kernel": mk.DPFPFeatures(1)}, None),
        (mk.Nystrom(2), {"kernel": mk.PolynomialFeatures(1, 0.0)}, "is signed"),
        (mk.Linformer(7, 3), {"kernel": Cauchy()}, r"Cauchy\(\) is not a DotKernel"),
        (mk.Linformer(7, 3), {"normalizer": mk.ScalableSoftmax()}, "ScalableSoftmax counts keys"),
        (mk.Linformer(7, 3), {"normalizer": mk.Sparsemax()}, None),
        (mk.Linformer(7, 3), {"mask": draw(7)}, "float mask adds to scores of single keys"),
        (mk.Linformer(6, 3), {}, r"k has shape \(2, 7, 4\): expected at most 6 keys"),
        (mk.Linformer(7, 3, heads=3), {}, r"k has shape \(2, 7, 4\): expected 3 heads at dimension -3"),
    ],
)  # fmt: skip
def test_what_one_refuses(engine: Engine, setting: dict[str, Any], reason: str | None) -> None:
    q, k, v = inputs(2, n=6, m=7)
    if reason is None:
        assert mk.attend(q, k, v, engine=engine, **setting).isfinite().all()
        return
    with pytest.raises(ValueError, match=f"cannot run this call: .*{reason}"):
        mk.attend(q, k, v, engine=engine, **setting)


@pytest.mark.parametrize("empty", ["n", "m", "d", "width"])
def test_nothing_to_compute_is_refused(empty: str) -> None:
    q, k, v = inputs(2, **{empty: 0})
    engines: list[Engine] = [mk.Nystrom(2), mk.Linformer(7, 3)]
    for engine in engines:
        with pytest.raises(ValueError, match="a length or a width is 0"):
            mk.attend(q, k, v, engine=engine)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mk.Nystrom(0), r"Nystrom\(landmarks=0\): expected an integer of at least 1"),
        (lambda: mk.Nystrom(True), r"landmarks=True"),
        (lambda: mk.Nystrom(ridge=-0.1), r"Nystrom\(ridge=-0.1\): expected a finite number of at least 0"),
        (lambda: mk.Nystrom(ridge=math.inf), r"Nystrom\(ridge=inf\)"),
        (lambda: mk.Nystrom(ridge=True), r"Nystrom\(ridge=True\)"),
        (lambda: mk.Linformer(0, 1), r"Linformer\(length=0\)"),
        (lambda: mk.Linformer(1, 1.5), r"Linformer\(rank=1.5\)"),  # type: ignore[arg-type]
        (lambda: mk.Linformer(1, 1, heads=0), r"Linformer\(heads=0\)"),
    ],
)
def test_bad_counts(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_told_as_approximate_and_never_chosen() -> None:
    q, k, v = inputs(2, n=200, m=220, d=4, width=3)
    engines: list[Engine] = [mk.Nystrom(8), mk.Linformer(220, 8)]
    for engine in engines:
        told = mk.explain(q, k, v, engine=engine)
        assert isinstance(engine, Engine) and not told.exact and "approximate" in str(told) and not told.compiled
        assert told.engine == engine.name and told.flops is not None
        assert told.flops < mk.explain(q, k, v, engine="reference").flops  # type: ignore[operator]
        assert mk.explain(q, k, v).exact
    # Two batches: (200 + 220 + 8) · 8 pairs of 2 (4 + 3) operations, and 3 · 8³ for the inverse.
    assert mk.explain(q, k, v, engine=mk.Nystrom(8)).flops == 2 * (428 * 8 * 14 + 3 * 512)
    assert mk.explain(q, k, v, engine=mk.Nystrom(8, ridge=0)).flops == 2 * (428 * 8 * 14 + 23 * 512)
    # Mixing: 2 · 8 · 220 · (4 + 3); then 200 queries over 8 keys.
    assert mk.explain(q, k, v, engine=mk.Linformer(220, 8)).flops == 2 * (2 * 8 * 220 * 7 + 200 * 8 * 14)
    assert mk.explain(q, k, v, Cauchy(), engine=mk.Nystrom(8)).flops is None
    more = mk.explain(q, k, v, Cauchy(), engine=mk.Nystrom(8)).peak_bytes
    assert more > mk.explain(q, k, v, engine=mk.Nystrom(8)).peak_bytes


@measurable
@pytest.mark.parametrize(
    "setting",
    [
        "engine=mk.Nystrom(16), mask=torch.arange(n) < n - 5",
        "engine=mk.Nystrom(16), kernel=mk.Additive(64, 2)",
        "engine=mk.Linformer(4096, 16)",
    ],
)
def test_no_table_of_all_pairs(setting: str) -> None:
    """A table of 4096 × 4096 for two heads is 128 MiB; the inputs, the output and all gradients are 16."""
    assert peaks(setting, 4096)[0] < 64


def test_a_layer_trains_the_engine_it_is_given() -> None:
    """The engine's parameters are the layer's: found, saved, moved, and they learn."""
    generator = torch.Generator().manual_seed(0)
    engine = mk.Linformer(12, 4, heads=2, generator=generator)
    layer = mk.MultiHeadAttention(8, 2, engine=engine, generator=generator)
    names = dict(layer.named_parameters())
    assert names["engine.E"] is engine.E and "engine.F" in layer.state_dict() and "Linformer" in repr(layer)
    x, target = torch.randn(2, 4, 12, 8, generator=generator)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    before = engine.E.detach().clone(), engine.F.detach().clone() if engine.F is not None else None
    for _ in range(60):
        loss = (layer(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert (engine.E - before[0]).abs().max() > 0.05 and engine.F is not None and before[1] is not None
    assert (engine.F - before[1]).abs().max() > 0.05
    twin = copy.deepcopy(layer).double()
    assert isinstance(twin.engine, mk.Linformer) and twin.engine.E.dtype == torch.float64
    assert_close(twin(x.double()).float(), layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="the future would leak"):
        layer(x, causal=True)
    with pytest.raises(ValueError, match=r"need_weights: engine=Linformer.* is not exact"):
        layer(x, need_weights=True)
    with pytest.raises(ValueError, match=r"engine Linformer.*torch.nn.MultiheadAttention has no place"):
        layer.to_torch()


def test_a_layer_hands_its_engine_on() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 8, generator=generator)
    layer = mk.MultiHeadAttention(
        8, 2, kernel=[mk.ScaledDot(), mk.Gaussian()], engine=mk.Nystrom(3), generator=generator
    )
    assert "engine=Nystrom(landmarks=3" in repr(layer)
    near = layer(x)
    layer.engine = "reference"
    exact = layer(x)
    assert (near - exact).abs().max() > 1e-4
    layer.engine = mk.Nystrom(9)
    assert_close(layer(x), exact)
    with pytest.raises(ValueError, match="engine='nystrom': expected \"auto\""):
        mk.MultiHeadAttention(8, 2, engine="nystrom")
    with pytest.raises(TypeError, match="it is a class, so add parentheses"):
        mk.MultiHeadAttention(8, 2, engine=mk.Nystrom)  # type: ignore[arg-type]


def test_under_vmap_and_compile() -> None:
    q, k, v = inputs(3, n=9, m=9)
    for engine in (mk.Nystrom(3), mk.Linformer(9, 3, generator=torch.Generator().manual_seed(0)).double()):
        out = mk.attend(q, k, v, engine=engine)
        assert_close(torch.func.vmap(lambda *x, e=engine: mk.attend(*x, engine=e))(q, k, v), out, **TIGHT)
        tangent = torch.func.jvp(lambda x, e=engine: mk.attend(x, k, v, engine=e), (q,), (torch.ones_like(q),))[1]
        step = (mk.attend(q + 1e-6, k, v, engine=engine) - mk.attend(q - 1e-6, k, v, engine=engine)) / 2e-6
        assert_close(tangent, step, rtol=1e-4, atol=1e-5)
        built = torch.compile(lambda *x, e=engine: mk.attend(*x, engine=e), backend="eager", fullgraph=True)
        assert_close(built(q, k, v), out, **TIGHT)


def test_inputs_are_not_written_to_and_may_lie_anyhow() -> None:
    q, k, v = inputs(2, n=9, m=9)
    held = [x.clone() for x in (q, k, v)]
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    engines: list[Engine] = [mk.Nystrom(3), mk.Linformer(9, 3)]
    for engine in engines:
        out = mk.attend(q, k, v, engine=engine)
        assert_close(mk.attend(*strided, engine=engine), out, **TIGHT)
        for x, before in zip((q, k, v), held, strict=True):
            assert torch.equal(x, before)
