"""How many pairs a memory of width 64 holds: python experiments/capacity.py, about eight minutes on one free core.

The first experiment of Schlag, Irie & Schmidhuber (2021, section 6.1): N keys and N values, each used once, in random
order; a query asks for the value of one key; the loss is half the squared error of the value. Written are, to
chapters/data/15-capacity.json, for each feature map and each N, one entry per seed:
  loss   the loss at the end, on fresh texts; 0.5 is what an empty memory gets
  best   the lowest loss on the way
  steps  the steps made
  spread the share of keys whose loss is below 0.05 at the end, and the share above 0.45
`theirs` holds what the authors' own logs end with. With --check nothing is written: a sample is run again.

What is as in the authors' code (github.com/ischlag/fast-weight-transformers, synthetic/): embeddings of 2.2 N numbers,
learned; keys made from the embedding and from the value's one-hot vector; the starts; Adam at 1e-3 with 32 queries a
step; a look at fresh texts every 100 steps; an end at a loss of 1e-3 or after 11 looks without progress.
What is not: from 200 pairs on 4 texts with 8 queries each, not 32 with one; at most 2000 steps (theirs: 100 000);
one seed or two; and a loss over all keys alike. Theirs asks for the first 200 keys at most and averages over batches of
32, the last of which is short, so that its few keys count for more. And values are never multiplied out: they are
one-hot and each occurs once, so the output holds the weights themselves, and the loss can be read off them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapters' own environment

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from bookkit.paths import ROOT  # noqa: E402

STORE = ROOT / "chapters" / "data" / "15-capacity.json"
WIDTH, BATCH, RATE, EVERY, LOOKED_AT = 64, 32, 1e-3, 100, 20
PATIENCE, ENOUGH = 10, 1e-3
STEPS = 2000
SEEDS = {20: 2, 60: 2, 100: 2, 200: 2, 300: 1, 600: 1}
TEXTS = {20: 32, 60: 32, 100: 32, 200: 4, 300: 4, 600: 4}
"""Texts in a batch; its 32 queries are spread over them."""
SIZES = tuple(TEXTS)
MARGIN = 0.02
"""How far another processor's last digits may move a loss."""
SAMPLE = (("softmax", 20), ("elu+1", 60), ("DPFP1", 60))

Features = Callable[[Tensor, Tensor], Tensor]
THEIRS = {
    "softmax": (6e-4, 7e-5, 2e-5, 9e-6, 5e-6, 0.054),
    "elu+1": (9e-4, 0.025, 0.17, 0.34, 0.40, 0.45),
    "DPFP1": (8e-4, 4e-4, 2e-4, 0.175, 0.29, 0.42),
    "DPFP2": (3e-4, 1e-3, 5e-4, 4e-4, 0.068, 0.33),
    "DPFP3": (5e-4, 5e-4, 5e-4, 9e-4, 3e-4, 0.20),
    "FAVOR64": (0.13, 0.49, 0.50, None, None, None),
}
DIMENSION = {"softmax": None, "elu+1": 64, "DPFP1": 128, "DPFP2": 256, "DPFP3": 384, "FAVOR64": 128}
"""Features per key; softmax has no finite number of them."""


def elu(x: Tensor, directions: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020)."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def dpfp(nu: int) -> Features:
    """Products of the two signs' rectified halves with themselves, rolled by 1 … ν (Schlag et al. 2021, eq. 37)."""

    def features(x: Tensor, directions: Tensor) -> Tensor:
        halves = torch.cat([x.relu(), (-x).relu()], dim=-1)
        return torch.cat([halves * halves.roll(shift, dims=-1) for shift in range(1, nu + 1)], dim=-1)

    return features


def favor(x: Tensor, directions: Tensor) -> Tensor:
    """exp(±w·x − |x|²/2)/√2m for m random directions w (Choromanski et al. 2021)."""
    along, half = x @ directions, x.square().sum(dim=-1, keepdim=True) / 2
    size = math.log(2 * directions.shape[-1]) / 2
    return torch.cat([(along - half - size).exp(), (-along - half - size).exp()], dim=-1)


MAPS: dict[str, Features | None] = {
    "softmax": None,
    "elu+1": elu,
    "DPFP1": dpfp(1),
    "DPFP2": dpfp(2),
    "DPFP3": dpfp(3),
    "FAVOR64": favor,
}


def orthogonal_directions(generator: torch.Generator) -> Tensor:
    """WIDTH orthogonal directions with the lengths of normal vectors, one per column."""
    block = torch.randn(WIDTH, WIDTH, generator=generator)
    q, r = torch.linalg.qr(block)
    return q * r.diagonal().sign() * block.norm(dim=-1)


