"""Kernels of a distance, against scikit-learn, gpytorch, closed forms and loops over pairs."""

import math
import sys
from pathlib import Path

import gpytorch
import pytest
import torch
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from torch import nn
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import _torch_private
from matchkernel.kernels.base import as_columns
from matchkernel.kernels.pairs import anchored

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor
ENGINES = ["reference", "fused"]
HALF = [torch.bfloat16, torch.float16]


def squares(q: Tensor, k: Tensor) -> Tensor:
    """|q − k|² in float64, from differences."""
    return (q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).square().sum(-1)


def absolutes(q: Tensor, k: Tensor) -> Tensor:
    return (q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).abs().sum(-1)


def gaussian_attention(q: Tensor, k: Tensor, v: Tensor, bandwidth: float | Tensor) -> Tensor:
    return (-squares(q, k) / (2 * bandwidth**2)).softmax(-1) @ v.double()


# Values.


@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 3.0])
def test_gaussian_and_laplacian_are_scikit_learns(bandwidth: float) -> None:
    q, k, _ = inputs(n=6, m=9, d=5)
    rbf = torch.from_numpy(rbf_kernel(q, k, gamma=1 / (2 * bandwidth**2)))
    laplacian = torch.from_numpy(laplacian_kernel(q, k, gamma=1 / bandwidth))
    assert_close(mk.Gaussian(bandwidth)(q, k), rbf.log())
    assert_close(mk.Laplacian(bandwidth)(q, k), laplacian.log())


@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_gaussian_and_rational_quadratic_are_gpytorchs(bandwidth: float, alpha: float) -> None:
    q, k, _ = inputs(n=6, m=9, d=5)
    rbf, rational = gpytorch.kernels.RBFKernel().double(), gpytorch.kernels.RQKernel().double()
    rbf.lengthscale = rational.lengthscale = bandwidth
    rational.alpha = alpha
    with torch.no_grad():
        assert_close(mk.Gaussian(bandwidth)(q, k), rbf(q, k).to_dense().log())
        assert_close(mk.RationalQuadratic(alpha, bandwidth)(q, k), rational(q, k).to_dense().log())


def test_three_points_by_hand() -> None:
    q, k = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 6.0], [1.0, 2.0], [1.0, 0.0]])
    assert_close(mk.Gaussian()(q, k), torch.tensor([[-12.5, 0.0, -2.0]]))
    assert_close(mk.Gaussian(5.0)(q, k), torch.tensor([[-0.5, 0.0, -0.08]]))
    assert_close(mk.Laplacian()(q, k), torch.tensor([[-7.0, 0.0, -2.0]]))
    assert_close(mk.Laplacian(2.0)(q, k), torch.tensor([[-3.5, 0.0, -1.0]]))
    assert_close(mk.RationalQuadratic()(q, k), -torch.tensor([[13.5, 1.0, 3.0]]).log())
    assert_close(mk.RationalQuadratic(2.0, 5.0)(q, k), -2 * torch.tensor([[1.25, 1.0, 1.04]]).log())


