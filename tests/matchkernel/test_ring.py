"""Attention across processes: real ones, over gloo, against the reference in one process; and one that dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel import distributed
from matchkernel._validate import build_problem
from matchkernel.engines._ring_block import absorb
from matchkernel.engines._ring_plan import pieces

sys.path.insert(0, str(Path(__file__).parent))
from ring_worker import CASES, GROUPS, Case, step

Tensor = torch.Tensor
WORKER = Path(__file__).parent / "ring_worker.py"


def started(folder: Path, *commands: list[str]) -> list[subprocess.Popen[bytes]]:
    """A process for each command line, its words in a file of the folder."""
    processes = []
    for number, command in enumerate(commands):
        with (folder / f"{number}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment))
    return processes


def ended(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """How each of them ended; who is still there after that time is stopped."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of four processes got, which torchrun has started."""
    folder = tmp_path_factory.mktemp("ring")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert ended(started(folder, [*torchrun, str(WORKER), "everything", str(folder)]), 400) == [0], logs(folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def reference(case: Case) -> dict[str, Tensor]:
    """By the table, in float64, on inputs as they were rounded."""
    *inputs, upstream = (x.double() for x in case.inputs())
    return step(case, inputs, upstream, engine="reference", **case.whole())


TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}


@pytest.mark.parametrize("name", CASES)
def test_shards_together_are_the_whole(found: list[dict[Any, Any]], name: str) -> None:
    case = CASES[name]
    expected = reference(case)
    for world in case.worlds:
        shares = [found[rank][world, name] for rank in GROUPS[world]]
        places = [case.shard(rank, world)[0] for rank in range(world)]
        for what, whole in expected.items():
            if what.startswith("parameter"):
                together = torch.stack([share[what] for share in shares]).sum(0)
            else:
                side = 0 if what[0] in "oq" else 1
                order = torch.cat([place[side] for place in places]).argsort()
                together = torch.cat([share[what] for share in shares], -2)[..., order, :]
            dtype = together.dtype
            assert dtype == (torch.float64 if what.startswith("parameter") else case.dtype), what
            tolerance = TOLERANCES[case.dtype]
            assert_close(together.double(), whole, **tolerance, msg=lambda m, w=world, x=what: f"{w} ranks, {x}: {m}")
            assert together.isfinite().all()


@pytest.mark.parametrize("name", ["causal, more queries", "later than every query"])
def test_the_reference_has_rows_of_zeros_and_no_nan(name: str) -> None:
    expected = reference(CASES[name])
    assert all(x.isfinite().all() for x in expected.values())
    if name == "causal, more queries":
        assert (expected["out"][..., :12, :] == 0).all() and (expected["q"][..., :12, :] == 0).all()


def test_the_readme_is_started_by_torchrun(found: list[dict[Any, Any]]) -> None:
    for rank in range(4):
        # Forward three shards, backward twice as many, each of 8 heads, 256 tokens, k and v of 64 float32.
        assert f"rank {rank}: (8, 256, 64), gradients of its keys (8, 256, 64), 9.0 MiB sent" in found[rank]["readme"]


