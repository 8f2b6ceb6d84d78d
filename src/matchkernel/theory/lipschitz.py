"""How fast a self-attention layer's output can move: Jacobian norms, and the bound that one layer has.

`dot_self_attention` has no Lipschitz constant over all inputs. `l2_self_attention`, which scores by squared distance
with W_Q = W_K and sends its values through the same projection, has one: `l2_lipschitz_bound`. The norm of one Jacobian
is a lower bound of the constant and no more: it can refute a bound and never establish one.

Source: Kim, Papamakarios & Mnih 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import attend
from ..kernels import Gaussian, ScaledDot

Layer = Callable[[Tensor], Tensor]


def dot_self_attention(
    x: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
) -> Tensor:
    """softmax(x W_Q (x W_K)ᵀ / √d_k) x W_V: one head, no mask.

    x (n, d), weights (d, d_k), (d, d_k), (d, d_v) → (n, d_v); a weight not given is the identity. Over all inputs it is
    not Lipschitz (Kim et al. 2021, theorem 3.1); over inputs of bounded size it is. Computed by the reference engine,
    so that it can be differentiated twice.
    """
    q, k, v = (_project(x, weight) for weight in (query_weight, key_weight, value_weight))
    return attend(q, k, v, ScaledDot(), engine="reference")


def l2_self_attention(x: Tensor, query_weight: Tensor | None = None, value_weight: Tensor | None = None) -> Tensor:
    """P x A W_V with P = softmax(−|x_i W_Q − x_j W_Q|² / √d_k) and A = W_Q W_Qᵀ / √d_k: one head of L2-MHA, tied.

    x (n, d), W_Q (d, d_k), W_V (d, d_v) → (n, d_v); a weight not given is the identity. W_K = W_Q by construction, and
    the values pass through A: without either the layer is not Lipschitz. The score is `Gaussian` with σ² = √d_k / 2.
    Source: Kim et al. 2021, section 3.2.
    """
    q = _project(x, query_weight)
    root = math.sqrt(q.shape[-1])
    v = (q if query_weight is None else q @ query_weight.mT) / root
    return attend(q, q, _project(v, value_weight), Gaussian(math.sqrt(root / 2)), engine="reference")


def l2_lipschitz_bound(n: int, query_weight: Tensor, value_weight: Tensor | None = None) -> float:
    """An upper bound of the Lipschitz constant of `l2_self_attention` on n tokens, in the Euclidean norm.

    √n / √d_k · (4 φ⁻¹(n − 1) + 1) · ‖W_Q‖₂² · ‖W_V‖₂,  φ(x) = x e^{x+1}

    φ⁻¹(n − 1) is Lambert's W((n − 1)/e); the bound grows like √n log n. Quadratic in W_Q as A is. Why it holds: with
    y = x W_Q / d_k^¼ and z_j = y_j − y_i the row Σ_j P_ij y_j moves by Σ_j P_ij dy_j and by the covariance, under P_i,
    of z_j and −2 z_j·(dy_j − dy_i), together at most 4 Σ_j P_ij |z_j|² + 1 times the longest dy_j. That mean is at most
    φ⁻¹(n − 1), and reaches it with all |z_j|² = 1 + φ⁻¹(n − 1). √n leads from the longest dy_j to the Frobenius norm.
    Raises ValueError for n < 1 or a weight that is no matrix.
    Source: Kim et al. 2021, theorem 3.2, for one head and W_O = I.
    """
    if n < 1:
        raise ValueError(f"n={n}: expected at least one token")
    for name, weight in {"query_weight": query_weight, "value_weight": value_weight}.items():
        if weight is not None and weight.ndim != 2:
            raise ValueError(f"{name} must have shape (d, width), got {tuple(weight.shape)}")
    of_query = float(torch.linalg.matrix_norm(query_weight.double(), ord=2))
    of_value = 1.0 if value_weight is None else float(torch.linalg.matrix_norm(value_weight.double(), ord=2))
    return math.sqrt(n / query_weight.shape[1]) * (4 * inverse_phi(n - 1) + 1) * of_query**2 * of_value


def inverse_phi(y: float) -> float:
    """The x ≥ 0 with x e^{x+1} = y, for y ≥ 0, by Newton's method. Raises ValueError for y < 0."""
    if y < 0:
        raise ValueError(f"y={y}: expected at least 0")
    # The function is convex: from above the root, log(1 + y) is, the steps only come down.
    x = math.log1p(y)
    for _ in range(100):
        step = (x - y * math.exp(-x - 1)) / (x + 1)
        x -= step
        if abs(step) <= 1e-15 * max(x, 1e-300):
            break
    return x


def jacobian_norm(layer: Layer, x: Tensor) -> float:
    """The largest singular value of the layer's Jacobian at x: the steepest way the output moves there.

    x of any shape, layer(x) of any shape. A lower bound of the Lipschitz constant in the Euclidean (Frobenius) norm,
    which is the supremum over x. Cost: one backward pass for each entry of the output, and a singular value
    decomposition of outputs × inputs.
    """
    return float(_norm(layer, x.detach(), create_graph=False))


def steepest(layer: Layer, x: Tensor, *, steps: int = 100, rate: float = 0.05) -> tuple[Tensor, float]:
    """An input near x at which the Jacobian is larger, by gradient ascent on log ‖J‖ (Adam), and ‖J‖ there.

    A better lower bound of the Lipschitz constant. The best input met is returned, x itself if none was better. Cost:
    `steps` Jacobians and their gradients. Raises ValueError for fewer steps than one.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    here = x.detach().clone().requires_grad_()
    best, most = x.detach().clone(), -math.inf
    ascent = torch.optim.Adam([here], lr=rate, maximize=True)
    for _ in range(steps + 1):
        ascent.zero_grad()
        norm = _norm(layer, here, create_graph=True)
        if norm.detach() > most:
            best, most = here.detach().clone(), norm.item()
        norm.log().backward()  # type: ignore[no-untyped-call]
        ascent.step()
    return best, most


def _norm(layer: Layer, x: Tensor, *, create_graph: bool) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(layer, x, create_graph=create_graph)  # type: ignore[no-untyped-call]
    norm: Tensor = torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), ord=2)
    return norm


def _project(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        expected = f"expected ({x.shape[-1]}, width)"
        raise ValueError(f"a weight has shape {tuple(weight.shape)} and x has shape {tuple(x.shape)}: {expected}")
    return x @ weight
