"""Every chapter: its shape, its numbers, its claims, its bytes."""

import difflib
import re
from pathlib import Path

import pytest

from bookkit import claims, faults
from bookkit.execute import run
from bookkit.hygiene import alt_text, problems, prose_problems
from bookkit.notebook import code_cells, normalise, read, text, write
from bookkit.paths import ROOT, chapters
from bookkit.prose import unsupported
from tests.book.lists import allowed, uncompared

CHAPTERS = chapters()
each_chapter = pytest.mark.parametrize("number", CHAPTERS, ids=lambda number: f"{number:02}")
PAGES = [ROOT / "intro.md", *sorted((ROOT / "chapters").glob("*.md"))]


def test_there_are_chapters():
    assert CHAPTERS, "chapters/ holds no notebook: every test of chapters below would pass without looking at one"


@each_chapter
def test_shape(number):
    notebook = read(CHAPTERS[number])
    found = problems(notebook, uncompared(number, notebook))
    assert not found, "\n".join(found)


@each_chapter
def test_numbers_in_prose_stand_in_outputs(number):
    found = unsupported(read(CHAPTERS[number]), allowed(number))
    assert not found, "\n".join(f"cell {n.cell}: no output holds {n.written}: … {n.context} …" for n in found)


@each_chapter
def test_no_number_is_allowed_in_vain(number):
    notebook = read(CHAPTERS[number])
    needed = {found.written for found in unsupported(notebook)}
    assert set(allowed(number)) <= needed


@each_chapter
def test_file_is_normalised(number, tmp_path):
    copy = tmp_path / CHAPTERS[number].name
    copy.write_bytes(CHAPTERS[number].read_bytes())
    changed = write(normalise(read(copy)), copy)
    assert not changed, "run `make chapter` on it: an editor has left its marks"


@each_chapter
def test_every_owed_claim_has_a_fault(number):
    planted = {fault.claim for fault in faults.load(number)}
    asserted = {proof.claim for proof in claims.proofs() if proof.chapter == number}
    assert asserted <= planted, f"tests/book/faults/{number:02}.toml plants nothing for {sorted(asserted - planted)}"
    assert planted <= asserted, f"tests/book/faults/{number:02}.toml: no cell asserts {sorted(planted - asserted)}"


@each_chapter
def test_references_lead_somewhere(number):
    markdown = "\n".join(text(c["source"]) for c in read(CHAPTERS[number])["cells"] if c["cell_type"] == "markdown")
    labels = re.findall(r"^\$\$ \((eq-[\w-]+)\)", markdown, re.MULTILINE)
    assert len(labels) == len(set(labels))
    assert all(label.startswith(f"eq-{number:02}-") for label in labels), labels
    everywhere = set().union(*(re.findall(r"\((eq-[\w-]+)\)", path.read_text()) for path in CHAPTERS.values()))
    assert set(re.findall(r"\{eq\}`([\w-]+)`", markdown)) <= everywhere
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "chapters/references.bib").read_text(), re.MULTILINE))
    cited = {key.strip() for group in re.findall(r"\{cite:\w+\}`([^`]+)`", markdown) for key in group.split(",")}
    assert cited, "a chapter cites its sources"
    assert cited <= keys


def test_every_chapter_stands_in_the_table_of_contents_in_order():
    listed = re.findall(r"^\s*- file: chapters/(\d\d-[\w-]+)$", (ROOT / "_toc.yml").read_text(), re.MULTILINE)
    assert listed == [path.stem for path in CHAPTERS.values()]


def test_claims_hold_together():
    found = claims.problems()
    assert not found, "\n".join(found)


def test_every_claim_of_the_list_is_owed_by_some_chapter():
    listed = claims.load()
    assert [claim.id for claim in listed] == [f"C{number:02}" for number in range(1, 31)]
    assert all(claim.chapters and set(claim.chapters) <= set(range(1, 24)) for claim in listed)
    assert all(claim.statement.endswith(".") and claim.statement.count(". ") == 0 for claim in listed)


def test_the_claims_page_names_every_claim_and_shows_every_assertion():
    page = claims.page()
    for claim in claims.load():
        assert claim.id in page and claim.statement in page
    for proof in claims.proofs():
        assert all(assertion in page for assertion in proof.assertions) and proof.anchor in page


def test_figures_are_described_once_in_the_book():
    described = [alt_text(cell) for path in CHAPTERS.values() for cell in code_cells(read(path)) if alt_text(cell)]
    assert len(described) == len(set(described))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain(page):
    assert prose_problems(page.read_text(encoding="utf-8")) == []


def test_no_chapter_is_heavy():
    sizes = {path.name: path.stat().st_size for path in CHAPTERS.values()}
    assert all(size < 2_000_000 for size in sizes.values()), sizes


def rerun_leaves_the_bytes(path: Path, copy: Path) -> None:
    write(normalise(run(read(path), path)), copy)
    differing = list(
        difflib.unified_diff(path.read_text().splitlines(), copy.read_text().splitlines(), lineterm="", n=0)
    )
    assert copy.read_bytes() == path.read_bytes(), "\n".join(line[:200] for line in differing[:20])


def test_running_a_chapter_again_leaves_its_bytes(tmp_path):
    shortest = min(CHAPTERS.values(), key=lambda path: len(code_cells(read(path))))
    rerun_leaves_the_bytes(shortest, tmp_path / "again.ipynb")


@pytest.mark.slow
@each_chapter
def test_running_every_chapter_again_leaves_its_bytes(number, tmp_path):
    rerun_leaves_the_bytes(CHAPTERS[number], tmp_path / "again.ipynb")
