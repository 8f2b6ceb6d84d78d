"""What is owed is demanded, what is asserted is listed, what only looks like it is refused."""

import json
import re

import pytest

from bookkit import claims, faults
from bookkit.branch import Outcome
from bookkit.notebook import read
from tests.bookkit.make import code, markdown, notebook

OWED = """
C02: {statement: A sentence., chapter: 1}
C03: {statement: Another., chapter: [1, 2]}
"""
FAULT = '[[fault]]\nclaim = "C02"\nfind = "x = 1"\nreplace = "x = 2"\n'


@pytest.fixture
def book(tmp_path):
    (tmp_path / "chapters").mkdir()
    (tmp_path / "tests/book/faults").mkdir(parents=True)
    (tmp_path / "chapters/claims.yml").write_text(OWED)
    (tmp_path / "tests/book/faults/01.toml").write_text(FAULT)

    def add(*cells, name="01-one.ipynb"):
        content = notebook(markdown("# One"), *cells)
        (tmp_path / "chapters" / name).write_text(json.dumps(content))
        return tmp_path

    return add


C02 = code("x = 1\nassert x == 1", tags=("claim-C02",))
C03 = code("assert_close(1, 1)", tags=("claim-C03",))


def test_all_is_well(book):
    root = book(C02, C03)
    assert claims.problems(root) == []
    page = claims.write_page(root).read_text()
    assert "assert x == 1" in page and "assert_close(1, 1)" in page
    assert "c02-chapter-1-cell-1" in page and "c03-chapter-1-cell-2" in page
    assert "Owed by chapter 2." in page and page.count("Owed by") == 1
    assert "- x = 1\n+ x = 2" in page and "So far 1 of the 2" in page


def test_a_missing_cell_fails(book, monkeypatch, capsys):
    root = book(C02)
    assert claims.problems(root) == ["chapter 1 owes C03 and has no cell tagged claim-C03 that asserts it"]
    with pytest.raises(ValueError, match="chapter 1 owes C03"):
        claims.write_page(root)
    monkeypatch.setattr(claims, "write_page", lambda: (_ for _ in ()).throw(ValueError("chapter 1 owes C03")))
    assert claims.main() == 1 and "owes C03" in capsys.readouterr().err


def test_an_extra_claim_of_a_later_chapter_is_welcome_and_an_unknown_one_is_not(book):
    assert any("C99" in wrong for wrong in claims.problems(book(C02, C03, code("assert 1", tags=("claim-C99",)))))


def test_a_cell_without_an_assertion_does_not_count(book):
    found = claims.problems(book(C02, code("print('assert 1')", tags=("claim-C03",))))
    assert len(found) == 2 and "owes C03" in found[0] and "no line of it begins with assert" in found[1]


@pytest.mark.parametrize("tag", ["claim-c03", "claim-3", "claims-C03", "claim-C003"])
def test_a_misspelt_tag_is_refused(book, tag):
    with pytest.raises(ValueError, match=re.escape(repr(tag))):
        claims.proofs(book(C02, C03, code("assert 1", tags=(tag,))))


def test_which_lines_assert():
    source = (
        "%matplotlib inline\nassert a\nx = 1; assert b\nfor i in y:\n    assert_close(\n        i, 2)\n"
        "'''\nassert c\n'''\ntorch.testing.assert_close(1, 1)\nassert_allclose(d, e)"
    )
    assert claims.assertions(source) == ("assert a", "assert_close(\n        i, 2)", "assert_allclose(d, e)")


def test_a_fault_is_planted_once_and_tried_from_its_cell_to_the_last_of_its_claim(book):
    early, late = code("assert 0", tags=("claim-C02",)), code("assert x", tags=("claim-C02",))
    root = book(early, C02, code("sketch(x)", tags=("hide-input",)), C03, late, code("x"))
    (fault,) = faults.load(1, root)
    original = read(root / "chapters/01-one.ipynb")
    trial = faults.plant(fault, original)
    assert trial.numbers == (2, 4, 5) and trial.catching == (2, 5)
    assert trial.sources == ("x = 2\nassert x == 1", "assert_close(1, 1)", "assert x")
    assert original == read(root / "chapters/01-one.ipynb")


def test_only_an_assertion_of_the_claims_own_cell_counts():
    fault = faults.Fault(1, "C02", "x = 1", "x = 2")
    trial = faults.Trial(fault, (3, 5, 8), ("x = 2", "assert y", "assert x == 1"), (8, 9))
    assert trial.verdict(Outcome(2, "AssertionError", "…")) == ""
    for outcome, said in (
        (
            Outcome(None),
            r"Nothing catches the fault planted in cell 3:\n    - x = 1\n    \+ x = 2\n.* cell 8, cell 9\.$",
        ),
        (
            Outcome(2, "NameError", "no x"),
            r"No assertion catches .*(?s:.)*cell 8 fails with NameError:\n\nassert x(?s:.)*no x",
        ),
        (Outcome(2, "Timeout", ""), "No assertion catches"),
        (
            Outcome(1, "AssertionError", ""),
            r"Caught too early, not by C02, asserted in cell 8, cell 9(?s:.)*cell 5 fails",
        ),
        (Outcome(0, "AssertionError", ""), "Caught too early"),
    ):
        assert re.search(said, trial.verdict(outcome)), trial.verdict(outcome)


def test_a_fault_that_fits_nowhere_or_twice_or_too_late_is_refused(book):
    (fault,) = faults.load(1, book(C02, C03))
    for cells, said in (
        ([code("y = 1")], "stands 0 times"),
        ([C02, C02], "stands 2 times"),
        ([code("assert 1", tags=("claim-C02",)), code("x = 1")], "no cell tagged claim-C02 runs after"),
    ):
        with pytest.raises(ValueError, match=said):
            faults.plant(fault, notebook(*cells))


@pytest.mark.parametrize("bad", ['claim = "C02"\nfind = "a"', 'claim = "C02"\nfind = "a"\nreplace = "a"'])
def test_a_fault_that_changes_nothing_is_refused(book, bad):
    root = book(C02, C03)
    (root / "tests/book/faults/01.toml").write_text(f"[[fault]]\n{bad}\n")
    with pytest.raises(ValueError, match=r"01\.toml"):
        faults.load(1, root)


def test_only_cells_that_nothing_depends_on_are_idle():
    cells = [
        code("x = 2", tags=("hide-input",)),
        code("figure = draw(x)", tags=("hide-input",)),
        code("table = x", tags=("hide-input",)),
        code("assert table == 1", tags=("claim-C02", "hide-input")),
        code("table[0] = 3", tags=("hide-cell",)),
        code("y = 5"),
        code("sketch(torch.randn(3, generator=generator))", tags=("hide-input",)),
    ]
    assert faults.idle(notebook(*cells), cells[5]["id"]) == {cells[1]["id"]}
    assert faults.idle(notebook(*cells), cells[1]["id"]) == set()
