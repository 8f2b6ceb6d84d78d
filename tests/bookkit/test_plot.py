"""The figures' style: readable, colour-blind safe, the same bytes each time, and clear about wrong shapes."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from fontTools.ttLib import TTFont
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from bookkit import fonts, palette, plot

matplotlib.use("agg")

ROOT = Path(__file__).parents[2]
# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "full sight": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    matplotlib.pyplot.close("all")


def contrast(first: str, second: str) -> float:
    low, high = sorted(palette.relative_luminance(to_rgb(colour)) for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def cielab(linear: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear sRGB."""
    red, green = [0.4124564, 0.2126729, 0.0193339], [0.3575761, 0.7151522, 0.119192]
    to_xyz = np.array([red, green, [0.1804375, 0.072175, 0.9503041]]).T
    ratio = (linear @ to_xyz.T) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)


def linear(colours: np.ndarray) -> np.ndarray:
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


@pytest.mark.parametrize("name", [name for name in plot.COLORS if name not in ("paper", "grid")])
def test_every_colour_can_write_a_label_on_the_paper(name: str) -> None:
    assert contrast(plot.COLORS[name], palette.PAPER) >= 4.5


@pytest.mark.parametrize("sight", BLINDNESS)
def test_the_first_four_colours_stay_apart(sight: str) -> None:
    series = linear(np.array([to_rgb(colour) for colour in plot.SERIES[:4]]))
    seen = cielab(np.clip(series @ np.array(BLINDNESS[sight]).T, 0, 1))
    distances = [float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)]
    assert min(distances) > 10, distances


def test_the_weight_map_starts_at_the_paper_and_darkens_in_equal_steps() -> None:
    colours = plot.WEIGHT_MAP(np.linspace(0, 1, 17))[:, :3]
    assert np.abs(colours[0] - to_rgb(palette.PAPER)).max() < 1 / 255
    lab = cielab(linear(colours))
    assert (np.diff(lab[:, 0]) < 0).all()
    steps = np.linalg.norm(np.diff(lab, axis=0), axis=1)
    assert steps.max() / steps.min() < 1.3


def test_the_score_map_is_neutral_at_zero_and_its_arms_darken() -> None:
    lightness = cielab(linear(plot.SCORE_MAP(np.linspace(0, 1, 17))[:, :3]))
    assert abs(lightness[8, 1]) < 5 and abs(lightness[8, 2]) < 8
    assert (np.diff(lightness[:9, 0]) > 0).all() and (np.diff(lightness[8:, 0]) < 0).all()


def test_importing_says_nothing() -> None:
    code = "import warnings; warnings.simplefilter('error'); from bookkit import plot"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert (done.stdout, done.stderr) == ("", "")


def drawings() -> dict[str, Callable[[], Figure]]:
    """One figure per helper."""

    def lines() -> Figure:
        figure, ax = plot.figure()
        plot.lines(ax, [2, 4, 8], {"scaled": [1, 1, 1], "raw $q k$": [1, 2, 4]}, xlabel="宽度 $d$", logx=True)
        plot.band(ax, [2, 4, 8], [1, 1, 1], [2, 2, 2])
        plot.reference(ax, y=1.5, label="theory")
        return figure

    def heatmap() -> Figure:
        figure, ax = plot.figure()
        words = ["过载", "超时"]
        plot.heatmap(ax, torch.tensor([[1.0, -torch.inf], [-2.0, 0.5]]), words, words, values=True)
        return figure

    def arrows() -> Figure:
        figure, ax = plot.figure()
        plot.arrows(ax, {"query": (1, 0), "key": torch.tensor([0.5, 2.0])}, colors={"query": "query"})
        return figure

    def bars() -> Figure:
        figure, ax = plot.figure()
        heights = {"train": [1, 2], "test": [2, -1]}
        plot.bars(ax, ["dot", "additive"], heights, errors={"train": [0.1, 0.1]}, values=".1f")
        return figure

    def scatter() -> Figure:
        figure, ax = plot.figure()
        plot.scatter(ax, [1, 2], [2, 1], xlabel="x", ylabel="y", names=["a", "b"])
        return figure

    return {draw.__name__: draw for draw in (lines, heatmap, arrows, bars, scatter)}


@pytest.mark.parametrize("name", drawings())
@pytest.mark.filterwarnings("error")
def test_a_figure_has_the_same_bytes_twice_and_no_date(name: str) -> None:
    first, second = png(drawings()[name]()), png(drawings()[name]())
    assert first == second
    assert b"Date" not in first and b"tIME" not in first