DISAGREEMENTS = {
    "width": "q's shape",
    "heads": "q's shape",
    "dtype": "the dtype: 'torch.float32' on rank 0, 'torch.float64' on rank 3",
    "causal": "causal: False on rank 0, True on rank 3",
    "kernel": "the kernel: 'ScaledDot()' on rank 0, 'Gaussian(bandwidth=1)' on rank 3",
    "normalizer": "the normalizer",
    "gradients": "gradients: False on rank 0, True on rank 3",
    "positions": "whose positions",
    "order": "ascend in the order of the ranks",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_all_told(found: list[dict[Any, Any]], what: str) -> None:
    for rank in range(4):
        assert DISAGREEMENTS[what] in found[rank]["disagreements"][what]


def test_bytes_and_explanations(found: list[dict[Any, Any]]) -> None:
    for rank in range(4):
        explained = found[rank]["explained"]
        # One description of the call to three others, and three blocks of 2 heads, n tokens, k and v of 8 float32.
        assert explained["dot 8"] == 3 * 4096 + 3 * 2 * 8 * 16 * 4
        assert explained["dot 16"] == 3 * 4096 + 3 * 2 * 16 * 16 * 4
        # A state of 8 × 9 for each of 2 heads, added up, and its scale: no length in it.
        assert explained["elu 8"] == explained["elu 16"] == 3 * 4096 + 2 * 3 * (2 * 8 * 9 * 4) // 4 + 3 * 2 * 4
        assert explained["dot"].startswith("ring: asked for; the shards of 4 processes, whose keys and values travel")
        assert "whose states alone travel" in explained["elu"] and "\nexact, " in explained["elu"]


def test_a_rank_that_dies_or_does_not_come_is_an_error_for_the_others(tmp_path: Path) -> None:
    processes = started(tmp_path, *([str(WORKER), "dying", str(tmp_path), str(rank), "3"] for rank in range(3)))
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / name).exists() for name in ("late", "0.alive", "1.alive", "2.alive")):
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes), logs(tmp_path)
            time.sleep(0.02)
        processes[1].send_signal(signal.SIGKILL)
        killed = time.time()
        assert ended(processes, 60) == [0, -signal.SIGKILL, 0], logs(tmp_path)
    finally:
        ended(processes, 0)
    seconds, late = (tmp_path / "late").read_text().split(" ", 1)
    assert 1.4 < float(seconds) < 1.5 + 30, "the wait is bounded by the timeout"
    assert "Ring, rank 0 of 2" in late and "within 1.5 s" in late
    for rank in (0, 2):
        moment, said = (tmp_path / f"{rank}.said").read_text().split(" ", 1)
        assert float(moment) - killed < 3 + 30, "the others hear of it within the timeout"
        assert f"Ring, rank {rank} of 3" in said and "A process died, raised, or never made this call" in said


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 16, 37])
def test_dealing_takes_apart_and_puts_together(n: int, world: int) -> None:
    x = torch.arange(2.0 * n * 3).reshape(2, n, 3)
    shards = [distributed.deal(x, rank, world) for rank in range(world)]
    assert torch.equal(distributed.undeal(shards), x)
    assert torch.equal(distributed.undeal([distributed.deal(x.mT, r, world, -1) for r in range(world)], -1), x.mT)
    places = [distributed.positions(n, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(n))
    assert all(torch.equal(place, place.sort().values) for place in places)
    assert all(torch.equal(shard, x[:, place]) for shard, place in zip(shards, places, strict=True))


def test_dealing_gives_equal_work() -> None:
    pairs = [sum(int(i) + 1 for i in distributed.positions(64, rank, 4)) for rank in range(4)]
    assert pairs == [64 * 65 // 2 // 4] * 4
    assert distributed.positions(16, 1, 2).tolist() == list(range(4, 12))
    assert distributed.positions(16, 0, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_dealing_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="rank=2, world=2"):
        distributed.positions(8, 2, 2)
    with pytest.raises(ValueError, match="tokens=-1"):
        distributed.positions(-1, 0, 2)
    with pytest.raises(ValueError, match=r"\[4, 5\] tokens, where deal\(\) gives \[5, 4\]"):
        distributed.undeal([torch.ones(4, 1), torch.ones(5, 1)])
    with pytest.raises(ValueError, match="got none"):
        distributed.undeal([])


def tables() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for world in (2, 3):
        shards = [distributed.positions(11, rank, world) for rank in range(world)]
        yield from ((a, b) for a in shards for b in shards)
    for n, m, shift in ((5, 5, 0), (5, 9, 4), (9, 5, -4), (4, 4, 2), (4, 4, -2), (4, 4, 9), (4, 4, -9), (0, 3, 0)):
        yield torch.arange(n) + shift, torch.arange(m)
    for _ in range(40):
        a, b = (torch.randint(0, 12, (n,), generator=generator) for n in (6, 7))
        yield a, b
        yield a.unique(), b.unique()
        yield a.unique() * 1.5, b.unique() + 0.0
    yield torch.arange(0, 60, 3), torch.arange(0, 60, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_pieces_are_the_visible_pairs_each_once(causal: bool) -> None:
    for query, key in tables():
        met = torch.zeros(len(query), len(key), dtype=torch.int)
        for piece in pieces(query, key, causal):
            rows, keys = met[piece.rows, piece.keys].shape
            assert rows and keys and (not piece.causal or rows == keys)
            part = torch.ones(rows, keys, dtype=torch.int)
            if piece.causal:
                part = part.tril()
            if piece.mask is not None:
                part = part * piece.mask
            met[piece.rows, piece.keys] += part
            assert piece.pairs == (part.sum() if piece.mask is None else part.numel())
        visible = (key <= query.unsqueeze(-1)) if causal else torch.ones_like(met, dtype=torch.bool)
        assert torch.equal(met, visible.int())


def test_dealt_and_contiguous_shards_give_few_pieces_without_a_table() -> None:
    for world in (2, 4):
        shards = [distributed.positions(64, rank, world) for rank in range(world)]
        for query in shards:
            counts = []
            for key in shards:
                found = pieces(query, key, True)
                assert len(found) == 1 and found[0].mask is None and found[0].causal == (query is key)
                counts.append(found[0].pairs)
            # Beside its own, each block costs every rank the same.
            own = len(query)
            assert sorted(counts) == sorted([own * (own + 1) // 2, *[own * own // 2] * (world - 1)])


def test_empty_parts_have_no_share() -> None:
    none = float("-inf")
    out, logsumexp = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), none)
    absorb(out, logsumexp, slice(0, 3), torch.ones(1, 1, 3, 2), torch.tensor([[[none, 0.0, none]]]))
    assert out[0, 0].tolist() == [[0, 0], [1, 1], [0, 0]] and logsumexp[0, 0].tolist() == [none, 0, none]
    absorb(out, logsumexp, slice(1, 3), torch.full((1, 1, 2, 2), 5.0), torch.tensor([[[0.0, none]]]))
    assert out[0, 0].tolist() == [[0, 0], [3, 3], [0, 0]]
    assert_close(
        logsumexp[0, 0], torch.tensor([none, 2.0, none]).where(torch.tensor([1, 0, 1]) > 0, torch.tensor(2.0).log())
    )


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "kernel": ({"kernel": mk.Laplacian()}, "neither a DotKernel nor a FeatureKernel"),
    "ALiBi, two-sided": ({"kernel": mk.ScaledDot() + mk.ALiBi(2)}, "neither a DotKernel"),
    "normalizer": ({"normalizer": mk.Sparsemax()}, "Sparsemax is not a softmax"),
    "score of features": ({"kernel": mk.EluFeatures(), "normalizer": mk.Softmax(2.0)}, "needs a score"),
    "mask": ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "shards may have different lengths"),
    "window": ({"window": 2}, "needs its neighbours"),
    "dropout": ({"dropout": 0.1}, "dropout"),
    "positions": ({"query_position": torch.arange(10).reshape(2, 5)}, "the same for every batch entry"),
    "group": ({}, "torch.distributed is not initialised: start with torchrun"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_it_cannot_do_is_refused_with_the_reason(what: str) -> None:
    more, reason = REFUSALS[what]
    x = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match=reason):
        mk.attend(x, x, x, engine=mk.Ring(), **more)


def test_features_in_causal_order_need_a_query_for_each_key() -> None:
    x = torch.randn(2, 5, 4)
    problem = build_problem(
        x[:, :3], x, x, mk.EluFeatures(), mask=None, causal=True, window=None, normalizer=None,
        query_position=None, key_position=None,
    )  # fmt: skip
    assert "as many queries as keys" in str(mk.Ring().refuse(problem))


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), True, "10"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"Ring\(timeout="):
        mk.Ring(timeout=timeout)
