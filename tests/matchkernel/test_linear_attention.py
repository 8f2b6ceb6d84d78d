"""Linear attention and its state: each way to change it against a loop over tokens, pieces against the whole."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import matchkernel as mk
from matchkernel.theory import fast_weights, memory

sys.path.insert(0, str(Path(__file__).parent))
from kernels_under_test import Squares
from oracle import draw

Tensor = torch.Tensor
LEAD, F, WIDTH = (2, 3), 4, 5
UPDATES = ("sum", "decay", "gate", "gates", "delta", "gated delta")


class Given(mk.FeatureKernel):
    """φ = x[…, :-1] · exp(x[…, -1]): features and scale written by hand."""

    def features(self, x: Tensor, position: Tensor) -> mk.Features:
        return mk.Features(x[..., :-1], x[..., -1])


def tokens(n: int, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = LEAD) -> tuple[Tensor, Tensor, Tensor]:
    """Features q, k, with some products below 0, the keys of unit length, and values."""
    q, k, v = draw(*lead, n, F, seed=1), draw(*lead, n, F, seed=2), draw(*lead, n, WIDTH, seed=3)
    return q.to(dtype), (k / k.norm(dim=-1, keepdim=True)).to(dtype), v.to(dtype)


def said(n: int, lead: tuple[int, ...] = LEAD) -> dict[str, Tensor]:
    """Log gates and steps for all updates: mostly weak gates, and every fifth token forgets nearly all."""
    strong = torch.where(torch.arange(n) % 5 == 4, -50.0, 0.0)[:, None]
    return {
        "gate": -draw(*lead, n, 1, seed=4).abs() + strong,
        "gates": -draw(*lead, n, F, seed=5).abs() + strong,
        "beta": 2.0 * draw(*lead, n, 1, seed=6).sigmoid(),
    }


RATE = torch.tensor([0.9, 0.5, 1.0], dtype=torch.float64)
DECAY = mk.Decay(RATE)


def update(name: str, parts: dict[str, Tensor]) -> object:
    return {
        "sum": lambda: None,
        "decay": lambda: DECAY,
        "gate": lambda: mk.Gates(parts["gate"]),
        "gates": lambda: mk.Gates(parts["gates"]),
        "delta": lambda: mk.DeltaRule(parts["beta"][..., 0]),
        "gated delta": lambda: mk.GatedDeltaRule(parts["gate"][..., 0], parts["beta"][..., 0]),
    }[name]()


def loop(name: str, q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and S and Σk after the last token, by the recurrence as it stands in the papers."""
    S = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1])
    total = q.new_zeros(*q.shape[:-2], q.shape[-1], 1)
    out = []
    for t in range(q.shape[-2]):
        key, value = k[..., t, :, None], v[..., t, None, :]
        kept: Tensor | float = 1.0
        if name == "decay":
            kept = RATE[:, None, None]
        elif name in ("gate", "gated delta"):
            kept = parts["gate"][..., t, :, None].exp()
        elif name == "gates":
            kept = parts["gates"][..., t, :, None].exp()
        if "delta" in name:
            beta = parts["beta"][..., t, :, None]
            eye = torch.eye(q.shape[-1], dtype=q.dtype)
            S = kept * (eye - beta * key @ key.mT) @ S + beta * key @ value
        else:
            S, total = kept * S + key @ value, kept * total + key
        out.append(q[..., t, None, :] @ S)
    return torch.cat(out, dim=-2), S, total[..., 0]


def run(
    name: str, n: int, chunk: int = 64, dtype: torch.dtype = torch.float64, **settings: object
) -> tuple[Tensor, mk.LinearState]:
    q, k, v = tokens(n, dtype)
    return mk.linear_attention(q, k, v, update=update(name, said(n)), chunk=chunk, **settings)


# Values.


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("n", "chunk"), [(1, 64), (2, 2), (63, 64), (64, 64), (65, 64), (70, 7), (12, 1), (9, 100)])
def test_is_the_recurrence(name: str, n: int, chunk: int) -> None:
    out, state = run(name, n, chunk, normalized=False)
    expected, S, total = loop(name, *tokens(n), said(n))
    assert_close(out, expected, atol=1e-11, rtol=1e-9)
    assert_close(state.memory * state.log_scale.exp()[..., None, None], S, atol=1e-11, rtol=1e-9)
    if "delta" in name:
        assert state.total is None
    else:
        assert_close(state.total * state.log_scale.exp()[..., None], total, atol=1e-11, rtol=1e-9)
    assert state.tokens == n


