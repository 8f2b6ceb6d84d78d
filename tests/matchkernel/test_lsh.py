"""The hashes and their collision laws; the LSH engine against the reference with the mask of who shares a bucket."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _buckets
from matchkernel.hashing import CrossPolytopeHash, SignHash, collision_probability

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs
from peak import measurable, peaks

Tensor = torch.Tensor
Setting = dict[str, Any]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The laws: how often two vectors at an angle share a bucket.


def _pair(angle: float, dim: int) -> Tensor:
    """Two vectors (2, dim) at an angle, of lengths that a hash must not see."""
    x = torch.zeros(2, dim, dtype=torch.float64)
    x[0, 0], x[1, 0], x[1, 1] = 3.0, 0.2 * math.cos(angle), 0.2 * math.sin(angle)
    turn = torch.linalg.qr(draw(dim, dim, seed=dim))[0]
    return x @ turn


@pytest.mark.parametrize(("dim", "angle"), [(2, 1.0), (7, 0.3), (7, 2.2)])
@pytest.mark.parametrize("made", [CrossPolytopeHash(2), CrossPolytopeHash(32), SignHash(8)], ids=repr)
def test_vectors_meet_as_often_as_the_law_says(made: CrossPolytopeHash | SignHash, angle: float, dim: int) -> None:
    generator, draws, together = _generator(), 2000, 0
    pair = _pair(angle, dim)
    for _ in range(draws):
        one, other = made(pair, made.draw(dim, generator)).tolist()
        together += one == other
    law = made.collision_probability(angle)
    assert abs(together / draws - law) < 4.0 * math.sqrt(law * (1.0 - law) / draws) + 1e-3


def test_the_laws_in_numbers_from_outside() -> None:
    """1 − θ/π of a random sign; and Reformer's hash at one radian: .68 of two buckets, .34 of eight."""
    assert SignHash(2).collision_probability(math.pi * (1 - 0.4431)) == pytest.approx(0.4431, abs=1e-12)
    assert CrossPolytopeHash(2).collision_probability(1.0) == pytest.approx(0.68, abs=5e-3)
    assert CrossPolytopeHash(8).collision_probability(1.0) == pytest.approx(0.34, abs=5e-3)


def test_the_quadrature() -> None:
    """At right angles every bucket is as likely as another, whatever the first vector's is."""
    for buckets in (4, 8, 30):
        made = CrossPolytopeHash(buckets)
        assert made.collision_probability(math.pi / 2) == pytest.approx(1.0 / buckets, abs=1e-4)
        assert made.collision_probability(0.0) == 1.0 and made.collision_probability(math.pi) == 0.0
        assert 0.97 < made.collision_probability(0.02) < 1.0
        law = [made.collision_probability(angle) for angle in (0.05, 0.5, 1.0, 2.0, 3.0)]
        assert law == sorted(law, reverse=True)
    # With two directions the law has a closed form: the square of the sign's.
    for angle in (0.4, 1.0, 2.0):
        p = 1.0 - angle / math.pi
        # Which of a and b is larger, and its sign, is decided by the signs of a + b and a − b, which are independent.
        assert CrossPolytopeHash(4).collision_probability(angle) == pytest.approx(p * p, abs=1e-4)


def test_rounds() -> None:
    assert collision_probability(1.0, 8, "sign", rounds=3) == pytest.approx(1 - (1 - (1 - 1 / math.pi) ** 3) ** 3)
    assert collision_probability(1.0, 2) == pytest.approx(1 - 1 / math.pi)


def test_a_hash_is_the_nearest_direction_or_the_side_of_each_plane() -> None:
    x, r = draw(5, 3, seed=1), draw(3, 4, seed=2)
    for row, bucket in zip(x, CrossPolytopeHash(8)(x, r).tolist(), strict=True):
        cosines = [float(row @ column) for column in r.T]
        signed = [*cosines, *(-c for c in cosines)]
        assert bucket == signed.index(max(signed))
    r = r[:, :3]
    for row, bucket in zip(x, SignHash(8)(x, r).tolist(), strict=True):
        assert bucket == sum(2**b for b in range(3) if float(row @ r[:, b]) > 0)


def test_hashing_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, r = draw(2, 50, 3, seed=1), draw(3, 4, seed=2)
    whole = CrossPolytopeHash(8)(x, r)
    monkeypatch.setattr("matchkernel.hashing.CHUNK", 64)
    assert torch.equal(CrossPolytopeHash(8)(x, r), whole)


@pytest.mark.parametrize("wrong", [0, 1, 2.0, True, 7])
def test_buckets_are_checked(wrong: Any) -> None:
    for made in (CrossPolytopeHash, SignHash, mk.LSH):
        with pytest.raises(ValueError, match="buckets"):
            made(wrong)
    with pytest.raises(ValueError, match="angle"):
        SignHash(2).collision_probability(4.0)
    with pytest.raises(ValueError, match="hash"):
        collision_probability(1.0, 2, "polar")


