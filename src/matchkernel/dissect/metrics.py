"""What each head attends to, beside what it would attend to by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .offsets import OffsetProfile
from .reading import Reading
from .rows import as_readings, content, permitted

Place = tuple[int, int]
"""(layer, head)."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One number per head and text, with what chance would give. T texts, L layers, h heads.

    Attributes:
        name: one of `METRICS`.
        texts: the T texts, as they were given to the model.
        value: (T, L, h); NaN where a text has no row that counts.
        uniform: (T, L, h), the same for a head that spreads its attention evenly over the keys it may attend to.
        matched: (T, L, h) for metrics that ask about content, else None: the same for a head that gives marks what this
            head gives them, and chooses among content tokens by their offset alone, as this head does on average.
    """

    name: str
    texts: tuple[str, ...]
    value: Tensor
    uniform: Tensor
    matched: Tensor | None

    def __repr__(self) -> str:
        texts, layers, heads = self.value.shape
        return f"Metric({self.name}: {texts} texts, {layers} layers of {heads} heads)"

    @property
    def mean(self) -> Tensor:
        """(L, h): mean over the texts that have a row that counts, each text counting once."""
        return self.value.nanmean(0)

    @property
    def error(self) -> Tensor:
        """(L, h): standard error of `mean` over texts; NaN with fewer than two texts."""
        there = (~self.value.isnan()).sum(0)
        square = (self.value - self.mean).square().nansum(0) / (there - 1)
        return (square / there).sqrt().where(there > 1, torch.nan)

    @property
    def base(self) -> Tensor:
        """(L, h): mean of `uniform` over the same texts."""
        return self.uniform.nanmean(0)

    @property
    def matched_base(self) -> Tensor | None:
        """(L, h): mean of `matched` over the same texts, or None."""
        return None if self.matched is None else self.matched.nanmean(0)

    def top(self, k: int = 1) -> list[Place]:
        """The (layer, head) of the k greatest means, greatest first; heads without a value are left out."""
        mean = self.mean.flatten()
        order = mean.nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
        heads = self.mean.shape[1]
        return [divmod(at, heads) for at in order if not mean[at].isnan()][:k]


@dataclass(frozen=True)
class Confirmed:
    """A head that was chosen on some texts, and what it does on others."""

    name: str
    layer: int
    head: int
    held_out: float
    """Its mean on texts that had no part in the choice: the number to print."""
    error: float
    """Standard error of `held_out` over those texts."""
    uniform: float
    matched: float | None
    selected: float
    """Its mean on the texts it was chosen on: too high, because the highest was chosen."""

    def __str__(self) -> str:
        matched = "" if self.matched is None else f", {self.matched:.3f} by position"
        return (
            f"{self.layer}.{self.head} {self.name} {self.held_out:.3f} ± {self.error:.3f} on held-out texts "
            f"({self.uniform:.3f} by chance{matched}; {self.selected:.3f} where it was chosen)"
        )


def head_metrics(
    readings: Reading | Iterable[Reading],
    names: Sequence[str] | None = None,
    *,
    reach: int = 8,
    marks: bool = False,
    profile: OffsetProfile | None = None,
) -> dict[str, Metric]:
    """Measure what every head of a model attends to, on one text or several.

    A metric names target keys for each query, and is the mean over rows of the attention that falls on them:
    mean_i Σ_{j ∈ target(i)} α_ij. Rows are those of content tokens; a row counts when it has a choice, that is when it
    may attend to a target and to something else.

        previous     j = i − 1            next  j = i + 1            self  j = i            (content tokens)
        same         another token with the same id; under a causal mask an earlier one
        induction    the token after an earlier token with the same id
        long         a content token further away than `reach` tokens
        punctuation  another content token without a letter or a digit
        first        the first token, whatever it is: [CLS], or where a decoder's text begins
        separator    a mark after the first content token: [SEP]
        sink         the one key that receives most from all rows together, chosen for each head and text
        entropy      not a share: −Σ_j α_ij log α_ij / log m_i, m_i keys that row i may attend to; uniform is 1

    Args:
        readings: of one model; read one at a time, so a generator keeps memory small.
        names: which of `METRICS`; all by default.
        reach: for "long", in tokens.
        marks: True counts the rows of the model's own marks ([CLS], [SEP]) too, and marks as content.
        profile: the offset profile of other texts, for the matched base rate of same, induction and punctuation. By
            default the text's own: a head's mean weight at each offset, pairs that are targets left out where others
            have that offset too. A text with one period, such as the same ids twice, has few others there: a profile
            from ordinary text says more.

    Returns:
        A dict from name to `Metric`.

    Raises:
        ValueError: an unknown name, naming the known ones; no readings; a profile that lacks an offset of a text.

    Cost: a few passes over (L, h, n, n) per metric.
    Sources: Clark et al. 2019, section 3, for previous, next, separator and entropy; Olsson et al. 2022 for induction
    ("prefix matching"); Voita et al. 2019, section 5, who call a head positional by where its largest weight falls.
    """
    chosen = METRICS if names is None else tuple(names)
    for name in chosen:
        if name not in METRICS:
            raise ValueError(f"names: no metric is called {name!r}; the known ones are {', '.join(METRICS)}")
    texts: list[str] = []
    found: dict[str, list[tuple[Tensor, Tensor, Tensor | None]]] = {name: [] for name in chosen}
    for reading in as_readings(readings):
        texts.append(reading.tokens.source)
        view = _View(reading, reach, marks, profile)
        for name in chosen:
            found[name].append(view.measure(name))
    return {name: _stack(name, texts, rows) for name, rows in found.items()}


def sinks(reading: Reading, *, marks: bool = False) -> tuple[Tensor, Tensor]:
    """The key of each head that receives most attention, and its share: positions (L, h) int64 and shares (L, h).

    The share is over all rows of content tokens (all rows with `marks`), rows that may not attend to it included.
    ValueError for a text without such rows.
    """
    rows = content(reading.tokens).to(reading.weights.device) | marks
    if not rows.any():
        raise ValueError("reading: the text is empty, so nothing asks; marks=True counts the model's own marks")
    received = reading.weights[:, :, rows].mean(-2)
    share, position = received.max(-1)
    return position, share


def confirm(chosen_on: Metric, held_out: Metric, k: int = 1) -> list[Confirmed]:
    """Choose the k heads that are greatest on some texts, and say what they are on others.

    The best of many heads is partly luck: what it shows on the texts it was chosen on is too high. Only the held-out
    number is a finding.

    Args:
        chosen_on, held_out: the same metric on two sets of texts that share none.
        k: how many heads.

    Raises:
        ValueError: two different metrics, models of two sizes, or a text that is in both sets.
    """
    if chosen_on.name != held_out.name or chosen_on.value.shape[1:] != held_out.value.shape[1:]:
        raise ValueError(
            f"held_out: expected the metric {chosen_on.name!r} of the same model, heads {tuple(chosen_on.mean.shape)}, "
            f"got {held_out.name!r}, heads {tuple(held_out.mean.shape)}"
        )
    both = set(chosen_on.texts) & set(held_out.texts)
    if both:
        raise ValueError(f"held_out: a text on which the heads were chosen is not held out: {min(both)!r}")
    matched = held_out.matched_base
    return [
        Confirmed(
            held_out.name, *place,
            held_out=float(held_out.mean[place]), error=float(held_out.error[place]),
            uniform=float(held_out.base[place]), matched=None if matched is None else float(matched[place]),
            selected=float(chosen_on.mean[place]),
        )
        for place in chosen_on.top(k)
    ]  # fmt: skip


def draw_ids(choices: int | Tensor, length: int, *, generator: torch.Generator) -> Tensor:
    """`length` different token ids in random order: of 0 … choices − 1, or of a tensor of ids. (length,) int64.

    Raises:
        ValueError: fewer different ids than `length`.
    """
    ids = torch.arange(choices) if isinstance(choices, int) else torch.unique(choices)
    if len(ids) < length:
        raise ValueError(f"length={length}: choices has {len(ids)} different ids")
    return ids[torch.randperm(len(ids), generator=generator)[:length]]


class _View:
    """One reading, and what its metrics share."""

    def __init__(self, reading: Reading, reach: int, marks: bool, profile: OffsetProfile | None) -> None:
        self.reading, self.reach, self.marks, self.profile = reading, reach, marks, profile
        self.weights = reading.weights
        device = self.weights.device
        self.ids = reading.tokens.ids.to(device)
        inside = content(reading.tokens).to(device)
        self.mark, self.rows = ~inside, inside | marks
        place = torch.arange(len(self.ids), device=device)
        self.offset = place - place[:, None]
        self.pairs = self.rows & self.rows[:, None]
        self.allowed = permitted(reading)
        self.free = self.allowed.sum(-1)

    def measure(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """(L, h) each: value, uniform base, matched base or None."""
        even = self.allowed.to(self.weights) / self.free.clamp(min=1).unsqueeze(-1)
        if name == "sink":
            # An even head has a sink too, chosen for it as for the head itself.
            value, uniform = (table[:, :, self.rows].mean(-2).amax(-1) for table in (self.weights, even))
            return value, uniform.expand_as(value), None
        if name == "entropy":
            value = torch.special.entr(self.weights).sum(-1) / self.free.to(self.weights).clamp(min=2).log()
            counts = self.rows & (self.free > 1)
            return _mean(value, counts), _mean(torch.ones_like(value), counts), None
        targets = _TARGETS[name](self)
        hit = (self.allowed & targets).sum(-1)
        counts = self.rows & (hit > 0) & (hit < self.free)
        value = _mean(_on(self.weights, targets), counts)
        uniform = _mean(_on(even, targets), counts).expand_as(value)
        return value, uniform, _mean(_on(self._matched(targets), targets), counts) if name in _ABOUT_CONTENT else None

    def _matched(self, targets: Tensor) -> Tensor:
        """(L, h, n, n): each row's attention to content, spread over content keys by the offset profile alone."""
        pairs = self.allowed & self.pairs
        at = self.offset + len(self.ids) - 1
        profile = self._own_profile(pairs, targets, at) if self.profile is None else self._given_profile(pairs, at)
        spread = profile[..., at] * pairs
        total = spread.sum(-1, keepdim=True)
        mass = (self.weights * pairs).sum(-1, keepdim=True)
        return spread * (mass / total.where(total > 0, 1))

    def _own_profile(self, pairs: Tensor, targets: Tensor, at: Tensor) -> Tensor:
        """(L, h, 2n − 1): the mean weight at each offset of the pairs that are no target, or of all if all are."""

        def mean(these: Tensor) -> tuple[Tensor, Tensor]:
            count = _by_offset(these.to(self.weights), at)
            return _by_offset(self.weights * these, at) / count.clamp(min=1), count

        others, count = mean(pairs & ~targets)
        return others.where(count > 0, mean(pairs)[0])

    def _given_profile(self, pairs: Tensor, at: Tensor) -> Tensor:
        """(L, h, 2n − 1): the given profile's weights, at the offsets that this text has."""
        assert self.profile is not None
        n, offsets = len(at), self.profile.offsets
        places = offsets + n - 1
        inside = (places >= 0) & (places < 2 * n - 1)
        known = torch.zeros(2 * n - 1, dtype=torch.bool, device=at.device)
        known[places[inside]] = True
        if bool((~known[at] & pairs).any()):
            raise ValueError(
                f"profile: it has offsets {int(offsets[0])} … {int(offsets[-1])}, "
                f"and not all that a text of {n} tokens needs; take it from longer texts"
            )
        profile = self.weights.new_zeros(*self.weights.shape[:2], 2 * n - 1)
        profile[..., places[inside]] = self.profile.weight[..., inside].to(profile)
        return profile

    def _same(self) -> Tensor:
        return (self.ids == self.ids[:, None]) & (self.offset != 0) & self.pairs

    def _induction(self) -> Tensor:
        before = self.ids.roll(1)
        return (before == self.ids[:, None]) & (self.offset < 0) & self.pairs & (self._place > 0)

    def _punctuation(self) -> Tensor:
        tokens = self.reading.tokens
        bare = [not any(map(str.isalnum, tokens.source[start:end])) for start, end in tokens.spans]
        return torch.tensor(bare, device=self.mark.device) & ~self.mark & (self.offset != 0)

    @property
    def _place(self) -> Tensor:
        return self.offset[0]


