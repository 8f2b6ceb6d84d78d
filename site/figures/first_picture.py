"""Draw the picture of the first page: one query, three match kernels, three flows of information.

    .venv/bin/python site/figures/first_picture.py        # writes site/static/first-picture*.svg

The phrases carry the small hand-made vectors of chapter 5 and the weights come from the library; only the kernel
differs between the panels. It is an illustration of what a kernel decides, not a measurement of a model.
"""

import math
from pathlib import Path

import torch

import matchkernel as mk
from bookkit.palette import COLORS, INK, PAPER

STATIC = Path(__file__).parents[1] / "static"
PHRASES = (
    "Because",
    "the server",
    "is overloaded,",
    "the system",
    "responds slowly,",
    "and finally",
    "the request",
    "times out.",
)
QUERY = PHRASES[-1]

# What each phrase is about, as in chapter 5:
# thing, trouble, link, cause, effect
MEANING = torch.tensor(
    [
        [0.0, 0, 1, 0, 0],
        [1.0, 0, 0, 0, 0],
        [0.0, 1, 0, 1, 0],
        [1.0, 0, 0, 0, 0],
        [0.0, 1, 0, 1, 1],
        [0.0, 0, 1, 0, 0],
        [1.0, 0, 0, 0, 0],
        [0.0, 1, 0, 0, 1],
    ]
)
CAUSE, EFFECT = 3, 4


class Causal(mk.MatchKernel):
    """s_ij = effect of i × cause of j: an effect looks for what can cause it."""

    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q[..., EFFECT, None] * k[..., None, :, CAUSE]


class Local(mk.MatchKernel):
    """s_ij = −|i − j|: nothing but distance in the text."""

    def encode_query(self, q: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return position[..., None].to(q.dtype)

    def encode_key(self, k: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return position[..., None].to(k.dtype)

    def match(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return -(q - k.mT).abs()


def panels() -> list[tuple[str, str, list[float]]]:
    """(title, question, weights that the last phrase gives to all of them) for each kernel."""
    chosen = [
        ("local", "who stands near me?", Local()),
        ("dot product", "who is like me?", 3 * mk.Dot()),
        ("causal", "what brought this about?", 3 * Causal()),
    ]
    return [(title, asks, mk.weights(MEANING, MEANING, kernel)[-1].tolist()) for title, asks, kernel in chosen]


def text(x: float, y: float, content: str, *, size: float = 17, color: str = INK, extra: str = "") -> str:
    """One line of words at (x, y), the left end of its baseline."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" {extra}>{content}</text>'


def panel(x: float, top: float, row_height: float, bar: float, content: tuple[str, str, list[float]]) -> list[str]:
    """One kernel: its name, what it asks, and from the query's dot a strand and a bar for each key's weight."""
    title, question, weights = content
    blue, orange = COLORS["query"], COLORS["key"]
    start = top + row_height * len(weights) + 18
    parts = [
        text(x - 30, top - 58, title, size=19, extra='font-weight="700"'),
        text(x - 30, top - 36, question, size=14, color=COLORS["slate"]),
    ]
    for row, weight in enumerate(weights):
        y = top + row * row_height - 6
        pull = 10 + 18 * (1 - row / len(weights))
        opacity = 0.25 + 0.75 * min(1.0, weight / 0.3)
        parts.append(
            f'<path d="M{x} {start} C{x - pull:.1f} {start - 30} {x - pull:.1f} {y + 26} {x} {y}" fill="none" '
            f'stroke="{blue}" stroke-width="{0.6 + 8 * weight:.2f}" stroke-linecap="round" opacity="{opacity:.2f}"/>'
        )
    for row, weight in enumerate(weights):
        y = top + row * row_height - 6
        length = max(2.0, bar * weight / 0.75)
        parts.append(f'<rect x="{x + 2}" y="{y - 9}" width="{length:.1f}" height="18" rx="2" fill="{orange}"/>')
        parts.append(text(x + 8 + length, y + 5, f"{math.floor(100 * weight + 0.5)} %", size=13))
    parts.append(f'<circle cx="{x}" cy="{start}" r="6.5" fill="{blue}"/>')
    return parts


def phrases(x: float, top: float, row_height: float) -> list[str]:
    """The words, right-aligned at x, the query below the keys."""
    bottom, blue = top + row_height * len(PHRASES) + 24, COLORS["query"]
    aligned = 'text-anchor="end"'
    return [
        *(text(x, top + row * row_height, phrase, extra=aligned) for row, phrase in enumerate(PHRASES)),
        text(x, bottom, QUERY, color=blue, extra=f'{aligned} font-weight="700"'),
        text(x, bottom + 20, "the query", size=13, color=blue, extra=aligned),
    ]


def draw(*, stacked: bool = False) -> str:
    """The picture as SVG, panels side by side or, for narrow screens, stacked. The same numbers give the same bytes."""
    row_height, parts = 29 if stacked else 34, []
    if stacked:
        block = row_height * len(PHRASES) + 136
        width, height = 400, 3 * block
        for index, content in enumerate(panels()):
            top = 84 + index * block
            parts += phrases(170, top, row_height) + panel(224, top, row_height, 110, content)
    else:
        width, height, top = 770, 92 + row_height * len(PHRASES) + 62, 92
        parts += phrases(160, top, row_height)
        for index, content in enumerate(panels()):
            parts += panel(210 + index * 192, top, row_height, 104, content)
    label = "One query, times out, under three match kernels"
    fonts = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="{fonts}">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([opening, paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    for title, _, weights in panels():
        print(title, dict(zip(PHRASES, (f"{weight:.2f}" for weight in weights), strict=True)))
    STATIC.joinpath("first-picture.svg").write_text(draw(), encoding="utf-8")
    STATIC.joinpath("first-picture-narrow.svg").write_text(draw(stacked=True), encoding="utf-8")
