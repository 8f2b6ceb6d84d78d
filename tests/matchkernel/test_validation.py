"""What does not fit is refused, and the error names the argument, its shape or type, and what was expected."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import inputs

Tensor = torch.Tensor


def _call(**change: Any) -> dict[str, Any]:
    q, k, v = inputs(2, 3)  # q (2, 3, 5, 4), k (2, 3, 7, 4), v (2, 3, 7, 3)
    return {"q": q, "k": k, "v": v, **change}


def _zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    ({"k": None}, TypeError, "k: expected a tensor, got NoneType"),
    ({"v": 3}, TypeError, "v: expected a tensor, got int"),
    ({"q": _zeros(2, 3, 5, 4, dtype=torch.int64)}, TypeError, r"q has dtype torch.int64: expected float16, bfloat16"),
    ({"v": _zeros(2, 3, 7, 3, dtype=torch.complex64)}, TypeError, r"v has dtype torch.complex64: expected float16"),
    ({"k": _zeros(4)}, ValueError, r"k has shape \(4,\): expected \(…, tokens, width\)"),
    ({"q": _zeros(2, 3, 5, 4, dtype=torch.float32)}, TypeError, "share one dtype, got torch.float32, torch.float64"),
    ({"v": torch.zeros(2, 3, 7, 3, dtype=torch.float64, device="meta")}, ValueError, "got cpu, cpu and meta"),
    ({"v": _zeros(2, 3, 6, 3)}, ValueError, r"k has shape \(2, 3, 7, 4\) and v \(2, 3, 6, 3\): expected as many"),
    ({"v": _zeros(2, 5, 7, 3)}, ValueError, r"k has shape \(2, 3, 7, 4\) and v \(2, 5, 7, 3\).*do not broadcast"),
    ({"q": _zeros(2, 4, 5, 4)}, ValueError, r"q has shape \(2, 4, 5, 4\) and k \(2, 3, 7, 4\).*multiple of k's heads"),
    ({"q": _zeros(5, 6, 5, 4)}, ValueError, r"q has shape \(5, 6, 5, 4\) and k \(2, 3, 7, 4\): leading dimensions"),
    ({"kernel": "dot"}, TypeError, "kernel: expected a MatchKernel, got 'dot'$"),
    ({"kernel": mk.Dot}, TypeError, "kernel: expected a MatchKernel, got <class.*it is a class, so add parentheses"),
    ({"kernel": mk.Softmax()}, TypeError, r"kernel: expected a MatchKernel, got Softmax\(\)"),
    ({"normalizer": mk.Softmax}, TypeError, "normalizer: expected a Normalizer.*it is a class, so add parentheses"),
    ({"normalizer": 1}, TypeError, "normalizer: expected a Normalizer, got 1$"),
    ({"kernel": mk.Bilinear(5)}, ValueError, r"q has shape .*4\), but this Bilinear expects a last dimension of 5"),
    ({"kernel": mk.Bilinear(4, 5)}, ValueError, r"k has shape .*4\), but this Bilinear expects a last dimension of 5"),
    ({"dropout": 1.0}, ValueError, "dropout=1.0: expected a probability from 0 up to, not including, 1"),
    ({"dropout": -0.1}, ValueError, "dropout=-0.1: expected a probability"),
    ({"mask": _zeros(5, 7, dtype=torch.int64)}, TypeError, r"mask has dtype torch.int64: expected bool.*mask.bool\(\)"),
    ({"mask": _zeros(5, 6)}, ValueError, r"mask has shape \(5, 6\), which does not broadcast.* \(2, 3, 5, 7\)"),
    ({"mask": _zeros(1, 2, 3, 5, 7)}, ValueError, r"mask has shape \(1, 2, 3, 5, 7\), which does not broadcast"),
    ({"mask": _zeros(2, 7, dtype=torch.bool)}, ValueError, r"mask has shape \(2, 7\)"),
    ({"window": 0}, ValueError, "window=0: expected at least 1"),
    ({"window": -1}, ValueError, "window=-1: expected at least 1"),
    ({"window": True}, TypeError, "window=True: expected an integer or a pair"),
    ({"window": 2.0}, TypeError, "window=2.0: expected an integer or a pair"),
    ({"window": (1, 2, 3)}, TypeError, r"window=\(1, 2, 3\): expected an integer or a pair"),
    ({"window": (1, -2)}, ValueError, r"window=\(1, -2\): each side must be an integer of at least −1, or None"),
    ({"window": (1.5, 0)}, ValueError, r"window=\(1.5, 0\): each side"),
    ({"window": (True, 0)}, ValueError, r"window=\(True, 0\): each side"),
    ({"query_position": torch.arange(4)}, ValueError, r"query_position has shape \(4,\), expected \(2, 3, 5\)"),
    ({"key_position": torch.arange(5)}, ValueError, r"key_position has shape \(5,\), expected \(2, 3, 7\)"),
    ({"key_position": torch.tensor(1)}, ValueError, r"key_position has shape \(\), expected \(2, 3, 7\)"),
    ({"query_position": _zeros(4, 3, 5)}, ValueError, r"query_position has shape \(4, 3, 5\), expected \(2, 3, 5\)"),
    ({"query_position": _zeros(5, dtype=torch.bool)}, TypeError, "query_position has dtype torch.bool: expected"),
    ({"key_position": _zeros(7, dtype=torch.complex64)}, TypeError, "key_position has dtype torch.complex64"),
    (
        {"engine": "flash"},
        ValueError,
        "engine='flash': expected \"auto\" or one of 'linear', 'sparse', 'fused', 'tiled', 'reference'",
    ),
    ({"kernel": mk.Cosine(torch.ones(4))}, ValueError, r"one entry per head has shape \(4,\).*4 heads at dimension -3"),
    ({"normalizer": mk.SinkSoftmax(torch.ones(2))}, ValueError, r"one entry per head has shape \(2,\).*2 heads"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_attend_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mk.attend(**_call(**change))


@pytest.mark.parametrize("call", [mk.weights, mk.scores])
def test_tables_refuse_the_same(call: Any) -> None:
    q, k, _ = inputs()
    with pytest.raises(TypeError, match=r"mask has dtype torch\.int64"):
        call(q, k, mask=torch.ones(5, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"k has shape \(7, 4\).*expects a last dimension of 3"):
        call(q, k, mk.Bilinear(4, 3))


@pytest.mark.parametrize("engine", ["auto", "reference", "fused"])
@pytest.mark.parametrize("kernel", [mk.ScaledDot(), mk.Dot() + mk.Cosine(), mk.Cosine()], ids=repr)
def test_widths_that_differ_are_named(kernel: mk.MatchKernel, engine: str) -> None:
    q, _, v = inputs()
    k = _zeros(7, 6)
    with pytest.raises(ValueError, match=r"q has shape \(5, 4\).*k.*\(7, 6\)"):
        mk.attend(q, k, v, kernel, engine=engine)


def test_a_kernel_that_returns_another_shape_is_told() -> None:
    class Column(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            return q.sum(-1, keepdim=True)

    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"Column.match returned shape \(5, 1\), expected \(5, 7\)"):
        mk.attend(q, k, v, Column())


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_an_encoder_that_loses_a_token_is_told(engine: str) -> None:
    class Short(mk.DotKernel):
        def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
            return k[..., 1:, :]

    q, k, v = inputs(2)
    with pytest.raises(
        ValueError, match=r"k has shape \(2, 7, 4\): Short\(\) encodes it as \(2, 6, 4\), expected .*7, width"
    ):
        mk.attend(q, k, v, Short(), engine=engine)


def test_encodings_that_do_not_meet_are_told() -> None:
    class Wide(mk.DotKernel):
        def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
            return q[..., :2].expand(4, *q.shape[:-1], 2)

    q, k, v = inputs(3)
    with pytest.raises(ValueError, match=r"encodings of shape .* do not broadcast"):
        mk.attend(q, k, v, Wide() + _Two())


class _Two(mk.DotKernel):
    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        return q[..., :2].expand(2, *q.shape[:-1], 2)
