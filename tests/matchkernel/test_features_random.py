"""Random feature maps: their mean, their variance against closed forms, and the measure that they are drawn from."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics.pairwise import rbf_kernel
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.kernels.features_random import random_projection

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor
D = 16


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(norm: float, cosine: float, seed: int = 0, d: int = D) -> tuple[Tensor, Tensor]:
    """x and y of one length with a given angle between them, (1, d) each, in a direction drawn at random."""
    frame = torch.linalg.qr(draw(d, 2, seed=seed)).Q
    x = norm * frame[:, :1].mT
    y = norm * (cosine * frame[:, :1] + math.sqrt(1 - cosine**2) * frame[:, 1:]).mT
    return x, y


def as_tokens(x: Tensor) -> Tensor:
    """The token that the library's scaling, d^(−1/4), takes to x."""
    return x * x.shape[-1] ** 0.25


def estimates(make: Callable[[], mk.FeatureKernel], q: Tensor, k: Tensor, draws: int) -> Tensor:
    """κ of one pair under `draws` projections."""
    kernel, generator = make().double(), seeded(1)
    values = []
    for _ in range(draws):
        kernel.redraw(generator)
        values.append(kernel.kappa(q, k).reshape(()))
    return torch.stack(values)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def single(kernel: mk.FeatureKernel, q: Tensor, k: Tensor) -> Tensor:
    """What each direction alone gives for κ: their mean is κ, and for independent directions so is their variance."""
    (x, a), (y, b) = kernel.encode(q, k, torch.zeros(1), torch.zeros(1))
    parts = (x * y * (a + b).exp()).reshape(-1)
    rows = kernel.projection.shape[0]
    return parts.reshape(-1, rows).sum(0) * rows


SOFTMAX = [mk.FavorFeatures, mk.HyperbolicFeatures, mk.TrigonometricFeatures]


# The mean.


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("kind", SOFTMAX)
def test_the_mean_is_the_exponential_of_the_scaled_dot_product(kind: type[mk.FeatureKernel], orthogonal: bool) -> None:
    for seed, (norm, cosine) in enumerate(((0.6, 1.0), (0.9, 0.3), (0.8, -0.5), (0.7, -1.0))):
        x, y = pair(norm, cosine, seed)
        q, k = as_tokens(x), as_tokens(y)
        truth = math.exp(float((q * k).sum()) / math.sqrt(D))
        assert truth == pytest.approx(math.exp(norm**2 * cosine))
        mean, error = mean_and_error(estimates(lambda: kind(D, 40, orthogonal), q, k, 400))
        assert abs(mean - truth) < 3 * error + 1e-12, f"{mean} against {truth}, error {error}"
        assert error < 0.06 * truth


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_mean_of_fourier_features_is_scikit_learns_gaussian(orthogonal: bool) -> None:
    for seed, (distance, bandwidth) in enumerate(((0.5, 1.0), (1.5, 1.0), (3.0, 2.0), (6.0, 1.5))):
        q = draw(1, D, seed=seed)
        step = draw(1, D, seed=seed + 20)
        k = q + distance * step / step.norm()
        truth = float(rbf_kernel(q, k, gamma=1 / (2 * bandwidth**2))[0, 0])
        assert truth == pytest.approx(math.exp(-(distance**2) / (2 * bandwidth**2)))
        values = estimates(lambda b=bandwidth: mk.FourierFeatures(D, 40, b, orthogonal), q, k, 400)
        mean, error = mean_and_error(values)
        assert abs(mean - truth) < 3 * error + 1e-12, f"{mean} against {truth}, error {error}"
        assert values.abs().max() <= 1.0 + 1e-12