# The engine.


def _hold(leaves: tuple[Tensor, ...], engine: mk.LSH, setting: Setting, tolerance: float = 1e-9) -> None:
    """Value and gradients against the reference in float64 with the mask written out."""
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = mk.attend(q, k, v, engine=engine, **setting)
    mask = _mask(engine, q.detach(), k.detach(), setting.get("causal", False))
    given = setting.get("mask")
    if given is not None:
        mask = mask & given if given.dtype == torch.bool else torch.where(mask, given, -torch.inf)
    rest = {name: x for name, x in setting.items() if name not in ("causal", "mask")}
    truth = mk.attend(*wide, mask=mask, engine="reference", **rest)
    assert_close(out.double(), truth, rtol=tolerance, atol=tolerance)
    down = draw(*out.shape, seed=9)
    ours = torch.autograd.grad(out, (q, k, v), down.to(out.dtype))
    for mine, theirs in zip(ours, torch.autograd.grad(truth, wide, down), strict=True):
        assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * (1.0 + float(theirs.abs().max())))


def _mask(engine: mk.LSH, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Who shares a bucket in some round, written out from the buckets; in causal order with every query's own key."""
    query, key = engine.hashes(q, k)
    if q.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]):
        key = key.repeat_interleave(q.shape[-3] // k.shape[-3], -2)
    n, m = q.shape[-2], k.shape[-2]
    meets = torch.zeros(*torch.broadcast_shapes(q.shape[:-2], key.shape[1:-1]), n, m, dtype=torch.bool)
    for r in range(engine.rounds):
        meets |= query[r][..., :, None] == key[r][..., None, :]
    if causal:
        order = torch.arange(m) - (torch.arange(n) + m - n)[:, None]
        meets = (meets & (order <= 0)) | (order == 0)
    return meets


ENGINES = [
    (2, 1, "sign"), (8, 1, "cross-polytope"), (8, 3, "cross-polytope"), (16, 2, "sign"), (128, 2, "cross-polytope"),
]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "rounds", "kind"), ENGINES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 7), (150, 150), (20, 130), (130, 20)])
def test_equal_to_the_reference_with_its_mask(
    n: int, m: int, buckets: int, rounds: int, kind: str, causal: bool
) -> None:
    engine = mk.LSH(buckets, rounds, kind, _generator(3))
    leaves = inputs(2, 4, n=n, m=m)
    _hold(leaves, engine, {"causal": causal})
    grouped = (leaves[0], leaves[1][:, :2], leaves[2][:, :2])
    _hold(
        grouped, engine, {"causal": causal, "mask": draw(2, 1, 1, m, seed=4) > -0.3, "normalizer": mk.SinkSoftmax(0.2)}
    )
    _hold(leaves, engine, {"causal": causal, "mask": draw(m, seed=4), "normalizer": mk.ScalableSoftmax(0.5)})


@pytest.mark.parametrize("setting", [
    {"kernel": mk.Gaussian(1.3)}, {"kernel": mk.Rotary(4), "causal": True}, {"kernel": -0.4 * mk.Dot()},
    {"kernel": mk.ScaledDot() + mk.ALiBi(2), "causal": True}, {"window": 9}, {"window": 5, "causal": True},
    {"normalizer": mk.Softmax(0.6)},
], ids=str)  # fmt: skip
def test_kernels_windows_and_layouts(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mk.LSH(4, 2, generator=_generator(1))
    _hold(inputs(2, n=80, m=80), engine, setting)
    monkeypatch.setattr(_buckets, "SCORES", 1)
    q, k, v = inputs(3, 2, n=80, m=80)
    _hold((q.transpose(0, 1).contiguous().transpose(0, 1), k[:1], v[:1]), engine, setting)
    if "ALiBi" not in repr(setting):
        _hold(inputs(n=80, m=80), engine, setting)


def test_the_mask_that_it_gives() -> None:
    engine = mk.LSH(8, 2, generator=_generator())
    for q, k, _ in (inputs(n=9, m=9), inputs(2, 3, n=4, m=9), (draw(4, 5, 3, seed=1), draw(2, 9, 3, seed=2), None)):
        for causal in (False, True):
            assert torch.equal(engine.mask(q, k, causal), _mask(engine, q, k, causal))
    assert bool(engine.mask(draw(9, 3), draw(9, 3, seed=1), causal=True).diagonal().all())


def test_halves() -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)):
        _hold(
            inputs(2, n=150, m=150, d=16, width=16, dtype=dtype),
            mk.LSH(8, 2, generator=_generator()),
            {"causal": True},
            tolerance,
        )


