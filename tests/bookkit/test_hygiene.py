"""A tiny chapter passes; with one thing wrong, exactly that is found."""

import pytest

from bookkit.hygiene import problems, prose_problems
from tests.bookkit.make import chapter, code, markdown, picture, stream

ALT = "Two curves: the score rises with the width, the weight stays where it was."


def figure(alt=ALT, pictures=1, source="draw()"):
    return code(source, *[picture()] * pictures, mystnb={"image": {"alt": alt}} if alt else {})


def error():
    return {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}


def shown(words):
    return {"output_type": "execute_result", "metadata": {}, "data": {"text/plain": words}, "execution_count": 1}


def widget():
    return {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.jupyter.widget-view+json": {}}}


def test_a_tiny_chapter_passes():
    assert problems(chapter()) == []
    assert problems(chapter(figure(), code("torch.randn(3, generator=generator)", shown("tensor([1.])")))) == []


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (code("1", count=None), "code cells [2] are not run"),
        (code("1", error()), "ended in ValueError"),
        (code("1", stream("warned", "stderr")), "wrote to stderr"),
        (code("1", shown("<Line2D at 0x7f55ce791fd0>")), "'0x7f55ce791fd0'"),
        (code("1", stream("/tmp/ipykernel_17/1.py")), "not the same twice"),
        (code("1", shown("tensor([1.], device='cuda:0')")), "not the same twice or elsewhere"),
        (code("1", widget()), "needs a running kernel"),
        (code("\n\n".join("x = 1" for _ in range(21))), "has 21 lines"),
        (figure(alt=""), "without mystnb.image.alt"),
        (figure(alt="A plot."), "does not say what is seen"),
        (figure(alt="../../_build/html/_images/0123456789abcdef0123456789abcdef.png"), "does not say what is seen"),
        (figure(pictures=2), "2 pictures under one description"),
        (code("1", tags=("nbval-ignore-output",)), "does not say why"),
        (code("1", tags=("nbval-skip",)), "asks not to be tested"),
        (code("1", tags=("raises-exception",)), "asks not to be tested"),
        (code("# NBVAL_IGNORE_OUTPUT\n1"), "asks not to be tested"),
        (code("started = time.perf_counter()"), "takes a time"),
        (code("%timeit x"), "takes a time"),
        (code("import time"), "takes a time"),
        (code("requests.get(x)"), "reaches for the network"),
        (code("AutoModel.from_pretrained('x')"), "reaches for the network"),
        (code("!pip install x"), "reaches for the network"),
        (code("warnings.filterwarnings('ignore')"), "hides a warning"),
        (code("torch.manual_seed(0)"), "pass a generator"),
        (code("torch.randn(3)"), "calls randn without a generator"),
        (code("w.normal_()"), "calls normal_ without a generator"),
        (code("torch.randn_like(x)"), "calls randn_like without a generator"),
        (code("x.to(device)"), "does not choose the device"),
        (markdown("It is important to note that x."), "says 'it is important to note'"),
        (markdown("Let's begin."), 'says "let\'s"'),
        (markdown("\\begin{align} x \\end{align}"), "a bare \\begin{align}"),
        (markdown("Done \U0001f680"), "an emoji"),
        (markdown("### Exercise 1.9\n\nUnsolved."), "Exercise 1.9 has no collapsed solution"),
    ],
)
def test_one_thing_wrong_is_found(cell, said):
    found = problems(chapter(cell))
    assert len(found) == 1 and said in found[0]


def test_counts_out_of_order_are_found():
    noted = chapter(code("x = 1"), code("y = 1"))
    noted["cells"][2]["execution_count"], noted["cells"][3]["execution_count"] = 3, 2
    assert "counts are not 1…7" in problems(noted)[0]


def test_a_drawing_may_be_long_and_a_chapter_of_long_cells_may_not():
    long = "\n".join(f"x{number} = 1" for number in range(15))
    assert problems(chapter(code(long + "\n" * 3 + long, tags=("hide-input",)))) == []
    found = problems(chapter(*(code(long + f"\ny = {number}") for number in range(9))))
    assert found == ["the median cell has 16 lines (at most 6)"]


def test_two_figures_with_one_description_are_found():
    assert "same description" in problems(chapter(figure(), figure(source="draw(2)")))[0]


def test_an_uncompared_cell_has_to_be_listed_and_the_list_to_be_needed():
    trained = code("train()", tags=("nbval-ignore-output",))
    assert problems(chapter(trained), [trained["id"]]) == []
    compared = code("train()")
    assert "compared all the same" in problems(chapter(compared), [compared["id"]])[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# A tiny chapter", "A tiny chapter", "does not begin with '# Title'"),
        ("What you will be able to do", "Objectives", "no admonition"),
        ("Reading time", "Length", "no reading time"),
        ("## What we saw", "## Summary", "no section '## What we saw'"),
        ("## Sources", "## Literature", "no section '## Sources'"),
        ("## What comes next", "## Next", "no section '## What comes next'"),
    ],
)
def test_a_missing_part_is_found(old, new, said):
    noted = chapter()
    for cell in noted["cells"]:
        cell["source"] = cell["source"].replace(old, new)
    assert said in problems(noted)[0]


def test_three_exercises_are_too_few():
    noted = chapter()
    noted["cells"] = [cell for cell in noted["cells"] if "1.4" not in cell["source"] and "4 + 4" not in cell["source"]]
    assert problems(noted) == ["3 exercises (at least 4)"]


def test_sections_out_of_order_are_found():
    noted = chapter()
    noted["cells"][-1]["source"] = "## What comes next\n\nMore.\n\n## Sources\n\nNone."
    assert "not in the order" in problems(noted)[0]


def test_words_are_judged_as_words():
    assert prose_problems("The outlet's closed, violet; a delver.") == []
