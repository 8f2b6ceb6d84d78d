"""Who may meet whom, counted key by key."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel import masks

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor


def _seen(n: int, m: int, **setting: Any) -> list[list[int]]:
    """For each query the keys with weight above zero, which for a softmax are the permitted ones."""
    q, k, _ = inputs(n=n, m=m)
    table = mk.weights(q, k, **setting)
    return [row.nonzero().flatten().tolist() for row in table]


@pytest.mark.parametrize(("n", "m"), [(4, 4), (2, 5), (5, 2), (1, 4), (4, 1)])
def test_causal_order_is_aligned_to_the_end(n: int, m: int) -> None:
    assert _seen(n, m, causal=True) == [[j for j in range(m) if j <= i + m - n] for i in range(n)]


def test_a_window_counts_its_keys() -> None:
    for w in (1, 2, 3):
        causal = _seen(8, 8, causal=True, window=w)
        both = _seen(8, 8, window=w)
        assert [len(row) for row in causal] == [min(w, i + 1) for i in range(8)]
        assert causal[6] == list(range(7 - w, 7))
        assert len(both[4]) == 2 * w - 1 and both[4] == list(range(4 - w + 1, 4 + w))


@pytest.mark.parametrize(
    ("window", "keys_of_4"),
    [((2, 1), [2, 3, 4, 5]), ((0, 0), [4]), ((-1, 1), [0, 1, 2, 3, 4, 5]), ((1, -1), [3, 4, 5, 6, 7]),
     ((None, 0), [0, 1, 2, 3, 4]), ((-1, -1), list(range(8))), (100, list(range(8)))],
)  # fmt: skip
def test_window_pairs_are_those_of_flash_attention(window: Any, keys_of_4: list[int]) -> None:
    assert _seen(8, 8, window=window)[4] == keys_of_4
    assert _seen(8, 8, window=window, causal=True)[4] == [j for j in keys_of_4 if j <= 4]


def test_windows_and_causal_order_follow_positions() -> None:
    positions = torch.tensor([10, 3, 7])
    assert _seen(3, 3, causal=True, query_position=positions, key_position=positions) == [[0, 1, 2], [1], [1, 2]]
    assert _seen(3, 3, window=4, query_position=positions, key_position=positions) == [[0, 2], [1], [0, 2]]
    halves = torch.tensor([0.0, 0.5, 1.5])
    assert _seen(3, 3, window=2, causal=True, query_position=halves, key_position=halves) == [[0], [0, 1], [1, 2]]


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_one_side_may_have_positions_of_its_own(engine: str) -> None:
    q, k, v = inputs(n=3, m=4)
    at = torch.tensor([3, 0, 9, 1])
    out = mk.attend(q, k, v, causal=True, key_position=at, engine=engine)
    assert_close(out, by_loop(q, k, v, allowed=lambda i, j: int(at[j]) <= i + 1))
    out = mk.attend(q, k, v, causal=True, query_position=at[:3], engine=engine)
    assert_close(out, by_loop(q, k, v, allowed=lambda i, j: j <= int(at[i])))


def test_positions_of_each_sequence_are_its_own() -> None:
    q, k, v = inputs(2, n=3, m=3)
    position = torch.tensor([[0, 1, 2], [2, 1, 0]])
    out = mk.attend(q, k, v, causal=True, query_position=position, key_position=position)
    for b, order in enumerate(position.tolist()):
        assert_close(out[b], by_loop(q[b], k[b], v[b], allowed=lambda i, j, order=order: order[j] <= order[i]))


def _mask_shapes(n: int, m: int) -> list[tuple[int, ...]]:
    return [
        (), (1,), (m,), (1, 1), (1, m), (n, 1), (n, m), (1, n, m), (3, 1, m), (3, n, m), (2, 1, 1, m),
        (1, 3, n, 1), (2, 3, n, m),
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("shape", _mask_shapes(4, 6), ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_every_mask_that_broadcasts(shape: tuple[int, ...], kind: str, engine: str) -> None:
    q, k, v = inputs(2, 3, n=4, m=6)
    mask = draw(*shape, seed=8) > -0.3 if kind == "bool" else draw(*shape, seed=8)
    for causal in (False, True):
        out = mk.attend(q, k, v, mask=mask, causal=causal, engine=engine)
        full = mask.expand(2, 3, 4, 6)
        for b in range(2):
            for h in range(3):
                here = full[b, h]

                def allowed(i: int, j: int, here: Tensor = here, causal: bool = causal) -> bool:
                    return not (causal and j > i + 2) and (kind == "float" or bool(here[i, j]))

                def bias(i: int, j: int, here: Tensor = here) -> float:
                    return float(here[i, j]) if kind == "float" else 0.0

                assert_close(out[b, h], by_loop(q[b, h], k[b, h], v[b, h], allowed=allowed, bias=bias))


@pytest.mark.parametrize("shape", [(5, 1, 1, 1, 6), (1, 2, 3, 4, 6), (5, 2, 3, 4, 6), (2, 1, 4, 6), (5, 2, 1, 1, 1)])
@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_masks_of_five_dimensions(shape: tuple[int, ...], engine: str) -> None:
    q, k, v = inputs(5, 2, 3, n=4, m=6)
    mask = draw(*shape, seed=8) > -0.3
    out = mk.attend(q, k, v, mask=mask, engine=engine)
    full = mask.expand(5, 2, 3, 4, 6)
    for a in range(5):
        for b in range(2):
            for h in range(3):
                here = full[a, b, h]
                truth = by_loop(q[a, b, h], k[a, b, h], v[a, b, h], allowed=lambda i, j, here=here: bool(here[i, j]))
                assert_close(out[a, b, h], truth)


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_grouped_heads_belong_to_the_query_heads(heads: int, causal: bool, engine: str) -> None:
    q, k, v = draw(2, 6, 5, 4, seed=1), draw(2, 2, 5, 4, seed=2), draw(2, 2, 5, 3, seed=3)
    mask = draw(2, heads, 5, 5, seed=8) > 0
    out = mk.attend(q, k, v, mask=mask, causal=causal, engine=engine)
    for b in range(2):
        for h in range(6):
            here = mask[b, h % heads]
            truth = by_loop(
                q[b, h], k[b, h // 3], v[b, h // 3],
                allowed=lambda i, j, here=here: bool(here[i, j]) and (j <= i or not causal),
            )  # fmt: skip
            assert_close(out[b, h], truth)


def test_a_key_hidden_from_one_head_of_its_group_is_kept_for_the_other() -> None:
    q, k, v = draw(4, 5, 4, seed=1), draw(2, 5, 4, seed=2), draw(2, 5, 3, seed=3)
    mask = torch.ones(4, 1, 5, dtype=torch.bool)
    mask[1, :, 2], mask[2:, :, 3] = False, False
    v[1, 3] = float("nan")  # hidden from both heads of the second group, and only from them
    for engine in ("reference", "fused"):
        out = mk.attend(q, k, v, mask=mask, engine=engine)
        for h in range(4):
            keys = mask[h, 0]
            assert_close(out[h], by_loop(q[h], k[h // 2][keys], v[h // 2][keys]))


def test_a_float_mask_is_added_after_temperature_and_length() -> None:
    q, k, v = inputs(n=4, m=6)
    mask = draw(4, 6, seed=8)
    for engine in ("reference", "fused"):
        warm = mk.attend(q, k, v, mask=mask, normalizer=mk.Softmax(2.5), engine=engine)
        assert_close(warm, by_loop(q, k, v, bias=lambda i, j: float(mask[i, j]), factor=lambda _: 1 / 2.5))
        long = mk.attend(q, k, v, mask=mask, normalizer=mk.ScalableSoftmax(0.4), engine=engine)
        growing = by_loop(
            q, k, v, bias=lambda i, j: float(mask[i, j]), factor=lambda m: 0.4 * float(torch.tensor(float(m)).log())
        )
        assert_close(long, growing, rtol=1e-6, atol=1e-6)


def test_a_float_mask_of_any_precision_fits_any_input() -> None:
    q, k, v = inputs(n=4, m=6)
    mask = draw(4, 6, seed=8, dtype=torch.bfloat16)
    for engine in ("reference", "fused"):
        assert_close(mk.attend(q, k, v, mask=mask, engine=engine), mk.attend(q, k, v, mask=mask.double()))


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_mask_learns(engine: str) -> None:
    q, k, v = inputs(2, n=4, m=6)
    mask = draw(4, 6, seed=8).requires_grad_()
    if engine == "fused":
        with pytest.raises(ValueError, match="mask that needs a gradient"):
            mk.attend(q, k, v, mask=mask, engine=engine)
        return
    assert torch.autograd.gradcheck(lambda x: mk.attend(q, k, v, mask=x), (mask,))


def test_decoding_one_by_one_is_the_causal_pass() -> None:
    q, k, v = inputs(2, 3, n=9, m=9)
    bias = draw(3, 9, 9, seed=8)
    for window in (None, 3):
        for normalizer in (mk.Softmax(), mk.SinkSoftmax(0.2), mk.ScalableSoftmax(0.7)):
            call: dict[str, Any] = {"causal": True, "window": window, "normalizer": normalizer}
            whole = mk.attend(q, k, v, mask=bias, **call)
            for t in range(9):
                step = mk.attend(
                    q[..., t : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :],
                    mask=bias[:, t : t + 1, : t + 1], **call,
                )  # fmt: skip
                assert_close(step, whole[..., t : t + 1, :])
            last = mk.attend(q[..., 5:, :], k, v, mask=bias[:, 5:], **call)
            assert_close(last, whole[..., 5:, :])


# Conversions.


def test_key_padding_of_multihead_attention() -> None:
    """torch.nn.MultiheadAttention with identity projections is the oracle."""
    mha = torch.nn.MultiheadAttention(4, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        mha.in_proj_weight.copy_(torch.eye(4, dtype=torch.float64).repeat(3, 1))
        mha.out_proj.weight.copy_(torch.eye(4))
    q, k, v = inputs(2, n=5, m=7, width=4)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    theirs = mha(q, k, v, key_padding_mask=padding, need_weights=False)[0]
    mask = masks.from_key_padding(padding)
    assert mask.shape == (2, 1, 1, 7) and mask.dtype == torch.bool
    assert_close(mk.attend(q[:, None], k[:, None], v[:, None], mask=mask)[:, 0], theirs)


def test_attention_mask_and_lengths_say_the_same() -> None:
    lengths = torch.tensor([7, 4, 0])
    ones = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 7])
    from_lengths = masks.from_lengths(lengths, 7)
    assert from_lengths.shape == (3, 1, 1, 7)
    assert from_lengths[:, 0, 0].tolist() == ones.bool().tolist()
    for dtype in (torch.int64, torch.float32, torch.bool):
        assert torch.equal(masks.from_attention_mask(ones.to(dtype)), from_lengths)
    q, k, v = inputs(3, 2)
    out = mk.attend(q, k, v, mask=from_lengths)
    for b, length in enumerate(lengths.tolist()):
        for h in range(2):
            assert_close(out[b, h], by_loop(q[b, h], k[b, h, :length], v[b, h, :length]))


def test_packed_documents_are_separate_sequences() -> None:
    documents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    q, k, v = inputs(2, n=8, m=8)
    packed = mk.attend(q, k, v, mask=masks.from_documents(documents), causal=True)
    for document in range(3):
        own = documents == document
        assert_close(packed[:, own], mk.attend(q[:, own], k[:, own], v[:, own], causal=True))
    other = masks.from_documents(torch.tensor([0, 1]), torch.tensor([1, 0, 1]))
    assert other.tolist() == [[False, True, False], [True, False, True]]


@pytest.mark.parametrize(
    ("convert", "argument", "message"),
    [
        (masks.from_key_padding, torch.zeros(2, 3), r"padding: expected bool.*torch.float32 of \(2, 3\)"),
        (masks.from_key_padding, torch.zeros(3, dtype=torch.bool), r"padding.*\(3,\)"),
        (masks.from_attention_mask, torch.tensor([[2, 1]]), r"attention_mask: expected zeros and ones.*\(1, 2\)"),
        (masks.from_attention_mask, torch.ones(3), r"attention_mask.*\(batch, m\), got \(3,\)"),
        (lambda x: masks.from_lengths(x, 4), torch.tensor([1.0]), r"lengths: expected integers.*float32"),
        (lambda x: masks.from_lengths(x, 4), torch.tensor([[1]]), r"lengths.*\(1, 1\)"),
    ],
)
def test_conversions_refuse_what_they_do_not_know(convert: Any, argument: Tensor, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        convert(argument)


def test_counts_of_visible_keys() -> None:
    """What ScalableSoftmax counts, in both ways of counting: along the keys, and from the whole table."""
    q, k, _ = inputs(n=3, m=5)
    keys = torch.tensor([True, False, True, True, False])
    for setting, counts in (
        ({}, [5, 5, 5]),
        ({"causal": True}, [3, 4, 5]),
        ({"mask": keys}, [3, 3, 3]),
        ({"mask": keys, "causal": True}, [2, 3, 3]),
        ({"mask": keys, "causal": True, "window": 2}, [1, 2, 1]),
        ({"mask": torch.where(keys, 0.5, float("-inf"))}, [3, 3, 3]),
        ({"mask": torch.ones(1, 1, dtype=torch.bool), "causal": True}, [3, 4, 5]),
    ):
        table = mk.weights(q, k, normalizer=mk.ScalableSoftmax(), **setting)
        kernel_scores = mk.scores(q, k, **setting)
        for row, logits, count in zip(table, kernel_scores, counts, strict=True):
            seen = row > 0
            assert int(seen.sum()) == count
            bias = 0.5 if isinstance(setting.get("mask"), torch.Tensor) and setting["mask"].dtype != torch.bool else 0.0
            truth = (float(torch.tensor(float(count)).log()) * (logits[seen] - bias) + bias).softmax(-1)
            assert_close(row[seen], truth, rtol=1e-6, atol=1e-6)


def test_more_queries_than_keys_under_causal_order() -> None:
    q, k, v = inputs(2, n=6, m=2)
    for engine in ("reference", "fused"):
        out = mk.attend(q, k, v, causal=True, engine=engine)
        assert torch.equal(out[:, :4], torch.zeros_like(out[:, :4]))
        assert_close(out[:, 4], v[:, 0])


@pytest.mark.parametrize("window", [None, (0, 0), (2, 1), (3, None), (None, 2), (40, 40), (1, 30)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (3, 9), (9, 3), (1, 5), (5, 1)])
def test_what_windows_leave_is_counted_without_a_table(
    n: int, m: int, causal: bool, window: tuple[int | None, int | None] | None
) -> None:
    place = masks.Visibility(
        n, m, None, causal, window, torch.arange(m - n, m), torch.arange(m), aligned=True
    )
    table = torch.ones(n, m, dtype=torch.bool) if place.by_position is None else place.by_position
    assert torch.equal(place.visible.expand(n, 1), table.sum(-1, keepdim=True))
    sees = torch.ones(n, dtype=torch.bool) if place.query_sees is None else place.query_sees
    seen = torch.ones(m, dtype=torch.bool) if place.key_seen is None else place.key_seen
    assert torch.equal(sees.expand(n), table.any(-1))
    assert torch.equal(seen.expand(m), table.any(-2))
