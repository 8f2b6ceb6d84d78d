"""Heads with another bilinear form in them: the symmetric part of M, its transpose, its best part of rank r.

Each function takes a `Head` and returns one to put in its place, and touches the content term x M x'ᵀ alone; the terms
of the biases (`Head.terms`) and the scale stay exactly as they were.

    head = model.head(2, 9)
    model.read(text, heads={(2, 9): symmetric_part(head)})
    model.embed(texts, heads={(h.layer, h.index): transposed(h) for h in model.heads()})

No function is needed to put another match kernel, normaliser or mask into a head, a layer or the whole model:
`read`, `embed` and `losses` take them as they are.

    model.read(text, kernel={(2, 9): Gaussian(bandwidth=2.0)}, normalizer={3: Sparsemax()}, window=8)

What to measure afterwards is in `embedding_shift` and `loss_shift`.

Where a rotation stands between query and key, x_i W_Q R_{j−i} W_Kᵀ x_jᵀ, there is one M for each offset, and
"transposed" and "symmetric" are said of the whole table of content scores: token i asking about token j trades places
with j asking about i. That comes to the same swap of W_Q and W_K, since R_{i−j} is the transpose of R_{j−i}.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from .head import Head


def symmetric_part(head: Head) -> Head:
    """The head with (M + Mᵀ)/2 in place of M: what is left if asking and being asked are the same thing.

    Never made as a matrix: [W_Q, W_K] [W_K, W_Q]ᵀ / 2. Its rank is at most twice the head's.
    """
    left, right = torch.cat([head.W_Q, head.W_K], 1), torch.cat([head.W_K, head.W_Q], 1)
    return _with_content(head, left / math.sqrt(2), right / math.sqrt(2))


def antisymmetric_part(head: Head) -> Head:
    """The head with (M − Mᵀ)/2 in place of M: pure direction; what a asks of b it refuses when b asks of a.

    [W_Q, W_K] [W_K, −W_Q]ᵀ / 2; together with `symmetric_part` it adds up to M.
    """
    left, right = torch.cat([head.W_Q, head.W_K], 1), torch.cat([head.W_K, -head.W_Q], 1)
    return _with_content(head, left / math.sqrt(2), right / math.sqrt(2))


def transposed(head: Head) -> Head:
    """The head with Mᵀ in place of M: queries and keys trade places, in the content term only.

    Under a rotation the whole table of content scores is transposed, offsets included (as its symmetric part is taken,
    in `symmetric_part`).
    """
    return _with_content(head, head.W_K, head.W_Q)


def truncated(head: Head, rank: int) -> Head:
    """The head with the best approximation of M of the given rank (in squared error: its largest singular values).

    Args:
        rank: 0 … the width of W_Q; 0 leaves the terms of the biases alone, the full width leaves the head as it is.

    Raises:
        ValueError: the rank is outside that range, or the head rotates its queries and keys: it then has a form M for
            each offset between the two, with singular vectors of its own, and no one matrix of lower rank is the best
            for all of them.

    Cost: an SVD of a matrix of the head's width; M itself is not made. Source: Eckart & Young 1936.
    """
    width = head.W_Q.shape[1]
    if head.rotation is not None:
        raise ValueError(
            f"head ({head.layer}, {head.index}) rotates queries and keys, so it has a bilinear form for each offset "
            "and no one matrix to truncate; its form at one offset is in head.form(offset)"
        )
    if not 0 <= rank <= width:
        raise ValueError(f"rank is {rank}; the head's M is a product of factors of width {width}: expected 0…{width}")
    # In float64: what is kept at full rank must be the head again, to the rounding of its own type.
    (q_basis, q_mix), (k_basis, k_mix) = (torch.linalg.qr(W.double()) for W in (head.W_Q, head.W_K))
    U, S, Vh = torch.linalg.svd(q_mix @ k_mix.mT)
    root = S[:rank].sqrt()
    left, right = q_basis @ U[:, :rank] * root, k_basis @ Vh[:rank].mT * root
    return _with_content(head, left.to(head.W_Q.dtype), right.to(head.W_K.dtype))


def random_like(head: Head, generator: torch.Generator) -> Head:
    """The head with a random M: Gaussian factors of the same width, scaled so that M keeps its Frobenius norm.

    What a change of M does has to be held against this one: the same size, nothing learned. Where the head rotates,
    the norm is that at offset 0.

    Args:
        generator: where the factors are drawn from; their distribution does not depend on any basis.
    """
    left, right = (
        torch.randn(W.shape, generator=generator, device=generator.device).to(W) for W in (head.W_Q, head.W_K)
    )
    grow = (_norm(head.W_Q, head.W_K) / _norm(left, right)).sqrt()
    return _with_content(head, grow * left, grow * right)


def without_key_term(head: Head) -> Head:
    """The head without b_Q W_Kᵀ x'ᵀ, the score that a key has whoever asks.

    Setting b_Q to zero is all it takes; the constant b_Q·b_K goes with it, which no softmax sees.
    """
    return replace(head, b_Q=torch.zeros_like(head.b_Q))


def only_key_term(head: Head) -> Head:
    """The head with b_Q W_Kᵀ x'ᵀ and the constant alone: every token asks for the same keys.

    Setting W_Q to zero is all it takes. In a head without biases it leaves no score at all: uniform attention.
    """
    return replace(head, W_Q=torch.zeros_like(head.W_Q))


def _with_content(head: Head, left: Tensor, right: Tensor) -> Head:
    """The head with x left rightᵀ x'ᵀ for its content term, and its bias terms as they were.

    The terms of the biases get coordinates of their own, as wide as a query so that a rotation turns them as before:
    the query [x left, x W_Q + b_Q, b_Q] meets the key [x' right, b_K, x' W_K].
    """
    W_Q, W_K, b_Q, b_K = head.W_Q, head.W_K, head.b_Q, head.b_K
    if head.rotation is not None and W_Q.shape[1] % head.rotation.dim:
        raise ValueError(
            f"W_Q of {head!r} has {W_Q.shape[1]} columns; its rotation turns chunks of {head.rotation.dim}, and "
            "columns beyond the last whole chunk do not turn: such a head has no one rotated form"
        )
    content_bias = left.new_zeros(left.shape[1])
    if not (b_Q.any() or b_K.any()):
        return replace(head, W_Q=left, W_K=right, b_Q=content_bias, b_K=content_bias.clone())
    return replace(
        head,
        W_Q=torch.cat([left, W_Q, torch.zeros_like(W_Q)], 1),
        b_Q=torch.cat([content_bias, b_Q, b_Q]),
        W_K=torch.cat([right, torch.zeros_like(W_K), W_K], 1),
        b_K=torch.cat([content_bias, b_K, torch.zeros_like(b_K)]),
    )


def _norm(left: Tensor, right: Tensor) -> Tensor:
    """The Frobenius norm of left rightᵀ, which is not made."""
    return ((left.mT @ left) * (right.mT @ right)).sum().clamp_min(0).sqrt()