@pytest.mark.parametrize("name", UPDATES[:4])
def test_normalized_is_divided_by_the_same_sum_without_values(name: str) -> None:
    n = 70
    q, k, v = tokens(n)
    q, k = q.square(), k.square()
    out, _ = mk.linear_attention(q, k, v, update=update(name, said(n)))
    ones = torch.ones_like(v[..., :1])
    expected = loop(name, q, k, v, said(n))[0] / loop(name, q, k, ones, said(n))[0]
    assert_close(out, expected)


@pytest.mark.parametrize(
    "kernel",
    [
        mk.EluFeatures(),
        mk.TaylorFeatures(),
        mk.DPFPFeatures(),
        mk.PolynomialFeatures(3),
        mk.CosFeatures(80),
        mk.FavorFeatures(6, 16, generator=torch.Generator().manual_seed(0)),
        mk.FourierFeatures(6, 16, 2.0, generator=torch.Generator().manual_seed(0)),
        mk.HedgehogFeatures(6),
        Squares(),
    ],
)
def test_the_sum_is_attend_in_causal_order(kernel: mk.FeatureKernel) -> None:
    kernel = kernel.double()
    q, k, v = (draw(2, 70, 6, seed=s) for s in (1, 2, 3))
    expected = mk.attend(q, k, v, kernel, causal=True, engine="reference")
    assert_close(mk.linear_attention(q, k, v, kernel)[0], expected, atol=1e-8, rtol=1e-8)
    table = kernel.kappa(q, k).tril()
    assert_close(mk.linear_attention(q, k, v, kernel, normalized=False)[0], table @ v, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("kernel", [mk.EluFeatures(), mk.TaylorFeatures(), mk.DPFPFeatures()])
def test_retnets_decay_is_alibi_on_a_feature_kernel(kernel: mk.FeatureKernel) -> None:
    rate = torch.tensor([0.99, 0.9, 0.5], dtype=torch.float64)
    q, k, v = (draw(2, 3, 70, 6, seed=s) for s in (1, 2, 3))
    faded, _ = mk.linear_attention(q, k, v, kernel, mk.Decay(rate))
    assert_close(faded, mk.attend(q, k, v, kernel + mk.ALiBi(slopes=-rate.log()), causal=True, engine="reference"))
    assert (faded - mk.attend(q, k, v, kernel, causal=True)).abs().max() > 0.01


def test_agrees_with_the_derivations_of_theory() -> None:
    q, k, v = tokens(70)
    out, state = mk.linear_attention(q, k, v, normalized=False)
    assert_close(out, fast_weights.by_state(q, k, v, causal=True))
    assert_close(out, fast_weights.by_chunks(q, k, v, 16))
    assert_close(state.memory, memory.sum_rule(k, v))
    beta = said(70)["beta"][..., 0]
    out, state = mk.linear_attention(q, k, v, update=mk.DeltaRule(beta))
    states = memory.delta_states(k, v, beta)
    assert_close(state.memory, memory.delta_rule(k, v, beta))
    assert_close(out, (q.unsqueeze(-2) @ states).squeeze(-2))


def test_a_gate_for_all_features_is_the_same_gate_for_each() -> None:
    q, k, v = tokens(70)
    gate = said(70)["gate"]
    one, _ = mk.linear_attention(q, k, v, update=mk.Gates(gate), normalized=False)
    each, _ = mk.linear_attention(q, k, v, update=mk.Gates(gate.expand(*LEAD, 70, F)), normalized=False)
    assert_close(one, each)
    fixed = torch.full((1, 1), math.log(0.7), dtype=torch.float64)
    decay, _ = mk.linear_attention(q, k, v, update=mk.Decay(0.7), normalized=False)
    assert_close(decay, mk.linear_attention(q, k, v, update=mk.Gates(fixed.expand(70, 1)), normalized=False)[0])


def test_the_gated_delta_rule_has_both_others_in_it() -> None:
    q, k, v = tokens(20)
    beta, gate = said(20)["beta"][..., 0], said(20)["gate"][..., 0]
    both = mk.linear_attention(q, k, v, update=mk.GatedDeltaRule(torch.zeros_like(gate), beta))[0]
    assert_close(both, mk.linear_attention(q, k, v, update=mk.DeltaRule(beta))[0])
    # Keys at right angles leave nothing to correct: only the gates are left.
    k = torch.eye(20, dtype=torch.float64)
    q = draw(*LEAD, 20, 20)
    gated = mk.linear_attention(q, k, v, update=mk.GatedDeltaRule(gate, torch.ones_like(beta)))[0]
    assert_close(gated, mk.linear_attention(q, k, v, update=mk.Gates(gate[..., None]), normalized=False)[0])


# Pieces.


@pytest.mark.parametrize("name", UPDATES)
def test_prefill_and_then_token_by_token_is_the_whole(name: str) -> None:
    n, first = 70, 60
    q, k, v = tokens(n)
    parts = said(n)
    expected, whole = run(name, n)

    def piece(at: slice, state: mk.LinearState | None) -> tuple[Tensor, mk.LinearState]:
        now = update(name, {key: x[..., at, :] for key, x in parts.items()})
        return mk.linear_attention(q[..., at, :], k[..., at, :], v[..., at, :], update=now, state=state)

    out, state = piece(slice(first), None)
    rows = [out]
    for t in range(first, n):
        out, state = piece(slice(t, t + 1), state)
        rows.append(out)
    assert_close(torch.cat(rows, dim=-2), expected, atol=1e-9, rtol=1e-7)
    assert_close(state.memory, whole.memory)
    assert state.tokens == whole.tokens == n
    nothing, after = piece(slice(0), state)
    assert nothing.shape == (*LEAD, 0, WIDTH)
    assert_close(after.memory, state.memory)
    assert after.tokens == n


def test_positions_go_on_where_the_state_was_left() -> None:
    kernel = mk.CosFeatures(40)
    q, k, v = (draw(2, 20, 6, seed=s) for s in (1, 2, 3))
    expected = mk.linear_attention(q, k, v, kernel)[0]
    _, state = mk.linear_attention(q[:, :12], k[:, :12], v[:, :12], kernel)
    assert_close(mk.linear_attention(q[:, 12:], k[:, 12:], v[:, 12:], kernel, state=state)[0], expected[:, 12:])


def test_a_state_can_be_read_by_rules_of_another_kind() -> None:
    q, k, v = tokens(20)
    n, gate, beta = 12, said(20)["gate"][..., 12:, 0], said(20)["beta"][..., 12:, 0]
    _, state = mk.linear_attention(q[..., :n, :], k[..., :n, :], v[..., :n, :], update=mk.Decay(RATE))
    late = [x[..., n:, :] for x in (q, k, v)]
    out, after = mk.linear_attention(*late, update=mk.GatedDeltaRule(gate, beta), state=state)
    S = loop("decay", q[..., :n, :], k[..., :n, :], v[..., :n, :], said(20))[1]
    for t in range(20 - n):
        key = late[1][..., t, :, None]
        S = gate[..., t, None, None].exp() * S
        S = S + beta[..., t, None, None] * key @ (late[2][..., t, None, :] - key.mT @ S)
    assert_close(after.memory, S)
    assert_close(out[..., -1:, :], late[0][..., -1:, :] @ S)
    with pytest.raises(ValueError, match="no total"):
        mk.linear_attention(*late, state=after)


@pytest.mark.parametrize("name", UPDATES)
def test_the_future_touches_nothing(name: str) -> None:
    n, cut = 70, 41
    q, k, v = tokens(n)
    parts = said(n)

    def first(change: Callable[[Tensor], Tensor]) -> Tensor:
        late = [torch.cat([x[..., :cut, :], change(x[..., cut:, :])], dim=-2) for x in (q, k, v)]
        others = {key: torch.cat([x[..., :cut, :], x[..., cut:, :] / 3.0], dim=-2) for key, x in parts.items()}
        return mk.linear_attention(*late, update=update(name, others))[0][..., :cut, :]

    assert torch.equal(first(lambda x: 100.0 * x), first(lambda x: x - 5.0))


@pytest.mark.parametrize("kernel", [mk.EluFeatures(), mk.FavorFeatures(4, 32), Given()])
def test_a_long_key_in_the_future_scales_nothing_in_the_past(kernel: mk.FeatureKernel) -> None:
    q, k, v = (draw(2, 70, 4, seed=s, dtype=torch.float32) for s in (1, 2, 3))
    expected = mk.linear_attention(q, k, v, kernel)[0]
    k[:, 50:] *= 30.0
    changed = mk.linear_attention(q, k, v, kernel)[0]
    assert torch.equal(changed[:, :50], expected[:, :50])
    assert changed.isfinite().all() and not torch.equal(changed[:, 50:], expected[:, 50:])


# The range of a float.


@pytest.mark.parametrize("name", UPDATES)
def test_float32_is_as_good_as_its_digits(name: str) -> None:
    n = 300
    q, k, v = tokens(n)
    expected = loop(name, q, k, v, said(n))[0]
    out = run(name, n, dtype=torch.float32, normalized=False)[0]
    assert out.dtype == torch.float32
    assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("width", [1, F])
def test_weak_gates_after_strong_ones_keep_their_digits(width: int) -> None:
    # 60 gates of −50, then weak ones: the sum from the start is −3000, and a float32 there ends at 2e-4.
    q, k, v = tokens(64, torch.float32, ())
    q, k = q.square(), k.square()
    gate = torch.full((64, width), -50.0)
    gate[60:] = -0.1
    out, state = mk.linear_attention(q, k, v, update=mk.Gates(gate), normalized=False)
    expected, S, _ = loop("gates", q.double(), k.double(), v.double(), {"gates": gate.double()})
    assert_close(out.double(), expected, atol=1e-6, rtol=2e-6)
    assert_close(state.memory.double(), S, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["gate", "gates", "gated delta"])
@pytest.mark.parametrize("at", [0, 1, 31, 32, 40])
def test_a_gate_of_zero_forgets_all(name: str, at: int) -> None:
    q, k, v = (x.requires_grad_() for x in tokens(50, torch.float32))
    parts = {key: x.float() for key, x in said(50).items()}
    for gate in ("gate", "gates"):
        parts[gate][..., at, :] = float("-inf")
    leaves = [x.requires_grad_() for x in parts.values()]
    out, state = mk.linear_attention(q, k, v, update=update(name, parts), normalized=False)
    late = {key: x[..., at:, :] for key, x in parts.items()}
    alone, after = mk.linear_attention(
        *(x[..., at:, :] for x in (q, k, v)), update=update(name, late), normalized=False
    )
    assert_close(out[..., at:, :], alone)
    assert_close(state.memory, after.memory)
    grads = torch.autograd.grad(out.square().sum() + state.memory.sum(), [q, k, v, *leaves], allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", UPDATES[:4])
@pytest.mark.parametrize("shape", ["rising", "falling", "far down"])
def test_scales_far_beyond_a_float_cancel(name: str, shape: str) -> None:
    n = 70
    q, k, v = tokens(n)
    q, k = q.square() + 0.1, k.square() + 0.1
    steps = torch.arange(n, dtype=torch.float64)
    scale = {"rising": 7.0 * steps, "falling": -7.0 * steps, "far down": steps.sin() - 400.0}[shape]
    parts = said(n)
    if shape == "falling":
        # Only what is forgotten faster than keys shrink leaves the new ones their say.
        parts = {key: x - 9.0 if key != "beta" else x for key, x in parts.items()}
    q32, k32 = (torch.cat([x.float(), scale.float().expand(*LEAD, n)[..., None]], dim=-1) for x in (q, k))
    out, state = mk.linear_attention(q32, k32, v.float(), Given(), update(name, parts))
    # What no float64 holds either, divided by its largest so far: γ^{i−j} κ_ij as one exponential.
    gates = {"sum": torch.zeros(n, 1), "decay": RATE.log()[:, None, None].expand(3, n, 1)}
    gates |= {"gate": parts["gate"], "gates": parts["gates"]}
    gate = gates[name].double().expand(*LEAD, n, -1)
    rows = []
    for i in range(n):
        since = gate[..., : i + 1, :].flip(-2).cumsum(-2).flip(-2)
        since = torch.cat([since[..., 1:, :], torch.zeros_like(since[..., :1, :])], dim=-2) + scale[: i + 1, None]
        weight = q[..., i, None, :] * k[..., : i + 1, :] * (since - since.amax((-2, -1), keepdim=True)).exp()
        weight = weight.sum(-1)
        rows.append((weight[..., None, :] @ v[..., : i + 1, :]) / weight.sum(-1)[..., None, None])
    assert_close(out.double(), torch.cat(rows, dim=-2), atol=5e-4, rtol=5e-4)
    assert state.memory.isfinite().all() and state.log_scale.isfinite().all()


def test_one_gate_that_stays_open_keeps_a_large_key_in_range() -> None:
    # What the first feature holds is e^300 times what comes later, and the other features are long forgotten.
    k = torch.tensor([[1.0, 1.0, 0.0], *[[1.0, 1.0, -300.0]] * 9])
    q = torch.ones(10, 3) * torch.tensor([1.0, 1.0, 0.0])
    v = torch.arange(1.0, 11.0)[:, None]
    gate = torch.tensor([0.0, -100.0]).expand(10, 2)
    out, state = mk.linear_attention(q, k, v, Given(), mk.Gates(gate))
    assert_close(out, torch.ones(10, 1))
    assert_close(state.log_scale, torch.tensor(0.0))


@pytest.mark.parametrize("name", ["delta", "gated delta"])
def test_a_rule_that_corrects_takes_features_as_long_as_they_are(name: str) -> None:
    q, k, v = tokens(20)
    scale = draw(2, *LEAD, 20, 1, seed=9) / 4.0
    out, state = mk.linear_attention(
        torch.cat([q, scale[0]], dim=-1), torch.cat([k, scale[1]], dim=-1), v, Given(), update(name, said(20))
    )
    expected, S, _ = loop(name, q * scale[0].exp(), k * scale[1].exp(), v, said(20))
    assert_close(out, expected)
    assert_close(state.memory, S)


def test_unnormalised_scales_come_back() -> None:
    q, k, v = (draw(20, 4, seed=s) for s in (1, 2, 3))
    q[:, -1], k[:, -1] = -300.0, 300.0
    out, state = mk.linear_attention(q, k, v, Given(), normalized=False)
    assert_close(out, (q[:, :-1] @ k[:, :-1].mT).tril() @ v)
    assert_close(state.log_scale, torch.tensor(300.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", UPDATES)
def test_halves_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    n = 200
    q, k, v = tokens(n, dtype)
    parts = {key: x.to(dtype) for key, x in said(n).items()}
    out, state = mk.linear_attention(q, k, v, update=update(name, parts), normalized=False)
    assert out.dtype == dtype and state.memory.dtype == torch.float32
    expected = loop(name, q.double(), k.double(), v.double(), {key: x.double() for key, x in parts.items()})[0]
    # Rounded once, at the end.
    assert_close(out.double(), expected, atol=1e-4, rtol=torch.finfo(dtype).eps)


def test_a_row_without_weight_gives_zeros_and_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3, 2)))
    out, _ = mk.linear_attention(q, k, v)
    assert not out.any()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


# Derivatives.


@pytest.mark.parametrize("name", UPDATES)
def test_first_and_second_derivatives_through_outputs_and_states(name: str) -> None:
    n, f, width = 5, 2, 2
    q, k, v = (draw(n, w, seed=s) for s, w in ((1, f), (2, f), (3, width)))
    parts = {key: x[..., : min(f, x.shape[-1])] for key, x in said(n, ()).items()}
    needed = {"gate": ("gate",), "gates": ("gates",), "delta": ("beta",), "gated delta": ("gate", "beta")}.get(name, ())
    S, total = draw(f, width, seed=8), None if "delta" in name else draw(f, seed=9).abs() + 1.0

    def call(q: Tensor, k: Tensor, v: Tensor, S: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        given = parts | dict(zip(needed, rest, strict=True))
        state = mk.LinearState(S, total, q.new_tensor(0.3))
        out, after = mk.linear_attention(
            q, k, v, update=mk.Decay(0.8) if name == "decay" else update(name, given), state=state, chunk=3
        )
        return (out, after.memory) if after.total is None else (out, after.memory, after.total)

    leaves = [x.requires_grad_() for x in (q.square() + 0.1, k.square() + 0.1, v, S, *(parts[key] for key in needed))]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("kernel", [mk.EluFeatures(), mk.FavorFeatures(4, 8), mk.TaylorFeatures()])
def test_gradients_are_those_of_the_table(kernel: mk.FeatureKernel) -> None:
    leaves = [draw(2, 20, 4, seed=s).requires_grad_() for s in (1, 2, 3)]
    kernel = kernel.double()
    ours = mk.linear_attention(*leaves, kernel, chunk=8)[0]
    table = mk.attend(*leaves, kernel, causal=True, engine="reference")
    for mine, other in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (ours, table)), strict=True):
        assert_close(mine, other)


