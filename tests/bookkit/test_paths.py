"""Which notebooks are chapters."""

import pytest

from bookkit.paths import ROOT, chapters


def book(tmp_path, *names: str):
    (tmp_path / "chapters").mkdir()
    for name in names:
        (tmp_path / "chapters" / name).touch()
    return tmp_path


def test_numbered_notebooks_are_chapters_and_drafts_are_not(tmp_path):
    root = book(tmp_path, "02-two.ipynb", "01-one.ipynb", "draft.ipynb", "draft-two.ipynb")
    assert [(number, path.name) for number, path in chapters(root).items()] == [
        (1, "01-one.ipynb"),
        (2, "02-two.ipynb"),
    ]


def test_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Chapter\.ipynb: a chapter is named NN-name\.ipynb"):
        chapters(book(tmp_path, "Chapter.ipynb"))


def test_one_number_for_two_chapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"01-two\.ipynb and 01-one\.ipynb are both chapter 1"):
        chapters(book(tmp_path, "01-one.ipynb", "01-two.ipynb"))


def test_the_book_holds_no_draft():
    assert list((ROOT / "chapters").glob("draft*")) == []
