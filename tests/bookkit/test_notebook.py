"""The same content gives the same bytes; what is not content is taken out, what is content is kept."""

import copy
import json

import pytest

from bookkit.notebook import normalise, read, text, write
from tests.bookkit.make import code, markdown, notebook, stream


def example():
    return notebook(
        markdown("# Title  \n\n"),
        code("x = 1", stream("a\n"), stream("b\n"), stream("oh\n", "stderr"), count=7),
        code("x", {"output_type": "execute_result", "data": {"text/plain": "1"}, "metadata": {}, "execution_count": 9}),
    )


def test_counts_streams_and_results_are_made_regular():
    cells = normalise(example())["cells"]
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2]
    assert [output["text"] for output in cells[1]["outputs"]] == ["a\nb\n", "oh\n"]
    assert cells[2]["outputs"][0]["execution_count"] == 2


def test_an_unrun_cell_keeps_no_count():
    noted = example()
    noted["cells"][1]["execution_count"] = None
    assert [cell.get("execution_count") for cell in normalise(noted)["cells"]] == [None, None, 1]


def test_editors_marks_go_and_tags_stay():
    noted = example()
    noted["metadata"] = {"language_info": {"version": "3.12.1"}, "widgets": {}, "jupytext": {"formats": "md"}}
    noted["cells"][1]["metadata"] = {
        "tags": ["claim-C02"],
        "mystnb": {"image": {"alt": "seen"}},
        "execution": {"iopub.execute_input": "2026-01-01T00:00:00Z"},
        "collapsed": False,
    }
    clean = normalise(noted)
    assert clean["metadata"]["language_info"] == {"name": "python"} and "widgets" not in clean["metadata"]
    assert clean["cells"][1]["metadata"] == {"tags": ["claim-C02"], "mystnb": {"image": {"alt": "seen"}}}


def test_ids_are_kept_unless_they_are_random_missing_or_twice():
    noted = notebook(*(code(f"x = {number}") for number in range(6)))
    given = ["mine", "0a1b2c3d", "7f3a1c1e-93a7-4c4b-8a52-0d3c1d2e4f50", "mine", "", "no spaces please"]
    for cell, name in zip(noted["cells"], given, strict=True):
        cell["id"] = name
    del noted["cells"][4]["id"]
    first = [cell["id"] for cell in normalise(copy.deepcopy(noted))["cells"]]
    assert first[0] == "mine" and len(set(first)) == 6
    assert all(name.startswith("code-") for name in first[1:])
    assert [cell["id"] for cell in normalise(copy.deepcopy(noted))["cells"]] == first
    edited = normalise(noted)
    edited["cells"][1]["source"] = "x = 100"
    assert normalise(edited)["cells"][1]["id"] == first[1]


def test_equal_cells_get_different_ids():
    noted = notebook(code("same"), code("same"))
    for cell in noted["cells"]:
        cell["id"] = "01234567"
    assert len({cell["id"] for cell in normalise(noted)["cells"]}) == 2


def test_writing_again_changes_nothing(tmp_path):
    path = tmp_path / "a.ipynb"
    assert write(normalise(example()), path)
    before = path.read_bytes()
    assert not write(normalise(read(path)), path)
    assert path.read_bytes() == before and before.endswith(b"}\n")
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_joined_and_missing_ids_given_the_same_way_twice(tmp_path):
    raw = example()
    raw["cells"][1]["source"] = ["x = 1\n", "y = 2"]
    for cell in raw["cells"]:
        del cell["id"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(raw))
    one, two = read(path), read(path)
    assert one["cells"][1]["source"] == "x = 1\ny = 2" and text(["a\n", "b"]) == "a\nb"
    assert [cell["id"] for cell in one["cells"]] == [cell["id"] for cell in two["cells"]]


@pytest.mark.parametrize("content", ["not json", "[]", '{"nbformat": 3, "cells": []}'])
def test_what_is_no_notebook_is_said_so(tmp_path, content):
    path = tmp_path / "broken.ipynb"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"broken\.ipynb is not a notebook"):
        read(path)