def test_a_rate_is_learned_and_checked_again() -> None:
    rate = nn.Parameter(torch.tensor([0.9, 0.5, 0.99], dtype=torch.float64))
    decay = mk.Decay(rate)
    assert [name for name, _ in decay.named_parameters()] == ["rate"]
    q, k, v = tokens(20)

    def call(rate: Tensor) -> Tensor:
        return torch.func.functional_call(decay, {"rate": rate}, (), tie_weights=False)

    out, _ = mk.linear_attention(q, k, v, update=decay, normalized=False)
    (ours,) = torch.autograd.grad(out.square().sum(), rate)
    leaf = rate.detach().requires_grad_()
    distance = (torch.arange(20)[:, None] - torch.arange(20)).clamp_min(0)
    table = (q @ k.mT * leaf[:, None, None] ** distance).tril()
    assert_close(ours, torch.autograd.grad((table @ v).square().sum(), leaf)[0])
    with torch.no_grad():
        rate[1] = 1.5
    with pytest.raises(ValueError, match="at most 1"):
        mk.linear_attention(q, k, v, update=decay)


def test_detach_cuts_the_past_off() -> None:
    q, k, v = (x.requires_grad_() for x in tokens(8))
    for name in ("sum", "delta"):
        state = mk.linear_attention(q, k, v, update=update(name, said(8)))[1]
        assert state.memory.requires_grad and not state.detach().memory.requires_grad
        assert_close(state.detach().memory, state.memory.detach())
        assert state.detach().tokens == 8


