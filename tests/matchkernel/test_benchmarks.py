"""The stored benchmarks: every row there with its number or its reason, judged as the targets say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
Row = dict[str, Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_kernels

    return bench_kernels


@pytest.fixture
def memory(bench: ModuleType) -> ModuleType:
    import bench_memory

    return bench_memory


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fused", "kernels", "lengths", "linear", "memory", "multihead", "ring", "window"])
def test_a_result_says_where_and_when_it_was_taken(name: str) -> None:
    machine = stored(name)["machine"]
    assert machine["threads"] == 1
    assert len(machine["date"]) == 10
    assert machine["cpu"]
    assert machine["torch"]


def test_every_row_of_the_table_is_stored(bench: ModuleType) -> None:
    expected = {
        (group.what, n, group.causal, backward, way)
        for group in bench.GROUPS
        for n in group.lengths
        for backward in (False, True)
        for way in group.ways()
    }
    rows = stored("kernels")["rows"]
    got = [(row["what"], row["n"], row["causal"], row["backward"], row["way"]) for row in rows]
    assert len(got) == len(set(got))
    assert set(got) == expected


def test_every_row_has_its_number_or_the_reason_why_not() -> None:
    for row in stored("kernels")["rows"]:
        if row["ms"] is None:
            assert len(row["reason"]) > 10, row
        else:
            assert row["low"] <= row["ratio"] <= row["high"], row
            assert row["ms"] > 0.0
            assert row["repeats"] >= 3


def test_only_peers_are_excused() -> None:
    excused = {row["way"] for row in stored("kernels")["rows"] if row["ms"] is None}
    assert not any(way.startswith(("matchkernel", "fused dot")) for way in excused), excused


def test_a_baseline_is_one_times_itself() -> None:
    rows = stored("kernels")["rows"]
    own = [row for row in rows if row["way"] == row["baseline"]]
    assert own
    assert all(row["ratio"] == row["low"] == row["high"] == 1.0 for row in own)


def test_the_targets_are_judged_from_the_rows(bench: ModuleType) -> None:
    found = stored("kernels")
    assert found["targets"] == json.loads(json.dumps(bench.targets.judge(found["rows"])))
    assert all(target["met"] in ("aim", "must", "missed", "told") for target in found["targets"])


def test_the_machine_has_limits_and_kernels_stand_below_them() -> None:
    roof = stored("kernels")["roofline"]
    assert roof["ridge"] == pytest.approx(roof["matmul_gflops"] / roof["copy_gbs"], rel=0.02)
    assert {row["way"] for row in roof["rows"]} >= {"fused dot", "dense dot", "Gaussian", "Additive", "Laplacian"}
    # A busy neighbour can slow the measurement of the limit, but not by half.
    assert all(row["gflops"] <= 1.5 * roof["matmul_gflops"] for row in roof["rows"])


def test_memory_is_stored_for_every_kernel_and_length(memory: ModuleType) -> None:
    found = stored("memory")
    got = {(row["what"], row["n"]) for row in found["rows"] if row["way"] == "matchkernel"}
    assert got == {(what, n) for what in memory.kernels() for n in memory.LENGTHS}
    assert all(row["mib"] > 0.0 if row["mib"] is not None else row["reason"] for row in found["rows"])
    assert found["targets"] == json.loads(json.dumps(memory.judge(found["rows"], found["slopes"])))


def test_the_ring_is_measured_beside_one_process(bench: ModuleType) -> None:
    found = stored("ring")
    ways = {(row["what"], row["way"]): row for row in found["rows"]}
    assert {way for _, way in ways} > {"one process", "ring", "ring, dealt", "ring, contiguous"}
    assert found["targets"] == json.loads(json.dumps(bench.targets.judge(found["rows"], bench.targets.RING_LINES)))
    # Forward one block of keys and values, backward another and one of gradients; and what the call is, to one other.
    assert ways["ring", "ring"]["sent"] == 3 * (2 * 2048 * 8 * 64 * 4) + 4096
    assert len({row["sent"] for row in found["messages"] if row["way"] == "state"}) == 1


# ---- how it is measured and judged ----------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_round(bench: ModuleType) -> None:
    """A machine that is four times slower in every other round leaves the ratio at 2."""
    import harness

    elapsed = {"a": 1.0, "b": 2.0}
    calls: list[str] = []

    def pretend(call: Any) -> float:
        call()
        round_ = (len(calls) - 1) // 2
        return elapsed[calls[-1]] * (4.0 if round_ % 2 else 1.0)

    ways = {name: (lambda name=name: calls.append(name)) for name in elapsed}
    result = harness.measure(ways, baseline="a", repeats=5, clock=pretend, warm=True)
    assert result["b"] == {"ms": 2.0, "ratio": 2.0, "low": 2.0, "high": 2.0, "repeats": 5}
    assert calls == list("abbaabbaab")


def row(way: str, ratio: float, n: int = 1024, what: str = "additive", **more: Any) -> Row:
    place = {"what": what, "n": n, "causal": False, "backward": False, "way": way, "baseline": "matchkernel"}
    return place | {"ms": ratio, "ratio": ratio, "low": ratio, "high": ratio} | more


@pytest.mark.parametrize(
    ("peer", "met"), [(25.0, "aim"), (20.0, "aim"), (19.9, "must"), (10.0, "must"), (9.9, "missed")]
)
def test_the_fastest_peer_is_the_one_that_counts(bench: ModuleType, peer: float, met: str) -> None:
    line = next(line for line in bench.targets.LINES if line.line == "Additive ÷ best peer, forward")
    rows = [row("matchkernel", 1.0), row("naive", 60.0), row("KeOps", peer), row("d2l", 0.0, ms=None)]
    (judged,) = bench.targets.judge(rows, [line])
    assert judged["measured"] == pytest.approx(1.0 / peer, abs=1e-4)
    assert judged["met"] == met
    assert judged["where"] == {"n": 1024, "beside": "KeOps"}


def test_the_worst_length_is_the_one_that_counts(bench: ModuleType) -> None:
    line = next(line for line in bench.targets.LINES if line.line == "Gaussian ÷ fused dot, forward")
    cases = {1024: 1.5, 2048: 1.05, 4096: 1.1}  # 1,024 is shorter than what is promised
    rows = [row("Gaussian", ratio, n, "dot", baseline="fused dot") for n, ratio in cases.items()]
    (judged,) = bench.targets.judge(rows, [line])
    assert (judged["measured"], judged["met"], judged["where"]["n"]) == (1.1, "must", 4096)


def test_a_line_without_rows_was_not_measured(bench: ModuleType) -> None:
    assert {target["met"] for target in bench.targets.judge([])} == {"not measured"}


def test_a_way_that_computes_something_else_is_not_timed(bench: ModuleType) -> None:
    import torch

    right = [torch.ones(3)]
    assert bench.agree("same", [torch.ones(3) + 1e-5], right) is right
    with pytest.raises(AssertionError, match="other computes something else"):
        bench.agree("other", [torch.ones(3) * 1.01], right)
    with pytest.raises(AssertionError, match="other computes something else"):
        bench.agree("other", [torch.full((3,), float("nan"))], right)


def test_the_slope_is_that_of_the_logarithms(memory: ModuleType) -> None:
    assert memory.slope([{"n": n, "mib": 3.0 * n**1.5} for n in (64, 256, 1024)]) == pytest.approx(1.5)


@pytest.fixture
def lengths(bench: ModuleType) -> ModuleType:
    import bench_lengths

    return bench_lengths


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([4.0, 2.0, 0.5, 0.25], 2**0.5 * 200),  # half way between 2 and 0.5, in logarithms
        ([2.0, 0.5, 2.0, 0.5], 2**0.5 * 400),  # above once more: not from there on
        ([0.9, 0.5, 0.4, 0.1], 100.0),
        ([4.0, 3.0, 2.0, 1.0], None),
        ([0.5, 0.5, 0.5, 1.5], None),
    ],
)
def test_a_method_pays_from_where_it_stays_below(
    lengths: ModuleType, ratios: list[float], expected: float | None
) -> None:
    found = lengths.crossover([100, 200, 400, 800], ratios)
    assert found == (None if expected is None else pytest.approx(expected))


def test_every_method_is_stored_at_every_length_it_reaches(lengths: ModuleType) -> None:
    expected = {
        (name, n, backward)
        for name, method in lengths.METHODS.items()
        for n in lengths.ROUNDS
        for backward in (False, True)
        if n <= method.longest
    }
    rows = stored("lengths")["rows"]
    assert sorted(expected) == sorted((row["method"], row["n"], row["backward"]) for row in rows)
    assert all(row["ms_per_head"] == pytest.approx(row["ms"] / row["heads"], abs=1e-4) for row in rows)


def test_slopes_and_crossovers_follow_from_the_stored_rows(lengths: ModuleType) -> None:
    found = stored("lengths")
    growth = lengths.slopes(found["rows"], "ms_per_head") + lengths.slopes(found["memory"], "mib")
    assert found["slopes"] == growth
    assert found["crossovers"] == lengths.crossovers(found["rows"])
    assert found["targets"] == lengths.judge(growth)
    assert {row["method"] for row in found["long"]} == set(lengths.LINES)