def test_fourier_features_are_cosines_of_differences_and_scikit_learns_directions_give_its_kernel() -> None:
    q, k, _ = inputs(n=6, m=9, d=5)
    kernel = mk.FourierFeatures(5, 12, 0.7, generator=seeded(0)).double()
    difference = (q.unsqueeze(-2) - k.unsqueeze(-3)) / 0.7
    assert_close(kernel.kappa(q, k), (difference @ kernel.projection.mT).cos().mean(-1))
    assert_close(kernel.kappa(q, q).diagonal(), torch.ones(6).double())
    sampler = RBFSampler(gamma=1 / (2 * 0.7**2), n_components=4000, random_state=0).fit(q.numpy())
    many = mk.FourierFeatures(5, 8000, 0.7).double()
    many.projection.copy_(torch.from_numpy(sampler.random_weights_.T) * 0.7)
    rbf = torch.from_numpy(rbf_kernel(q, k, gamma=1 / (2 * 0.7**2)))
    assert (many.kappa(q, k) - rbf).abs().max() < 4 / math.sqrt(8000)


def test_the_softmax_kernels_are_their_formulas() -> None:
    """From the projection and the definition, with no stabiliser."""
    q, k, _ = inputs(d=6)
    x, y = q / 6**0.25, k / 6**0.25
    for kind in SOFTMAX:
        kernel = kind(6, 8, generator=seeded(0)).double()
        a, b = x @ kernel.projection.mT, y @ kernel.projection.mT
        down = torch.exp(-(x.square().sum(-1)[:, None] + y.square().sum(-1)) / 2)
        truth = {
            mk.FavorFeatures: down * (a.unsqueeze(1) + b).exp().mean(-1),
            mk.HyperbolicFeatures: down * (a.unsqueeze(1) + b).cosh().mean(-1),
            mk.TrigonometricFeatures: (a.unsqueeze(1) - b).cos().mean(-1) / down,
        }[kind]
        assert kernel.projection.shape == (8 if kind is mk.FavorFeatures else 4, 6)
        assert_close(kernel.kappa(q, k), truth)


# The variance.


def variance_and_error(values: Tensor) -> tuple[float, float]:
    """The sample variance, and its own standard error from the fourth moment."""
    centred = values - values.mean()
    square = centred.square()
    return float(square.mean()), float(square.std() / math.sqrt(len(values)))


@pytest.mark.parametrize("cosine", [1.0, 0.4, -0.6])
def test_the_variance_is_that_of_lemma_2(cosine: float) -> None:
    """Choromanski et al. 2021: m = 64 directions, norms 1/2, from 2·10⁵ independent ones."""
    m, rows = 64, 200_000
    x, y = pair(0.5, cosine)
    q, k = as_tokens(x), as_tokens(y)
    softmax = math.exp(float((x * y).sum()))
    together, apart = (float(z.square().sum()) for z in (x + y, x - y))
    positive = math.exp(together) * softmax**2 * (1 - math.exp(-together)) / m
    closed = {
        mk.FavorFeatures: positive,
        mk.HyperbolicFeatures: (1 - math.exp(-together)) / 2 * positive,
        mk.TrigonometricFeatures: math.exp(together) * softmax**-2 * (1 - math.exp(-apart)) ** 2 / (2 * m),
    }
    for kind, truth in closed.items():
        count = rows if kind is mk.FavorFeatures else 2 * rows
        kernel = kind(D, count, False, generator=seeded(3)).double()
        variance, error = variance_and_error(single(kernel, q, k) / math.sqrt(m))
        assert abs(variance - truth) < 3 * error + 1e-12, f"{kind.__name__}: {variance} against {truth} ± {error}"
        assert error < 0.05 * truth + 1e-12


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.5])
def test_the_variance_of_fourier_features_is_that_of_pairs(distance: float) -> None:
    """Sutherland & Schneider 2015: (1 + κ(2Δ) − 2κ(Δ)²)/D, and less than with a random phase."""
    count, rows = 128, 200_000
    q = draw(1, D)
    step = draw(1, D, seed=9)
    k = q + distance * step / step.norm()
    exact, twice = math.exp(-(distance**2) / 2), math.exp(-2 * distance**2)
    kernel = mk.FourierFeatures(D, 2 * rows, 1.0, False, generator=seeded(3)).double()
    variance, error = variance_and_error(single(kernel, q, k) / math.sqrt(count / 2))
    truth = (1 + twice - 2 * exact**2) / count
    assert abs(variance - truth) < 3 * error, f"{variance} against {truth} ± {error}"
    assert variance < (1 + twice / 2 - exact**2) / count


