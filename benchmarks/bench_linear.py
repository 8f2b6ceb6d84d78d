"""Linear attention against its best peers; writes results/linear.json.

b · h = 8, d = 64, float32. `python benchmarks/bench_linear.py --repeats 0.3` for a quick look.
"""

from __future__ import annotations

import argparse

import peers
import targets
import torch
from bench_kernels import Group, rows_of, time_slope
from harness import one_thread, store
from targets import Line
from ways import WIDTH, Build, Inputs, Way

import matchkernel as mk

Tensor = torch.Tensor
FEATURES = 256
LENGTH = 16384
OURS = "matchkernel"


def ours(kernel: mk.MatchKernel) -> Build:
    def build(inputs: Inputs) -> Way:
        return Way(
            lambda: mk.attend(inputs.q, inputs.k, inputs.v, kernel, causal=inputs.causal, engine="linear"),
            inputs.leaves,
        )

    return build


def elu(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1.0


def fast_transformers(inputs: Inputs) -> Way:
    """The C++ extension, and around it what its module does, without that one's change of layout."""
    causal_product = peers.fast_transformers().causal_dot_product

    def call() -> Tensor:
        q, k = elu(inputs.q), elu(inputs.k)
        if not inputs.causal:
            state = torch.einsum("nhsd,nhsm->nhmd", k, inputs.v)
            weight = 1.0 / (torch.einsum("nhld,nhd->nhl", q, k.sum(dim=2)) + 1e-6)
            return torch.einsum("nhld,nhmd,nhl->nhlm", q, state, weight).contiguous()
        weight = 1.0 / (torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + 1e-6)
        out: Tensor = causal_product(q, k, inputs.v)
        return out * weight[..., None]

    return Way(call, inputs.leaves)


def performer(inputs: Inputs) -> Way:
    attention = peers.performer().linear_attention
    return Way(lambda: attention(elu(inputs.q), elu(inputs.k), inputs.v), inputs.leaves)


def performer_favor(inputs: Inputs) -> Way:
    attention = peers.performer().FastAttention(dim_heads=WIDTH, nb_features=FEATURES, causal=False)
    return Way(lambda: attention(inputs.q, inputs.k, inputs.v), inputs.leaves)


def causal() -> dict[str, Build]:
    """flash-linear-attention has no row: its kernels need a GPU. What its import says is stored beside the peers."""
    return {OURS: ours(mk.EluFeatures()), "fast-transformers": fast_transformers}


def both_sides() -> dict[str, Build]:
    return {
        OURS: ours(mk.EluFeatures()),
        "fast-transformers": fast_transformers,
        "performer-pytorch": performer,
    }


def favor() -> dict[str, Build]:
    """Not the same numbers: each draws its own projection, and the peer adds 1e-4 to every feature."""
    kernel = mk.FavorFeatures(WIDTH, FEATURES, generator=torch.Generator().manual_seed(0))
    found: dict[str, Build] = {OURS: ours(kernel)}
    try:
        peers.performer()
    except peers.Missing as missing:
        print(f"  performer-pytorch: {missing}")
    else:
        found["performer-pytorch"] = performer_favor
    return found


GROUPS = [
    Group("elu + 1, causal", causal, {LENGTH: 7}, causal=True),
    Group("elu + 1", both_sides, {LENGTH: 7}),
    Group("FAVOR+", favor, {LENGTH: 5}, same=False),
]
PAIRS: list[tuple[str, str, tuple[float, float], tuple[float, float], str, tuple[str, ...]]] = [
    ("causal linear ÷ fast-transformers", "elu + 1, causal", (0.55, 0.62), (0.30, 0.30), OURS, ("fast-transformers",)),
    ("linear ÷ best peer", "elu + 1", (0.80, 0.60), (0.40, 0.40), OURS, ("fast-transformers", "performer-pytorch")),
    ("FAVOR+ ÷ performer-pytorch", "FAVOR+", (0.35, 0.35), (0.18, 0.18), OURS, ("performer-pytorch",)),
]
LINES = [
    Line(f"{line}, {'with backward' if backward else 'forward'}", must[backward], aim[backward], what, way, backward,
         peers=beside)
    for line, what, must, aim, way, beside in PAIRS
    for backward in (False, True)
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=float, default=1.0, help="multiply the rounds, e.g. 0.3 for a quick look")
    parser.add_argument("--only", nargs="+", metavar="WHAT", help="these groups; printed and not stored")
    arguments = parser.parse_args()
    one_thread()
    rows = rows_of([group for group in GROUPS if not arguments.only or group.what in arguments.only], arguments.repeats)
    judged = targets.judge(rows, LINES)
    print(targets.table(judged))
    if arguments.only:
        return
    slopes = time_slope(ours(mk.EluFeatures()), OURS, [2**i for i in range(9, 16)])
    for found in slopes:
        print(f"slope of time, n = 512 … 32768{', with backward' if found['backward'] else ''}: {found['slope']}")
    print(store("linear", rows, __doc__ or "", peers=peers.linear_peers(), targets=judged, slopes=slopes))


if __name__ == "__main__":
    main()
