"""The figures of an atlas. The one module here that needs matplotlib; it is imported only when figures are drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from torch import Tensor

MAP = "cividis"
"""Its lightness rises steadily, and it looks nearly the same to a colour-blind reader."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
DASHES = ("-", "--", "-.", ":")
MOST_NAMED = 40
"""Beyond so many tokens a table's labels would lie over one another: numbers then, every fifth or tenth."""


def heads(panels: Mapping[str, Tensor], title: str, *, label: str = "share of the attention") -> Figure:
    """One small map of all heads for each measure.

    Args:
        panels: name → (layers, heads), all in the unit of `label`, in 0…1.
        title: what stands above them.
    """
    layers, count = next(iter(panels.values())).shape
    columns = min(3 if layers < 2 * count else 8, len(panels))
    rows = -(-len(panels) // columns)
    cell = min(0.22, 2.6 / count, 4.2 / layers)
    size = (columns * (count * cell + 0.6) + 0.9, rows * (layers * cell + 0.6) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax, (name, values) in zip(axes.flat, panels.items(), strict=False):
        ax.imshow(_array(values), cmap=MAP, vmin=0.0, vmax=1.0, interpolation="nearest")
        ax.set_title(name, fontsize=9)
        ax.set_xticks(range(0, count, max(1, count // 6)))
        ax.set_yticks(range(0, layers, max(1, layers // 6)))
        ax.tick_params(labelsize=7, length=2)
        ax.set_xlabel("head", fontsize=7, labelpad=1)
        ax.set_ylabel("layer", fontsize=7, labelpad=1)
    _finish(figure, axes, len(panels), label)
    figure.suptitle(title, fontsize=10)
    return figure


def tables(weights: Mapping[str, Tensor], labels: Sequence[str], fonts: Sequence[str], title: str) -> Figure:
    """One small table of weights for each head.

    Args:
        weights: the head's title → (n, n), rows are queries and columns keys.
        labels: the n tokens, or their numbers.
        fonts: the families that the labels are set in, from `fonts_for`.
    """
    n = len(labels)
    columns = min(3, len(weights))
    rows = -(-len(weights) // columns)
    side = min(5.0, max(2.2, 0.13 * n + 0.9))
    figure = Figure(figsize=(columns * side + 0.9, rows * (side + 0.25) + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax, (name, table) in zip(axes.flat, weights.items(), strict=False):
        ax.imshow(_array(table), cmap=MAP, vmin=0.0, vmax=1.0, interpolation="nearest")
        ax.set_title(name, fontsize=8)
        _token_ticks(ax, labels, fonts)
        ax.set_xlabel("key", fontsize=7)
        ax.set_ylabel("query", fontsize=7)
    _finish(figure, axes, len(weights), "weight")
    figure.suptitle(title, fontsize=10)
    return figure


def profiles(offsets: Tensor, curves: Mapping[str, Tensor], ylabel: str, title: str) -> Figure:
    """One line for each head over the offset of key from query.

    Args:
        offsets: (r,), j − i in tokens.
        curves: the head's title → (r,), in the unit of `ylabel`.
    """
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    ax = figure.subplots()
    for index, (name, values) in enumerate(curves.items()):
        ax.plot(
            _array(offsets), _array(values), label=name, color=COLORS[index % len(COLORS)],
            linestyle=DASHES[index % len(DASHES)], marker="o", markersize=3, linewidth=1.4,
        )  # fmt: skip
    ax.axvline(0, color="#999999", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    ax.set_xlabel("offset j − i of the key from the query (tokens)", fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    ax.set_title(title, fontsize=10)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=150)


def fonts_for(text: str) -> list[str] | None:
    """Font families in which every character of a text has a picture: matplotlib's own, or that and one more.

    None when no installed font has what is missing, as with Chinese on a machine without a Chinese font.
    """
    default = font_manager.FontProperties().get_name()
    needed = {ord(character) for character in text if not character.isspace()}
    missing = needed - _characters(font_manager.findfont(default))
    if not missing:
        return [default]
    for font in sorted(font_manager.fontManager.ttflist, key=lambda font: (font.weight != 400, font.fname)):
        # Matplotlib brings Unicode's font of last resort, which has a box for every character and a picture for none.
        drawn = font.style == "normal" and not font.name.startswith("Last Resort")
        if drawn and missing <= _characters(font.fname):
            return [default, font.name]
    return None


def _characters(path: str) -> set[int]:
    try:
        font = FT2Font(path)
    except OSError:  # removed from the machine after matplotlib made its list
        return set()
    return set(font.get_charmap()) if font.scalable else set()  # a font of bitmaps (emoji) cannot be drawn


def _finish(figure: Figure, axes: NDArray[Any], used: int, label: str) -> None:
    """Clear the panels that are left over, and put one colour bar beside all."""
    for ax in list(axes.flat)[used:]:
        ax.set_axis_off()
    bar = figure.colorbar(axes.flat[0].images[0], ax=axes, shrink=0.7, pad=0.02)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _token_ticks(ax: Axes, labels: Sequence[str], fonts: Sequence[str]) -> None:
    n = len(labels)
    if n <= MOST_NAMED:
        # A dollar sign would start a formula.
        names = [label.replace("$", r"\$") for label in labels]
        ax.set_xticks(range(n), names, rotation=90, fontsize=6, fontfamily=list(fonts))
        ax.set_yticks(range(n), names, fontsize=6, fontfamily=list(fonts))
    else:
        step = 5 if n <= 80 else 10 * -(-n // 200)
        ax.set_xticks(range(0, n, step))
        ax.set_yticks(range(0, n, step))
    ax.tick_params(labelsize=6, length=1.5, pad=1.5)


def _array(values: Tensor) -> Any:
    return values.detach().float().cpu().numpy()
