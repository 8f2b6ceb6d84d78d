"""Recall by one layer, five kernels, three widths: python experiments/one_layer_recall.py, about two minutes.

A text holds 32 pairs, each one token that shows both: one of 64 keys, one of 64 values (a vocabulary of 128). Every key
in the text is asked for, and the layer has to name its value. Queries, keys and values have one width d; all tables are
learned. To chapters/data/15-recall.json go, for each kernel and width, the accuracies on 64 fresh texts, one per seed,
and beside them a reference.
With --check nothing is written: a sample is run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapters' own environment

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import matchkernel as mk  # noqa: E402
from bookkit.paths import ROOT  # noqa: E402

STORE = ROOT / "chapters" / "data" / "15-recall.json"
SYMBOLS, PAIRS, BATCH, STEPS, RATE, SEEDS, TEST = 64, 32, 16, 600, 0.03, 4, 10_000
WIDTHS = (8, 16, 32)
MARGIN = 0.06
"""How far another processor's last digits may move an accuracy."""
SAMPLE = (("identity", 8), ("softmax", 8), ("elu+1", 16))
REFERENCE = {
    "softmax": (1.0, 1.0, 1.0),
    "Gaussian": (1.0, 1.0, 1.0),
    "Taylor-2": (0.84, 1.0, 1.0),
    "identity": (0.16, 0.77, 1.0),
    "elu+1": (0.15, 0.47, 0.97),
}
"""What another program for the same task got; its number of steps and its rate are not known."""


def weights(name: str, q: Tensor, k: Tensor, shown: Tensor) -> Tensor:
    """The weight of every pair in the text for every key asked for: q, k (symbols, d), shown (texts, PAIRS)."""
    width = q.shape[-1]
    if name == "identity":
        table = q @ k.mT / width**0.5
    elif name == "Taylor-2":
        table = mk.TaylorFeatures().kappa(q, k)
    elif name == "elu+1":
        table = mk.EluFeatures().kappa(q, k)
    else:
        table = (mk.ScaledDot() if name == "softmax" else mk.Gaussian(width**0.25))(q, k)
    # A symbol's query and key are the same in every text, so all scores come from one table.
    found = table[shown[:, :, None], shown[:, None, :]]
    if name == "identity":
        return found
    if name in ("softmax", "Gaussian"):
        return found.softmax(dim=-1)
    return found / found.sum(dim=-1, keepdim=True)


class Layer(nn.Module):
    """Queries and keys for 64 symbols, values of 64 others, and a read-out: four tables."""

    def __init__(self, name: str, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.name = name
        drawn = torch.randn(4, SYMBOLS, width, generator=generator)
        drawn[3] /= width**0.5
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Parameter(table.clone()) for table in drawn)

    def forward(self, shown: Tensor, values: Tensor) -> Tensor:
        """Votes (texts, PAIRS, SYMBOLS) for the value of every key shown."""
        return weights(self.name, self.W_Q, self.W_K, shown) @ self.W_V[values] @ self.W_O.mT


def texts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Different keys, any values."""
    shown = torch.rand(count, SYMBOLS, generator=generator).argsort(dim=-1)[:, :PAIRS]
    return shown, torch.randint(SYMBOLS, (count, PAIRS), generator=generator)


def run(name: str, width: int, seed: int) -> float:
    """Train one layer; the share of right answers on texts that are the same for all."""
    generator = torch.Generator().manual_seed(seed)
    layer = Layer(name, width, generator)
    optimizer = torch.optim.Adam(layer.parameters(), lr=RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    for _ in range(STEPS):
        shown, values = texts(BATCH, generator)
        loss = nn.functional.cross_entropy(layer(shown, values).flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    with torch.no_grad():
        shown, values = texts(64, torch.Generator().manual_seed(TEST))
        return round((layer(shown, values).argmax(dim=-1) == values).float().mean().item(), 4)


def disagreements(store: dict[str, Any], sample: tuple[tuple[str, int], ...] = SAMPLE) -> list[str]:
    """The first run of each setting in `sample` again; what differs from the store by more than MARGIN."""
    wrong = []
    for name, width in sample:
        apart = abs(run(name, width, seed=0) - store["ours"][name][str(width)][0])
        if not apart <= MARGIN:
            wrong.append(f"{name}, width {width}: the accuracy is {apart:.3f} off the stored one")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Recall by one layer, five kernels, three widths.")
    parser.add_argument("--check", action="store_true", help="run a sample again and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.check:
        wrong = disagreements(json.loads(STORE.read_text(encoding="utf-8")))
        print("\n".join(wrong) or f"{len(SAMPLE)} runs agree with {STORE.name}")
        return int(bool(wrong))
    lines = []
    for name in REFERENCE:
        found = {str(width): [run(name, width, seed) for seed in range(SEEDS)] for width in WIDTHS}
        lines.append(f'  "{name}": {json.dumps(found)}')
        print(lines[-1], flush=True)
    reference = {name: dict(zip(map(str, WIDTHS), row, strict=True)) for name, row in REFERENCE.items()}
    head = f' "about": {json.dumps((__doc__ or "").splitlines()[0])},\n "torch": {json.dumps(torch.__version__)},\n'
    body = ' "ours": {\n' + ",\n".join(lines) + f'\n }},\n "reference": {json.dumps(reference)}\n'
    STORE.write_text("{\n" + head + body + "}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
