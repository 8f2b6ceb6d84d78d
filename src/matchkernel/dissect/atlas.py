"""All heads of a model at a glance: what their forms are like, and what they attend to in some texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .form import Form, Spread, random_forms, spreads
from .metrics import METRICS, Metric, Place, head_metrics
from .model import Model
from .offsets import OffsetProfile, offset_profile
from .reading import Reading
from .tokens import Tokens

LAST = ("first", "separator", "long")
"""Named only where nothing else is. On the first token and on marks a head leaves the attention that it has no other
use for, half of all heads more than on anything else; and a first token that is a word is far away from most others."""
ROLES = (*(name for name in METRICS if name not in (*LAST, "sink", "entropy")), *LAST)
"""The metrics that can name what a head does: those that say beforehand which keys they mean."""
DRAWS = 20
"""Random heads that a form's numbers are held against; their spread is a hundredth of what trained heads show."""


class Role(NamedTuple):
    """What a head does above chance."""

    layer: int
    head: int
    name: str
    """One of `ROLES`."""
    share: float
    """Of its attention, averaged over rows and texts."""
    base: float
    """The same by chance: evenly spread, or (for what asks about content) by position alone, whichever is more."""

    @property
    def above(self) -> float:
        return self.share - self.base

    def __str__(self) -> str:
        return f"{self.layer}.{self.head} {self.name} {self.share:.2f} (chance {self.base:.2f})"


@dataclass(frozen=True, eq=False)
class Atlas:
    """The numbers of every head of a model.

    `str()` is the table. What it says of a head holds for these texts: a head that is picked out of many because its
    number is the highest has to be measured again on others (`confirm`). And chance knows positions, not words: a head
    that sends every token to one word sends it from that word's repetitions too, and shows as "same" (its table of
    weights, with a column, tells).

    Attributes:
        model: its name.
        texts: what was read.
        margin: how far above its base rate a share must be to name what a head does.
        forms: the bilinear form of each head, in a model with rotation at offset 0.
        random: the measures of random forms of the same shape, for comparison.
        metrics: name → `Metric`, every one in `METRICS`.
        profile: every head's offset profile.
    """

    model: str
    texts: tuple[str, ...]
    margin: float
    forms: dict[Place, Form]
    random: dict[str, Spread]
    metrics: dict[str, Metric]
    profile: OffsetProfile

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Atlas({self.model}, {len(self.forms)} heads, {len(self.texts)} texts)"

    def base(self, name: str, layer: int, head: int) -> float:
        """What chance gives a head for one of `ROLES`: the higher of the even and the matched base rate."""
        metric, matched = self.metrics[name], self.metrics[name].matched_base
        even = float(metric.base[layer, head])
        return even if matched is None else max(even, float(matched[layer, head]))

    def roles(self, layer: int, head: int, margin: float | None = None) -> list[Role]:
        """All that a head does above its base rate by the margin, the most first, but `LAST` after all others.

        Args:
            margin: the atlas's own unless given.
        """
        margin = self.margin if margin is None else margin
        found = [
            Role(layer, head, name, float(self.metrics[name].mean[layer, head]), self.base(name, layer, head))
            for name in ROLES
        ]
        # A comparison with NaN, which stands where no row could attend that way, is False.
        passing = [role for role in found if role.above >= margin]
        return sorted(passing, key=lambda role: (role.name in LAST, -role.above))

    def notable(self, margin: float | None = None) -> list[Role]:
        """For each of `ROLES` the head that it is named for most above chance; left out where no head is."""
        named = [role for place in self.forms for role in self.roles(*place, margin)[:1]]
        best = (max((r for r in named if r.name == name), key=lambda r: r.above, default=None) for name in ROLES)
        return [role for role in best if role is not None]

    def table(self, sort: str = "head", top: int | None = None) -> str:
        """The atlas as text, a line for each head, at most 100 characters wide.

        Args:
            sort: a name in `COLUMNS`: "head" in the model's order, any other the greatest first.
            top: only so many lines; all unless given.

        Raises:
            ValueError: an unknown column, naming the known ones; top below 1.
        """
        if sort not in COLUMNS:
            raise ValueError(f"sort is {sort!r}; the columns are {', '.join(COLUMNS)}")
        if top is not None and top < 1:
            raise ValueError(f"top is {top}; expected at least 1")
        places = list(self.forms)
        if sort != "head":
            value = COLUMNS[sort].of
            places.sort(key=lambda place: -_or_least(value(self, *place)))
        lines = [_line(column.title for column in COLUMNS.values())]
        lines += [_line(column.show(self, *place) for column in COLUMNS.values()) for place in places[:top]]
        lines += [_line(column.chance(self) for column in COLUMNS.values())]
        rule = "─" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


