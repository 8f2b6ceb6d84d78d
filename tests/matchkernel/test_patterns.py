"""Block patterns: each constructor against its definition pair by pair, the algebra, and what is refused."""

import math
from typing import Any

import pytest
import torch

import matchkernel as mk
from matchkernel import BlockPattern

N, BLOCK = 61, 8
SIZE = math.ceil(N / BLOCK)

DEFINITIONS: dict[str, tuple[Any, Any]] = {
    "causal": (lambda: BlockPattern.causal(N, BLOCK), lambda i, j: j <= i),
    "window": (lambda: BlockPattern.window(N, BLOCK, 2, 1), lambda i, j: i - 2 <= j <= i + 1),
    "window behind": (lambda: BlockPattern.window(N, BLOCK, 1), lambda i, j: j in (i, i - 1)),
    "dilated": (lambda: BlockPattern.dilated(N, BLOCK, 2, 3), lambda i, j: abs(i - j) in (0, 3, 6)),
    "strided": (lambda: BlockPattern.strided(N, BLOCK, 3), lambda i, j: abs(i - j) < 3 or (i - j) % 3 == 0),
    "global": (lambda: BlockPattern.global_blocks(N, BLOCK, [0, 5]), lambda i, j: i in (0, 5) or j in (0, 5)),
    "either": (
        lambda: BlockPattern.window(N, BLOCK, 1, 1) | BlockPattern.global_blocks(N, BLOCK),
        lambda i, j: abs(i - j) <= 1 or 0 in (i, j),
    ),
    "both": (
        lambda: BlockPattern.strided(N, BLOCK, 3) & BlockPattern.causal(N, BLOCK),
        lambda i, j: j <= i and (i - j < 3 or (i - j) % 3 == 0),
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_pattern_is_what_it_says(name: str) -> None:
    make, met = DEFINITIONS[name]
    pattern = make()
    expected = [[met(i, j) for j in range(SIZE)] for i in range(SIZE)]
    assert pattern.table.tolist() == expected
    assert pattern.density == pytest.approx(sum(map(sum, expected)) / SIZE**2)
    by_pair = [[expected[i // BLOCK][j // BLOCK] for j in range(N)] for i in range(N)]
    assert pattern.mask(N).tolist() == by_pair


def test_the_mask_of_other_lengths_and_of_heads() -> None:
    table = torch.tensor([[[True, False, True]], [[False, True, True]]])
    pattern = BlockPattern(table, 2)
    mask = pattern.mask(2, 5)
    assert mask.shape == (2, 2, 5)
    assert mask[:, 0].tolist() == [[True, True, False, False, True], [False, False, True, True, True]]
    assert repr(pattern) == "BlockPattern(2 heads, 1 × 3 blocks of 2, density 0.667)"
    one = BlockPattern(torch.tensor([[True, True, False]]), 2)
    assert (pattern & one).table.tolist() == [[[True, False, False]], [[False, True, False]]]
    with pytest.raises(ValueError, match="does not fit 3 queries and 5 keys, which make 2 × 3 blocks of 2"):
        pattern.mask(3, 5)


def test_random_blocks_are_as_many_as_asked_and_not_drawn_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = BlockPattern.random(N, BLOCK, 3, generator=generator)
    assert pattern.table.sum(-1).tolist() == [3] * SIZE
    again = BlockPattern.random(N, BLOCK, 3, generator=generator)
    assert not torch.equal(pattern.table, again.table)
    assert torch.equal(pattern.table, BlockPattern.random(N, BLOCK, 3, generator=generator.manual_seed(0)).table)
    besides = BlockPattern.causal(N, BLOCK)
    other = BlockPattern.random(N, BLOCK, 3, generator=generator, besides=besides)
    assert not (other.table & besides.table).any()
    assert other.table.sum(-1).tolist() == [min(3, SIZE - 1 - i) for i in range(SIZE)]
    everything = BlockPattern.random(N, BLOCK, 100, generator=generator)
    assert everything.density == 1.0
    many = torch.stack([BlockPattern.random(N, BLOCK, 2, generator=generator).table for _ in range(400)])
    # Each block is drawn with probability 2/8; five standard errors of 400 draws.
    assert ((many.double().mean(0) - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / 400)).all()


def test_bigbird_is_a_window_global_blocks_and_random_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    pattern = BlockPattern.bigbird(64 * 20, 64, generator=generator)
    kept = BlockPattern.window(64 * 20, 64, 1, 1) | BlockPattern.global_blocks(64 * 20, 64, [0, 1])
    assert (pattern.table | kept.table).equal(pattern.table)
    extra = (pattern.table & ~kept.table).sum(-1)
    assert extra.tolist() == [0, 0] + [3] * 18
    assert pattern.table[10].sum() == 3 + 2 + 3


def test_a_pattern_is_a_copy_and_is_not_changed_by_the_algebra() -> None:
    table = torch.eye(3, dtype=torch.bool)
    pattern = BlockPattern(table, 4)
    table[0, 1] = True
    assert pattern.density == pytest.approx(1 / 3)
    _ = pattern | BlockPattern(torch.ones(3, 3, dtype=torch.bool), 4)
    assert pattern.density == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: BlockPattern(torch.ones(2, 2), 4), TypeError, "table: expected a tensor of bool.*float32"),
        (lambda: BlockPattern([[True]], 4), TypeError, "got list"),  # type: ignore[arg-type]
        (lambda: BlockPattern(torch.ones(2, dtype=torch.bool), 4), ValueError, r"table has shape \(2,\)"),
        (lambda: BlockPattern(torch.ones(0, 2, dtype=torch.bool), 4), ValueError, "none of them 0"),
        (lambda: BlockPattern(torch.ones(2, 2, dtype=torch.bool), 0), ValueError, "block=0: expected an integer"),
        (lambda: BlockPattern.window(N, BLOCK, -1), ValueError, "left=-1"),
        (lambda: BlockPattern.window(N, BLOCK, 1, 2.0), ValueError, "right=2.0"),  # type: ignore[arg-type]
        (lambda: BlockPattern.dilated(N, BLOCK, 2, 0), ValueError, "step=0"),
        (lambda: BlockPattern.strided(N, BLOCK, 0), ValueError, "stride=0"),
        (lambda: BlockPattern.global_blocks(N, BLOCK, [8]), ValueError, "numbers from 0 to 7, got 8"),
        (lambda: BlockPattern.causal(0, BLOCK), ValueError, "n=0"),
        (
            lambda: BlockPattern.bigbird(N, BLOCK, generator=torch.Generator(), window=2),
            ValueError,
            "window=2: expected an odd",
        ),
        (
            lambda: BlockPattern.random(
                N, BLOCK, 1, generator=torch.Generator(), besides=BlockPattern.causal(N, BLOCK + 1)
            ),
            ValueError,
            "besides: expected a pattern of 8 × 8 blocks of 8",
        ),
        (lambda: BlockPattern.causal(N, 8) | BlockPattern.causal(N, 16), ValueError, "one block size and one shape"),
        (lambda: BlockPattern.causal(N, 8) & BlockPattern.causal(99, 8), ValueError, "one block size and one shape"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
    with pytest.raises(TypeError):
        BlockPattern.causal(N, BLOCK) | 3  # type: ignore[operator]


def test_it_is_public() -> None:
    assert mk.BlockPattern is BlockPattern
