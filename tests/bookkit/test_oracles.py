"""A row is refused unless its cell is there, asserts, and shows every number that the row gives as ours."""

import json

import pytest
import yaml

from bookkit import oracles
from tests.bookkit.make import code, markdown, notebook, stream

ROW = {
    "id": "variance",
    "what": "Variance of a sum",
    "source": "gauss1809, p. 7; bayes1763",
    "setup": "d = 4",
    "theirs": ["1", "a second line"],
    "ours": "0.994 ± 0.013",
    "cell": "oracle-variance",
}
CELL = code("assert v\nprint(v, e)", stream("0.9941 ± 0.0127\n"), tags=("claim-C06", "oracle-variance"))
TEST = {key: value for key, value in ROW.items() if key != "cell"} | {"test": "tests/test_a.py::test_it"}


@pytest.fixture
def book(tmp_path):
    (tmp_path / "chapters").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "chapters/references.bib").write_text("@book{gauss1809,\n}\n@misc{bayes1763,\n}\n")
    (tmp_path / "tests/test_a.py").write_text("def test_it():\n    assert v == (0.994, 0.013)\n")

    def make(*rows, cells=(CELL,)):
        content = notebook(markdown("# One\n\n## How large?"), *cells)
        (tmp_path / "chapters/01-one.ipynb").write_text(json.dumps(content))
        (tmp_path / "chapters/oracles.yml").write_text(yaml.safe_dump(list(rows), allow_unicode=True))
        return tmp_path

    return make


def test_all_is_well(book):
    root = book(ROW)
    assert oracles.problems(root) == []
    page = oracles.write_page(root).read_text()
    assert "{ref}`chapter 1, How large?, cell 1 <oracle-variance-chapter-1-cell-1>`" in page
    assert "**Variance of a sum**\n    ({cite:t}`gauss1809`, p. 7; {cite:t}`bayes1763`)\n\n    d = 4\n" in page
    assert "  - 1\\\n    a second line\n  - 0.994\u00a0±\u00a00.013\n" in page


def test_a_test_in_place_of_a_cell(book):
    root = book(TEST, cells=())
    assert oracles.problems(root) == []
    assert "`test_it` of `test_a.py`" in oracles.page(root)


@pytest.mark.parametrize(
    "change, cells, said",
    [
        ({}, (), "no chapter has a cell tagged oracle-variance"),
        ({}, (code("print(1)", stream("0.994 0.013"), tags=("oracle-variance",)),), "no line of it begins with assert"),
        ({"ours": "0.994 ± 0.012"}, (CELL,), "holds 0.012"),
        ({"ours": "0.994 ± 0.013, 1.004"}, (CELL,), "holds 1.004"),
        ({"ours": ["0.994", "−0.013"]}, (CELL,), "holds −0.013"),
        ({"source": "euler1748"}, (CELL,), "references.bib has no 'euler1748'"),
        (
            {},
            (CELL, code("assert 1", tags=("oracle-other",))),
            "tagged oracle-other, and chapters/oracles.yml has no row",
        ),
    ],
)
def test_what_does_not_hold_is_said(change, cells, said, book):
    root = book({**ROW, **change}, cells=cells)
    assert any(said in problem for problem in oracles.problems(root)), oracles.problems(root)
    with pytest.raises(ValueError, match="do not hold together"):
        oracles.write_page(root)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"test": "tests/test_b.py::test_it"}, "there is no file tests/test_b.py"),
        ({"test": "tests/test_a.py::test_other"}, "tests/test_a.py has no test_other"),
        ({"ours": "0.995"}, "tests/test_a.py does not hold 0.995"),
    ],
)
def test_a_test_that_is_not_there_is_said(change, said, book):
    assert oracles.problems(book({**TEST, **change}, cells=())) == [f"row variance: {said}"]


@pytest.mark.parametrize(
    "row, said",
    [
        ({**ROW, "ours": 0.5}, r"row 1 \(variance\): ours is to be text and is 0.5: put it in quotes"),
        ({**ROW, "theirs": []}, "theirs is to be text and is None"),
        ({**ROW, "what": ["a", "b"]}, "what is to be text"),
        ({**ROW, "figure": "x"}, "has a field 'figure'"),
        ({**ROW, "test": "tests/test_a.py::test_it"}, "needs one of cell and test, not both"),
        ({key: ROW[key] for key in ROW if key != "cell"}, "and has neither"),
        ({key: ROW[key] for key in ROW if key != "setup"}, "has no setup"),
        ({**ROW, "cell": "variance"}, "cell is to be oracle-variance"),
        ({**ROW, "id": "Variance"}, "an id is lower case"),
        ({**TEST, "test": "test_it"}, r"test is to be tests/….py::test_…"),
        ("variance", r"row 1 \(without an id\): is 'variance'"),
    ],
)
def test_a_row_that_is_none_is_refused(row, said, book):
    with pytest.raises(ValueError, match=said):
        oracles.load(book(row))


def test_two_rows_of_one_id_are_refused(book):
    with pytest.raises(ValueError, match="two rows of one id: variance"):
        oracles.load(book(ROW, ROW))


@pytest.mark.parametrize("tag", ["oracle-Variance", "oracle_variance", "oracles-variance", "oracle-"])
def test_a_misspelt_tag_is_refused(tag, book):
    with pytest.raises(ValueError, match="is not oracle-<id>"):
        oracles.problems(book(ROW, cells=(CELL, code("assert 1", tags=(tag,)))))


def test_cells_of_one_tag_show_together(book):
    parts = [code(f"assert {x}", stream(x), tags=("oracle-variance",)) for x in ("0.994", "0.013")]
    root = book(ROW, cells=parts)
    assert oracles.problems(root) == [] and "cell 1 of" not in oracles.page(root)
    assert oracles.page(root).count("{ref}") == 2


@pytest.mark.parametrize(
    "ours, output, absent",
    [
        ("3.9e-3", "0.00389", []),
        ("3.9 × 10⁻³", "3.89e-03", []),
        ("3.9 × 10⁻³", "3.79e-03", ["3.9 × 10⁻³"]),
        ("98 %", "0.981", []),
        ("98", "0.981", ["98"]),
        ("20\u2009000 pairs", "20,000", []),
        ("about 0.30", "0.304", []),
        ("0.30", "0.306", ["0.30"]),
        ("float64, Taylor-2, d₁", "", []),
        ("-0.5 and −0.5", "0.5", ["-0.5", "−0.5"]),
        ("3–4", "3 4", []),
    ],
)
def test_which_numbers_are_missing(ours, output, absent):
    assert oracles.missing(ours, output) == absent


def test_the_command_says_why(monkeypatch, capsys):
    monkeypatch.setattr(oracles, "write_page", lambda: (_ for _ in ()).throw(ValueError("row x: nothing")))
    assert oracles.main() == 1 and "row x" in capsys.readouterr().err
