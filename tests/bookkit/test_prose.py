"""A number in prose that no output holds is found; one that does, with its rounding, is left in peace."""

import pytest

from bookkit.prose import numbers, stated, unsupported
from tests.bookkit.make import code, markdown, notebook, stream

OUTPUT = "0.9693 of them, tensor([-2.1788, 1024.0]), 147,456 numbers, loss 3.21e-05, [0.5, 20]"


def found(prose: str, source: str = "x = 20_000", output: str = OUTPUT) -> list[str]:
    return [number.written for number in unsupported(notebook(markdown(prose), code(source, stream(output))))]


@pytest.mark.parametrize(
    "prose",
    [
        "the weight is 0.97, or 0.969, or 0.9693",
        "97 % of it, 96.9%, 96.93 per cent, 97 percent",
        "it falls by 2.18 to −2.18",
        "1,024 and 1024 and 147,456 and 147\u202f456",
        "the loss is 3.2e-5",
        "it draws 20,000 pairs",
        "about 0.99, over 19, nearly 1,000, more than 145,000",
        "one of 12 heads, 3 keys, the 2nd of 7",
    ],
)
def test_supported(prose):
    assert found(prose) == []


@pytest.mark.parametrize(
    ("prose", "wrong"),
    [
        ("the weight is 0.96", "0.96"),
        ("the weight is 0.968", "0.968"),
        ("the weight is 0.96931", "0.96931"),
        ("98 % of it", "98 %"),
        ("it rises to 2.17", "2.17"),
        ("147,457 numbers", "147,457"),
        ("−0.97 of it", "−0.97"),
        ("a loss of 3.3e-5", "3.3e-5"),
        ("about 0.85", "0.85"),
        ("13 of them", "13"),
        ("**0.42**", "0.42"),
        ("| a | 0.42 |", "0.42"),
        ("(0.42)", "0.42"),
        ("0.42.", "0.42"),
        ("from 0.97 to 0.42", "0.42"),
        ("$1/n = 0.42$", "0.42"),
        ("$s = -0.97$", "-0.97"),
    ],
)
def test_planted_wrong_numbers_are_found(prose, wrong):
    assert found(prose) == [wrong]


@pytest.mark.parametrize(
    "prose",
    [
        "$x_{42}$ and $$x = 0.42$$ (eq-01-x) and `0.42`",
        "```python\n0.42\n```",
        "{eq}`eq-13-14` and {cite:p}`vaswani2017attention` and [here](https://a.org/0.42)",
        "chapter 13, chapters 14 and 15, section 13.2, Exercise 16.1, equation (13.2), layer 14, heads 13, 14 and 15",
        "(C13) and C14",
        "published in 2017, MiniLM-L6-v2, float32, int64",
        "*Reading time:* 25 minutes.",
        ":::{admonition} About the solution of 13.1\n:class: dropdown\n:::",
        "13. the thirteenth item",
        "<!-- 0.42 -->",
    ],
)
def test_what_is_no_result_is_passed_over(prose):
    assert found(prose) == []


def test_an_allowed_number_passes_and_no_other():
    noted = notebook(markdown("0.42 and 0.43"), code("1", stream("nothing")))
    assert [number.written for number in unsupported(noted, ["0.42"])] == ["0.43"]


def test_latex_outputs_and_code_count():
    latex = {"output_type": "execute_result", "metadata": {}, "data": {"text/latex": "$\\displaystyle 0.42 x$"}}
    assert unsupported(notebook(markdown("0.42 and 0.43"), code("y = 0.43", latex))) == []


def test_a_picture_is_no_output():
    shown = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBOR0.42"}}
    assert unsupported(notebook(markdown("0.42"), code("1", shown)))


def test_context_and_place_are_told():
    (number,) = numbers("Some words before 0.42 and after.", cell=7)
    assert number.cell == 7 and number.context == "Some words before 0.42 and after."


def test_numbers_are_read_from_outputs():
    assert stated("tensor([1.5000, -0.2934]) (3, 21) 1,024 2.") == {1.5, -0.2934, 3, 21, 1024, 2}


def test_a_short_number_needs_its_output_nearby_and_a_long_one_does_not():
    far = [code(f"x = {number}e3") for number in range(8)]
    noted = notebook(code("1", stream("0.42 0.421")), *far, markdown("0.42 and 0.421"))
    assert [number.written for number in unsupported(noted)] == ["0.42"]
    assert unsupported(notebook(code("1", stream("0.42")), *far, markdown("## What we saw\n\n0.42"))) == []
    assert unsupported(notebook(code("1", stream("0.42")), *far[1:], markdown("0.42"))) == []
