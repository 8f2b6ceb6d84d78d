"""Figures from outside: public results that the book's own must reproduce, and the page that sets them side by side.

`chapters/oracles.yml` has a row for each; a chapter's cell, tagged `oracle-<id>`, or a test asserts it. The page
`chapters/oracles.md` is written from both, by `python -m bookkit.oracles` and, as a Sphinx extension, before each
build.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bookkit.claims import assertions
from bookkit.notebook import output_text, read, tags, text
from bookkit.paths import ROOT, chapters
from bookkit.prose import stated
from bookkit.tagged import give_anchors, keep

_FIELDS = ("id", "what", "source", "setup", "theirs", "ours")
_LINES = ("setup", "theirs", "ours")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TAG = re.compile(rf"oracle-({_ID.pattern})")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# The digit after a letter, or after a letter and a dash, belongs to a name: float64, Taylor-2.
_NUMBER = re.compile(
    r"(?<![\w.])(?<!\w-)[−-]?(?P<digits>\d+(?:[\u00a0\u2009\u202f]\d{3})*(?:\.\d+)?)"
    r"(?:e(?P<e>[+−-]?\d+)|\s?[×·]\s?10(?P<power>[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?(?P<percent>\s?%)?"
)


@dataclass(frozen=True)
class Row:
    """A row of the table: who says what, in which set-up, both figures, and the cell or the test that asserts it.

    `source` holds pairs of a BibTeX key and a place in that source ("" for none); `setup`, `theirs` and `ours` hold
    lines. One of `cell` (the tag "oracle-<id>") and `test` ("tests/….py::test_…") is empty.
    """

    id: str
    what: str
    source: tuple[tuple[str, str], ...]
    setup: tuple[str, ...]
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    cell: str
    test: str


@dataclass(frozen=True)
class Shown:
    """A cell tagged for a row: where it stands, its assertions, and what it shows."""

    id: str
    path: Path
    chapter: int
    section: str
    cell: int
    assertions: tuple[str, ...]
    output: str

    @property
    def anchor(self) -> str:
        """The id that the cell has on the built page."""
        return _anchor(self.id, self.chapter, self.cell)


def _anchor(row: str, chapter: int, cell: int) -> str:
    return f"oracle-{row}-chapter-{chapter}-cell-{cell}"


def load(root: Path = ROOT) -> list[Row]:
    """Return the rows of `chapters/oracles.yml` in the file's order.

    Raises ValueError, naming every row and field at fault, when a row is not as the head of that file says.
    """
    entries = yaml.safe_load((root / "chapters" / "oracles.yml").read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError("chapters/oracles.yml is not a list of rows")
    wrong = [f"row {at} {_name(entry)}: {fault}" for at, entry in enumerate(entries, 1) for fault in _faults(entry)]
    if wrong:
        raise ValueError("chapters/oracles.yml does not hold together:\n  " + "\n  ".join(wrong))
    ids = [entry["id"] for entry in entries]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"chapters/oracles.yml has two rows of one id: {', '.join(twice)}")
    return [_row(entry) for entry in entries]


def _name(entry: Any) -> str:
    return f"({entry['id']})" if isinstance(entry, dict) and "id" in entry else "(without an id)"


def _faults(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"is {entry!r}, not a row of fields"
        return
    for field in _FIELDS:
        if field not in entry:
            yield f"has no {field}"
    for field in sorted(map(str, entry.keys() - {*_FIELDS, "cell", "test"})):
        yield f"has a field {field!r}, which no row has"
    if ("cell" in entry) == ("test" in entry):
        yield "needs one of cell and test, " + ("not both" if "cell" in entry else "and has neither")
    for field, value in entry.items():
        lines = value if isinstance(value, list) and field in _LINES else [value]
        for line in lines or [None]:
            if not isinstance(line, str) or not line.strip():
                hint = ": put it in quotes" if isinstance(line, int | float | dict) else ""
                yield f"{field} is to be text and is {line!r}{hint}"
    name = str(entry.get("id", ""))
    if name and not _ID.fullmatch(name):
        yield "an id is lower case, digits and dashes"
    if "cell" in entry and entry["cell"] != f"oracle-{name}":
        yield f"cell is to be oracle-{name} and is {entry['cell']!r}"
    if "test" in entry and not _TEST.fullmatch(str(entry["test"])):
        yield f"test is to be tests/….py::test_… and is {entry['test']!r}"


def _row(entry: dict[str, Any]) -> Row:
    source = tuple(
        (key.strip(), place.strip()) for key, _, place in (part.partition(",") for part in entry["source"].split(";"))
    )
    return Row(
        id=entry["id"],
        what=" ".join(entry["what"].split()),
        source=source,
        setup=_as_lines(entry["setup"]),
        theirs=_as_lines(entry["theirs"]),
        ours=_as_lines(entry["ours"]),
        cell=entry.get("cell", ""),
        test=entry.get("test", ""),
    )


def _as_lines(value: str | list[str]) -> tuple[str, ...]:
    return tuple(" ".join(line.split()) for line in ([value] if isinstance(value, str) else value))


def shown(root: Path = ROOT) -> list[Shown]:
    """Return every cell of every chapter that is tagged for a row, in reading order.

    Raises ValueError when a tag that begins with "oracle" is not oracle-<id>.
    """
    found = []
    for number, path in chapters(root).items():
        section, count = "", 0
        for cell in read(path)["cells"]:
            if cell["cell_type"] == "markdown":
                headings = re.findall(r"^##+ (.+)$", text(cell["source"]), re.MULTILINE)
                section = headings[-1].strip() if headings else section
            count += cell["cell_type"] == "code"
            for tag in tags(cell):
                if match := _TAG.fullmatch(tag):
                    asserted = assertions(text(cell["source"]))
                    output = "\n".join(output_text(output) for output in cell["outputs"])
                    found.append(Shown(match[1], path, number, section, count, asserted, output))
                elif tag.lower().startswith("oracle"):
                    raise ValueError(f"{path.name}, cell {count}: the tag {tag!r} is not oracle-<id>")
    return found


def missing(ours: str, output: str) -> list[str]:
    """Return the numbers of `ours`, as written, to which no number of the output rounds.

    A number is written plainly or as 3e-7 or 3 × 10⁻⁷; a percentage may have been printed as a share.
    """
    known = stated(output)
    absent = []
    for match in _NUMBER.finditer(ours):
        digits = re.sub(r"\s", "", match["digits"])
        exponent = (match["e"] or (match["power"] or "0").translate(_SUPERSCRIPT)).replace("−", "-")
        scale = 10.0 ** int(exponent)
        value = float(digits) * scale * (-1 if match[0][0] in "−-" else 1)
        tolerance = 0.5 * scale * 10.0 ** -len(digits.partition(".")[2]) * (1 + 1e-6)
        scales = (1.0, 100.0) if match["percent"] else (1.0,)
        if not any(abs(other * number - value) <= tolerance for number in known for other in scales):
            absent.append(match[0].strip())
    return absent


def problems(root: Path = ROOT) -> list[str]:
    """Return what is wrong, in sentences: sources, cells and tests that are not there, numbers that nothing shows."""
    rows, given = load(root), shown(root)
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", (root / "chapters/references.bib").read_text("utf-8"), re.MULTILINE))
    known = {row.id for row in rows if row.cell}
    wrong = [
        f"{one.path.name}, cell {one.cell} is tagged oracle-{one.id}, and chapters/oracles.yml has no row of it"
        for one in given
        if one.id not in known
    ]
    wrong += [
        f"{one.path.name}, cell {one.cell} is tagged oracle-{one.id} and no line of it begins with assert"
        for one in given
        if not one.assertions
    ]
    for row in rows:
        wrong += [f"row {row.id}: references.bib has no {key!r}" for key, _ in row.source if key not in keys]
        if row.test:
            wrong += [f"row {row.id}: {fault}" for fault in _test_faults(row, root)]
            continue
        own = [one for one in given if one.id == row.id]
        if not own:
            wrong.append(f"row {row.id}: no chapter has a cell tagged {row.cell}")
            continue
        output = "\n".join(one.output for one in own)
        for number in missing(" ; ".join(row.ours), output):
            wrong.append(f"row {row.id}: no output of the cells tagged {row.cell} holds {number}")
    return wrong


def _test_faults(row: Row, root: Path) -> Iterator[str]:
    match = _TEST.fullmatch(row.test)
    assert match is not None
    path = root / match[1]
    if not path.is_file():
        yield f"there is no file {match[1]}"
        return
    source = path.read_text(encoding="utf-8")
    if match[2] not in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}:
        yield f"{match[1]} has no {match[2]}"
    for number in missing(" ; ".join(row.ours), source):
        if not number.isdigit():
            yield f"{match[1]} does not hold {number}"


def page(root: Path = ROOT) -> str:
    """Return the page "Figures from outside", as MyST."""
    rows, given = load(root), shown(root)
    lines = [
        "# Figures from outside",
        "",
        "What others published, or what a formula of theirs gives, beside what this book's code gives in the same",
        "set-up. A wrong implementation would not meet them. Each row is asserted where it says: by a cell of a",
        "chapter, or by a test of the library. ± is one standard error, unless the cell says otherwise.",
        "",
        "::::{list-table}",
        ":header-rows: 1",
        ":widths: 40 30 30",
        ":class: oracles",
        "",
        "* - What, in which set-up",
        "  - Theirs",
        "  - Ours",
    ]
    for row in rows:
        cited = "; ".join(f"{{cite:t}}`{key}`" + (f", {place}" if place else "") for key, place in row.source)
        where = [_link(one) for one in given if one.id == row.id] if row.cell else [_code(row.test)]
        what = [f"**{row.what}**", f"({cited})", "", *_broken(row.setup), "", f"Asserted in {' and '.join(where)}"]
        for mark, column in zip(("* - ", "  - ", "  - "), (what, _broken(row.theirs), _broken(row.ours)), strict=True):
            lines.append(mark + column[0])
            lines += [f"    {line}".rstrip() for line in column[1:]]
    return "\n".join([*lines, "::::", ""])


def _broken(lines: tuple[str, ...]) -> list[str]:
    """Return lines that stay apart on the page, by MyST's line break, with each ± on the line of its number."""
    lines = tuple(line.replace(" ± ", "\u00a0±\u00a0") for line in lines)
    return [f"{line}\\" for line in lines[:-1]] + [lines[-1]]


def _link(one: Shown) -> str:
    title = f"chapter {one.chapter}, {one.section or 'its start'}, cell {one.cell}"
    return f"{{ref}}`{title} <{one.anchor}>`"


def _code(test: str) -> str:
    path, name = test.split("::")
    return f"`{name}` of `{Path(path).name}`"


def write_page(root: Path = ROOT) -> Path:
    """Write `chapters/oracles.md` and return its path; raises ValueError, listing all, when `problems` finds any."""
    wrong = problems(root)
    if wrong:
        raise ValueError("The figures from outside do not hold together:\n  " + "\n  ".join(wrong))
    return keep(root / "chapters" / "oracles.md", page(root))


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx write the page before it looks for pages, and give tagged cells an anchor to link to."""
    write_page(Path(app.confdir))
    app.connect("doctree-read", _give_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _give_anchors(app: Any, doctree: Any) -> None:
    give_anchors(app, doctree, _TAG, _anchor)


def main() -> int:
    """Write the page; return 1, having said why, when a row does not hold."""
    try:
        print(f"{write_page().relative_to(ROOT)} written")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
