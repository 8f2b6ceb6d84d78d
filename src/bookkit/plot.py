"""The one drawing style of the book, and a few helpers that keep plotting out of the reader's way.

    from bookkit import plot

    figure, ax = plot.figure()
    plot.lines(ax, widths, {"with the scale": scaled, "without": raw}, xlabel="width d", ylabel="entropy (nats)")

Importing sets the style: every figure carries its own warm paper, so that it reads the same on a light and on a dark
page; the colours survive colour blindness; Chinese characters and mathtext both work in every label.

Helpers draw on the Axes they are given and return None, so a cell that ends with one shows the figure and nothing
else. A cell whose last line is plain matplotlib ends with `plot.show()`. Arrays may be tensors (any device or dtype,
also with a gradient), numpy arrays or lists. A wrong shape is a ValueError that names the argument and what was
expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bookkit.palette import COLORS, DASHES, INK, PAPER, SCORE_MAP, SERIES, WEIGHT_MAP, relative_luminance
from bookkit.style import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "SCORE_MAP",
    "SERIES",
    "WEIGHT_MAP",
    "arrows",
    "band",
    "bars",
    "figure",
    "heatmap",
    "lines",
    "reference",
    "scatter",
    "show",
]

Numbers = Sequence[float] | Sequence[Sequence[float]] | NDArray[Any] | torch.Tensor
LABEL_HEIGHT = 12.0
"""Points between the baselines of two direct labels."""


def figure(
    rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 3.4, **options: Any
) -> tuple[Figure, Any]:
    """A figure on the book's paper, `width` by `height` inches, and its axes as `pyplot.subplots` gives them.

    One panel gives one Axes, several give an array. `options` go to `pyplot.subplots` (sharey=True, width_ratios=…).
    """
    made, axes = pyplot.subplots(rows, columns, figsize=(width, height), **options)
    return made, axes


def show() -> None:
    """Show the open figure: the last line of a cell that would otherwise end with a matplotlib object."""
    pyplot.show()


def lines(
    ax: Axes,
    x: Numbers,
    series: Mapping[str, Numbers],
    *,
    xlabel: str = "",
    ylabel: str = "",
    logx: bool = False,
    logy: bool = False,
    markers: bool = False,
    labels: Literal["end", "legend", "none"] = "end",
    colors: Mapping[str, str] | None = None,
) -> None:
    """One line per entry of `series` over the shared `x`, each with its own colour and dashes, named at its right end.

    x: (n,); every entry of series: (n,). labels="legend" where the ends lie too close together or a name is long.
    colors: {label: a name from COLORS or any matplotlib colour}; without it, the order of SERIES.
    """
    across = _numbers(x, "x", 1)
    _axis_labels(ax, xlabel, ylabel)
    if logx:
        _log_axis(ax, across)
    ax.set_yscale("log" if logy else "linear")
    ends: list[tuple[str, float, float, str]] = []
    for index, (label, values) in enumerate(series.items()):
        up = _numbers(values, f"series[{label!r}]", 1)
        if len(up) != len(across):
            raise ValueError(f"series[{label!r}] has {len(up)} values, x has {len(across)}: they must be as many")
        color = _color(colors, label, index)
        dashes = DASHES[index % len(DASHES)]
        ax.plot(across, up, color=color, linestyle=dashes, label=label, marker="o" if markers else "")
        last = np.flatnonzero(np.isfinite(up))
        if len(last):
            ends.append((label, float(across[last[-1]]), float(up[last[-1]]), color))
    if labels == "end":
        _name_ends(ax, ends)
    elif labels == "legend":
        ax.legend()


def band(ax: Axes, x: Numbers, low: Numbers, high: Numbers, *, color: str = "blue", label: str | None = None) -> None:
    """A light band between `low` and `high` over `x`, all (n,): the spread over seeds behind a line."""
    across, bottom, top = _numbers(x, "x", 1), _numbers(low, "low", 1), _numbers(high, "high", 1)
    if not len(across) == len(bottom) == len(top):
        counts = f"{len(across)}, {len(bottom)} and {len(top)}"
        raise ValueError(f"x, low and high have {counts} values: they must be as many")
    ax.fill_between(across, bottom, top, color=COLORS.get(color, color), alpha=0.16, linewidth=0, label=label)


def reference(ax: Axes, *, x: float | None = None, y: float | None = None, label: str = "") -> None:
    """A thin dotted line at `x` or at `y` (one of them), named at its left or top end: what theory or chance says."""
    grey = COLORS["slate"]
    dotted = (0, (2, 2))
    if y is not None and x is None:
        ax.axhline(y, color=grey, linewidth=1.1, linestyle=dotted, zorder=1.5)
        place: dict[str, Any] = {"xy": (0.0, y), "xycoords": ("axes fraction", "data")}
        place |= {"xytext": (5, 3), "va": "bottom"}
    elif x is not None and y is None:
        ax.axvline(x, color=grey, linewidth=1.1, linestyle=dotted, zorder=1.5)
        place = {"xy": (x, 1.0), "xycoords": ("data", "axes fraction"), "xytext": (4, -3), "va": "top"}
    else:
        raise ValueError(f"give one of x and y, got x={x} and y={y}")
    if label:
        ax.annotate(label, textcoords="offset points", ha="left", color=grey, fontsize=8.5, **place)


def heatmap(
    ax: Axes,
    table: Numbers,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    *,
    label: str = "weight",
    values: bool = False,
    digits: int = 2,
    diverging: bool | None = None,
    limit: float | None = None,
    colorbar: bool = True,
    xlabel: str = "key",
    ylabel: str = "query",
    title: str = "",
) -> None:
    """A table of weights or scores, a query per row and a key per column.

    table: (n, m), finite or -inf (a pair that is not permitted: grey). rows: n names; columns: m names.
    Weights and other amounts run from the paper (0) to dark blue; with a negative entry, or diverging=True, the map
    runs from brown over neutral (0) to blue. `limit` is the value of the darkest colour (default: the largest
    magnitude); pass the same one to panels that are compared. values=True writes the numbers, with `digits` decimals.
    """
    grid = _numbers(table, "table", 2)
    for names, length, argument in ((rows, grid.shape[0], "rows"), (columns, grid.shape[1], "columns")):
        if names is not None and len(names) != length:
            raise ValueError(f"{argument} has {len(names)} names, table has shape {grid.shape}: expected {length}")
    if np.isnan(grid).any() or np.isposinf(grid).any():
        raise ValueError("table holds NaN or +inf; only finite numbers and -inf (not permitted) can be drawn")
    permitted = np.isfinite(grid)
    signed = bool((grid[permitted] < 0).any()) if diverging is None else diverging
    top = float(np.abs(grid[permitted]).max(initial=0.0)) if limit is None else limit
    top = top if top > 0 else 1.0
    image = ax.imshow(
        np.ma.masked_where(~permitted, grid),
        cmap=SCORE_MAP if signed else WEIGHT_MAP,
        vmin=-top if signed else 0.0,
        vmax=top,
        aspect="equal",
        interpolation="nearest",
    )
    cell = _cell_points(ax, grid.shape)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    slanted = columns is not None and max(map(_ems, columns), default=0.0) * 9 > cell - 2
    if columns is not None:
        ax.set_xticks(range(grid.shape[1]), columns, rotation=45 if slanted else 0, ha="right" if slanted else "center")
        ax.tick_params(axis="x", pad=1 if slanted else 3)
        if slanted:
            for tick in ax.get_xticklabels():
                tick.set_rotation_mode("anchor")
    if rows is not None:
        ax.set_yticks(range(grid.shape[0]), rows)
    _axis_labels(ax, xlabel, ylabel)
    if title:
        ax.set_title(title)
    if values:
        written = {at: f"{grid[at]:.{digits}f}".replace("-", "−") for at in zip(*np.nonzero(permitted), strict=True)}
        size = float(np.clip((cell - 3) / max(map(_ems, written.values()), default=1.0), 5.0, 8.5))
        for (row, column), text in written.items():
            red, green, blue, _ = image.to_rgba(np.array([[grid[row, column]]]))[0, 0]
            color = PAPER if relative_luminance((red, green, blue)) < 0.21 else INK  # equal contrast there
            ax.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    if colorbar:
        bar = ax.figure.colorbar(image, ax=ax, label=label, shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.ax.grid(False)


def arrows(ax: Axes, vectors: Mapping[str, Numbers], *, colors: Mapping[str, str] | None = None) -> None:
    """Plane vectors as arrows from the origin, equal scale on both axes, each named at its tip.

    vectors: {label: (x, y)}. colors: {label: a name from COLORS, such as "query", or any matplotlib colour}.
    """
    tips = {label: _numbers(tip, f"vectors[{label!r}]", 1) for label, tip in vectors.items()}
    for label, tip in tips.items():
        if tip.shape != (2,):
            raise ValueError(f"vectors[{label!r}] has shape {tip.shape}: expected (2,)")
    reach = np.array([np.zeros(2), *tips.values()])
    low, high = reach.min(axis=0), reach.max(axis=0)
    margin = 0.22 * max(float((high - low).max()), 1e-9)
    ax.set_xlim(low[0] - margin, high[0] + margin)
    ax.set_ylim(low[1] - margin, high[1] + margin)
    ax.set_aspect("equal", adjustable="box")
    for index, (label, tip) in enumerate(tips.items()):
        color = _color(colors, label, index)
        style = {"arrowstyle": "-|>,head_width=0.28,head_length=0.55", "mutation_scale": 13, "color": color}
        style |= {"linewidth": 2.0, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=(tip[0], tip[1]), xytext=(0.0, 0.0), arrowprops=style)
        length = float(np.hypot(*tip)) or 1.0
        push = (8 * tip[0] / length, 8 * tip[1] / length)
        side = "left" if tip[0] >= 0 else "right"
        ax.annotate(
            label, xy=(tip[0], tip[1]), xytext=push, textcoords="offset points", ha=side, va="center", color=color
        )
    ax.plot(0, 0, marker="o", markersize=3.5, color=INK)


def bars(
    ax: Axes,
    labels: Sequence[str],
    heights: Numbers | Mapping[str, Numbers],
    *,
    ylabel: str = "",
    xlabel: str = "",
    errors: Numbers | Mapping[str, Numbers] | None = None,
    values: str = "",
    colors: Mapping[str, str] | None = None,
) -> None:
    """A bar per label; with heights={series: heights}, a group of bars per label and a legend.

    labels: n names; heights: (n,) or {name: (n,)}; errors: the same form, half the length of the error bar.
    values: a format such as ".2f" writes each height above its bar.
    """
    grouped = heights if isinstance(heights, Mapping) else {"": heights}
    spread = errors if isinstance(errors, Mapping) else {"": errors} if errors is not None else {}
    width = 0.72 / max(len(grouped), 1)
    places = np.arange(len(labels))
    for index, (name, given) in enumerate(grouped.items()):
        tall = _numbers(given, f"heights[{name!r}]" if name else "heights", 1)
        if len(tall) != len(labels):
            raise ValueError(f"heights {name!r} has {len(tall)} values for {len(labels)} labels: they must be as many")
        yerr = _numbers(spread[name], "errors", 1) if name in spread else None
        at = places + (index - (len(grouped) - 1) / 2) * width
        color = _color(colors, name, index)
        drawn = ax.bar(at, tall, width * 0.94, yerr=yerr, color=color, label=name, ecolor=INK, capsize=2)
        if values:
            ax.bar_label(drawn, labels=[format(h, values).replace("-", "−") for h in tall], padding=2, fontsize=8.5)
    ax.set_xticks(places, labels)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    ax.axhline(0.0, color=COLORS["slate"], linewidth=0.8)
    if values:
        ax.margins(y=0.12)
    _axis_labels(ax, xlabel, ylabel)
    if isinstance(heights, Mapping):
        ax.legend()


def scatter(
    ax: Axes,
    x: Numbers,
    y: Numbers,
    *,
    xlabel: str = "",
    ylabel: str = "",
    label: str = "",
    color: str | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Points at (x, y), both (n,). `label` names the group (`ax.legend()` shows it), `names` writes one per point."""
    across, up = _numbers(x, "x", 1), _numbers(y, "y", 1)
    if len(across) != len(up):
        raise ValueError(f"x has {len(across)} values, y has {len(up)}: they must be as many")
    if names is not None and len(names) != len(across):
        raise ValueError(f"names has {len(names)} entries for {len(across)} points: they must be as many")
    shade = COLORS.get(color, color) if color is not None else SERIES[len(ax.collections) % len(SERIES)]
    ax.scatter(across, up, s=18, color=shade, alpha=0.8, linewidths=0, label=label or None)
    for name, left, height in zip(names or (), across, up, strict=False):
        ax.annotate(name, xy=(left, height), xytext=(4, 3), textcoords="offset points", fontsize=8.5)
    _axis_labels(ax, xlabel or ax.get_xlabel(), ylabel or ax.get_ylabel())