# Shapes.


def test_leading_dimensions_broadcast_and_nothing_is_written_to() -> None:
    n = 9
    q, k, v = draw(2, 1, n, F, seed=1), draw(3, n, F, seed=2), draw(n, WIDTH, seed=3)
    gate = -draw(2, 1, n, 1, seed=4).abs()
    copies = [x.clone() for x in (q, k, v, gate)]
    full = [x.expand(2, 3, *x.shape[-2:]) for x in (q, k, v)]
    out, state = mk.linear_attention(q, k, v, update=mk.Gates(gate), normalized=False)
    expected, S, _ = loop("gate", *full, {"gate": gate.expand(2, 3, n, 1)})
    assert_close(out, expected)
    assert_close(state.memory, S)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, gate), copies, strict=True))
    strided = [x.mT.contiguous().mT for x in full]
    assert_close(mk.linear_attention(*strided, update=mk.Gates(gate), normalized=False)[0], expected)
    one, _ = mk.linear_attention(q[0, 0], k[0], v, normalized=False)
    assert_close(one, (q[0, 0] @ k[0].mT).tril() @ v)


@pytest.mark.parametrize("name", UPDATES)
def test_grouped_heads_share_a_state(name: str) -> None:
    n = 9
    _, k, v = tokens(n)
    q = draw(2, 6, n, F, seed=7)
    out, state = mk.linear_attention(q, k, v, update=update(name, said(n)), normalized=False)
    assert out.shape == (2, 6, n, WIDTH) and state.memory.shape == (2, 3, F, WIDTH)
    expected, same = loop(name, q[:, ::2], k, v, said(n))[0], loop(name, q[:, 1::2], k, v, said(n))[0]
    assert_close(out, torch.stack([expected, same], dim=2).flatten(1, 2))
    last = update(name, {key: x[..., -1:, :] for key, x in said(n).items()})
    again, _ = mk.linear_attention(*(x[..., -1:, :] for x in (q, k, v)), update=last, state=state, normalized=False)
    assert again.shape == (2, 6, 1, WIDTH)