class Memory(nn.Module):
    """One layer of attention over N pairs. Values are one-hot, so its output is the weight of each pair."""

    def __init__(self, features: Features | None, pairs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.features, self.generator = features, generator
        wide = int(2 * pairs * 1.1)
        # Starts as in the authors' code: xavier for softmax, ±1/√width for a feature map, torch's own for the biases.
        key = math.sqrt(6 / (wide + pairs + WIDTH)) if features is None else WIDTH**-0.5
        query = math.sqrt(6 / (wide + WIDTH)) if features is None else WIDTH**-0.5

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            return nn.Parameter((torch.rand(shape, generator=generator) * 2 - 1) * bound)

        self.embedding = nn.Parameter(torch.randn(pairs, wide, generator=generator))
        self.W_Q, self.W_K = uniform(query, wide, WIDTH), uniform(key, wide, WIDTH)
        self.W_K_value = uniform(key, pairs, WIDTH)
        self.b_Q, self.b_K = uniform(wide**-0.5, WIDTH), uniform((wide + pairs) ** -0.5, WIDTH)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """keys, values (texts, N) as indices, asked (texts, queries) as keys → weights (texts, queries, N)."""
        q = self.embedding[asked] @ self.W_Q + self.b_Q
        k = (self.embedding @ self.W_K + self.b_K)[keys] + self.W_K_value[values]
        if self.features is None:
            return (q @ k.mT / math.sqrt(WIDTH)).softmax(dim=-1)
        directions = orthogonal_directions(self.generator) if self.features is favor else q
        kappa = self.features(q, directions) @ self.features(k, directions).mT
        return kappa / (kappa.sum(dim=-1, keepdim=True) + 1e-6)


def shuffled(texts: int, pairs: int, generator: torch.Generator) -> Tensor:
    """For each text the numbers 0 … N−1 in random order."""
    return torch.rand(texts, pairs, generator=generator).argsort(dim=-1)


def loss_of(weights: Tensor, keys: Tensor, asked: Tensor) -> Tensor:
    """½|output − value|² of each query: ½ Σ w² − w(right) + ½, since values are one-hot."""
    right = (asked[..., None] == keys[:, None, :]).to(weights.dtype)
    return 0.5 * (weights - right).square().sum(dim=-1)


@torch.no_grad()
def examine(memory: Memory, pairs: int, generator: torch.Generator) -> Tensor:
    """The loss of every key in fresh texts (texts, N)."""
    texts = min(LOOKED_AT, TEXTS[pairs])
    keys, values = shuffled(texts, pairs, generator), shuffled(texts, pairs, generator)
    asked = torch.arange(pairs).expand(texts, -1)
    return loss_of(memory(keys, values, asked), keys, asked)


def run(name: str, pairs: int, seed: int) -> dict[str, Any]:
    """Train one memory and say how it ends."""
    generator = torch.Generator().manual_seed(seed)
    memory = Memory(MAPS[name], pairs, generator)
    optimizer = torch.optim.Adam(memory.parameters(), lr=RATE)
    texts = TEXTS[pairs]
    best, strikes, step, found = math.inf, 0, 0, torch.tensor(math.nan)
    while step < STEPS:
        step += 1
        keys, values = shuffled(texts, pairs, generator), shuffled(texts, pairs, generator)
        asked = torch.randint(pairs, (texts, BATCH // texts), generator=generator)
        loss = loss_of(memory(keys, values, asked), keys, asked).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            found = examine(memory, pairs, generator)
            mean = found.mean().item()
            best, strikes = (mean, 0) if mean < best else (best, strikes + 1)
            if mean <= ENOUGH or strikes > PATIENCE:
                break
    each = found.mean(dim=0)
    spread = [round(share.float().mean().item(), 3) for share in (each < 0.05, each > 0.45)]
    return {"loss": float(f"{found.mean():.2g}"), "best": float(f"{best:.2g}"), "steps": step, "spread": spread}


def measure(kept: dict[str, Any]) -> dict[str, Any]:
    """Every map and size that `kept` lacks, smallest first, each written as soon as it is there."""
    for pairs in SIZES:
        for name in MAPS:
            if THEIRS[name][SIZES.index(pairs)] is None or str(pairs) in kept.get(name, {}):
                continue
            start = time.monotonic()
            runs = [run(name, pairs, seed) for seed in range(SEEDS[pairs])]
            kept.setdefault(name, {})[str(pairs)] = runs
            print(pairs, name, [made["loss"] for made in runs], f"{time.monotonic() - start:.0f} s", flush=True)
            write(kept)
    return kept


def write(found: dict[str, Any]) -> None:
    """The store, a line for each map and size."""
    theirs = {
        name: {str(pairs): loss for pairs, loss in zip(SIZES, row, strict=True) if loss is not None}
        for name, row in THEIRS.items()
    }
    head = {"about": (__doc__ or "").splitlines()[0], "torch": torch.__version__, "features": DIMENSION}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    for title, table in (("ours", found), ("theirs", theirs)):
        rows = []
        for name, sizes in table.items():
            inner = ",\n".join(f'   "{size}": {json.dumps(value)}' for size, value in sizes.items())
            rows.append(f'  "{name}": {{\n{inner}\n  }}')
        lines.append(f' "{title}": {{\n' + ",\n".join(rows) + "\n }")
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def disagreements(store: dict[str, Any], sample: tuple[tuple[str, int], ...] = SAMPLE) -> list[str]:
    """The first run of each cell in `sample` again; what differs from the store by more than MARGIN."""
    wrong = []
    for name, pairs in sample:
        kept = store["ours"][name][str(pairs)][0]["loss"]
        apart = abs(run(name, pairs, seed=0)["loss"] - kept)
        if not apart <= MARGIN:
            wrong.append(f"{name}, {pairs} pairs: the loss is {apart:.3f} off the stored one")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="How many pairs a memory of width 64 holds.")
    parser.add_argument("--check", action="store_true", help="run a sample again and write nothing")
    parser.add_argument("--keep", action="store_true", help="keep what the store has and measure the rest")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.check:
        wrong = disagreements(json.loads(STORE.read_text(encoding="utf-8")))
        print("\n".join(wrong) or f"{len(SAMPLE)} runs agree with {STORE.name}")
        return int(bool(wrong))
    measure(json.loads(STORE.read_text(encoding="utf-8"))["ours"] if given.keep else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