def test_cauchy_is_rational_quadratic_with_alpha_one_and_gaussian_its_limit() -> None:
    q, k, _ = inputs(d=5)
    assert_close(mk.RationalQuadratic(bandwidth=0.5**0.5)(q, k).exp(), 1 / (1 + squares(q, k)))
    assert_close(mk.RationalQuadratic(1e7, 1.3)(q, k), mk.Gaussian(1.3)(q, k), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_gaussian_over_keys_of_one_length_is_a_scaled_dot(engine: str) -> None:
    q, k, v = inputs(2, 3, d=4)
    k = 1.7 * k / k.norm(dim=-1, keepdim=True)
    for bandwidth in (1.0, 2.0):
        ours = mk.attend(q, k, v, mk.Gaussian(bandwidth), engine=engine)
        assert_close(ours, mk.attend(q, k, v, bandwidth**-2 * mk.Dot(), engine=engine))
    assert_close(mk.attend(q, k, v, mk.Gaussian(2**0.5), engine=engine), mk.attend(q, k, v))


def test_operations_of_a_pair() -> None:
    assert mk.Gaussian().flops_per_pair(64, 64) == 130
    assert mk.Laplacian().flops_per_pair(64, 64) == 193
    assert mk.RationalQuadratic().flops_per_pair(64, 64) == 134


def test_what_distances_call_themselves() -> None:
    assert repr(mk.Gaussian(2.0)) == "Gaussian(bandwidth=2)"
    assert repr(mk.Laplacian(torch.ones(3))) == "Laplacian(bandwidth=<per head, 3 heads>)"
    assert repr(0.5 * mk.RationalQuadratic(2.0)) == "0.5 * RationalQuadratic(alpha=2, bandwidth=1)"


@pytest.mark.parametrize("make", [mk.Gaussian, mk.Laplacian, mk.RationalQuadratic])
def test_values_that_no_distance_takes(make: type[mk.MatchKernel]) -> None:
    for wrong in (0.0, -1.0, math.nan, torch.tensor([1.0, -1.0])):
        with pytest.raises(ValueError, match=r"(bandwidth|alpha)=….*above 0"):
            make(wrong)
    with pytest.raises(ValueError, match="so q needs 3 heads at dimension -3"):
        make(torch.ones(3))(*inputs(2)[:2])
    with pytest.raises(ValueError, match=r"RationalQuadratic\(bandwidth=…\)"):
        mk.RationalQuadratic(1.0, 0.0)


# Bandwidths per head and learned, and heads that share keys.


def per_head(engine: str, heads: int, kernel: mk.MatchKernel, score, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`kernel` against `score(h, q_h, k_h)`, one head at a time, keys shared by groups of query heads."""
    ours = mk.attend(q, k, v, kernel, engine=engine)
    for h in range(heads):
        group = h // (heads // k.shape[-3])
        truth = score(h, q[..., h, :, :], k[..., group, :, :]).softmax(-1) @ v[..., group, :, :]
        assert_close(ours[..., h, :, :], truth)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("learned", [False, True])
def test_one_bandwidth_per_head_also_where_heads_share_keys(learned: bool, key_heads: int) -> None:
    q, _, _ = inputs(2, 4)
    _, k, v = inputs(2, key_heads)
    q, k = q + 10, k + 10
    entries = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    other = entries.flip(0)
    size = nn.Parameter(entries) if learned else entries
    for engine in ENGINES:
        per_head(engine, 4, mk.Gaussian(size), lambda h, x, y: -squares(x, y) / 2 / entries[h] ** 2, q, k, v)
    per_head("reference", 4, mk.Laplacian(size), lambda h, x, y: -absolutes(x, y) / entries[h], q, k, v)

    def rational(h: int, x: Tensor, y: Tensor) -> Tensor:
        return -other[h] * (1 + squares(x, y) / 2 / other[h] / entries[h] ** 2).log()

    per_head("reference", 4, mk.RationalQuadratic(other, size), rational, q, k, v)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_learned_temperature_per_head_where_heads_share_keys(engine: str) -> None:
    q, _, _ = inputs(2, 4)
    _, k, v = inputs(2, 2)
    entries = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)

    def cosine(h: int, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cosine_similarity(x.unsqueeze(-2), y.unsqueeze(-3), dim=-1) / entries[h]

    per_head(engine, 4, mk.Cosine(nn.Parameter(entries.clone())), cosine, q, k, v)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bandwidth_learns_what_its_formula_says(engine: str) -> None:
    q, k, v = inputs(2, 2)
    ours, truth = (nn.Parameter(torch.tensor([0.7, 1.9], dtype=torch.float64)) for _ in range(2))
    mk.attend(q, k, v, mk.Gaussian(ours), engine=engine).sin().sum().backward()
    gaussian_attention(q, k, v, truth[:, None, None]).sin().sum().backward()
    assert_close(ours.grad, truth.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_dimensions_in_the_keys_than_in_the_queries(engine: str) -> None:
    """The anchor is one key of each batch, so queries shared by the batch are moved differently in each."""
    q = draw(3, 5, 4, seed=1) + 20
    _, k, v = inputs(2, 3)
    assert_close(
        mk.attend(q, k + 20, v, mk.Gaussian(2.0), engine=engine),
        gaussian_attention(q.expand(2, -1, -1, -1), k + 20, v, 2.0),
    )


# The engine.


@pytest.mark.parametrize("kernel", [mk.Gaussian(2.0), mk.Gaussian(torch.ones(3)), mk.ScaledDot() + 0.3 * mk.Gaussian()])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gaussian_runs_in_torchs_fused_kernel(
    kernel: mk.MatchKernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(2, 3, n=64, m=64, d=16, width=16, dtype=dtype)
    ran: list[int] = []
    call = _torch_private.forward

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest):
        ran.append(_torch_private.chosen_backend(q, k, v, None, False))
        return call(q, k, v, *rest)

    monkeypatch.setattr(_torch_private, "forward", watched)
    assert mk.explain(q, k, v, kernel).engine == "fused"
    mk.attend(q, k, v, kernel)
    assert ran == [1], "torch did not choose its flash kernel"
    assert mk.explain(q, k, v, mk.Laplacian()).engine != "fused"


def test_gaussian_encodes_one_more_coordinate_and_a_half_type_three() -> None:
    for dtype, width in ((torch.float64, 5), (torch.float32, 5), (torch.bfloat16, 7), (torch.float16, 7)):
        q, k, _ = inputs(d=4, dtype=dtype)
        encoded = mk.Gaussian().encode(q, k, torch.arange(5), torch.arange(7), up_to_row_shift=True)
        assert [x.shape[-1] for x in encoded] == [width, width] and {x.dtype for x in encoded} == {dtype}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sink_sees_the_distance_and_not_only_its_differences(engine: str) -> None:
    q, k, v = inputs(2, d=4)
    for kernel, score in (
        (mk.Gaussian(1.5), -squares(q, k) / 4.5),
        (mk.Gaussian(torch.tensor([1.0, 2.0], dtype=torch.float64)), None),
        (-0.5 * mk.Gaussian(2.0) + mk.Dot(), squares(q, k) / 16 + q @ k.mT),
    ):
        if score is None:
            score = -squares(q, k) / torch.tensor([2.0, 8.0])[:, None, None]
        weight = score.exp()
        truth = weight / (1 + weight.sum(-1, keepdim=True)) @ v
        assert_close(mk.attend(q, k, v, kernel, normalizer=mk.SinkSoftmax(), engine=engine), truth)


# Sums and multiples keep the anchor and the digits.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_sums_and_multiples_of_gaussians(engine: str, offset: float) -> None:
    q, k, v = inputs(2, 3, d=16, dtype=torch.float32)
    q, k = q + offset, k + offset
    factor = torch.tensor([0.5, 1.0, 2.0])
    gap = -squares(q, k) / 2
    for kernel, score in (
        (3.0 * mk.Gaussian(2.0), 0.75 * gap),
        (factor * mk.Gaussian(2.0), factor[:, None, None] * gap / 4),
        (
            mk.Gaussian(2.0) + mk.Gaussian(torch.tensor([1.0, 2.0, 4.0])),
            gap / 4 + gap / torch.tensor([1.0, 4.0, 16.0])[:, None, None],
        ),
        (0.1 * (mk.Gaussian(2.0) + 0.5 * mk.Cosine()), 0.1 * (gap / 4 + 0.5 * mk.Cosine()(q.double(), k.double()))),
    ):
        truth = score.softmax(-1) @ v.double()
        assert_close(mk.attend(q, k, v, kernel, engine=engine).double(), truth, rtol=0.0, atol=3e-5)
        assert_close(mk.scores(q, k, kernel).double(), score, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("dtype", HALF)
def test_sums_and_multiples_keep_the_digits_of_a_norm(dtype: torch.dtype) -> None:
    """A factor of 0.3 or 1/9 in a half type would cost a norm of 300 a whole unit of score."""
    q, k, v = inputs(2, 2, n=40, m=50, d=64, width=16, dtype=dtype)
    k = (k * torch.linspace(0.2, 3.0, 50)[:, None]).to(dtype)
    third = torch.tensor([0.3, 0.3])
    dot = q.double() @ k.double().mT
    for kernel, score in (
        (third * mk.Gaussian(3.0), -0.3 * squares(q, k) / 18),
        (mk.Gaussian(torch.full((2,), 5.0)), -squares(q, k) / 50),
        (0.3 * mk.Gaussian(3.0) + 0.01 * mk.Dot(), -0.3 * squares(q, k) / 18 + 0.01 * dot),
    ):
        truth = score.softmax(-1) @ v.double()
        ours = mk.attend(q, k, v, kernel, engine="fused").double()
        assert (ours - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max(), repr(kernel)


def test_fine_coordinates_keep_twice_the_digits_and_their_derivatives() -> None:
    q, k = (draw(6, 2, seed=seed, dtype=torch.float32).mul(1e3).requires_grad_() for seed in (1, 2))
    for dtype in HALF:
        eps = torch.finfo(dtype).eps
        encoded_q, encoded_k = as_columns(q, k, dtype)
        assert encoded_q.shape[-1] == encoded_k.shape[-1] == 6 and encoded_q.dtype == dtype
        product = (encoded_q.double() * encoded_k.double()).sum(-1)
        truth = (q.double() * k.double()).sum(-1)
        assert bool(((product - truth).abs() <= eps**2 * (q * k).abs().sum(-1)).all())
        for ours, exact in zip(
            torch.autograd.grad(product.sum(), (q, k)), torch.autograd.grad(truth.sum(), (q, k)), strict=True
        ):
            assert_close(ours, exact, rtol=2 * eps, atol=0.0)


# Traps.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offset", [0.0, 5.0, 10.0, 100.0, 1e3])
@pytest.mark.parametrize("bandwidth", [2.0, torch.full((3,), 2.0)])
def test_trap_inputs_far_from_the_origin(bandwidth: float | Tensor, offset: float, engine: str) -> None:
    """One column for the norm loses all digits of the distance, unless the first key is the origin."""
    q, k, v = inputs(2, 3, n=40, m=50, d=64, dtype=torch.float32)
    q, k = q + offset, k + offset
    truth = gaussian_attention(q, k, v, 2.0)
    ours = mk.attend(q, k, v, mk.Gaussian(bandwidth), engine=engine).double()
    assert (ours - truth).abs().max() < 1e-5
    assert_close(mk.scores(q, k, mk.Gaussian(bandwidth)).double(), -squares(q, k) / 8, rtol=0.0, atol=1e-4)
    cauchy = mk.attend(q, k, v, mk.RationalQuadratic(1.0, bandwidth)).double()
    assert (
        cauchy - (1 / (1 + squares(q, k) / 8)) @ v.double() / (1 / (1 + squares(q, k) / 8)).sum(-1, keepdim=True)
    ).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0.0, 1.0, 10.0, 100.0])
def test_trap_a_norm_in_one_half_precision_column(offset: float, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 3, n=40, m=50, d=64, width=64, dtype=torch.float64)
    q, k, v = (x.to(dtype) for x in (q + offset, k + offset, v))
    truth = gaussian_attention(q, k, v, 2.0)
    ours = mk.attend(q, k, v, mk.Gaussian(2.0), engine="fused").double()
    column = torch.cat([k, -k.square().sum(-1, keepdim=True) / 2], -1)
    naive = mk.attend(torch.cat([q, torch.ones_like(q[..., :1])], -1), column, v, 0.25 * mk.Dot()).double()
    error = (ours - truth).abs().max()
    assert error <= torch.finfo(dtype).eps * truth.abs().max()
    # NaN where the norm has left float16.
    assert not bool((naive - truth).abs().max() <= 2 * error), "the naive column shows nothing to guard against"


def test_trap_a_norm_beyond_float16() -> None:
    """|k|²/2 is 80,000 here: more than float16 holds."""
    q = torch.full((1, 64), 50.0, dtype=torch.float16)
    k = torch.cat([torch.zeros_like(q), q, q + 1])
    ours = mk.attend(q, k, torch.eye(3, dtype=torch.float16), mk.Gaussian(8.0), engine="fused")
    assert_close(ours.double(), gaussian_attention(q, k, torch.eye(3), 8.0), rtol=0.0, atol=1e-3)
    sink = mk.attend(
        q, k, torch.eye(3, dtype=torch.float16), mk.Gaussian(8.0), normalizer=mk.SinkSoftmax(), engine="fused"
    )
    weight = (-squares(q, k) / 128).exp()
    assert_close(sink.double(), weight / (1 + weight.sum(-1, keepdim=True)), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    "kernel", [mk.Gaussian(0.7), mk.Laplacian(), mk.RationalQuadratic(0.4), mk.Dot() + mk.Gaussian()], ids=repr
)
def test_trap_slopes_where_query_and_key_are_equal(kernel: mk.MatchKernel) -> None:
    """A root or an absolute value is not smooth at 0; here its slope is 0, and the slope of that is finite."""
    x = draw(2, 5, 4)
    for value in (x, torch.zeros_like(x)):
        q, k = value.clone().requires_grad_(), value.clone().requires_grad_()
        diagonal = kernel(q, k).diagonal(dim1=-2, dim2=-1)
        slopes = torch.autograd.grad(diagonal.sum(), (q, k), create_graph=True)
        if not isinstance(kernel, mk.DotKernel) or isinstance(kernel, mk.Gaussian):
            assert_close(diagonal, torch.zeros_like(diagonal), rtol=0.0, atol=1e-14)
            assert_close(slopes[0], torch.zeros_like(value), rtol=0.0, atol=1e-14)
        bends = torch.autograd.grad(sum(s.sin().sum() for s in slopes), (q, k))
        assert all(bool(t.isfinite().all()) for t in (*slopes, *bends))


def test_the_laplacians_slope_is_a_count_of_signs() -> None:
    q, k = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[0.0, 2.0], [3.0, 5.0], [1.0, 1.0]])
    (slope,) = torch.autograd.grad(mk.Laplacian(2.0)(q, k).sum(), q, create_graph=True)
    assert slope.tolist() == [[(-1 + 1 + 0) / 2, (0 + 1 - 1) / 2]]


@pytest.mark.parametrize("kernel", [mk.Gaussian(0.7), mk.Laplacian(1.3), mk.RationalQuadratic(0.4, 1.2)], ids=repr)
def test_slopes_and_their_slopes_are_those_of_finite_differences(kernel: mk.MatchKernel) -> None:
    q, k = (x.requires_grad_() for x in inputs(2, n=3, m=4)[:2])
    assert torch.autograd.gradcheck(lambda q, k: kernel(q, k), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: kernel(q, k), (q, k))


@pytest.mark.parametrize("make", [mk.Gaussian, mk.Laplacian, mk.RationalQuadratic])
def test_slopes_of_the_parameters_are_those_of_finite_differences(make: type[mk.MatchKernel]) -> None:
    q, k, _ = inputs(2, n=3, m=4)
    value = torch.tensor([0.8, 1.7], dtype=torch.float64, requires_grad=True)

    def score(value: Tensor) -> Tensor:
        kernel = make(nn.Parameter(torch.ones(2, dtype=torch.float64)))
        name = next(iter(dict(kernel.named_parameters())))
        return torch.func.functional_call(kernel, {name: value}, (q, k))

    assert torch.autograd.gradcheck(score, value) and torch.autograd.gradgradcheck(score, value)


# The anchor.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kernel", [mk.Gaussian(), mk.Dot() + mk.Gaussian(2.0), mk.RationalQuadratic()], ids=repr)
def test_a_first_key_that_is_no_number_does_not_spread(kernel: mk.MatchKernel, engine: str) -> None:
    if engine == "fused" and not isinstance(kernel, mk.DotKernel):
        engine = "auto"
    q, k, v = inputs(2, n=5, m=7)
    k[:, 0], v[:, 0] = math.nan, math.nan
    clean = mk.attend(q, k[:, 1:], v[:, 1:], kernel, engine="reference")
    hidden = torch.arange(7) > 0
    assert_close(mk.attend(q, k, v, kernel, mask=hidden, engine=engine), clean)
    # Some query sees it: that row is NaN, and no other.
    pairs = hidden.repeat(5, 1)
    pairs[3, 0] = True
    k[:, 0, 1:], v[:, 0] = 0.0, 0.0
    scores = mk.scores(q, k, kernel, mask=pairs)
    assert bool(scores[:, 3, 0].isnan().all())
    assert_close(scores[:, :, 1:], kernel(q, k[:, 1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kernel", [mk.Gaussian(), mk.Gaussian(torch.tensor([0.5, 2.0]))], ids=repr)
def test_later_keys_change_no_bit_of_an_earlier_row(kernel: mk.MatchKernel, engine: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, n=6, m=6, dtype=dtype)
    q, k = q + 50, k + 50
    before = mk.attend(q, k, v, kernel, causal=True, engine=engine)
    k[:, 4:] *= 3
    after = mk.attend(q, k, v, kernel, causal=True, engine=engine)
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize(
    "kernel", [mk.Gaussian(), mk.Laplacian(4.0), mk.RationalQuadratic(), mk.Gaussian(2.0) + mk.Gaussian(3.0)], ids=repr
)
def test_decoding_with_a_cache_is_the_full_pass(kernel: mk.MatchKernel) -> None:
    q, k, v = inputs(2, 3, n=9, m=9, dtype=torch.float32)
    q, k = q + 100, k + 100
    full = mk.attend(q, k, v, kernel, causal=True)
    for i in range(9):
        one = mk.attend(q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :], kernel, causal=True)
        assert_close(one[..., 0, :], full[..., i, :], rtol=1e-5, atol=1e-6)


def test_the_anchor_moves_both_by_the_first_key_and_has_no_slope() -> None:
    q, k, _ = inputs(2, d=3)
    q.requires_grad_(), k.requires_grad_()
    moved_q, moved_k = anchored(q, k)
    assert_close(moved_q, q - k[:, :1]) and assert_close(moved_k, k - k[:, :1])
    assert torch.equal(torch.autograd.grad(moved_q.sum() + moved_k.sum(), k)[0], torch.ones_like(k))
    k = k.detach().clone()
    k[:, 0] = torch.tensor([math.inf, math.nan, 2.0])
    assert_close(anchored(q, k)[0], q - torch.tensor([0.0, 0.0, 2.0]))
    assert_close(anchored(q, k, beyond=2.0)[0], q - 0.0)
    grouped_q, grouped_k = anchored(draw(2, 6, 5, 3), draw(2, 3, 4, 3, seed=1))
    key = draw(2, 3, 4, 3, seed=1)
    for h in range(6):
        assert_close(grouped_q[:, h], draw(2, 6, 5, 3)[:, h] - key[:, h // 2, :1])
    assert bool((grouped_k[..., 0, :] == 0).all())


def test_without_keys_there_is_no_anchor() -> None:
    q, k, v = inputs(2, n=3, m=0)
    for kernel in (mk.Gaussian(), mk.Laplacian(), mk.RationalQuadratic()):
        assert kernel(q, k).shape == (2, 3, 0)
        assert torch.equal(mk.attend(q, k, v, kernel), torch.zeros(2, 3, 3, dtype=torch.float64))