@pytest.mark.parametrize("name", UPDATES)
def test_no_tokens_and_no_batch(name: str) -> None:
    q, k, v = tokens(0)
    out, state = mk.linear_attention(q, k, v, update=update(name, said(0)))
    assert out.shape == (*LEAD, 0, WIDTH) and state.memory.shape == (*LEAD, F, WIDTH) and not state.memory.any()
    started, _ = mk.linear_attention(*tokens(3), state=state, update=update(name, said(3)))
    assert_close(started, run(name, 3)[0])
    none = mk.linear_attention(torch.zeros(0, 3, 4, F), torch.zeros(0, 3, 4, F), torch.zeros(0, 3, 4, WIDTH))
    assert none[0].shape == (0, 3, 4, WIDTH)


def test_a_state_knows_its_size() -> None:
    _, state = mk.linear_attention(*tokens(9, torch.float32), normalized=False)
    assert state.nbytes == 4 * 6 * (F * WIDTH + F + 1)
    assert repr(state) == "LinearState(memory=(2, 3, 4, 5), tokens=9)"
    again = mk.linear_attention(*tokens(9, torch.float32), state=state, normalized=False)[1]
    assert again.nbytes == state.nbytes and again.tokens == 18


# What it costs.


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest, self.all = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                self.all += x.numel()
        return out