def test_orthogonal_directions_err_less_but_not_by_orders_of_magnitude() -> None:
    """d = 16, m = 64, norms 0.7, one direction for both: the case of the largest variance."""
    x, y = pair(0.7, 1.0)
    q, k = as_tokens(x), as_tokens(y)
    truth = math.exp(0.49)
    errors = {}
    for orthogonal in (True, False):
        values = estimates(lambda o=orthogonal: mk.FavorFeatures(D, 64, o), q, k, 2500)
        square = (values - truth).square()
        errors[orthogonal] = float(square.mean()), float(square.std() / math.sqrt(len(square)))
    (low, low_error), (high, high_error) = errors[True], errors[False]
    assert high - low > 3 * math.hypot(low_error, high_error)
    assert 0.5 < low / high < 0.95


def test_orthogonal_fourier_features_err_less() -> None:
    q = draw(1, D)
    step = draw(1, D, seed=9)
    k = q + 2.0 * step / step.norm()
    low, high = (
        estimates(lambda o=orthogonal: mk.FourierFeatures(D, 32, 1.0, o), q, k, 1500).var()
        for orthogonal in (True, False)
    )
    assert low < 0.9 * high


# The measure.


def test_blocks_are_orthogonal_and_lengths_are_those_of_normal_vectors() -> None:
    projection = random_projection(20_002, 8, generator=seeded(0))
    assert projection.shape == (20_002, 8) and projection.dtype == torch.float64
    blocks = projection[:20_000].reshape(-1, 8, 8)
    gram = blocks @ blocks.mT
    off = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-11
    lengths = projection.norm(dim=-1)
    assert stats.kstest(lengths.numpy(), stats.chi(8).cdf).pvalue > 0.01
    # Lengths are drawn for each row: those of a block are no more alike than any others.
    assert abs(float(torch.corrcoef(lengths[:20_000].reshape(-1, 8)[:, :2].T)[0, 1])) < 4 / math.sqrt(2500)
    for row in (0, 3, 7):
        assert stats.kstest(blocks[:, row, row].numpy(), "norm").pvalue > 0.01


def test_rotations_are_drawn_from_the_haar_measure() -> None:
    """E Q_ij = 0, E (tr Q)² = 1 and as many reflections as rotations; a decomposition's own Q fails."""
    d, draws = 4, 20_000
    projection = random_projection(draws * d, d, generator=seeded(1))
    ours = (projection / projection.norm(dim=-1, keepdim=True)).reshape(draws, d, d)
    raw = torch.linalg.qr(torch.randn(draws, d, d, generator=seeded(1), dtype=torch.float64)).Q

    def worst(q: Tensor) -> float:
        """The largest deviation from a moment of the Haar measure, in its own standard errors."""
        trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
        samples = [*q.flatten(1).unbind(1), trace.square() - 1, torch.linalg.det(q), q[:, 0, 0].square() - 1 / d]
        return max(abs(float(x.mean() / (x.std() / math.sqrt(draws)).clamp_min(1e-12))) for x in samples)

    assert worst(ours) < 4
    assert worst(raw) > 20


def test_without_blocks_rows_are_independent_normal_vectors() -> None:
    projection = random_projection(4000, 5, orthogonal=False, generator=seeded(0))
    assert torch.equal(projection, torch.randn(4000, 5, generator=seeded(0), dtype=torch.float64))


# Draws.


EVERY: list[Callable[..., mk.FeatureKernel]] = [*SOFTMAX, mk.FourierFeatures]


