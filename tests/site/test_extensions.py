"""The site's own Sphinx extensions, each on the smallest input that shows what it is for."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from docutils.core import publish_doctree

EXTENSIONS = Path(__file__).parents[2] / "site" / "extensions"


def extension(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", EXTENSIONS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_text(docstring: str) -> str:
    """What a reader sees of a docstring after rewriting; a warning of docutils is an error."""
    lines = extension("docstrings").rewrite(docstring.splitlines())
    return publish_doctree("\n".join(lines), settings_overrides={"halt_level": 2, "report_level": 5}).astext()


@pytest.mark.parametrize(
    "sign",
    ["|q − k|²/2σ² and |k|", "x* and *args", "trailing_ and _leading_", r"a \ b", "`name`s of things", "`a` = `b`"],
)
def test_signs_print_as_they_stand(sign: str) -> None:
    assert as_text(f"Says {sign} here.").replace(" s of", "s of") == f"Says {sign.replace('`', '')} here."


def test_a_formula_becomes_a_literal_and_keeps_its_line() -> None:
    doctree = publish_doctree("\n".join(extension("docstrings").rewrite(["One line.", "", "s_ij = q_i · k_j / |q|"])))
    assert [node.astext() for node in doctree.findall(lambda node: node.tagname == "literal_block")] == [
        "s_ij = q_i · k_j / |q|"
    ]


def test_arguments_become_a_list_whatever_their_indentation() -> None:
    seen = as_text("One line.\n\nArgs:\n    q: (…, n, d), or a\n    multiple of\n        heads.\n    k, v: as q.\n")
    assert "q: (…, n, d), or a multiple of heads." in seen and "k, v: as q." in seen


def test_a_page_that_no_longer_needs_mending_is_reported(tmp_path: Path) -> None:
    accessible = extension("accessible")
    page = tmp_path / "page.html"
    page.write_text("".join(old for old, _ in accessible.MENDED[1:]), encoding="utf-8")
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    accessible.logging = SimpleNamespace(getLogger=lambda name: logger)
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), outdir=tmp_path)
    accessible.mend(app, None)
    assert page.read_text("utf-8") == "".join(new for _, new in accessible.MENDED[1:])
    assert len(said) == 1 and "Toggle hidden content" in said[0]
