"""A head's form, computed in small matrices, against the whole matrix in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from matchkernel import Rotary
from matchkernel.dissect import Head, mismatched_forms, random_forms, spreads
from matchkernel.dissect.form import MEASURES
from tests.matchkernel.oracle import draw


def make(d_model, width, *, d_head=None, rotation=None, seed=0, layer=0, index=0, dtype=torch.float64):
    parts = [draw(d_model, width, seed=seed + i, dtype=dtype) for i in range(2)]
    biases = [draw(width, seed=seed + 2 + i, dtype=dtype) for i in range(2)]
    d_head = d_head or width
    values = torch.zeros(d_model, d_head, dtype=dtype)
    return Head(
        layer, index, W_Q=parts[0], W_K=parts[1], W_V=values, W_O=values.T, b_Q=biases[0], b_K=biases[1],
        b_V=values[0], scale=1 / math.sqrt(d_head), rotation=rotation,
    )  # fmt: skip


def turn(dim, base, angle_of, interleaved):
    """The dim × dim matrix R of a rotary embedding, for queries and keys that are rows: k → k R."""
    matrix = np.zeros((dim, dim))
    for pair in range(dim // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        angle = angle_of * base ** (-2 * pair / dim)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = math.sin(angle), -math.sin(angle)
    return matrix


def dense(left, right, b_q, b_k):
    """Every number of a form from the d_model × d_model matrix left rightᵀ, in numpy."""
    M = left @ right.T
    S = (M + M.T) / 2
    singular = np.linalg.svd(M, compute_uv=False)
    values = np.linalg.eigvalsh(S)
    share = singular**2 / (M**2).sum()
    share = share[share > 1e-20]
    project = [side @ np.linalg.pinv(side) for side in (left, right)]
    dims = [np.linalg.matrix_rank(side) for side in (left, right)]
    return {
        "norm": math.sqrt((M**2).sum()),
        "trace": np.trace(M),
        "rank": np.linalg.matrix_rank(M),
        "participation_ratio": (singular**2).sum() ** 2 / (singular**4).sum(),
        "entropy_rank": math.exp(-(share * np.log(share)).sum()),
        "rank_90": next(k for k in range(1, len(M) + 1) if (singular[:k] ** 2).sum() >= 0.9 * (singular**2).sum()),
        "symmetric_share": (S**2).sum() / (M**2).sum(),
        "positive_share": values[values > 0].sum() / np.abs(values).sum(),
        "overlap": np.trace(project[0] @ project[1]) / min(dims),
        "key_term": math.sqrt(((right @ b_q) ** 2).sum()),
        "query_term": math.sqrt(((left @ b_k) ** 2).sum()),
        "antisymmetric_share": (((M - M.T) / 2) ** 2).sum() / (M**2).sum(),
        "singular": singular,
        "eigenvalues": values,
    }


def check(form, expected, rtol=1e-9):
    assert form.measures() == {name: pytest.approx(expected[name], rel=rtol) for name in MEASURES}
    assert form.query_term == pytest.approx(expected["query_term"], rel=rtol)
    assert form.antisymmetric_share == pytest.approx(expected["antisymmetric_share"], rel=rtol)
    k = len(form.singular_values)
    np.testing.assert_allclose(form.singular_values, expected["singular"][:k], rtol=rtol, atol=1e-9)
    np.testing.assert_allclose(expected["singular"][k:], 0, atol=1e-9)
    # The form keeps the eigenvalues that can differ from zero; the dense matrix has the zeros too.
    eigenvalues = np.sort(expected["eigenvalues"])[::-1]
    k = len(form.eigenvalues)
    ours = np.concatenate([form.eigenvalues, np.zeros(len(eigenvalues) - k)])
    np.testing.assert_allclose(np.sort(ours)[::-1], eigenvalues, rtol=rtol, atol=1e-9)


# Narrow, with d_model below twice the width, and with a width above d_model.
@pytest.mark.parametrize(("d_model", "width"), [(12, 4), (6, 4), (3, 5), (5, 1)])
def test_small_matrices_give_what_the_whole_matrix_gives(d_model, width):
    head = make(d_model, width, seed=7)
    parts = [part.numpy() for part in (head.W_Q, head.W_K, head.b_Q, head.b_K)]
    form = head.form()
    check(form, dense(*parts))
    assert form.singular_values.shape == (min(width, d_model),)
    assert form.eigenvalues.shape == (min(2 * width, d_model),)
    assert (form.singular_values.diff() <= 0).all() and (form.eigenvalues.diff() <= 0).all()


@pytest.mark.parametrize("place", [(2, 9), (0, 2), (4, 9)])
def test_a_trained_head_gives_what_its_whole_matrix_gives(model, place):
    head = model.head(*place)
    parts = [part.double().numpy() for part in (head.W_Q, head.W_K, head.b_Q, head.b_K)]
    check(head.form(), dense(*parts), rtol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, -1, -5, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_rotary_head_has_a_form_for_each_offset(offset, interleaved, chunks):
    head = make(9, 4 * chunks, d_head=4, rotation=Rotary(4, base=50.0, interleaved=interleaved))
    R = np.kron(np.eye(chunks), turn(4, 50.0, offset, interleaved))
    left, right, b_q, b_k = (part.numpy() for part in (head.W_Q, head.W_K, head.b_Q, head.b_K))
    expected = dense(left, right @ R, b_q, b_k @ R)
    check(head.form(offset), expected)
    if offset:
        assert head.form(offset).norm != pytest.approx(head.form().norm, rel=1e-3)


def test_the_form_at_an_offset_is_the_one_the_scores_are_made_of():
    head = make(5, 4, rotation=Rotary(4, base=50.0))
    head = replace(head, b_Q=0 * head.b_Q, b_K=0 * head.b_K)
    # The scores between all unit vectors at two places are the whole matrix, times the scale.
    unit = torch.eye(5, dtype=torch.float64)
    at = torch.full((5,), 11)
    M = head.scores(unit, unit, query_position=at, key_position=at - 3, scale=1.0)
    form = head.form(-3)
    assert_close(form.singular_values, torch.linalg.svdvals(M)[:4])
    assert form.trace == pytest.approx(float(M.trace()))
    assert form.trace != pytest.approx(head.form(3).trace, rel=1e-3), "the sign of an offset matters"


def test_a_change_of_basis_inside_the_head_changes_nothing():
    head = make(11, 4, seed=3)
    A = draw(4, 4, seed=99)
    inverse = torch.linalg.inv(A)
    other = replace(head, W_Q=head.W_Q @ A, b_Q=head.b_Q @ A, W_K=head.W_K @ inverse.T, b_K=head.b_K @ inverse.T)
    x = draw(6, 11, seed=5)
    assert_close(other.scores(x), head.scores(x))
    assert_close(other.form().singular_values, head.form().singular_values)
    assert_close(other.form().eigenvalues, head.form().eigenvalues)
    assert other.form().measures() == pytest.approx(head.form().measures(), rel=1e-9)
    assert other.form().query_term == pytest.approx(head.form().query_term)
    # What does depend on the basis, and is therefore no measure of a head: the factors' own spectra.
    assert not torch.allclose(torch.linalg.svdvals(other.W_Q), torch.linalg.svdvals(head.W_Q), rtol=0.1)


def test_a_change_of_basis_that_the_rotation_allows_changes_nothing():
    head = make(11, 4, seed=3, rotation=Rotary(4, base=50.0))
    # Scaled turns of each pair (t, t + 2): these, and no others, pass through every rotation.
    A = torch.zeros(4, 4, dtype=torch.float64)
    for pair, (size, angle) in enumerate([(2.0, 0.4), (0.3, -1.1)]):
        A[pair, pair] = A[pair + 2, pair + 2] = size * math.cos(angle)
        A[pair, pair + 2], A[pair + 2, pair] = size * math.sin(angle), -size * math.sin(angle)
    inverse = torch.linalg.inv(A)
    other = replace(head, W_Q=head.W_Q @ A, b_Q=head.b_Q @ A, W_K=head.W_K @ inverse.T, b_K=head.b_K @ inverse.T)
    for offset in (0, -2, 7):
        assert other.form(offset).measures() == pytest.approx(head.form(offset).measures(), rel=1e-9)


def test_a_rotation_of_the_stream_changes_nothing_but_a_stretch_does():
    head = make(6, 3, seed=1)
    Q, _ = torch.linalg.qr(draw(6, 6, seed=2))
    turned = replace(head, W_Q=Q @ head.W_Q, W_K=Q @ head.W_K)
    assert turned.form().measures() == pytest.approx(head.form().measures(), rel=1e-9)
    half = replace(head, W_Q=Q @ head.W_Q)
    assert half.form().symmetric_share != pytest.approx(head.form().symmetric_share, rel=1e-2)
    assert half.form().participation_ratio == pytest.approx(head.form().participation_ratio)


def planted(M):
    """A head whose form is M: W_Q = M, W_K = identity."""
    n = len(M)
    zero = torch.zeros(n, dtype=torch.float64)
    return replace(make(n, n), W_Q=M.double(), W_K=torch.eye(n, dtype=torch.float64), b_Q=zero, b_K=zero)


def test_forms_whose_numbers_are_known():
    symmetric = planted(torch.diag(torch.tensor([3.0, 1.0, -1.0]))).form()
    assert symmetric.symmetric_share == pytest.approx(1)
    assert symmetric.positive_share == pytest.approx(4 / 5)
    assert symmetric.trace == pytest.approx(3)
    assert symmetric.participation_ratio == pytest.approx(11**2 / (81 + 1 + 1))
    assert [symmetric.rank_for(share) for share in (0.5, 9 / 11, 0.82, 10 / 11, 1.0)] == [1, 1, 2, 2, 3]
    antisymmetric = planted(torch.tensor([[0.0, 2.0], [-2.0, 0.0]])).form()
    assert antisymmetric.symmetric_share == pytest.approx(0, abs=1e-20)
    assert antisymmetric.trace == pytest.approx(0, abs=1e-12)
    assert (antisymmetric.participation_ratio, antisymmetric.entropy_rank) == (pytest.approx(2), pytest.approx(2))
    one = planted(torch.outer(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0.0, 3.0, 4.0]))).form()
    assert (one.rank, one.rank_for(0.9)) == (1, 1)
    assert (one.norm, one.trace) == (pytest.approx(15), pytest.approx(14))
    assert (one.participation_ratio, one.entropy_rank) == (pytest.approx(1), pytest.approx(1))
    # ‖S‖² = (‖M‖² + tr M²)/2, and M² = 14 M here.
    assert one.symmetric_share == pytest.approx((15**2 + 14**2) / (2 * 15**2))
    never = planted(-torch.eye(4)).form()
    assert (never.positive_share, never.trace) == (pytest.approx(0), pytest.approx(-4))


def test_overlap_is_the_mean_squared_cosine_of_the_principal_angles():
    head = make(4, 2)
    plane = torch.eye(4, dtype=torch.float64)[:, :2]
    first, second = 0.3, 1.2
    tilted = torch.zeros(4, 2, dtype=torch.float64)
    tilted[0, 0], tilted[2, 0] = math.cos(first), math.sin(first)
    tilted[1, 1], tilted[3, 1] = math.cos(second), math.sin(second)
    mixed = tilted @ torch.tensor([[1.0, 5.0], [-2.0, 1.0]], dtype=torch.float64)
    expected = (math.cos(first) ** 2 + math.cos(second) ** 2) / 2
    assert replace(head, W_Q=plane, W_K=mixed).form().overlap == pytest.approx(expected)
    assert replace(head, W_Q=plane, W_K=plane @ draw(2, 2)).form().overlap == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_16_bits_has_a_rank_and_an_overlap(dtype):
    """384 · ε is 3 in bfloat16: no singular value is three times the greatest."""
    head = make(384, 8, dtype=torch.float64)
    whole, small = (each.form() for each in (head, to(head, dtype)))
    assert small.rank == whole.rank == 8
    assert small.overlap == pytest.approx(whole.overlap, rel=0.05)
    fewer = to(replace(head, W_Q=head.W_Q * (torch.arange(8) < 3)), dtype)
    assert fewer.form().rank == 3
    mixed = to(replace(head, W_Q=head.W_Q[:, :3] @ draw(3, 8, seed=9)), dtype)
    assert mixed.form().rank == 3, "what rounding adds is no direction"


def to(head, dtype):
    return replace(head, **{name: getattr(head, name).to(dtype) for name in ("W_Q", "W_K", "b_Q", "b_K")})


def test_rank_counts_what_is_above_the_rounding_of_the_weights():
    head = make(40, 8, dtype=torch.float32)
    U, S, V = torch.linalg.svd(head.M.double())
    cut = replace(head, W_Q=(U[:, :8] * S[:8]).float(), W_K=V[:8].T.float())
    assert cut.form().rank == 8
    few = (U[:, :3] * S[:3]) @ V[:3]
    # Rank 3, stored in eight columns that float32 has rounded.
    mix = draw(8, 8, seed=9)
    W_Q, W_K = (few @ V[:8].T @ mix).float(), (V[:8].T @ torch.linalg.inv(mix).T).float()
    form = replace(head, W_Q=W_Q, W_K=W_K).form()
    assert form.singular_values[3] > 0
    assert form.rank == 3


def test_random_forms_are_the_chance_level_that_theory_gives():
    head = make(48, 6, seed=4)
    forms = random_forms(head, 400, generator=torch.Generator().manual_seed(0))
    found = spreads(forms)

    def close(name, expected):
        return abs(found[name].mean - expected) < 4 * found[name].sd / math.sqrt(400)

    # E tr M² = r d and E ‖M‖² = r d², so that the symmetric share is ½ + 1/(2d); E ‖P_Q P_K‖² = r²/d.
    assert close("symmetric_share", 0.5 + 1 / (2 * 48))
    assert close("positive_share", 0.5)
    assert close("overlap", 6 / 48)
    assert close("trace", 0.0)
    assert found["rank"] == (6, 0, 6, 6, 400)
    # The size of the weights is the head's own: E ‖M‖² = ‖W_Q‖² ‖W_K‖² / r.
    square = sum(form.norm**2 for form in forms) / 400
    assert square == pytest.approx(float(head.W_Q.norm() ** 2 * head.W_K.norm() ** 2) / 6, rel=0.02)
    assert 0 < found["symmetric_share"].sd < 0.05


def test_random_forms_follow_their_generator_and_touch_no_other():
    head, before = make(8, 2), torch.get_rng_state()
    first, again, other = (
        random_forms(head, 2, generator=torch.Generator().manual_seed(seed))[1].trace for seed in (5, 5, 6)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"draws=0"):
        random_forms(head, 0, generator=torch.Generator())


def test_mismatched_pairs_are_all_strangers_of_one_layer():
    heads = [make(7, 3, seed=10 * i, layer=i // 3, index=i % 3) for i in range(5)]
    forms = mismatched_forms(heads)
    expected = [
        torch.linalg.matrix_norm(a.W_Q @ b.W_K.T)
        for a in heads for b in heads if a is not b and a.layer == b.layer
    ]  # fmt: skip
    assert len(forms) == 3 * 2 + 2
    assert_close(torch.tensor([form.norm for form in forms]), torch.stack(expected).float())
    a, b = heads[0], heads[1]
    assert forms[0].key_term == pytest.approx(float((b.W_K @ a.b_Q).norm()))
    assert forms[0].query_term == pytest.approx(float((a.W_Q @ b.b_K).norm()))


def test_heads_that_share_keys_are_no_strangers():
    heads = [make(7, 3, seed=10 * i, index=i) for i in range(4)]
    heads[1] = replace(heads[1], W_K=heads[0].W_K.clone())
    heads[3] = replace(heads[3], W_K=heads[2].W_K.clone())
    norms = sorted(form.norm for form in mismatched_forms(heads))
    assert norms == pytest.approx(
        sorted(float((a.W_Q @ b.W_K.T).norm()) for a, b in [(heads[i], heads[2 - i // 2 * 2]) for i in range(4)])
    )
    with pytest.raises(ValueError, match=r"two heads of one layer whose W_K differ"):
        mismatched_forms([heads[0], heads[1], make(7, 3, layer=1)])


def test_spreads_are_numpys():
    forms = [make(6, 2, seed=20 * i).form() for i in range(5)]
    found = spreads(iter(forms))
    assert tuple(found) == MEASURES
    for name in MEASURES:
        values = np.array([form.measures()[name] for form in forms])
        expected = (values.mean(), values.std(ddof=1), values.min(), values.max(), 5)
        assert found[name] == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"got 1, expected at least 2"):
        spreads(forms[:1])


def test_what_cannot_be_answered_is_refused():
    head = make(6, 2)
    with pytest.raises(ValueError, match=r"offset=3: Head\(layer=0.* does not rotate"):
        head.form(3)
    with pytest.raises(ValueError, match=r"the form is zero"):
        replace(head, W_K=0 * head.W_K).form()
    with pytest.raises(ValueError, match=r"the form is zero or not finite"):
        replace(head, W_K=head.W_K / 0).form()
    for share in (0.0, 1.01, -1.0):
        with pytest.raises(ValueError, match=r"expected a share"):
            head.form().rank_for(share)


def test_the_trained_heads_differ_from_chance_in_symmetry(model):
    forms = {(head.layer, head.index): head.form() for head in model.heads()}
    trained = spreads(forms.values())
    generator = torch.Generator().manual_seed(0)
    chance = spreads(random_forms(model.head(0, 0), 20, generator=generator))
    strangers = spreads(mismatched_forms([model.head(2, h) for h in range(12)]))
    assert trained["symmetric_share"].mean == pytest.approx(0.585, abs=1e-3)
    assert chance["symmetric_share"].mean == pytest.approx(0.501, abs=2e-3)
    assert strangers["symmetric_share"].mean == pytest.approx(0.503, abs=5e-3)
    assert max(forms, key=lambda place: forms[place].symmetric_share) == (2, 9)
    assert min(forms, key=lambda place: forms[place].positive_share) == (0, 7)
    assert repr(forms[2, 9]).startswith("Form(rank 32, participation ratio 7.6, symmetric share 0.867")


def test_a_language_models_head_has_the_form_that_its_scores_have(smollm):
    read = smollm.read("The rabbit ran across the field and the dog ran after it.")
    head = smollm.head(16, 0)
    x = read.inputs[16]
    offset = -4
    R = turn(64, head.rotation.base, offset, head.rotation.interleaved)
    left, right = head.W_Q.double().numpy(), head.W_K.double().numpy() @ R
    scores = x.double().numpy() @ left @ right.T @ x.double().numpy().T / 8
    for i in (5, 9):
        assert read.scores[16, 0, i, i + offset].item() == pytest.approx(scores[i, i + offset], rel=1e-3, abs=1e-2)
    zero = np.zeros(64)
    check(head.form(offset), {**dense(left, right, zero, zero), "rank": 64}, rtol=1e-6)


def test_a_language_models_shared_keys_make_no_strangers(smollm):
    assert len(mismatched_forms([smollm.head(3, h) for h in range(9)])) == 9 * 2
