"""The colours of the book's figures. site/static/book.css carries the same ones as CSS variables.

Every entry of COLORS that draws a line or a word has a contrast of at least 4.5 on PAPER, and the first four of SERIES
stay apart under simulated red, green and blue blindness (tests/bookkit/test_plot.py measures both).
"""

from types import MappingProxyType

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

PAPER = "#FBF7EE"
INK = "#23282E"
GRID = "#E6DFD0"
FORBIDDEN = "#C9C3B6"
"""Cells of a table of scores that hold -inf: this query may not attend to that key."""

COLORS = MappingProxyType(
    {
        "blue": "#1463A5",
        "vermilion": "#BC4A00",
        "green": "#0F7B52",
        "violet": "#55207A",
        "ochre": "#846500",
        "slate": "#5B6570",
        "ink": INK,
        "paper": PAPER,
        "grid": GRID,
        # What recurs through the book keeps its colour.
        "query": "#1463A5",
        "key": "#BC4A00",
        "value": "#0F7B52",
    }
)

SERIES = tuple(COLORS[name] for name in ("blue", "vermilion", "green", "violet", "ochre", "slate"))
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (5.0, 1.6)),
    (0, (5.0, 1.4, 1.2, 1.4)),
    (0, (1.4, 1.2)),
    (0, (8.0, 2.0)),
    (0, (3.0, 1.2, 1.2, 1.2, 1.2, 1.2)),
)
"""Lines differ by their dashes too, so that a grey print still tells them apart."""

# Equal steps of CIELAB distance from one stop to the next: equal differences of weight look equally large.
_WEIGHT_STOPS = (
    "#FBF7EE", "#E6EDE9", "#D2E2E5", "#BDD7DF", "#A9CBDA", "#95BFD4", "#81B2CE", "#6DA5C7", "#5B98C0",
    "#4D8BB8", "#407DB1", "#3270A8", "#25619C", "#1A528B", "#154478", "#103766", "#0B2A55",
)  # fmt: skip
_SCORE_STOPS = (
    "#8E3B00", "#AC571C", "#CA7337", "#DC8D54", "#E6A471", "#EEBA8E", "#F4CEAC", "#F6E0CB", "#F7F3EA",
    "#D7E1E4", "#B6D0DE", "#95BDD6", "#76A7CA", "#5591BE", "#377AAE", "#246199", "#0A4A85",
)  # fmt: skip


def _map(name: str, stops: tuple[str, ...]) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(name, stops, N=256, bad=FORBIDDEN)


WEIGHT_MAP = _map("match-weight", _WEIGHT_STOPS)
"""Sequential, for weights and other amounts: 0 is the paper, more is darker."""

SCORE_MAP = _map("match-score", _SCORE_STOPS)
"""Diverging, for scores: 0 is neutral, positive is blue, negative is brown."""


def relative_luminance(color: tuple[float, float, float]) -> float:
    """Luminance of an sRGB colour with channels in 0..1, as WCAG 2 defines it."""
    channels = np.asarray(color, dtype=float)
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))
