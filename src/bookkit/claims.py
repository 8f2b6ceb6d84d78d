"""The book's claims: which chapter owes which, which cell asserts it, and the page that lists them.

`chapters/claims.yml` says what is owed; the chapters' tags (`claim-C07`) say what is asserted, and where. The page
`chapters/claims.md` is written from both, by `python -m bookkit.claims` and, as a Sphinx extension, before each build.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bookkit import faults
from bookkit.notebook import code_cells, read, tags, text
from bookkit.paths import ROOT, chapters
from bookkit.tagged import give_anchors, keep

_TAG = re.compile(r"claim-(C\d\d)")
_ASSERTING = {"assert_close", "assert_allclose", "assert_array_equal", "assert_equal"}


@dataclass(frozen=True)
class Claim:
    """A claim: its id ("C07"), what it says, and the numbers of the chapters that owe a cell asserting it."""

    id: str
    statement: str
    chapters: tuple[int, ...]


@dataclass(frozen=True)
class Proof:
    """A cell that asserts a claim: the chapter's number and title, the cell's count, and its assertions' source."""

    claim: str
    chapter: int
    title: str
    path: Path
    cell: int
    assertions: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """The id that the cell has on the built page."""
        return _anchor(self.claim, self.chapter, self.cell)


def _anchor(claim: str, chapter: int, cell: int) -> str:
    return f"{claim.lower()}-chapter-{chapter}-cell-{cell}"


def load(root: Path = ROOT) -> list[Claim]:
    """Return the claims of `chapters/claims.yml` in order of their ids."""
    entries = yaml.safe_load((root / "chapters" / "claims.yml").read_text(encoding="utf-8"))
    claims = []
    for name, entry in entries.items():
        owed = entry["chapter"]
        claims.append(Claim(name, entry["statement"].strip(), tuple(owed if isinstance(owed, list) else [owed])))
    return sorted(claims, key=lambda claim: claim.id)


def assertions(source: str) -> tuple[str, ...]:
    """Return the source of each assertion in a cell: `assert` statements and calls of `assert_close` and its kin.

    Only one that begins its line counts, so that a reader sees it at a glance; lines of IPython magic are passed over.
    """
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    found = []
    for node in ast.walk(ast.parse(plain)):
        if not isinstance(node, ast.Assert | ast.Expr):
            continue
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if isinstance(node, ast.Assert) or (isinstance(called, ast.Name) and called.id in _ASSERTING):
            segment = ast.get_source_segment(plain, node)
            before = plain.splitlines()[node.lineno - 1][: node.col_offset]
            if segment is not None and not before.strip():
                found.append((node.lineno, segment))
    return tuple(segment for _, segment in sorted(found))


def proofs(root: Path = ROOT) -> list[Proof]:
    """Return every asserting cell of every chapter, in reading order.

    Raises ValueError when a tag that begins with "claim" is not claim-CNN.
    """
    found = []
    for number, path in chapters(root).items():
        notebook = read(path)
        heading = re.search(r"^# (.+)$", text(notebook["cells"][0]["source"]), re.MULTILINE)
        title = heading[1] if heading else path.stem
        for count, cell in enumerate(code_cells(notebook), start=1):
            for tag in tags(cell):
                match = _TAG.fullmatch(tag)
                if match:
                    asserted = assertions(text(cell["source"]))
                    found.append(Proof(match[1], number, title, path, count, asserted))
                elif tag.lower().startswith("claim"):
                    raise ValueError(f"{path.name}, cell {count}: the tag {tag!r} is not claim-CNN")
    return found


def problems(root: Path = ROOT) -> list[str]:
    """Return what is wrong, in sentences: owed and missing, unknown ids, claim cells without an assertion."""
    claims, given, present = load(root), proofs(root), chapters(root)
    asserted = {(proof.claim, proof.chapter) for proof in given if proof.assertions}
    known = {claim.id for claim in claims}
    wrong = [
        f"chapter {number} owes {claim.id} and has no cell tagged claim-{claim.id} that asserts it"
        for claim in claims
        for number in claim.chapters
        if number in present and (claim.id, number) not in asserted
    ]
    for proof in given:
        where = f"{proof.path.name}, cell {proof.cell}"
        if proof.claim not in known:
            wrong.append(f"{where} asserts {proof.claim}, which chapters/claims.yml does not have")
        if not proof.assertions:
            wrong.append(f"{where} is tagged claim-{proof.claim} and no line of it begins with assert")
    return wrong


def page(root: Path = ROOT) -> str:
    """Return the Claims page, as MyST."""
    claims, given, present = load(root), proofs(root), chapters(root)
    planted = [fault for number in present for fault in faults.load(number, root)]
    done = sum(all(number in present for number in claim.chapters) for claim in claims)
    lines = [
        "# Claims",
        "",
        f"The book makes {len(claims)} claims. Each is asserted by a cell that fails when the claim is false, and each",
        "such cell is tried: a fault is planted in a copy of the chapter, and the cell has to catch it. "
        f"So far {done} of the {len(claims)}",
        "stand in a chapter in full; the others are owed by chapters that are not written yet.",
        "",
    ]
    for claim in claims:
        lines += [f"(claim-{claim.id.lower()})=", f"## {claim.id}", "", claim.statement, ""]
        for proof in (proof for proof in given if proof.claim == claim.id):
            link = f"{{ref}}`cell {proof.cell} of chapter {proof.chapter}, {proof.title} <{proof.anchor}>`"
            lines += [f"Asserted in {link}:", "", "```python", *proof.assertions, "```", ""]
        own = [fault for fault in planted if fault.claim == claim.id]
        if own:
            lines += [f":::{{dropdown}} Planted and caught: {len(own)} fault{'s' if len(own) > 1 else ''}"]
            for fault in own:
                lines += ["```diff"]
                lines += [f"- {line}" for line in fault.find.splitlines()]
                lines += [f"+ {line}" for line in fault.replace.splitlines()]
                lines += ["```"]
            lines += [":::", ""]
        owed = [number for number in claim.chapters if number not in present]
        if owed:
            which = ", ".join(map(str, owed))
            lines += [f"Owed by chapter{'s' if len(owed) > 1 else ''} {which}.", ""]
    return "\n".join(lines)


def write_page(root: Path = ROOT) -> Path:
    """Write `chapters/claims.md` and return its path; raises ValueError, listing all, when `problems` finds any."""
    wrong = problems(root)
    if wrong:
        raise ValueError("The claims do not hold together:\n  " + "\n  ".join(wrong))
    return keep(root / "chapters" / "claims.md", page(root))


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx write the page before it looks for pages, and give asserting cells an anchor to link to."""
    write_page(Path(app.confdir))
    app.connect("doctree-read", _give_anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _give_anchors(app: Any, doctree: Any) -> None:
    give_anchors(app, doctree, _TAG, _anchor)


def main() -> int:
    """Write the Claims page; return 1, having said why, when a chapter owes what it does not have."""
    try:
        print(f"{write_page().relative_to(ROOT)} written")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