def counted(name: str, n: int, chunk: int) -> _Counter:
    q, k, v = (x.requires_grad_() for x in tokens(n))
    now = update(name, said(n))
    with _Counter() as counter:
        out, _ = mk.linear_attention(q, k, v, update=now, chunk=chunk)
        torch.autograd.grad(out.sum(), (q, k, v))
    return counter


@pytest.mark.parametrize("name", UPDATES)
def test_a_chunk_is_no_loop_over_its_tokens_and_a_text_no_table(name: str) -> None:
    small, large = counted(name, 32, 32), counted(name, 64, 64)
    # Gates by feature halve the chunk once more.
    assert large.calls <= 1.3 * small.calls
    # A slice's gradient is as long as the text: a slice for each chunk would be a table in disguise.
    short, long = counted(name, 128, 16), counted(name, 256, 16)
    assert long.calls < 2.1 * short.calls and long.all < 2.1 * short.all
    assert long.largest == 6 * 256 * (WIDTH + ("delta" not in name))


# Transforms.


@pytest.mark.parametrize("name", UPDATES)
def test_vmap_and_jvp(name: str) -> None:
    q, k, v = (x[0] for x in tokens(9))
    parts = {key: x[0] for key, x in said(9).items()}

    def call(q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return mk.linear_attention(q, k, v, update=update(name, parts), chunk=4)[0]

    every = tokens(9)
    mapped = torch.func.vmap(call)(*every, said(9))
    assert_close(mapped, call(*every, said(9)))
    tangents = tuple(draw(*x.shape, seed=20 + i) for i, x in enumerate((q, k, v)))
    _, forward = torch.func.jvp(lambda *x: call(*x, parts), (q, k, v), tangents)
    h = 1e-6
    ahead, behind = (call(*(x + s * h * t for x, t in zip((q, k, v), tangents, strict=True)), parts) for s in (1, -1))
    assert_close(forward, (ahead - behind) / (2.0 * h), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gates", "gated delta"])
def test_compiles_without_a_break(name: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return mk.linear_attention(q, k, v, update=update(name, parts), chunk=4)[0]

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert_close(compiled(*tokens(6), said(6)), call(*tokens(6), said(6)))


# Errors.


def test_what_does_not_fit_is_refused_by_name() -> None:
    q, k, v = tokens(6)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"q has shape .*as many queries as keys", lambda: mk.linear_attention(q[..., :3, :], k, v)),
        (ValueError, r"as many values as keys", lambda: mk.linear_attention(q, k, v[..., :3, :])),
        (ValueError, r"expected equally many features", lambda: mk.linear_attention(q[..., :3], k, v)),
        (TypeError, r"share one dtype", lambda: mk.linear_attention(q.float(), k, v)),
        (TypeError, r"v: expected a tensor", lambda: mk.linear_attention(q, k, [1.0])),
        (ValueError, r"chunk=0", lambda: mk.linear_attention(q, k, v, chunk=0)),
        (ValueError, r"chunk=True", lambda: mk.linear_attention(q, k, v, chunk=True)),
        (TypeError, r"kernel: expected a FeatureKernel.*Dot", lambda: mk.linear_attention(q, k, v, mk.ScaledDot())),
        (TypeError, r"add parentheses", lambda: mk.linear_attention(q, k, v, mk.EluFeatures)),
        (TypeError, r"update: expected None, Decay", lambda: mk.linear_attention(q, k, v, update=0.9)),
        (TypeError, r"add parentheses", lambda: mk.linear_attention(q, k, v, update=mk.Decay)),
        (TypeError, r"state: expected a LinearState", lambda: mk.linear_attention(q, k, v, state=v)),
        (ValueError, r"memory of shape \(2, 3, 5, 5\), expected \(2, 3, 4, 5\)", lambda: mk.linear_attention(
            q, k, v, state=mk.LinearState(torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 5), torch.zeros(2, 3)))),
        (ValueError, r"normalized=True: DeltaRule", lambda: mk.linear_attention(
            q, k, v, update=mk.DeltaRule(torch.ones(6)), normalized=True)),
        (ValueError, r"Decay\(rate=…\)", lambda: mk.Decay(0.0)),
        (ValueError, r"at most 1, got 1.5", lambda: mk.Decay(1.5)),
        (TypeError, r"Decay\(rate=…\)", lambda: mk.Decay("fast")),
        (ValueError, r"4 heads at dimension -3", lambda: mk.linear_attention(q, k, v, update=mk.Decay(torch.ones(4)))),
        (ValueError, r"Gates\(log_gate=…\).*at most 0, got up to 1", lambda: mk.Gates(torch.ones(6, 4))),
        (ValueError, r"at most 0, got up to nan", lambda: mk.Gates(torch.full((6, 4), math.nan))),
        (TypeError, r"Gates\(log_gate=…\): expected a floating-point tensor \(…, n, f\)", lambda: mk.Gates(-1.0)),
        (TypeError, r"a tensor of torch.int64", lambda: mk.Gates(torch.zeros(6, 4, dtype=torch.int64))),
        (ValueError, r"Gates\(log_gate=…\) has shape \(6,\): expected \(…, n, f\)", lambda: mk.Gates(torch.zeros(6))),
        (ValueError, r"Gates\(log_gate=…\) has shape \(5, 4\): expected \(2, 3, 6, 4\)", lambda: mk.linear_attention(
            q, k, v, update=mk.Gates(torch.zeros(5, 4)))),
        (ValueError, r"Gates\(log_gate=…\) has shape \(7, 3, 6, 4\)", lambda: mk.linear_attention(
            q, k, v, update=mk.Gates(torch.zeros(7, 3, 6, 4)))),
        (ValueError, r"DeltaRule\(beta=…\) has shape \(5,\): expected \(2, 3, 6\)", lambda: mk.linear_attention(
            q, k, v, update=mk.DeltaRule(torch.ones(5)))),
        (TypeError, r"DeltaRule\(beta=…\): expected a floating-point tensor", lambda: mk.DeltaRule(1.0)),
        (ValueError, r"GatedDeltaRule\(log_gate=…\) has shape \(5,\)", lambda: mk.linear_attention(
            q, k, v, update=mk.GatedDeltaRule(torch.zeros(5), torch.ones(6)))),
        (ValueError, r"GatedDeltaRule\(log_gate=…\): expected logarithms", lambda: mk.GatedDeltaRule(
            torch.ones(6), torch.ones(6))),
    ]  # fmt: skip
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()


