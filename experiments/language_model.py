"""One small language model with each match kernel: python experiments/language_model.py, fifteen minutes of one core.

The text is Lewis Carroll's Alice's Adventures in Wonderland (1865; chapters/data/23-alice.txt.xz), cut into 512 tokens
by merges that its first four fifths teach. Those are trained on; the last fifth, the end of the book, is held out.
Width, depth, steps, batches and the start of every shared weight are the same for all: they come from the seed alone.
What differs is the kernel. Written to chapters/data/23-language-model.json:
  tuning   {kernel: {rate: loss}}, all rates, the seed in TUNING
  fresh    {kernel: {"rate", "parameters", "seeds", "loss": [per seed], "by_position": [per seed][range in RANGES]}} at
           the rate that was best, the seeds in FRESH
Losses are in nats per character of the held-out text. With --check nothing is written: a sample is run again. A store
that is there is kept and what it lacks is run, so that a kernel added to KERNELS, or a seed to FRESH, costs its own
runs alone.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapters' own environment

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy, gelu  # noqa: E402

import matchkernel as mk  # noqa: E402
from bookkit.paths import ROOT  # noqa: E402

TEXT = ROOT / "chapters" / "data" / "23-alice.txt.xz"
STORE = ROOT / "chapters" / "data" / "23-language-model.json"
TOKENS, WIDTH, HEADS, LAYERS, LENGTH = 512, 64, 2, 2, 128
BATCH, STEPS = 4, 300
RATES = (0.01, 0.02, 0.005)
TUNING, FRESH = 100, tuple(range(16))
RANGES = ((0, 4), (4, 16), (16, 32), (32, 64), (64, 128))
"""Places in the context: the first token read has place 0 and sees itself alone."""
SAMPLE = ("scaled dot", "window 32")
MARGIN = 0.03
"""How far another processor's last digits may move a loss."""
_EACH = WIDTH // HEADS
_TILED = mk.Tiled(compile=False)


class Way(NamedTuple):
    """A kernel, made from a generator, and who computes it: an engine that is named, so that it stays the same one."""

    make: Callable[[torch.Generator], mk.MatchKernel]
    engine: Any = "fused"
    window: int | None = None


def per_head(value: float) -> nn.Parameter:
    """A learned number for each head."""
    return nn.Parameter(torch.full((HEADS,), value))


KERNELS: dict[str, Way] = {
    "scaled dot": Way(lambda generator: mk.ScaledDot()),
    "cosine": Way(lambda generator: mk.Cosine(per_head(0.2))),
    "Gaussian": Way(lambda generator: mk.Gaussian(per_head(_EACH**0.25))),
    "rational quadratic": Way(lambda generator: mk.RationalQuadratic(1.0, per_head(_EACH**0.25)), "reference"),
    "bilinear": Way(lambda generator: mk.Bilinear(_EACH, generator=generator)),
    "additive": Way(lambda generator: mk.Additive(_EACH, 8, generator=generator), _TILED),
    "dot + ALiBi": Way(lambda generator: mk.ScaledDot() + mk.ALiBi(HEADS)),
    "rotary": Way(lambda generator: mk.Rotary(_EACH)),
    "window 32": Way(lambda generator: mk.ScaledDot(), window=32),
    "elu + 1": Way(lambda generator: mk.EluFeatures(), "reference"),
    "elu + 1, decay": Way(lambda generator: mk.EluFeatures() + mk.ALiBi(HEADS), "reference"),
    "FAVOR+ 64": Way(lambda generator: mk.FavorFeatures(_EACH, 64, generator=generator), "reference"),
    "Hedgehog": Way(lambda generator: mk.HedgehogFeatures(_EACH, heads=HEADS), "reference"),
}


class Text(NamedTuple):
    """Token ids to learn from and held out, and how many characters a token of the latter stands for on average."""

    train: Tensor
    held_out: Tensor
    characters_per_token: float


