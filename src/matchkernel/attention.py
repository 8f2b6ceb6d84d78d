"""Attention with any match kernel: check the call, choose an engine, run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._validate import build_problem
from .engines import Engine, Fused, Linear, Problem, Reference, Sparse, Tiled
from .kernels.base import MatchKernel
from .kernels.dot import Dot, ScaledDot
from .normalizers import Normalizer
from .roofline import Roofline, roofline

_REFERENCE = Reference()
_BY_NAME: dict[str, Engine] = {engine.name: engine for engine in (Linear(), Sparse(), Fused(), Tiled(), _REFERENCE)}
"""In the order in which "auto" asks them; the reference refuses only what is not defined and stands last."""


@dataclass(frozen=True)
class Explanation:
    """Which engine runs a call and why, and what it costs: counted, not measured.

    `flops` counts multiplications and additions, None when the kernel does not say what a pair costs. `bytes` are read
    and written at least once; `peak_bytes` is the most held at a time beside the inputs. `exact` is False for an
    engine that approximates, `compiled` True where torch.compile builds its arithmetic. `roofline()` guesses the time.
    """

    engine: str
    reason: str
    exact: bool
    compiled: bool
    flops: int | None
    bytes: int
    peak_bytes: int
    device: torch.device

    def roofline(self) -> Roofline:
        """The least time that this machine could take, from its measured speeds; ValueError for uncounted operations.

        Measured and not counted, so it is not part of what is printed: two runs would not print the same.
        """
        if self.flops is None:
            raise ValueError(f"{self.engine}: the kernel does not say what a pair costs (flops_per_pair)")
        return roofline(self.flops, self.bytes, self.device)

    def __str__(self) -> str:
        kind = "exact" if self.exact else "approximate"
        flops = "uncounted operations" if self.flops is None else f"{_short(self.flops, 1000)}FLOP"
        return (
            f"{self.engine}: {self.reason}\n"
            f"{kind}, {flops}, {_short(self.bytes, 1024)}B of traffic, "
            f"{_short(self.peak_bytes, 1024)}B held beside the inputs"
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: MatchKernel | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    normalizer: Normalizer | None = None,
    query_position: Tensor | None = None,
    key_position: Tensor | None = None,
    dropout: float = 0.0,
    engine: str | Engine = "auto",
) -> Tensor:
    """Each query's average of the values, weighted by how well the kernel matches it to each key.

    out_i = Σ_j α_ij v_j,  α_i = normalizer(s_i),  s_ij = kernel(q_i, k_j)

    Args:
        q: (…, n, d). k: (…, m, d_k). v: (…, m, d_v). One dtype; leading dimensions broadcast, and q may have
            a multiple of k's heads at dimension −3 (query head h uses key head h // group).
        kernel: any MatchKernel; `ScaledDot()` by default, which is softmax(q kᵀ/√d) v.
        mask: broadcasts to (…, n, m). Bool: True = may attend. Floating: added to the score, after temperature and
            length scaling. Integers are refused.
        causal: a query attends to no key with a later position. With default positions this is aligned to the end: the
            last query sees every key.
        window: w for |i − j| < w, or (left, right) as in flash-attention, −1 for no limit.
        normalizer: `Softmax()` by default.
        query_position, key_position: (…, n) and (…, m); 0 … m−1 for the keys and the last n of them for the queries by
            default. They decide causal order and windows, and the kernel's encoders see them.
        dropout: probability of dropping a weight, the others scaled up.
        engine: "auto", a name ("linear", "sparse", "fused", "tiled", "reference") or an engine with parameters,
            `Tiled(queries=128)`. What is asked for runs or raises, and never hands over to another.

    Returns:
        (…, n, d_v) in the inputs' dtype. A query that may attend to nothing gets zeros, and zero gradients. A NaN in a
        key or value that no query may attend to does not reach the output.

    Raises:
        TypeError, ValueError: naming the argument, its shape or dtype and what was expected; ValueError also when a
            named engine, or none at all, can run the call, with the reasons: a signed `FeatureKernel` has no score.

    Cost: O(n m) time. O(n) memory where the fused engine runs without a mask per query: alone, causal, and with a mask
    over the keys. Positions of one's own, a mask with a row per query, or a window that is not much shorter than the
    keys make it hold one n × m mask. O(n w) time and O(n) memory for shorter windows of w keys on the sparse engine.
    O(n m) memory on the reference. `explain` tells.
    Source: Vaswani et al. 2017, eq. 1, for the default; Tsai et al. 2019, eq. 2, for the general form.
    """
    problem = build_problem(
        q, k, v, kernel, mask=mask, causal=causal, window=window, normalizer=normalizer,
        query_position=query_position, key_position=key_position, dropout=dropout,
    )  # fmt: skip
    return _choose(problem, engine)[0].run(problem)


def weights(
    q: Tensor,
    k: Tensor,
    kernel: MatchKernel | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    normalizer: Normalizer | None = None,
    query_position: Tensor | None = None,
    key_position: Tensor | None = None,
) -> Tensor:
    """The table of weights α (…, n, m) that `attend` multiplies the values with. Dense: for people who look."""
    problem = build_problem(
        q, k, k, kernel, mask=mask, causal=causal, window=window, normalizer=normalizer,
        query_position=query_position, key_position=key_position,
    )  # fmt: skip
    return _REFERENCE.weights(problem)


def scores(
    q: Tensor,
    k: Tensor,
    kernel: MatchKernel | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    query_position: Tensor | None = None,
    key_position: Tensor | None = None,
) -> Tensor:
    """The table of scores s (…, n, m), before any normaliser: a float mask added, −inf where a query may not attend."""
    problem = build_problem(
        q, k, k, kernel, mask=mask, causal=causal, window=window, normalizer=None,
        query_position=query_position, key_position=key_position,
    )  # fmt: skip
    return _REFERENCE.masked_scores(problem)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: MatchKernel | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    normalizer: Normalizer | None = None,
    query_position: Tensor | None = None,
    key_position: Tensor | None = None,
    dropout: float = 0.0,
    engine: str | Engine = "auto",
) -> Explanation:
    """Which engine `attend` would run for the same arguments, why, and its cost; nothing is computed."""
    problem = build_problem(
        q, k, v, kernel, mask=mask, causal=causal, window=window, normalizer=normalizer,
        query_position=query_position, key_position=key_position, dropout=dropout,
    )  # fmt: skip
    chosen, before = _choose(problem, engine)
    reason = "; ".join([*before, chosen.reason(problem)])
    cost = chosen.cost(problem)
    compiled = chosen.compiles(problem)
    return Explanation(
        chosen.name, reason, chosen.exact, compiled, cost.flops, cost.bytes, cost.peak_bytes, q.device
    )  # fmt: skip


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: MatchKernel | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with any match kernel in the place of the scaled dot product.

    Argument names and conventions are torch's: a causal order aligned to the start, grouped heads only when asked for,
    and not `attn_mask` together with `is_causal`. `scale` multiplies the plain dot product as in torch, or the score
    of `kernel` when one is given.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal: torch takes one of them; attend() takes both")
    if not enable_gqa and query.dim() > 2 and key.dim() > 2 and query.shape[-3] != key.shape[-3]:
        if 1 not in (query.shape[-3], key.shape[-3]):
            raise ValueError(
                f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}: "
                "pass enable_gqa=True for grouped heads"
            )
    n, m = query.shape[-2], key.shape[-2]
    if kernel is None:
        kernel = ScaledDot() if scale is None else scale * Dot()
    elif scale is not None:
        kernel = scale * kernel
    start = None if n == m or not is_causal else torch.arange(n, device=query.device)
    return attend(
        query, key, value, kernel, mask=attn_mask, causal=is_causal,
        query_position=start, dropout=dropout_p,
    )  # fmt: skip


def _choose(problem: Problem, engine: str | Engine) -> tuple[Engine, list[str]]:
    """The engine, and what led to it: why those that were asked first are not it, or that it was asked for."""
    if engine == "auto":
        refusals: list[str] = []
        for candidate in _BY_NAME.values():
            if not concerned(candidate, problem):
                continue
            refusal = candidate.refuse(problem) or candidate.declines(problem)
            if refusal is None:
                return candidate, refusals
            refusals.append(f"not {candidate.name} ({refusal})")
        raise ValueError(f"no engine can run this call: {'; '.join(refusals)}")
    check_engine(engine)
    chosen, how = (_BY_NAME[engine], "asked for by name") if isinstance(engine, str) else (engine, "asked for")
    refusal = chosen.refuse(problem)
    if refusal is not None:
        raise ValueError(f"engine={engine!r} cannot run this call: {refusal}")
    return chosen, [how]


def concerned(engine: Engine, problem: Problem) -> bool:
    """Whether the question arises: an engine for calls of one kind may say so with a method `concerns`, and is then
    not told of where it never would have been asked."""
    concerns = getattr(engine, "concerns", None)
    return concerns is None or bool(concerns(problem))


def check_engine(engine: object) -> None:
    """Raise unless `engine` is what the argument of that name takes."""
    if isinstance(engine, str):
        if engine != "auto" and engine not in _BY_NAME:
            raise ValueError(f'engine={engine!r}: expected "auto" or one of {", ".join(map(repr, _BY_NAME))}')
    elif isinstance(engine, type) or not isinstance(engine, Engine):
        hint = "; it is a class, so add parentheses" if isinstance(engine, type) else ""
        raise TypeError(f"engine: expected a name or an engine such as mk.Tiled(queries=128), got {engine!r}{hint}")


def _short(count: float, base: int) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < base:
            return f"{count:.3g} {unit if base == 1000 or not unit else unit.upper() + 'i'}"
        count /= base
    return f"{count:.3g} {'P' if base == 1000 else 'Pi'}"