@pytest.mark.parametrize("kind", EVERY)
def test_a_draw_is_its_generators_and_stays_until_redrawn(kind: Callable[..., mk.FeatureKernel]) -> None:
    q, k, v = inputs(2, d=6)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (kind(6, 10, generator=seeded(4)).double() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    table = first.kappa(q, k)
    assert torch.equal(table, second.kappa(q, k)) and torch.equal(table, first.kappa(q, k))
    mk.attend(q, k, v, first)
    first.train().eval()
    assert torch.equal(table, first.kappa(q, k))
    held = first.projection
    first.redraw(seeded(5))
    assert not torch.equal(first.kappa(q, k), table)
    assert first.projection is held and held.dtype == torch.float64
    first.redraw(seeded(5))
    second.redraw(seeded(5))
    assert torch.equal(first.kappa(q, k), second.kappa(q, k))
    assert torch.equal(torch.get_rng_state(), before)
    first.redraw()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", EVERY)
def test_the_projection_is_a_buffer_and_travels_with_the_module(kind: Callable[..., mk.FeatureKernel]) -> None:
    q, k, _ = inputs(2, d=6)
    kernel, other = kind(6, 10, generator=seeded(0)), kind(6, 10, generator=seeded(1))
    assert not list(kernel.parameters()) and list(kernel.state_dict()) == ["projection"]
    assert kernel.projection.dtype == torch.float32
    assert not torch.allclose(kernel.kappa(q, k), other.kappa(q, k))
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(kernel.kappa(q, k), other.kappa(q, k))
    assert kernel.double().projection.dtype == torch.float64
    assert kernel.kappa(q.float(), k.float()).dtype == torch.float64
    assert kernel.to(torch.bfloat16).kappa(q.bfloat16(), k.bfloat16()).dtype == torch.float32
    rows = 12 if kind is mk.FavorFeatures else 6
    assert kind(6, 12, orthogonal=False, generator=seeded(0)).projection.shape == (rows, 6)


def test_a_module_on_meta_keeps_its_generator_out_of_the_way() -> None:
    kernel = mk.FavorFeatures(6, 10, generator=seeded(0)).to("meta")
    assert kernel.projection.device.type == "meta" and kernel.projection.shape == (10, 6)


@pytest.mark.parametrize("kind", EVERY)
def test_what_cannot_be_drawn(kind: Callable[..., mk.FeatureKernel]) -> None:
    name = kind.__name__
    for arguments, error, message in (
        ((0, 4), ValueError, rf"{name}\(dim=…\): expected at least 1, got 0"),
        ((4, 0), ValueError, rf"{name}\(features=…\): expected at least 1"),
        ((4, 2.0), TypeError, rf"{name}\(features=…\): expected an integer"),
    ):
        with pytest.raises(error, match=message):
            kind(*arguments)
    if kind is not mk.FavorFeatures:
        with pytest.raises(ValueError, match=rf"{name}\(features=5\): expected an even number"):
            kind(4, 5)
    with pytest.raises(TypeError, match=rf"{name}\(orthogonal=…\): expected True or False"):
        kind(4, 6, orthogonal=1)
    with pytest.raises(ValueError, match=r"tokens of shape \(5, 4\): this .* expects a last dimension of 6"):
        kind(6, 8)(*inputs()[:2])


def test_bandwidths() -> None:
    q, k, _ = inputs(2, 3, d=6)
    per_head = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    apart = mk.FourierFeatures(6, 8, per_head, generator=seeded(0)).double()
    for head, bandwidth in enumerate(per_head.tolist()):
        one = mk.FourierFeatures(6, 8, bandwidth, generator=seeded(0)).double()
        assert_close(apart.kappa(q, k)[:, head], one.kappa(q[:, head], k[:, head]))
    assert_close(apart.kappa(q, k[:, :1])[:, 2], apart.kappa(q, k[:, :1].expand_as(k))[:, 2])
    learned = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
    kernel = mk.FourierFeatures(6, 8, learned, generator=seeded(0)).double()
    assert_close(kernel.kappa(q, k), mk.FourierFeatures(6, 8, 1.3, generator=seeded(0)).double().kappa(q, k))
    kernel.kappa(q, k).sin().sum().backward()
    step = 1e-6

    def total(bandwidth: float) -> float:
        return float(mk.FourierFeatures(6, 8, bandwidth, generator=seeded(0)).double().kappa(q, k).sin().sum())

    assert float(learned.grad) == pytest.approx((total(1.3 + step) - total(1.3 - step)) / (2 * step), rel=1e-5)
    with pytest.raises(ValueError, match=r"FourierFeatures\(bandwidth=…\): expected a finite number above 0"):
        mk.FourierFeatures(6, 8, 0.0)
    with pytest.raises(ValueError, match="bandwidth has one entry for each of 3 heads"):
        apart.kappa(q[:, :2], k[:, :2])
    assert repr(mk.FourierFeatures(6, 8, 2.0, False)) == "FourierFeatures(6, 8, orthogonal=False, bandwidth=2)"


# Extremes.


@pytest.mark.parametrize("kind", [mk.FavorFeatures, mk.HyperbolicFeatures])
@pytest.mark.parametrize("length", [1.0, 30.0])
def test_positive_features_of_long_tokens(kind: type[mk.FeatureKernel], length: float) -> None:
    """float32 against the logarithm of the sum of exponentials in float64; κ itself overflows."""
    q, k, v = inputs(2, n=9, m=9, d=8, dtype=torch.float32)
    q, k = (length * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    kernel = kind(8, 64, generator=seeded(0))
    x, y, projection = q.double() / 8**0.25, k.double() / 8**0.25, kernel.projection.double()
    a, b = x @ projection.mT, y @ projection.mT
    if kind is mk.HyperbolicFeatures:
        a, b = torch.cat([a, -a], -1), torch.cat([b, -b], -1)
    inner = (a.unsqueeze(-2) + b.unsqueeze(-3)).logsumexp(-1) - math.log(64)
    truth = inner - x.square().sum(-1, keepdim=True) / 2 - y.square().sum(-1).unsqueeze(-2) / 2
    met = inner + math.log(64) - a.amax(-1, keepdim=True) - b.amax(-1).unsqueeze(-2) > -87.0
    assert met.float().mean() > 0.6
    scores = mk.scores(q, k, kernel).double()
    assert_close(scores[met], truth[met], rtol=1e-5, atol=1e-4)
    assert (scores[~met] < scores[met].min()).all() and scores.isfinite().all()
    for causal in (True, False):
        out = mk.attend(q, k, v, kernel, causal=causal)
        assert out.isfinite().all()
        assert_close(mk.weights(q, k, kernel, causal=causal).sum(-1), torch.ones(2, 9))
    best = truth.masked_fill(~met, -math.inf).softmax(-1)
    assert_close(mk.weights(q, k, kernel).double(), best, rtol=1e-2, atol=1e-3)


def test_signed_features_of_long_tokens_stay_in_range() -> None:
    q, k, v = inputs(2, n=9, m=9, d=8, dtype=torch.float32)
    q, k = (30.0 * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    for kind in (mk.TrigonometricFeatures, mk.FourierFeatures):
        kernel = kind(8, 64, generator=seeded(0))
        out = mk.attend(q, k, v, kernel)
        assert out.isfinite().all()
        wide = mk.attend(q.double(), k.double(), v.double(), kernel)
        row = mk.weights(q.double(), k.double(), kernel).abs().sum(-1)
        assert ((out.double() - wide).abs().amax(-1) < 1e-3 * row.square()).all()


@pytest.mark.parametrize("kind", EVERY)
def test_half_precision_is_rounded_once_at_the_end(kind: Callable[..., mk.FeatureKernel]) -> None:
    kernel = kind(6, 12, generator=seeded(0))
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = inputs(2, d=6, dtype=dtype)
        wide = [x.float() for x in (q, k, v)]
        assert torch.equal(mk.attend(q, k, v, kernel), mk.attend(*wide, kernel).to(dtype))


@pytest.mark.parametrize("kind", EVERY)
def test_derivatives_are_those_of_finite_differences(kind: Callable[..., mk.FeatureKernel]) -> None:
    kernel = kind(6, 12, generator=seeded(0)).double()
    q, k = (x.requires_grad_() for x in inputs(n=2, m=3, d=6)[:2])
    torch.autograd.gradcheck(lambda q, k: kernel.kappa(q, k), (q, k))
    torch.autograd.gradgradcheck(lambda q, k: kernel.kappa(q, k), (q, k))
