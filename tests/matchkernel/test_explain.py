"""Which engine, why, and at what cost: counted by hand here, and never another engine than was asked for."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import Fused, Reference

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor


class Cauchy(mk.MatchKernel):
    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.log1p(mk.squared_distance(q, k))


class Counted(Cauchy):
    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        return 10


class Half(mk.Normalizer):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) / 2


@pytest.mark.parametrize(
    ("setting", "engine", "reason"),
    [
        ({}, "fused", "inner product of encodings"),
        ({"kernel": mk.Cosine(0.3) + mk.Dot()}, "fused", "inner product"),
        ({"kernel": mk.Bilinear(4)}, "fused", r"Bilinear\(4, 4\)"),
        ({"normalizer": mk.SinkSoftmax()}, "fused", "inner product"),
        ({"normalizer": mk.ScalableSoftmax(), "causal": True, "window": 2}, "fused", "inner product"),
        ({"mask": torch.ones(7, dtype=torch.bool)}, "fused", "inner product"),
        ({"mask": torch.ones(7)}, "fused", "inner product"),
        ({"kernel": Cauchy()}, "reference", r"not fused \(Cauchy\(\) is not a DotKernel"),
        ({"normalizer": Half()}, "reference", r"not fused \(Half is not a softmax"),
        ({"dropout": 0.1}, "reference", r"not fused \(dropout leaves torch's fused kernel"),
        ({"mask": torch.ones(7, requires_grad=True)}, "reference", r"not fused \(a mask that needs a gradient"),
    ],
)
def test_what_auto_chooses_and_why(setting: dict[str, Any], engine: str, reason: str) -> None:
    q, k, v = inputs(2, 3)
    told = mk.explain(q, k, v, **setting)
    assert told.engine == engine and told.exact and not told.compiled
    assert re.search(reason, told.reason), told.reason
    if engine == "reference":
        refusal = "engine='fused' cannot run this call: " + reason.removeprefix(r"not fused \(")
        for call in (mk.attend, mk.explain):
            with pytest.raises(ValueError, match=refusal):
                call(q, k, v, engine="fused", **setting)


@pytest.mark.parametrize("empty", ["n", "m", "d", "width"])
def test_nothing_to_compute_is_no_work_for_a_fused_kernel(empty: str) -> None:
    q, k, v = inputs(2, **{empty: 0})
    assert "there is nothing to compute" in mk.explain(q, k, v).reason
    out = mk.attend(q, k, v)
    assert out.shape == (2, q.shape[-2], v.shape[-1])
    # With no coordinate to compare every score is 0, and every query takes the mean.
    assert_close(out, v.mean(-2, keepdim=True).expand_as(out) if empty == "d" else torch.zeros_like(out))


@pytest.mark.parametrize("setting", [{}, {"kernel": Cauchy()}, {"dropout": 0.2}, {"normalizer": mk.SinkSoftmax()}])
@pytest.mark.parametrize("name", ["auto", "reference", "fused"])
def test_what_is_told_is_what_runs(setting: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for engine in (Fused, Reference):
        monkeypatch.setattr(engine, "run", _noted(engine.run, engine.name, ran))
    q, k, v = inputs(2, 3)
    try:
        told = mk.explain(q, k, v, engine=name, **setting)
    except ValueError as error:
        with pytest.raises(ValueError, match="cannot run this call"):
            mk.attend(q, k, v, engine=name, **setting)
        assert name == "fused" and "fused" in str(error) and ran == []
        return
    mk.attend(q, k, v, engine=name, **setting)
    assert ran == [told.engine] and name in ("auto", told.engine)
    assert told.reason.startswith("asked for by name") == (name != "auto")


def _noted(run: Any, name: str, ran: list[str]) -> Any:
    def noted(self: Any, problem: Any) -> Tensor:
        ran.append(name)
        return run(self, problem)

    return noted


def test_an_error_inside_the_fused_engine_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the operator failed")

    monkeypatch.setattr("matchkernel.engines._torch_private.forward", broken)
    q, k, v = inputs(2, 3)
    for name in ("auto", "fused"):
        with pytest.raises(RuntimeError, match="the operator failed"):
            mk.attend(q, k, v, engine=name)


def test_operations_counted_by_hand() -> None:
    q, k, v = inputs(2, 3, n=5, m=7, d=4, width=3)
    # 6 tables of 5 × 7 pairs; a pair costs 4 multiply-adds for the score and 3 for the value.
    assert mk.explain(q, k, v).flops == 6 * 5 * 7 * 2 * (4 + 3)
    # Causal, 7 keys: rows of 3, 4, 5, 6 and 7.
    assert mk.explain(q, k, v, causal=True).flops == 6 * (3 + 4 + 5 + 6 + 7) * 2 * (4 + 3)
    assert mk.explain(q, k, v, causal=True, engine="reference").flops == 6 * 5 * 7 * 2 * (4 + 3)
    square = inputs(n=6, m=6, d=4, width=3)
    assert mk.explain(*square, causal=True).flops == (1 + 2 + 3 + 4 + 5 + 6) * 2 * (4 + 3)
    tall = inputs(n=5, m=2, d=4, width=3)
    assert mk.explain(*tall, causal=True).flops == (1 + 2) * 2 * (4 + 3)
    # A window is a dense mask to torch's kernel: it computes every pair.
    assert mk.explain(q, k, v, causal=True, window=2).flops == 6 * 5 * 7 * 2 * (4 + 3)
    assert mk.explain(q, k, v, mk.Bilinear(4, rank=2)).flops == 6 * 5 * 7 * 2 * (2 + 3)
    assert mk.explain(q, k, v, mk.Dot() + mk.Cosine()).flops == 6 * 5 * 7 * 2 * (8 + 3)
    assert mk.explain(q, k, v, 2 * mk.Dot()).flops == 6 * 5 * 7 * 2 * (4 + 3)
    # A factor on a kernel that is no dot product is one more multiplication for each pair.
    assert mk.explain(q, k, v, Counted()).flops == 6 * 5 * 7 * (10 + 2 * 3)
    assert mk.explain(q, k, v, 2 * Counted()).flops == 6 * 5 * 7 * (11 + 2 * 3)
    assert mk.explain(q, k, v, Counted() + mk.Dot()).flops == 6 * 5 * 7 * (10 + 8 + 2 * 3)
    assert mk.explain(q, k, v, Cauchy()).flops is None
    assert mk.explain(q, k, v, Cauchy() + mk.Dot()).flops is None


def test_grouped_heads_are_counted_once_per_query_head() -> None:
    q, k, v = draw(2, 6, 5, 4), draw(2, 2, 5, 4), draw(2, 2, 5, 3)
    told = mk.explain(q, k, v)
    assert told.flops == 12 * 25 * 2 * (4 + 3)
    assert told.bytes == 8 * (2 * 6 * 5 * 4 + 2 * 2 * 5 * 4 + 2 * 2 * 5 * 3 + 2 * 6 * 5 * 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_counted_by_hand(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, n=5, m=7, d=4, width=3, dtype=dtype)
    size = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}[dtype]
    told = mk.explain(q, k, v)
    assert told.bytes == size * 6 * (5 * 4 + 7 * 4 + 7 * 3 + 5 * 3)
    dense = mk.explain(q, k, v, engine="reference")
    table = 6 * 5 * 7 * max(size, 4)
    assert dense.peak_bytes == 3 * table and dense.bytes == told.bytes + 4 * table


def test_the_fused_engine_holds_no_table() -> None:
    held = [mk.explain(*inputs(n=n, m=n), causal=True).peak_bytes for n in (64, 128, 256)]
    assert held[2] - held[1] == 2 * (held[1] - held[0])
    q, k, v = inputs(n=256, m=256)
    window = mk.explain(q, k, v, causal=True, window=4)
    assert window.peak_bytes >= 256 * 256 * 8, "a window is a dense mask here, and must be told"


def test_an_explanation_reads_as_a_sentence() -> None:
    q, k, v = inputs(2, 3)
    text = str(mk.explain(q, k, v))
    assert text.startswith("fused: ScaledDot() is an inner product of encodings")
    assert "exact, 2.94 kFLOP, 3.94 KiB of traffic" in text and "held beside the inputs" in text
    assert "uncounted operations" in str(mk.explain(q, k, v, Cauchy()))


def test_explaining_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr("matchkernel.engines._torch_private.forward", never)
    monkeypatch.setattr(Cauchy, "match", never)
    q, k, v = inputs(2, 3)
    for setting in ({}, {"kernel": Cauchy()}, {"causal": True}, {"normalizer": mk.SinkSoftmax()}):
        mk.explain(q, k, v, **setting)
