"""Weights had tile by tile are those of the whole row, forward and backward, whatever the tiles."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw

Tensor = torch.Tensor
SOFTMAX = [mk.Softmax(), mk.SinkSoftmax(0.3), mk.ScalableSoftmax()]
ONLINE = [*SOFTMAX, mk.Sigmoid()]
TILINGS = [(12,), (1,) * 12, (5, 7), (1, 2, 9), (4, 4, 4)]
online = pytest.mark.parametrize("normalizer", ONLINE, ids=repr)
tilings = pytest.mark.parametrize("tiles", TILINGS, ids=str)


def _table(dtype: torch.dtype = torch.float64, size: float = 3.0) -> Tensor:
    """Scores (2, 7, 12): row 2 sees nothing, row 1 late keys, row 3 early ones, and nobody sees column 4."""
    scores = draw(2, 7, 12, seed=4, dtype=dtype) * size
    scores[draw(2, 7, 12, seed=5) > 0.8] = -math.inf
    scores[:, 2] = scores[..., 4] = -math.inf
    scores[:, 1, :8] = scores[:, 3, 3:] = -math.inf
    return scores


def _slices(tiles: tuple[int, ...]) -> Iterator[slice]:
    stop = 0
    for width in tiles:
        yield slice(stop, stop := stop + width)


def _stream(normalizer: mk.Normalizer, scores: Tensor, v: Tensor, tiles: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    state = normalizer.start(torch.full(scores.shape[:-1], math.nan, dtype=scores.dtype))
    accumulated = torch.zeros(*scores.shape[:-1], v.shape[-1], dtype=scores.dtype)
    for at in _slices(tiles):
        state, weights, carry = normalizer.absorb(state, scores[..., at])
        assert bool((weights[scores[..., at] == -math.inf] == 0).all())
        if carry is not None:
            accumulated = carry.unsqueeze(-1) * accumulated
        accumulated = accumulated + weights @ v[..., at, :]
    return normalizer.close(state, accumulated)


def _plain(normalizer: mk.Normalizer, scores: Tensor) -> Tensor:
    """The weights without `remainder`, which the engine applies to the finished row."""
    return (mk.Softmax() if normalizer in SOFTMAX else normalizer).weigh(scores)


@online
@tilings
@pytest.mark.parametrize("size", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_are_the_whole_row(
    normalizer: mk.Normalizer, tiles: tuple[int, ...], size: float, dtype: torch.dtype
) -> None:
    scores, v = _table(dtype, size), draw(2, 12, 3, seed=6, dtype=dtype)
    out, statistic = _stream(normalizer, scores, v, tiles)
    weights = _plain(normalizer, scores)
    assert out.dtype == statistic.dtype == dtype and statistic.shape == (2, 7)
    assert_close(out, weights @ v)
    assert bool(statistic.isfinite().all())
    assert torch.equal(out[:, 2], torch.zeros(2, 3, dtype=dtype))
    # Scores of 1e4 are known to four digits behind the point in float32, and so are logarithms of weights.
    tolerance = 1e-2 if size == 1e4 and dtype == torch.float32 else 1e-5
    again = torch.cat([normalizer.again(scores[..., at], statistic) for at in _slices(tiles)], -1)
    assert_close(again, weights, rtol=tolerance, atol=1e-6)
    assert torch.equal(again == 0, weights == 0)


@pytest.mark.parametrize("normalizer", SOFTMAX, ids=repr)
@tilings
def test_the_statistic_is_the_log_sum_exp(normalizer: mk.Normalizer, tiles: tuple[int, ...]) -> None:
    scores = _table()
    _, statistic = _stream(normalizer, scores, draw(2, 12, 3), tiles)
    truth = scores.logsumexp(-1)
    rows = [0, 1, 3, 4, 5, 6]
    assert_close(statistic[:, rows], truth[:, rows])
    remainder, whole = normalizer.remainder(statistic), normalizer.weigh(scores).sum(-1)
    assert_close((torch.ones(2, 7, dtype=torch.float64) if remainder is None else remainder)[:, rows], whole[:, rows])


@online
def test_score_gradient_is_autograds(normalizer: mk.Normalizer) -> None:
    """Of a loss that reads both the output and the statistic."""
    scores, v = _table().requires_grad_(), draw(2, 12, 3, seed=6)
    grad_out, grad_statistic = draw(2, 7, 3, seed=7), draw(2, 7, seed=8) * (normalizer in SOFTMAX)
    grad_statistic[:, 2] = 0.0
    weights = _plain(normalizer, scores)
    out = weights @ v
    logsumexp = torch.where(torch.arange(7)[:, None] == 2, 0.0, scores).logsumexp(-1)
    truth = torch.autograd.grad([out, logsumexp], scores, [grad_out, grad_statistic])[0]
    row = ((grad_out * out).sum(-1) - grad_statistic).unsqueeze(-1).detach()
    ours = normalizer.score_gradient(weights.detach(), grad_out @ v.mT, row)
    assert_close(ours, truth)
    if normalizer in SOFTMAX:
        assert float((ours - normalizer.score_gradient(weights.detach(), grad_out @ v.mT, row + 1)).abs().max()) > 0.1


@online
def test_no_warning_of_a_row_that_never_ends(normalizer: mk.Normalizer) -> None:
    """Five tiles in which nothing may be attended to, before one key that may."""
    scores = torch.full((1, 11), -math.inf, dtype=torch.float64)
    scores[0, 10] = -700.0
    v = draw(11, 2)
    out, _ = _stream(normalizer, scores, v, (2, 2, 2, 2, 2, 1))
    assert_close(out[0], v[10] if normalizer in SOFTMAX else v[10] * math.exp(-700.0))


@online
def test_one_step_compiles_without_a_break(normalizer: mk.Normalizer) -> None:
    def step(rows: Tensor, first: Tensor, second: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state, weights, _ = normalizer.absorb(normalizer.start(rows), first)
        accumulated = weights @ v
        state, weights, carry = normalizer.absorb(state, second)
        accumulated = weights @ v + (accumulated if carry is None else accumulated * carry.unsqueeze(-1))
        out, statistic = normalizer.close(state, accumulated)
        return out, normalizer.score_gradient(normalizer.again(first, statistic), second, rows.unsqueeze(-1))

    scores = _table()
    call = (scores.new_ones(2, 7), scores[..., :6], scores[..., 6:].nan_to_num(neginf=-9.0), draw(2, 6, 3))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert_close(compiled(*call), step(*call))


def test_who_needs_whole_rows() -> None:
    assert all(normalizer.online for normalizer in ONLINE)
    for normalizer in (mk.Sparsemax(), mk.Entmax()):
        assert not normalizer.online
        with pytest.raises(NotImplementedError, match=f"{type(normalizer).__name__} needs whole rows of scores"):
            normalizer.absorb((), _table())