def _numbers(values: Any, argument: str, dimensions: int) -> NDArray[np.float64]:
    """`values` as float64, or a ValueError that names the argument when it has another number of dimensions."""
    if isinstance(values, torch.Tensor):
        array = values.detach().to("cpu", torch.float64).numpy()
    else:
        listed = [_plain(value) for value in values] if isinstance(values, (list, tuple)) else values
        array = np.asarray(listed, dtype=np.float64)
    if array.ndim != dimensions:
        raise ValueError(f"{argument} has shape {array.shape}: expected {dimensions} dimension{'s' * (dimensions > 1)}")
    return array


def _plain(value: Any) -> Any:
    """A tensor inside a list as numpy or a number; anything else as it is."""
    return value.detach().to("cpu", torch.float64).numpy() if isinstance(value, torch.Tensor) else value


def _color(colors: Mapping[str, str] | None, label: str, index: int) -> str:
    chosen = (colors or {}).get(label, SERIES[index % len(SERIES)])
    return COLORS.get(chosen, chosen)


def _log_axis(ax: Axes, across: NDArray[np.float64]) -> None:
    """A logarithmic x axis; widths and lengths that are powers of two are marked as such, in plain numbers."""
    if (across <= 0).any():
        raise ValueError(f"x has the smallest value {across.min()}: a logarithmic axis needs positive ones")
    exponents = np.log2(across)
    if not (exponents == np.round(exponents)).all():
        ax.set_xscale("log")
        return
    ax.set_xscale("log", base=2)
    ax.set_xticks(np.unique(across)[:: max(1, len(np.unique(across)) // 9)])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()


def _axis_labels(ax: Axes, xlabel: str, ylabel: str) -> None:
    if xlabel:
        ax.set_xlabel(xlabel)
    if ylabel:
        ax.set_ylabel(ylabel)


def _ems(text: str) -> float:
    """Rough width of `text` in units of its font size; a Chinese character is as wide as it is high."""
    return sum(1.0 if ord(character) > 0x2E80 else 0.54 for character in text)


def _panel_points(ax: Axes) -> tuple[float, float]:
    """Rough width and height of the drawing area in points, before the layout has run."""
    inches = ax.get_figure(root=True).get_size_inches()  # type: ignore[union-attr]
    spec = ax.get_subplotspec()
    rows, columns = spec.get_gridspec().get_geometry() if spec is not None else (1, 1)
    return float(inches[0]) * 72 * 0.78 / columns, float(inches[1]) * 72 * 0.78 / rows


def _cell_points(ax: Axes, shape: tuple[int, ...]) -> float:
    """Rough side of one square cell of a table of this shape, in points."""
    wide, tall = _panel_points(ax)
    return min(wide * 0.82 / max(shape[1], 1), tall / max(shape[0], 1))


def _name_ends(ax: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each label right of its line's end, pushed apart where two would overlap."""
    ax.autoscale_view()
    tall = _panel_points(ax)[1]
    up = ax.transData + ax.transAxes.inverted()
    natural = [float(up.transform((x, y))[1]) * tall for _, x, y, _ in ends]
    order = sorted(range(len(ends)), key=natural.__getitem__)
    heights = [natural[index] for index in order]
    for _ in range(20):
        for below in range(len(heights) - 1):
            overlap = LABEL_HEIGHT - (heights[below + 1] - heights[below])
            if overlap > 0:
                heights[below] -= overlap / 2
                heights[below + 1] += overlap / 2
    for height, index in zip(heights, order, strict=True):
        label, x, y, color = ends[index]
        ax.annotate(
            label,
            xy=(x, y),
            xytext=(7, height - natural[index]),
            textcoords="offset points",
            ha="left",
            va="center",
            color=color,
            annotation_clip=False,
        )
