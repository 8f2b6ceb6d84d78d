"""What somebody found who tried to break the library from its docstrings alone: each find, and its whole kind."""

import numpy as np
import pytest
import torch

import matchkernel as mk
from matchkernel.engines import _torch_private

Q, K, V = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))


class Returns(mk.MatchKernel):
    """A kernel whose match returns what a function makes of the dot product."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def match(self, q, k):
        return self.make(q @ k.mT)


@pytest.mark.parametrize("make", [lambda s: 0.0, lambda s: None, lambda s: (s, s)])
def test_a_match_that_returns_no_tensor_is_named(make) -> None:
    with pytest.raises(TypeError, match=r"Returns.match returned \w+, expected a tensor of scores"):
        mk.attend(Q, K, V, Returns(make))


@pytest.mark.parametrize("make", [lambda s: s > 0, lambda s: s.long(), lambda s: s.to(torch.complex64)])
def test_scores_that_are_not_floating_point_are_named(make) -> None:
    with pytest.raises(TypeError, match=r"Returns.match returned scores of torch\.\w+, expected floating point"):
        mk.scores(Q, K, Returns(make))


@pytest.mark.parametrize(
    "make", [lambda s: s[None], lambda s: s[..., :-1], lambda s: s.sum(-1), lambda s: s[:1].repeat(3, 1, 1, 1)]
)
def test_scores_of_another_shape_are_named(make) -> None:
    with pytest.raises(ValueError, match=r"Returns.match returned shape \(.*\), expected \(2, 4, 5, 5\)"):
        mk.attend(Q, K, V, Returns(make))


def test_scores_and_weights_have_the_inputs_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q, k = Q.to(dtype), K.to(dtype)
        wide = Returns(torch.Tensor.double)
        assert mk.scores(q, k, wide).dtype == mk.weights(q, k, wide).dtype == dtype
        assert (
            torch.equal(mk.scores(q, k, mk.Dot()), (q.double() @ k.double().mT).to(q.dtype)) or dtype == torch.float32
        )


def test_an_encoder_may_not_add_dimensions() -> None:
    class Wider(mk.DotKernel):
        def encode_query(self, q, position):
            return q[None]

    with pytest.raises(ValueError, match=r"q has shape \(2, 4, 5, 8\): Wider\(\) encodes it as \(1, 2, 4, 5, 8\)"):
        mk.attend(Q, K, V, Wider())


@pytest.mark.parametrize("name", ["query_position", "key_position"])
def test_positions_must_be_numbers(name) -> None:
    position = torch.arange(5.0)
    position[2] = float("nan")
    with pytest.raises(ValueError, match=rf"{name} of shape \(5,\) holds NaN"):
        mk.attend(Q, K, V, causal=True, **{name: position})
    with pytest.raises(TypeError, match=rf"{name}: expected a tensor, got list"):
        mk.attend(Q, K, V, causal=True, **{name: [0, 1, 2, 3, 4]})


@pytest.mark.parametrize("mask", [[[True] * 5] * 5, np.ones((5, 5), dtype=bool)])
def test_a_mask_that_is_no_tensor_is_named(mask) -> None:
    with pytest.raises(TypeError, match=r"mask: expected a tensor, got (list|ndarray)"):
        mk.attend(Q, K, V, mask=mask)


def test_flags_and_numbers_are_what_they_say() -> None:
    with pytest.raises(TypeError, match="causal: expected True or False, got 1"):
        mk.attend(Q, K, V, causal=1)
    for dropout in ("a", True, 1.0, -0.1):
        with pytest.raises(ValueError, match="dropout="):
            mk.attend(Q, K, V, dropout=dropout)
    assert torch.equal(mk.attend(Q, K, V, window=np.int64(2)), mk.attend(Q, K, V, window=2))


def test_kernels_subtract() -> None:
    difference = mk.Dot() - 0.5 * mk.Cosine()
    torch.testing.assert_close(
        mk.scores(Q, K, difference), mk.scores(Q, K, mk.Dot()) - 0.5 * mk.scores(Q, K, mk.Cosine())
    )
    torch.testing.assert_close(mk.scores(Q, K, -mk.Dot()), -(Q @ K.mT))


def test_explain_says_when_the_fused_engine_holds_a_table() -> None:
    n = 512
    q, k, v = torch.zeros(3, 1, 1, n, 8)
    plain = [{}, {"causal": True}, {"mask": torch.ones(n, dtype=torch.bool)}]
    tables = [
        {"window": 16, "engine": "fused"},
        {"causal": True, "query_position": torch.arange(n)},
        {"mask": torch.zeros(n, n)},
    ]
    for setting in plain:
        told = mk.explain(q, k, v, **setting)
        assert "n × m mask" not in told.reason and told.peak_bytes < n * n
    for setting in tables:
        told = mk.explain(q, k, v, **setting)
        assert "through an n × m mask" in told.reason and told.peak_bytes >= 4 * n * n
    assert _torch_private.available(q.device)


@pytest.mark.parametrize("kernel", [mk.PolynomialFeatures(2), mk.PolynomialFeatures(3), mk.CosFeatures(9)])
def test_a_sink_far_above_every_weight_leaves_finite_gradients(kernel) -> None:
    """e^200 is no float32, and its share of a row's gradient is 0 and not 0 · ∞."""
    logit = torch.nn.Parameter(torch.tensor(200.0))
    q = Q.clone().requires_grad_()
    out = mk.attend(q, K, V, kernel, normalizer=mk.SinkSoftmax(logit))
    gradients = torch.autograd.grad(out.sum(), (q, logit))
    assert out.abs().max() < 1e-30 and all(gradient.isfinite().all() for gradient in gradients)
