"""The style of every figure of the book, set once when this is imported. bookkit.plot draws with it."""

import logging

# On a machine with many fonts, matplotlib's first import says on stderr that it indexes them. In a stored output that
# line would come and go with the machine; the figures use one committed font, so nothing of interest is lost.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

import matplotlib  # noqa: E402
from cycler import cycler  # noqa: E402
from matplotlib import font_manager, pyplot  # noqa: E402

from bookkit import fonts  # noqa: E402
from bookkit.palette import COLORS, GRID, INK, PAPER, SCORE_MAP, SERIES, WEIGHT_MAP  # noqa: E402

__all__ = ["pyplot"]

font_manager.fontManager.addfont(str(fonts.FONT))
for _map in (WEIGHT_MAP, SCORE_MAP):
    matplotlib.colormaps.register(_map, force=True)

matplotlib.rcParams.update(
    {
        # The book's font comes first: mathtext takes the first family and knows no fallback.
        "font.family": [fonts.FAMILY, "DejaVu Sans"],
        "font.size": 9.5,
        "mathtext.fontset": "dejavusans",
        "figure.dpi": 110,
        "savefig.dpi": 110,
        "savefig.pad_inches": 0.12,
        "figure.constrained_layout.use": True,
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.edgecolor": COLORS["slate"],
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=SERIES),
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": COLORS["slate"],
        "ytick.color": COLORS["slate"],
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "lines.linewidth": 1.9,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "image.cmap": WEIGHT_MAP.name,
        "svg.hashsalt": "match-kernels",
    }
)