def test_directions_are_drawn_once() -> None:
    q, k, v = inputs(2, n=60, m=60)
    one, same, other = (mk.LSH(8, generator=_generator(seed)) for seed in (1, 1, 2))
    out = mk.attend(q, k, v, engine=one)
    assert torch.equal(mk.attend(q, k, v, engine=one), out) and torch.equal(mk.attend(q, k, v, engine=same), out)
    assert not torch.equal(mk.attend(q, k, v, engine=other), out)
    # Lengths and the dtype of the same numbers change no bucket.
    assert torch.equal(one.hashes(2.0 * q)[0], one.hashes(q)[0])


def test_with_many_rounds_everything_that_is_close_is_found() -> None:
    """Copies share every bucket. No angle above a right one: with enough rounds of two buckets all pairs meet."""
    q, k, v = (x.abs() for x in inputs(2, n=40, m=40))
    assert bool(mk.LSH(64, generator=_generator()).mask(q, q).diagonal(dim1=-2, dim2=-1).all())
    engine = mk.LSH(2, 60, generator=_generator())
    assert bool(engine.mask(q, k).all())
    assert_close(mk.attend(q, k, v, engine=engine), mk.attend(q, k, v))


def test_second_derivatives() -> None:
    leaves = tuple(x.requires_grad_() for x in (draw(2, 5, 3, seed=1), draw(1, 6, 3, seed=2), draw(1, 6, 2, seed=3)))
    engine = mk.LSH(4, 2, generator=_generator(5))

    def run(*x: Tensor) -> Tensor:
        return mk.attend(*x, causal=True, normalizer=mk.SinkSoftmax(0.1), engine=engine)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    once = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
    twice = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
    assert_close(once, tuple(x.detach() for x in twice))


def test_nan_that_nobody_meets_and_queries_that_meet_nobody() -> None:
    q, k, v = inputs(2, n=30, m=30)
    engine = mk.LSH(16, generator=_generator(2))
    mask = draw(30, seed=4) > 0.0
    unseen = ~(engine.mask(q, k) & mask).any(-2)
    blind = ~(engine.mask(q, k) & mask).any(-1)
    assert unseen.any() and blind.any()
    clean = mk.attend(q, k, v, mask=mask, engine=engine)
    assert bool((clean[blind] == 0).all())
    leaves = [x.requires_grad_() for x in (q, k, torch.where(unseen.unsqueeze(-1), torch.nan, v))]
    out = mk.attend(*leaves, mask=mask, engine=engine)
    assert_close(out, clean)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in grads) and bool((grads[0][blind] == 0).all())


def test_the_future_changes_nothing() -> None:
    q, k, v = inputs(2, n=90, m=90)
    engine = mk.LSH(4, 2, generator=_generator(2))
    before = mk.attend(q, k, v, causal=True, engine=engine)
    later = k.clone(), v.clone()
    for x in later:
        x[:, 60:] = draw(2, 30, x.shape[-1], seed=8)
    assert_close(mk.attend(q, *later, causal=True, engine=engine)[:, :60], before[:, :60])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"kernel": mk.Laplacian(1.0)}, "is not a DotKernel"),
        ({"normalizer": mk.Sparsemax()}, "is not a softmax"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": torch.ones(5, 7, dtype=torch.bool)}, "a row per query"),
        ({"key_position": torch.arange(7) + 1}, "positions of one's own"),
        ({"kernel": mk.Bilinear(4, 3)}, "have no hash in common"),
    ],
)
def test_refusals(setting: Setting, why: str) -> None:
    q, k, v = inputs(2)
    k = k[..., :3] if isinstance(setting.get("kernel"), mk.Bilinear) else k
    with pytest.raises(ValueError, match=why):
        mk.attend(q, k, v, engine=mk.LSH(4), **setting)


def test_arguments_and_what_it_says_of_itself() -> None:
    q, k, v = inputs(2, n=20, m=20)
    for wrong in ({"rounds": 0}, {"hash": "polar"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            mk.LSH(4, **wrong)
    told = mk.explain(q, k, v, engine=mk.LSH(4, 2, "sign"))
    assert not told.exact and "approximate" in str(told) and "the sign hash" in told.reason
    assert told.flops == 2 * 20 * (20 // 4 + 1) * 2 * (2 * 4 + 2 * 3)
    engine = mk.LSH(4)
    with pytest.raises(ValueError, match="function transforms"):
        torch.func.vmap(lambda x: mk.attend(x, k, v, engine=engine))(torch.stack([q, q]))


@measurable
def test_memory_grows_with_the_tokens() -> None:
    lengths = (2**12, 2**14)
    engine = "mk.LSH(n // 32, 2, generator=generator)"
    short, long = peaks(f"causal=True, engine={engine}", *lengths, width=32)
    assert math.log(long / short) / math.log(lengths[1] / lengths[0]) <= 1.1