def test_updates_read_as_they_were_made() -> None:
    assert repr(mk.Decay(0.9)) == "Decay(0.9)"
    assert repr(mk.Gates(torch.zeros(6, 4))) == "Gates((6, 4))"
    assert repr(mk.DeltaRule(torch.ones(2, 6))) == "DeltaRule((2, 6))"
    assert repr(mk.GatedDeltaRule(torch.zeros(6), torch.ones(6))) == "GatedDeltaRule((6,))"


def test_the_readmes_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    names: dict[str, Any] = {}
    exec(readme.partition("<!-- long -->\n```python\n")[2].partition("```")[0], names)
    assert capsys.readouterr().out == "sparse linear\n(1, 4, 1, 64) LinearState(memory=(1, 4, 64, 64), tokens=4097)\n"
    q, k, v = names["q"], names["k"], names["v"]
    more = [torch.cat([x, x[..., -1:, :]], dim=-2) for x in (q, k, v)]
    whole = mk.attend(*more, mk.EluFeatures(), causal=True)
    assert_close(names["out"], whole[..., -1:, :], rtol=1e-4, atol=1e-5)
    assert_close(names["read"], whole[..., :-1, :], rtol=1e-4, atol=1e-5)
    i, j = torch.arange(4000, 4096)[:, None], torch.arange(4096)
    masks = {
        "sinks": (j <= i) & (j > i - 128) | (j < 4),
        "blocks": names["pattern"].mask(4096, 4096)[..., 4000:, :] & (j <= i),
    }
    for name, mask in masks.items():
        exact = mk.attend(q[..., 4000:, :], k, v, mask=mask, engine="reference")
        assert_close(names[name][..., 4000:, :], exact, rtol=1e-4, atol=1e-5)
    assert names["best"].shape == names["landmarks"].shape == q.shape


def test_a_token_without_its_axis_is_not_taken_for_many() -> None:
    """Heads read as tokens, or a head too few, would broadcast against the state."""
    q, k, v = draw(3, 1, 2, 5, 4).unbind(0)
    _, state = mk.linear_attention(q, k, v, mk.EluFeatures())
    for wrong in ([x[..., 0, :] for x in (q, k, v)], [x[:, :1, :1] for x in (q, k, v)]):
        with pytest.raises(ValueError, match=r"state has a memory of shape \(1, 2, 4, 4\), expected"):
            mk.linear_attention(*wrong, mk.EluFeatures(), state=state)
    assert mk.linear_attention(*(x[..., :1, :] for x in (q, k, v)), mk.EluFeatures(), state=state)[1].tokens == 6
