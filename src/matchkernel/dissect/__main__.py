"""python -m matchkernel.dissect MODEL --text "…": the atlas of a model's heads as a table, and its figures."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .atlas import COLUMNS, LAST, ROLES, Atlas, atlas
from .model import Model
from .models import LOADERS, load
from .package import ModelFileError, ModelMissingError
from .tokens import Tokens

FIGURES = ("heads.png", "tables.png", "offsets.png")
MOST_MEMORY = 2**29
"""Bytes that the scores and weights of one text may take; measuring them takes seven times that."""
REACH = 8
"""Offsets that are drawn, either way."""
REFUSED, NO_MODEL = 2, 1

DESCRIPTION = """\
Open a trained model, read some texts with it, and print a line for each attention head: what it does most above
chance, four numbers of its bilinear form, and the share of its attention that falls on certain tokens. Then draw three
figures: all heads at a glance, tables of attention of heads that stand out, and their weight over the offset."""

EPILOG = f"""\
columns    above chance by: the measure that is furthest above its base rate, if it is by 0.20 of the attention;
           {", ".join(LAST)} only where no other is; chance knows places and not words, so
           look at tables.png before believing a name: a column there is one loud word
           r90: rank that keeps 90 % of M = W_Q W_K^T; PR: participation ratio of its singular values;
           sym, pos: its symmetric share, and the positive share of its symmetric part
           prev to sink: share of the attention; ent: entropy, 1 is even; – where the texts have no such case
           last line: what chance gives
to sort by {textwrap.fill(", ".join(COLUMNS), 100, subsequent_indent=" " * 11)}
exit       0: done; {REFUSED}: the command or a text is refused; {NO_MODEL}: a package is missing or a file altered
"""


class Refused(Exception):
    """What the reader is told in one line, and the exit status."""

    def __init__(self, message: str, status: int = REFUSED) -> None:
        super().__init__(message)
        self.status = status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0; 2 for a command or text that is refused; 1 without the model."""
    try:
        _run(_parser().parse_args(arguments))
    except Refused as refused:
        print(f"matchkernel.dissect: {refused}", file=sys.stderr)
        return refused.status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m matchkernel.dissect", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help=f"which model: {', '.join(LOADERS)}")
    parser.add_argument(
        "--text", metavar="TEXT", action="append", default=[], help="a text; may be given several times"
    )
    parser.add_argument(
        "--file", metavar="FILE", action="append", default=[],
        help="a file of texts in UTF-8, an empty line between two of them; may be given several times",
    )  # fmt: skip
    parser.add_argument("--sort", metavar="COLUMN", default="head", help="greatest first (default: the model's order)")
    parser.add_argument("--top", metavar="N", type=int, help="print only the first N lines (default: all)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out", metavar="DIR", type=Path,
        help="folder for the figures, made if need be (default: atlas-MODEL in the current folder)",
    )  # fmt: skip
    where.add_argument("--no-figures", action="store_true", help="only the table; needs no matplotlib")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that are already in the folder")
    return parser


def _run(options: argparse.Namespace) -> None:
    # All that can be refused without the model, before the seconds that opening it takes.
    if options.model not in LOADERS:
        raise Refused(f"no model is called {options.model!r}; the known models are {', '.join(LOADERS)}")
    if options.sort not in COLUMNS:
        raise Refused(f"--sort {options.sort}: the columns are {', '.join(COLUMNS)}")
    if options.top is not None and options.top < 1:
        raise Refused(f"--top {options.top}: expected at least 1")
    texts = _texts(options)
    folder = None if options.no_figures else options.out or Path(f"atlas-{options.model}")
    if folder is not None:
        _check_folder(folder, options.overwrite)
        if importlib.util.find_spec("matplotlib") is None:
            raise Refused("the figures need matplotlib: run  pip install matplotlib  or ask for --no-figures", NO_MODEL)
    try:
        model = load(options.model)
    except (ModelMissingError, ModelFileError) as error:
        raise Refused(str(error), NO_MODEL) from error
    read = [_tokens(model, number, text) for number, text in enumerate(texts, start=1)]
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Before the work, not after it. A file is made, since not every system tells who may write where.
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise Refused(f"--out {folder}: {error.strerror}") from error

    found = atlas(model, read)
    _print(found, model, read, options)
    if folder is not None:
        try:
            _draw(found, model, read[0], folder)
        except OSError as error:
            raise Refused(f"--out {folder}: {error.strerror or error}") from error