@dataclass(frozen=True)
class _Column:
    """One column of the table: its title, the number it holds, and how that is written."""

    title: str
    of: Callable[[Atlas, int, int], float]
    show: Callable[[Atlas, int, int], str]
    chance: Callable[[Atlas], str]


def atlas(model: Model, texts: Sequence[str | Tokens], *, margin: float = 0.2) -> Atlas:
    """Measure every head of a model: the numbers of its form, and what it attends to in some texts.

    Args:
        model: from `load`.
        texts: one or more, each with two tokens of its own at least. A longer or a second text makes the numbers more
            of the model and less of the text; repeated words are what "same" and "induction" need.
        margin: a head's doing is named where its share is above the base rate by so much; 0.2 of all its attention.

    Raises:
        ValueError: no text, or a text that is too long or too short.

    Cost: each text is read twice, so that only one reading is in memory: 2 · layers · heads · n² numbers, and
    seven times that while it is measured. About 10 ms a head for its form.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError("texts must be a list of at least one text; for one text write [text]")
    read = [text if isinstance(text, Tokens) else model.tokenize(text) for text in texts]

    def readings() -> Iterator[Reading]:
        return (model.read(tokens) for tokens in read)

    forms = {(head.layer, head.index): head.form() for head in model.heads()}
    generator = torch.Generator().manual_seed(0)
    return Atlas(
        model=model.size.name,
        texts=tuple(tokens.source for tokens in read),
        margin=margin,
        forms=forms,
        random=spreads(random_forms(model.head(0, 0), DRAWS, generator=generator)),
        metrics=head_metrics(readings()),
        profile=offset_profile(readings()),
    )


def _measure(title: str, name: str, digits: int) -> _Column:
    def of(atlas: Atlas, layer: int, head: int) -> float:
        return atlas.forms[layer, head].measures()[name]

    return _Column(
        title, of,
        show=lambda atlas, layer, head: _number(of(atlas, layer, head), digits),
        chance=lambda atlas: _number(atlas.random[name].mean, digits),
    )  # fmt: skip


def _metric(title: str, name: str) -> _Column:
    def of(atlas: Atlas, layer: int, head: int) -> float:
        return float(atlas.metrics[name].mean[layer, head])

    return _Column(
        title, of,
        show=lambda atlas, layer, head: _number(of(atlas, layer, head), 2),
        chance=lambda atlas: _number(float(atlas.metrics[name].base.mean()), 2),
    )  # fmt: skip


def _above(atlas: Atlas, layer: int, head: int) -> float:
    return max((role.above for role in atlas.roles(layer, head)[:1]), default=math.nan)


def _does(atlas: Atlas, layer: int, head: int) -> str:
    return next((f"{role.name:11} {role.above:+.2f}" for role in atlas.roles(layer, head)), f"{'–':17}")


COLUMNS: dict[str, _Column] = {
    "head": _Column(
        " head", lambda atlas, layer, head: 0.0, lambda atlas, layer, head: f"{layer:>2}.{head:<2}",
        lambda atlas: "chance",
    ),
    "above": _Column("above chance by  ", _above, _does, lambda atlas: f"{'':16}"),
    "rank_90": _measure(" r90", "rank_90", 0),
    "participation_ratio": _measure("  PR", "participation_ratio", 1),
    "symmetric_share": _measure(" sym", "symmetric_share", 2),
    "positive_share": _measure(" pos", "positive_share", 2),
    "previous": _metric("prev", "previous"),
    "next": _metric("next", "next"),
    "self": _metric("self", "self"),
    "same": _metric("same", "same"),
    "induction": _metric(" ind", "induction"),
    "long": _metric("long", "long"),
    "punctuation": _metric("punc", "punctuation"),
    "first": _metric(" 1st", "first"),
    "separator": _metric(" sep", "separator"),
    "sink": _metric("sink", "sink"),
    "entropy": _metric(" ent", "entropy"),
}  # fmt: skip
"""The columns of the table by the names that it can be sorted by: the head, what it does most above chance and by how
much, four measures of its form (`Form.measures`), and the metrics (`head_metrics`)."""


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _number(value: float, digits: int) -> str:
    return f"{'–':>4}" if math.isnan(value) else f"{value:4.{digits}f}"


def _line(cells: Iterator[str]) -> str:
    return " ".join(cells).rstrip()
