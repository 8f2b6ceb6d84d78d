"""The tiles of a problem: every permitted pair once, no tile that nobody needs, and comparisons where they are due."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import matchkernel as mk
from matchkernel._validate import build_problem
from matchkernel.engines._schedule import Rows, Span, even, limits, schedule
from matchkernel.masks import Visibility

Tensor = torch.Tensor


def _place(n: int, m: int, lead: tuple[int, ...] = (), **setting: Any) -> Visibility:
    q, k = torch.zeros(*lead, n, 1), torch.zeros(*lead, m, 1)
    blank: dict[str, Any] = dict.fromkeys(("mask", "window", "normalizer", "query_position", "key_position"))
    return build_problem(q, k, k, None, **(blank | {"causal": False} | setting)).visibility


def _who(place: Visibility) -> Tensor:
    """(entries in front, n, m): who may meet whom, one pair at a time."""
    lead = torch.broadcast_shapes(place.query_position.shape[:-1], place.key_position.shape[:-1])
    query = place.query_position.expand(*lead, -1).reshape(-1, place.queries).tolist()
    key = place.key_position.expand(*lead, -1).reshape(-1, place.keys).tolist()
    left, right = place.window or (None, None)
    return torch.tensor(
        [
            [
                [
                    (not place.causal or y <= x)
                    and (left is None or x - y <= left)
                    and (right is None or y - x <= right)
                    for y in keys
                ]
                for x in queries
            ]
            for queries, keys in zip(query, key, strict=True)
        ]
    )


def _check(place: Visibility, rows: int, keys: int) -> list[Rows]:
    """The plan, held to the pairs."""
    plan, who, bounds = schedule(place, limits(place), rows, keys), _who(place), limits(place)
    covered = torch.zeros(place.queries, place.keys, dtype=torch.int64)
    assert [x for block in plan for x in range(block.start, block.stop)] == list(range(place.queries))
    for block in plan:
        assert 1 <= block.stop - block.start <= rows
        for span in block.spans:
            assert 1 <= span.stop - span.start <= keys
            tile = who[:, block.start : block.stop, span.start : span.stop]
            covered[block.start : block.stop, span.start : span.stop] += 1
            assert span.partial or bool(tile.all()), "a tile that forbids a pair must be compared"
            # Positions of one's own are judged by their extremes: a tile between two queries may be met for nothing.
            if place.aligned:
                assert bool(tile.any()), "nobody meets in this tile"
    assert int(covered.max()) <= 1 and bool((covered >= who.any(0)).all()), "a pair is met twice, or never"
    if bounds is not None:
        allowed = torch.ones((), dtype=torch.bool)
        if bounds.first is not None:
            allowed = allowed & (bounds.position >= bounds.first)
        if bounds.last is not None:
            allowed = allowed & (bounds.position <= bounds.last)
        assert torch.equal(allowed.expand(*allowed.shape[:-2], *who.shape[-2:]).reshape(who.shape), who)
    return plan


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_permitted_pairs_are_met_exactly_once(data: st.DataObject) -> None:
    draw = data.draw
    n, m, rows, keys = (draw(st.integers(1, 9)) for _ in range(4))
    setting: dict[str, Any] = {"causal": draw(st.booleans())}
    side = st.none() | st.integers(0, 6)
    setting["window"] = draw(st.none() | st.integers(1, 5) | st.tuples(side, side))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    far = draw(st.sampled_from([0, 7, -100, 2**24 + 1, 2**40 + 1, -(2**33)]))
    kind = draw(st.sampled_from(["default", "integers", "floats", "small integers"]))
    for name, length in (("query_position", n), ("key_position", m)):
        if kind != "default":
            lead = (*batch, length) if draw(st.booleans()) else (length,)
            entries = draw(st.lists(st.integers(-6, 9), min_size=math.prod(lead), max_size=math.prod(lead)))
            position = torch.tensor(entries).reshape(lead)
            position = position.to(torch.int16) if kind == "small integers" else position + far
            setting[name] = position.double() / 4.0 if kind == "floats" else position
    _check(_place(n, m, batch, **setting), rows, keys)


@pytest.mark.parametrize(
    ("setting", "spans"),
    [
        ({}, [[(0, 4, False), (4, 8, False)]] * 2),
        ({"causal": True}, [[(0, 4, True)], [(0, 4, False), (4, 8, True)]]),
        ({"causal": True, "window": 1}, [[(0, 4, True)], [(4, 8, True)]]),
        ({"causal": True, "window": 2}, [[(0, 4, True)], [(3, 5, True), (5, 8, True)]]),
        ({"window": (None, 4)}, [[(0, 4, False), (4, 8, True)], [(0, 4, False), (4, 8, False)]]),
        ({"window": (0, None)}, [[(0, 4, True), (4, 8, False)], [(4, 8, True)]]),
        ({"causal": True, "query_position": torch.arange(-4, 4)}, [[], [(0, 4, True)]]),
        # In a corner of the second tile one key is late: everything else in it is permitted.
        ({"causal": True, "key_position": torch.tensor([0, 0, 0, 0, 0, 0, 0, 5])},
         [[(0, 3, False), (3, 7, False)], [(0, 4, False), (4, 8, True)]]),
        # Keys in the opposite order.
        ({"causal": True, "key_position": torch.arange(8).flip(0)}, [[(4, 8, True)], [(0, 4, True), (4, 8, False)]]),
        # One key that all see, far from the others that one query sees: the tile between them is left out.
        ({"window": (0, 0), "query_position": torch.zeros(8), "key_position": torch.tensor([0, 5, 5, 5, 5, 5, 5, 0.0])},
         [[(0, 4, True), (4, 8, True)]] * 2),
    ],
)  # fmt: skip
def test_the_tiles_of_eight_by_eight(setting: dict[str, Any], spans: list[list[tuple[int, int, bool]]]) -> None:
    plan = _check(_place(8, 8, **setting), 4, 4)
    assert [block.spans for block in plan] == [tuple(Span(*span) for span in block) for block in spans]


def test_a_gap_in_the_middle_is_left_out() -> None:
    position = torch.tensor([0] * 2 + [9] * 6 + [0] * 1)
    plan = _check(_place(2, 9, window=1, query_position=torch.zeros(2), key_position=position), 2, 3)
    assert plan[0].spans == (Span(0, 3, True), Span(6, 9, True))


@pytest.mark.parametrize(
    ("start", "stop", "most"), [(0, 10, 4), (3, 4, 1), (0, 8, 8), (0, 9, 8), (5, 105, 7), (2, 2, 3)]
)
def test_pieces_are_as_equal_as_can_be(start: int, stop: int, most: int) -> None:
    pieces = list(even(start, stop, most))
    sizes = [last - first for first, last in pieces]
    assert [x for first, last in pieces for x in range(first, last)] == list(range(start, stop))
    assert len(pieces) == math.ceil((stop - start) / most) and max(sizes, default=0) - min(sizes, default=0) <= 1


@pytest.mark.parametrize("far", [2**23 - 9, 2**24 - 3, 2**31, 2**52])
def test_positions_far_from_zero_keep_their_last_digit(far: int) -> None:
    position = torch.arange(9) + far
    for setting in ({"causal": True}, {"window": 2}, {"causal": True, "window": (3, None)}):
        place = _place(9, 9, query_position=position, key_position=position, **setting)
        _check(place, 2, 2)
        bounds = limits(place)
        assert bounds is not None and bounds.position.dtype == torch.float32
        # And where they lie further apart than float32 counts.
        apart = torch.cat([position[:-1] - far, position[-1:]])
        _check(_place(9, 9, query_position=apart, key_position=apart, **setting), 2, 2)


def test_no_order_no_limits() -> None:
    for setting in ({}, {"window": (None, -1)}, {"mask": torch.ones(3, dtype=torch.bool)}):
        assert limits(_place(2, 3, **setting)) is None
    x = torch.zeros(3, 1)
    assert bool((mk.attend(x, x, torch.ones(3, 1), mk.Laplacian(), window=(-1, -1), engine="tiled") == 1).all())
