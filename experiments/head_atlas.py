"""What becomes of a trained model without some of its heads: the measurements of chapter 11 that take minutes.

    python experiments/head_atlas.py            # both models, about two minutes of CPU time on one thread
    python experiments/head_atlas.py minilm     # one of them, the other stays as it is stored

writes chapters/data/11-heads.json. Texts come from chapters/data/11-texts.json.

MiniLM: each of its 72 heads is removed alone, then random halves and other shares of them, and the sentence vectors are
compared with the unchanged model's. Heads are ranked on *Alice*; what is stored of the ranking's use is measured on
other texts.
SmolLM2: heads are ranked as induction heads on the seeds in FOUND_ON, and removed on the seeds in TESTED_ON, beside
heads of the same layers drawn at random.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bookkit.paths import ROOT
from matchkernel.dissect import (
    Decoder,
    Encoder,
    Head,
    Tokens,
    ablate,
    ablate_to_mean,
    antisymmetric_part,
    draw_ids,
    embedding_shift,
    forbid,
    head_metrics,
    load,
    mean_mixed,
    only_key_term,
    random_like,
    silence,
    symmetric_part,
    transposed,
    truncated,
    without_key_term,
)

TEXTS = ROOT / "chapters/data/11-texts.json"
STORED = ROOT / "chapters/data/11-heads.json"
Place = tuple[int, int]

RANKS = (0, 1, 2, 4, 8, 16, 24, 32)
SHARES = (9, 18, 36, 54, 72)
DRAWS = 8
FOUND_ON = (0, 1, 2)
TESTED_ON = (10, 11, 12, 13, 14)
KINDS = ("random", "words")
LENGTH = 40
COUNTS = (1, 2, 4, 8, 16)
CONTROLS = (0, 1, 2)


def texts() -> dict[str, Any]:
    """The chapter's texts."""
    loaded: dict[str, Any] = json.loads(TEXTS.read_text(encoding="utf-8"))
    return loaded


def fingerprint() -> str:
    """Of the texts that are read here: what is stored belongs to these."""
    used = [texts()[name] for name in ("alice", "others", "plain", "common")]
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:16]


def unseen(found: dict[str, Any]) -> list[str]:
    """Texts that no head was chosen on: passages of four other books, and the plain sentences."""
    return [*list(found["others"].values())[:4], *found["plain"]]


# MiniLM


def places(model: Encoder | Decoder) -> list[Place]:
    """All heads of a model, layer by layer."""
    return [(layer, head) for layer in range(model.size.layers) for head in range(model.size.heads)]


def kept(model: Encoder, read: list[str], before: Tensor, **change: Any) -> list[float]:
    """Mean cosine to the unchanged sentence vectors, and rank correlation of the similarities of all pairs."""
    shift = embedding_shift(model, read, before=before, **change)
    return [round(shift.mean, 5), round(shift.rank_correlation, 5)]


def removed_alone(model: Encoder, place: Place, read: list[str], before: Tensor) -> float:
    """One head handing on nothing: the cosine that is left."""
    return kept(model, read, before, intervene=ablate({place}))[0]


def operations() -> dict[str, Callable[[Head], Head]]:
    """What is put in the place of every head at once."""
    noise = torch.Generator().manual_seed(0)
    changes: dict[str, Callable[[Head], Head]] = {
        "as trained": lambda head: head,
        "symmetric part": symmetric_part,
        "antisymmetric part": antisymmetric_part,
        "transposed": transposed,
        "random": lambda head: random_like(head, noise),
        "even": lambda head: only_key_term(without_key_term(head)),
    }
    return changes | {f"rank {rank}": partial(truncated, rank=rank) for rank in RANKS}


def operated(model: Encoder, change: Callable[[Head], Head], read: list[str]) -> list[float]:
    """Every head with another form in it: cosine, rank correlation."""
    return kept(model, read, model.embed(read), heads={(h.layer, h.index): change(h) for h in model.heads()})


def draw(count: int, seed: int, of: list[Place]) -> set[Place]:
    """`count` of the heads, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return {of[at] for at in torch.randperm(len(of), generator=generator)[:count].tolist()}


def minilm() -> dict[str, Any]:
    """Heads removed from the encoder."""
    model, found = load("minilm"), texts()
    assert isinstance(model, Encoder)
    heads, chosen_on, tested_on = places(model), found["alice"], unseen(found)
    means = mean_mixed(model, chosen_on)
    before = {"chosen_on": model.embed(chosen_on), "tested_on": model.embed(tested_on)}
    alone = {
        name: [removed_alone(model, place, read, before[name]) for place in heads]
        for name, read in (("chosen_on", chosen_on), ("tested_on", tested_on))
    }
    alone["to_mean"] = [
        kept(model, tested_on, before["tested_on"], intervene=ablate_to_mean({place}, means))[0] for place in heads
    ]
    order = sorted(range(len(heads)), key=lambda at: alone["chosen_on"][at])
    halves = {"most": order[:36], "least": order[36:]}
    return {
        "alone": alone,
        "random": {
            str(count): [
                kept(model, tested_on, before["tested_on"], intervene=ablate(draw(count, seed, heads)))
                for seed in range(DRAWS if count < len(heads) else 1)
            ]
            for count in SHARES
        },
        "half": {
            name: kept(model, tested_on, before["tested_on"], intervene=ablate({heads[at] for at in half}))
            for name, half in halves.items()
        },
        "surgery": {name: operated(model, change, found["plain"]) for name, change in operations().items()},
        "layer": [
            kept(model, tested_on, before["tested_on"], intervene=ablate({layer})) for layer in range(model.size.layers)
        ],
    }


# SmolLM2


def twice(model: Decoder, kind: str, seed: int, words: list[str]) -> Tokens:
    """LENGTH different tokens, twice over: any of the vocabulary, or common English words in random order."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        # The first 17 are marks of the chat format.
        ids = 17 + draw_ids(model.size.vocabulary - 17, LENGTH, generator=generator)
    else:
        whole = [tokens.ids for tokens in (model.tokenize(" " + word) for word in words) if len(tokens) == 1]
        ids = draw_ids(torch.cat(whole), LENGTH, generator=generator)
    return model.from_ids([*ids.tolist(), *ids.tolist()])