_TARGETS: dict[str, Callable[[_View], Tensor]] = {
    "previous": lambda view: (view.offset == -1) & view.pairs,
    "next": lambda view: (view.offset == 1) & view.pairs,
    "self": lambda view: (view.offset == 0) & view.pairs,
    "same": _View._same,
    "induction": _View._induction,
    "long": lambda view: (view.offset.abs() > view.reach) & view.pairs,
    "punctuation": _View._punctuation,
    "first": lambda view: (view._place == 0).expand_as(view.offset),
    "separator": lambda view: (view.mark & ((~view.mark).cumsum(0) > 0)).expand_as(view.offset),
}
"""The target keys of each metric, (n, n): may the key j be what the query i looks for?"""
_ABOUT_CONTENT = ("same", "induction", "punctuation")
METRICS = (*_TARGETS, "sink", "entropy")
"""The names that `head_metrics` knows."""


def _on(table: Tensor, targets: Tensor) -> Tensor:
    """(…, n, n) → (…, n): what of each row falls on the targets."""
    return torch.einsum("...ij,ij->...i", table, targets.to(table))


def _mean(rows: Tensor, counts: Tensor) -> Tensor:
    """(L, h, n) → (L, h): mean over the rows that count, NaN where none does."""
    return (rows * counts).sum(-1) / counts.sum(-1)


def _by_offset(table: Tensor, at: Tensor) -> Tensor:
    """(…, n, n) → (…, 2n − 1): sums over the pairs of each offset."""
    sums = table.new_zeros(*table.shape[:2], 2 * len(at) - 1)
    return sums.index_add_(-1, at.flatten(), table.flatten(-2))


def _stack(name: str, texts: list[str], found: list[tuple[Tensor, Tensor, Tensor | None]]) -> Metric:
    values, uniforms, matches = zip(*found, strict=True)
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ValueError(f"readings: expected readings of one model, got (layers, heads) {sorted(shapes)}")
    matched = None if matches[0] is None else torch.stack(matches)
    return Metric(name, tuple(texts), torch.stack(values), torch.stack(uniforms), matched)