@cache
def alice() -> Text:
    """The book as tokens: pairs of tokens are merged within words, most frequent first, as the first part teaches."""
    whole = re.sub(r"\s+", " ", lzma.decompress(TEXT.read_bytes()).decode("ascii"))
    whole = whole[whole.index("CHAPTER I") :]
    cut = whole.rindex(" ", 0, len(whole) * 4 // 5)
    pieces = [re.findall(r" ?[A-Za-z]+| ?[^A-Za-z ]+| ", part) for part in (whole[:cut], whole[cut:])]
    cuts = {piece: tuple(piece) for part in pieces for piece in part}
    counts = Counter(pieces[0])
    names = sorted(set(whole))
    while len(names) < TOKENS:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, count in counts.items():
            for pair in zip(cuts[piece], cuts[piece][1:], strict=False):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        names.append("".join(best))
        cuts = {piece: merged(parts, best) for piece, parts in cuts.items()}
    number = {name: index for index, name in enumerate(names)}
    train, held_out = (torch.tensor([number[name] for piece in part for name in cuts[piece]]) for part in pieces)
    return Text(train, held_out, sum(map(len, pieces[1])) / len(held_out))


def merged(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`parts` with each neighbouring `pair` put together, from the left."""
    if pair[0] not in parts:
        return parts
    done: list[str] = []
    at = 0
    while at < len(parts):
        together = parts[at : at + 2] == pair
        done.append("".join(pair) if together else parts[at])
        at += 2 if together else 1
    return tuple(done)


class Layer(nn.Module):
    """Attention and a hidden layer of twice the width, each added to what came in."""

    def __init__(self, way: Way, generator: torch.Generator) -> None:
        super().__init__()
        self.W_QKV = drawn(WIDTH, 3 * WIDTH, generator)
        self.W_O = drawn(WIDTH, WIDTH, generator)
        self.W_up, self.W_down = drawn(WIDTH, 2 * WIDTH, generator), drawn(2 * WIDTH, WIDTH, generator)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.way = way
        # From a generator of its own, so that what a kernel draws does not move the start of anything else.
        self.kernel = way.make(torch.Generator().manual_seed(generator.initial_seed()))

    def forward(self, x: Tensor) -> Tensor:
        """x (texts, tokens, WIDTH) → the same shape."""
        q, k, v = (self.before(x) @ self.W_QKV).unflatten(-1, (3, HEADS, _EACH)).permute(2, 0, 3, 1, 4)
        seen = mk.attend(q, k, v, self.kernel, causal=True, window=self.way.window, engine=self.way.engine)
        x = x + seen.transpose(1, 2).flatten(-2) @ self.W_O
        return x + gelu(self.between(x) @ self.W_up) @ self.W_down  # type: ignore[no-any-return]


class Model(nn.Module):
    """Tokens and places to the scores of the next token; the embedding reads in and out."""

    def __init__(self, way: Way, generator: torch.Generator) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(TOKENS, WIDTH, generator=generator) * 0.1)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH, generator=generator) * 0.1)
        self.layers = nn.Sequential(*(Layer(way, generator) for _ in range(LAYERS)))
        self.after = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (texts, n ≤ LENGTH) → scores (texts, n, TOKENS)."""
        x = self.layers(self.token[tokens] + self.place[: tokens.shape[-1]])
        return self.after(x) @ self.token.mT  # type: ignore[no-any-return]


def drawn(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=generator) / math.sqrt(rows))


def pace(step: int) -> float:
    """The share of the rate at a step: up in the first tenth, then down along a cosine to nearly 0."""
    start = STEPS // 10
    return (step + 1) / start if step < start else 0.5 + 0.5 * math.cos(math.pi * (step - start) / (STEPS - start))


def train(way: Way, rate: float, seed: int) -> Model:
    """One model, trained; the same seed gives every kernel the same start and the same texts."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(way, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
    text = alice().train
    for _ in range(STEPS):
        at = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        tokens = text[at + torch.arange(LENGTH + 1)]
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def losses(model: Model) -> Tensor:
    """Nats per token (texts, LENGTH) over the held-out part, each of its tokens predicted once."""
    text = alice().held_out
    starts = torch.arange(0, len(text) - LENGTH, LENGTH)
    tokens = text[starts[:, None] + torch.arange(LENGTH + 1)]
    rows = [cross_entropy(model(some[:, :-1]).mT, some[:, 1:], reduction="none") for some in tokens.split(8)]
    return torch.cat(rows)


def run(name: str, rate: float, seed: int) -> dict[str, Any]:
    """The held-out loss of one model in nats per character, whole and by the place in the context."""
    model = train(KERNELS[name], rate, seed)
    each = losses(model) / alice().characters_per_token
    return {
        "loss": round(each.mean().item(), 4),
        "by_position": [round(each[:, low:high].mean().item(), 4) for low, high in RANGES],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def best(tried: dict[str, float]) -> str:
    """The rate with the lowest loss."""
    return min(tried, key=lambda rate: tried[rate])


def measure(store: dict[str, Any], seeds: tuple[int, ...] = FRESH) -> None:
    """Whatever `store` lacks, all kernels at one rate or seed after the other; written after each run."""
    tuning, fresh = store.setdefault("tuning", {}), store.setdefault("fresh", {})
    for rate in RATES:
        for name in KERNELS:
            tried = tuning.setdefault(name, {})
            if str(rate) not in tried:
                start = time.process_time()
                tried[str(rate)] = run(name, rate, TUNING)["loss"]
                print(name, rate, tried[str(rate)], f"{time.process_time() - start:.0f} s", flush=True)
                write(store)
    for seed in seeds:
        for name in KERNELS:
            kept = fresh.setdefault(name, {"rate": best(tuning[name]), "seeds": [], "loss": [], "by_position": []})
            if seed not in kept["seeds"]:
                found = run(name, float(kept["rate"]), seed)
                kept["parameters"] = found["parameters"]
                at = bisect(kept["seeds"], seed)  # in order, so that kernels can be compared seed by seed
                kept["seeds"].insert(at, seed)
                kept["loss"].insert(at, found["loss"])
                kept["by_position"].insert(at, found["by_position"])
                print(name, seed, found["loss"], found["by_position"], flush=True)
                write(store)


def write(store: dict[str, Any]) -> None:
    """The store, a line for each kernel."""
    head = {"about": (__doc__ or "").splitlines()[0], "torch": torch.__version__.partition("+")[0]}
    head |= {"ranges": [list(pair) for pair in RANGES], "characters_per_token": alice().characters_per_token}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    for title in ("tuning", "fresh"):
        rows = ",\n".join(f'  "{name}": {json.dumps(store[title][name])}' for name in KERNELS if name in store[title])
        lines.append(f' "{title}": {{\n{rows}\n }}')
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read() -> dict[str, Any]:
    """The store as it is."""
    return json.loads(STORE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def disagreements(store: dict[str, Any], sample: tuple[str, ...] = SAMPLE) -> list[str]:
    """The first fresh run of each kernel in `sample` again; what differs from the store by more than MARGIN."""
    wrong = []
    for name in sample:
        kept = store["fresh"][name]
        apart = abs(run(name, float(kept["rate"]), FRESH[0])["loss"] - kept["loss"][0])
        if not apart <= MARGIN:
            wrong.append(f"{name}: the loss is {apart:.3f} off the stored one")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="One small language model with each match kernel.")
    parser.add_argument("--check", action="store_true", help="run a sample again and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.check:
        wrong = disagreements(read())
        print("\n".join(wrong) or f"{len(SAMPLE)} runs agree with {STORE.name}")
        return int(bool(wrong))
    measure(read() if STORE.exists() else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