def _texts(options: argparse.Namespace) -> list[str]:
    texts = list(options.text)
    for name in options.file:
        try:
            content = Path(name).read_text(encoding="utf-8-sig")  # the mark that some editors put first is no text
        except OSError as error:
            raise Refused(f"--file {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise Refused(f"--file {name}: not text in UTF-8 (byte {error.start})") from error
        parts = [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
        if not parts:
            raise Refused(f"--file {name}: there is no text in it")
        texts += parts
    if not texts:
        raise Refused("no text: give one with --text or --file")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise Refused(f"text {number} is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(f"text {number} is not valid Unicode (character {error.start})") from error
    return texts


def _check_folder(folder: Path, overwrite: bool) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise Refused(f"--out {folder}: there is a file of that name")
        there = [name for name in FIGURES if (folder / name).exists()]
        taken = [name for name in there if not (folder / name).is_file()]
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise Refused(f"--out {folder}: {error.strerror}") from error
    if taken:
        raise Refused(f"--out {folder}: {', '.join(taken)} in it is no file")
    if there and not overwrite:
        raise Refused(f"{folder} already holds {', '.join(there)}: name another folder with --out, or add --overwrite")


def _tokens(model: Model, number: int, text: str) -> Tokens:
    try:
        tokens = model.tokenize(text)
    except ValueError as error:
        raise Refused(f"text {number}: {error}") from error
    own = sum(end > start for start, end in tokens.spans)
    if own < 2:
        raise Refused(f"text {number} has {own} token of its own ({tokens}); attention between tokens takes at least 2")
    size = model.size
    memory = 2 * size.layers * size.heads * len(tokens) ** 2 * 4
    if memory > MOST_MEMORY:
        most = int((MOST_MEMORY / (2 * size.layers * size.heads * 4)) ** 0.5)
        raise Refused(
            f"text {number} has {len(tokens)} tokens, and its tables would take {memory / 2**20:.0f} MiB; "
            f"cut it into texts of at most {most} tokens"
        )
    return tokens


def _print(found: Atlas, model: Model, read: list[Tokens], options: argparse.Namespace) -> None:
    count = len(read)
    lengths = ", ".join(str(len(tokens)) for tokens in read[:8]) + (", …" if count > 8 else "")
    rotation = "" if model.rotation is None else "; forms at offset 0"
    print(f"{found.model}: {len(found.forms)} heads on {count} text{'s' * (count > 1)} of {lengths} tokens{rotation}")
    print()
    print(found.table(options.sort, options.top))
    print(f"\nfurthest above chance: {'; '.join(map(str, found.notable())) or 'no head by ' + str(found.margin)}")


def _draw(found: Atlas, model: Model, tokens: Tokens, folder: Path) -> None:
    from . import figures  # matplotlib takes half a second to import, and --no-figures does without

    panels = {name: found.metrics[name].mean for name in ROLES if not found.metrics[name].mean.isnan().all()}
    figures.save(figures.heads(panels, f"{found.model}: where each head's attention falls"), folder / "heads.png")
    chosen = found.notable() or found.notable(margin=-math.inf)
    reading = model.read(tokens)
    fonts = figures.fonts_for("".join(tokens.text))
    numbered = fonts is None or len(tokens) > figures.MOST_NAMED
    labels = [str(at) for at in range(len(tokens))] if numbered else tokens.text
    weights = {str(role): reading.weights[role.layer, role.head] for role in chosen}
    figures.save(figures.tables(weights, labels, fonts or [], f"{found.model}: text 1"), folder / "tables.png")
    near = found.profile.offsets.abs() <= REACH
    curves = {str(role): found.profile.weight[role.layer, role.head, near] for role in chosen}
    figures.save(
        figures.profiles(found.profile.offsets[near], curves, "mean weight", f"{found.model}: weight over the offset"),
        folder / "offsets.png",
    )
    print("figures: " + ", ".join(str(folder / name) for name in FIGURES))
    if numbered:
        if fonts is None:
            print("No installed font has every character of text 1, so tables.png shows numbers:")
        print("tokens of text 1: " + "  ".join(f"{at} {piece}" for at, piece in enumerate(tokens.text)))


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its number, not a traceback.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