def test_lines_draws_the_numbers_it_was_given() -> None:
    _, ax = plot.figure()
    values = torch.tensor([1.0, 4.0, 9.0], dtype=torch.bfloat16, requires_grad=True)
    plot.lines(ax, [1, 2, 3], {"square": values})
    assert ax.lines[0].get_ydata().tolist() == [1.0, 4.0, 9.0]
    assert [text.get_text() for text in ax.texts] == ["square"]


def test_labels_of_lines_that_end_together_do_not_overlap() -> None:
    figure, ax = plot.figure()
    plot.lines(ax, [0, 1], {"one": [0, 1.00], "two": [0, 1.01], "three": [0, 0.99], "far": [0, 0]})
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))


def test_heatmap_keeps_the_table_and_greys_what_is_not_permitted() -> None:
    _, ax = plot.figure()
    plot.heatmap(ax, [[0.0, 2.0], [-float("inf"), -1.0]], values=True)
    image = ax.images[0]
    assert image.get_clim() == (-2.0, 2.0)
    drawn = image.to_rgba(image.get_array())
    assert drawn[1, 0, :3] == pytest.approx(to_rgb(palette.FORBIDDEN), abs=0.01)
    assert [text.get_text() for text in ax.texts] == ["0.00", "2.00", "−1.00"]


def test_numbers_in_a_heatmap_can_be_read_on_their_cell() -> None:
    _, ax = plot.figure()
    plot.heatmap(ax, np.linspace(0, 1, 25).reshape(5, 5), values=True)
    image = ax.images[0]
    colours = image.to_rgba(image.get_array()).reshape(-1, 4)
    for text, cell in zip(ax.texts, colours, strict=True):
        assert contrast(text.get_color(), matplotlib.colors.to_hex(cell)) >= 3.7


def test_weights_start_at_zero() -> None:
    _, ax = plot.figure()
    plot.heatmap(ax, [[0.4, 0.6]], limit=1.0)
    assert ax.images[0].get_clim() == (0.0, 1.0) and ax.images[0].get_cmap().name == "match-weight"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ax: plot.lines(ax, [1, 2], {"a": [1, 2, 3]}), r"series\['a'\] has 3 values, x has 2"),
        (lambda ax: plot.lines(ax, [[1, 2]], {}), r"x has shape \(1, 2\): expected 1 dimension"),
        (lambda ax: plot.lines(ax, [0, 1], {"a": [1, 2]}, logx=True), "smallest value 0.0"),
        (lambda ax: plot.heatmap(ax, [1, 2]), r"table has shape \(2,\): expected 2 dimensions"),
        (lambda ax: plot.heatmap(ax, [[1, 2]], ["a", "b"]), r"rows has 2 names, table has shape \(1, 2\): expected 1"),
        (lambda ax: plot.heatmap(ax, [[1, 2]], None, ["a"]), r"columns has 1 names, .* \(1, 2\): expected 2"),
        (lambda ax: plot.heatmap(ax, [[float("nan"), 2]]), "NaN"),
        (lambda ax: plot.arrows(ax, {"q": (1, 2, 3)}), r"vectors\['q'\] has shape \(3,\): expected \(2,\)"),
        (lambda ax: plot.bars(ax, ["a"], [1, 2]), "2 values for 1 labels"),
        (lambda ax: plot.band(ax, [1], [1], [1, 2]), "1, 1 and 2"),
        (lambda ax: plot.scatter(ax, [1], [1, 2]), "x has 1 values, y has 2"),
        (lambda ax: plot.scatter(ax, [1], [1], names=["a", "b"]), "names has 2 entries for 1 points"),
        (lambda ax: plot.reference(ax), "give one of x and y"),
    ],
)
def test_a_wrong_shape_is_named(call: Callable[..., None], message: str) -> None:
    _, ax = plot.figure()
    with pytest.raises(ValueError, match=message):
        call(ax)


def test_helpers_return_nothing_so_that_a_cell_shows_its_figure_alone() -> None:
    _, ax = plot.figure()
    assert plot.lines(ax, [1], {"a": [1]}) is None
    assert plot.heatmap(ax, [[1.0]]) is None


def test_the_font_holds_every_chinese_character_of_the_book() -> None:
    held = set(TTFont(fonts.FONT).getBestCmap())
    pages = [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("chapters/*.md"), ROOT / "intro.md"]
    used = {c for page in pages if page.exists() for c in re.findall(r"[\u4e00-\u9fff]", page.read_text("utf-8"))}
    assert not {c for c in used if ord(c) not in held}, "add them to src/bookkit/fonts/characters.txt, run subset.py"