def induction(model: Decoder, tokens: Tokens) -> Tensor:
    """(layers, heads): attention to the token after the earlier copy of the present one."""
    return head_metrics(model.read(tokens), ["induction"])["induction"].value[0]


def copies(model: Decoder, tokens: Tokens, heads: set[Place]) -> list[float]:
    """Loss in the first copy and in the second, in nats per token, without these heads."""
    losses = model.losses([tokens], intervene=ablate(heads))[0]
    # losses[i] is that of token i + 1; the second copy's first token cannot be foreseen.
    return [round(losses[: LENGTH - 1].mean().item(), 4), round(losses[LENGTH:].mean().item(), 4)]


def ranking(model: Decoder, found: dict[str, Any]) -> tuple[list[Place], Tensor]:
    """All heads by their mean induction share on the seeds in FOUND_ON, and these shares (kinds × seeds, heads)."""
    shares = torch.stack([
        induction(model, twice(model, kind, seed, found["common"])) for kind in KINDS for seed in FOUND_ON
    ]).flatten(1)  # fmt: skip
    order = shares.mean(0).argsort(descending=True).tolist()
    return [divmod(at, model.size.heads) for at in order], shares


def matched(model: Decoder, top: list[Place], seed: int) -> set[Place]:
    """For each head of `top` another one of its layer that is not in it."""
    generator = torch.Generator().manual_seed(seed)
    chosen: set[Place] = set()
    for layer, _ in top:
        free = [(layer, h) for h in range(model.size.heads) if (layer, h) not in {*top, *chosen}]
        if free:
            chosen.add(free[int(torch.randint(len(free), (1,), generator=generator))])
    return chosen


def alterations(model: Decoder, ranked: list[Place]) -> dict[str, set[Place]]:
    """Which heads are taken out: none, the first few of the ranking, and controls for eight of them."""
    taken: dict[str, set[Place]] = {"none": set()}
    taken |= {f"top {count}": set(ranked[:count]) for count in COUNTS}
    taken |= {f"control {seed}": matched(model, ranked[:8], seed) for seed in CONTROLS}
    return taken


SINKS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "forbidden": {"mask": forbid(0)},
    "value zeroed": {"intervene": silence(0)},
    "ten others forbidden": {"mask": forbid(range(5, 15))},
}


def prose_of(found: dict[str, Any]) -> list[str]:
    """Four passages, two from *Alice* and two from other books."""
    return [*found["alice"][:2], *list(found["others"].values())[:2]]


def first_key(model: Decoder, text: str, change: dict[str, Any]) -> list[float]:
    """Share of attention on tokens 0 and 1, over all heads and the queries after them; loss of tokens 21 and on."""
    reading = model.read(text, **change)
    received = reading.weights[:, :, 2:].mean((0, 1, 2))
    return [round(number.item(), 4) for number in (received[0], received[1], reading.losses[20:].mean())]


def smollm2() -> dict[str, Any]:
    """Induction heads: found, removed, and what else that costs."""
    model, found = load("smollm2"), texts()
    assert isinstance(model, Decoder)
    ranked, shares = ranking(model, found)
    print("ranked", ranked[:8], flush=True)
    taken = alterations(model, ranked)
    return {
        "sink": {name: [first_key(model, text, change) for text in prose_of(found)] for name, change in SINKS.items()},
        "ranked": [list(place) for place in ranked[:16]],
        "shares": [[round(share, 4) for share in row] for row in shares.tolist()],
        "held_out": {
            kind: [
                [round(share, 4) for share in
                 induction(model, twice(model, kind, seed, found["common"])).flatten().tolist()]
                for seed in TESTED_ON
            ]
            for kind in KINDS
        },
        "taken": {name: sorted(map(list, heads)) for name, heads in taken.items()},
        "copies": {
            kind: {
                name: [copies(model, twice(model, kind, seed, found["common"]), heads) for seed in TESTED_ON]
                for name, heads in taken.items()
            }
            for kind in KINDS
        },
        "prose": {
            name: [round(loss.mean().item(), 4) for loss in model.losses(prose_of(found), intervene=ablate(heads))]
            for name, heads in taken.items()
        },
    }  # fmt: skip


PARTS = {"minilm": minilm, "smollm2": smollm2}


def main() -> None:
    """Measure what is asked for and store it."""
    torch.set_num_threads(1)
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    stored |= {"made_by": "experiments/head_atlas.py", "texts": fingerprint()}
    for name in sys.argv[1:] or PARTS:
        stored[name] = {"torch": torch.__version__.partition("+")[0], "texts": fingerprint()} | PARTS[name]()
        STORED.parent.mkdir(exist_ok=True)
        STORED.write_text(json.dumps(stored, separators=(",", ":")).replace('],"', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
