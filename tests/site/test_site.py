"""The built site in a real browser: every page in light, in dark, and 390 pixels wide."""

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from urllib.parse import urlparse

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.site import checks
from tests.site.conftest import MODES, ROOT, SITE, serve

THEME_PAGES = {"index.html", "search.html", "genindex.html", "py-modindex.html"}
"""Pages without an article: a redirect, the search and the indices."""

PAGES = sorted(
    str(path.relative_to(SITE))
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts and path.name not in THEME_PAGES
)
Open = Callable[..., BrowserContext]


def test_the_site_is_there() -> None:
    assert "intro.html" in PAGES, f"{SITE} holds no built site: run `make site` first"


def test_every_chapter_has_its_page_and_its_place_in_the_contents() -> None:
    chapters = [path.stem for path in sorted(ROOT.glob("chapters/[0-9][0-9]-*.ipynb"))]
    contents, first = (ROOT / "_toc.yml").read_text("utf-8"), (ROOT / "intro.md").read_text("utf-8")
    for chapter in chapters:
        assert f"chapters/{chapter}.html" in PAGES and f"chapters/{chapter}" in contents, chapter
        assert f"(chapters/{chapter}.ipynb)" in first, f"the map on the first page does not lead to {chapter}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PAGES)
def test_page(path: str, mode: str, address: str, context: Open) -> None:
    visit = checks.Visit(context(mode), address, path)
    wanted = [checks.requests, checks.maths, checks.pictures, checks.width, checks.accessibility]
    if mode == "dark":
        wanted.append(checks.darkness)
    if mode == "light":
        wanted.append(checks.buttons)
    findings = [finding for check in wanted for finding in check(visit)]
    assert not findings, "\n".join([f"{path}, {mode}:", *findings])


@pytest.mark.parametrize("path", PAGES)
def test_nothing_in_the_page_names_a_script_or_style_elsewhere(path: str) -> None:
    text = (SITE / path).read_text("utf-8")
    tags = re.findall(r"<(?:script|img|iframe|source|link|video|audio|object|embed)\b[^>]*>", text)
    elsewhere = [tag for tag in tags if re.search(r"\b(?:src|href|data)=\"(?:https?:)?//", tag)]
    assert not elsewhere
    assert not re.search(r"unpkg\.com|jsdelivr|cdnjs|googleapis|thebe", text)


@pytest.mark.parametrize("word", ["softmax", "temperature"])
def test_search_finds(word: str, address: str, context: Open) -> None:
    visit = checks.Visit(context(), address, f"search.html?q={word}")
    visit.page.wait_for_selector("#search-results ul.search li a", timeout=10_000)
    assert visit.page.locator("#search-results ul.search li a").count() >= 2
    assert not checks.requests(visit)


def test_the_button_switches_between_light_and_dark(address: str, context: Open) -> None:
    page = checks.Visit(context("light"), address, "intro.html").page
    seen = {page.evaluate("document.documentElement.dataset.theme")}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}


def test_the_contents_open_on_a_narrow_screen(address: str, context: Open) -> None:
    page: Page = checks.Visit(context("phone"), address, "intro.html").page
    link = page.locator(".bd-links a[href*='notation']").first
    assert not link.is_visible() or link.bounding_box()["x"] < 0  # type: ignore[index]
    page.locator("button.primary-toggle:visible").first.click()
    link.wait_for(state="visible")
    link.click()
    page.wait_for_url("**/notation.html")


def test_hidden_code_opens(address: str, context: Open) -> None:
    page = checks.Visit(context(), address, next(path for path in PAGES if "/0" in path)).page
    hidden = page.locator("div.cell details").first
    assert not hidden.locator("pre").first.is_visible()
    hidden.locator("summary").click()
    assert hidden.locator("pre").first.is_visible()


def first_picture() -> ModuleType:
    """The script that draws the picture of the first page, as a module."""
    spec = importlib.util.spec_from_file_location("first_picture", ROOT / "site" / "figures" / "first_picture.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_picture_is_the_one_its_script_draws() -> None:
    drawn = first_picture()
    static = ROOT / "site" / "static"
    assert (static / "first-picture.svg").read_text("utf-8") == drawn.draw()
    assert (static / "first-picture-narrow.svg").read_text("utf-8") == drawn.draw(stacked=True)
    described = (ROOT / "intro.md").read_text("utf-8")
    local, dot, causal = (weights for _, _, weights in drawn.panels())
    for phrase, weight in (
        ("times out itself", local[7]),
        ("the request", local[6]),
        ("and finally", local[5]),
        ("responds slowly", dot[4]),
        ("times out itself", dot[7]),
        ("is overloaded", causal[2]),
        ("responds slowly", causal[4]),
    ):
        assert f"{phrase} {100 * weight:.0f} %" in described


def test_the_first_picture_and_chapter_5_tell_the_same_story() -> None:
    chapter = json.loads((ROOT / "chapters" / "05-what-the-kernel-decides.ipynb").read_text("utf-8"))
    printed = "".join("".join(out.get("text", [])) for cell in chapter["cells"] for out in cell.get("outputs", []))
    local, dot, causal = (weights for _, _, weights in first_picture().panels())
    for name, weights in (("dot", dot), ("causal", causal), ("local", local)):
        assert f"{name:7} " + "  ".join(f"{weight:.2f}" for weight in weights) in printed


def _inserted(html: str) -> tuple[str, str]:
    """Replace nothing, put `html` at the start of the article."""
    return '<article class="bd-article">', f'<article class="bd-article">{html}'


FAULTS = {
    "a script from another host": (
        ("</body>", '<script src="https://example.org/a.js"></script></body>'),
        checks.requests,
        "another host",
    ),
    "a script that is not there": (("</body>", '<script src="no.js"></script></body>'), checks.requests, "404"),
    "a formula that is wrong": ((r"\(n\)", r"\(\frac{n}\)"), checks.maths, "error"),
    "a macro that does not exist": ((r"\(n\)", r"\(\nosuchmacro\)"), checks.maths, "error"),
    "a formula without delimiters": (("<p>number of", r"<p>\frac{n}{m} number of"), checks.maths, "as text"),
    "a table that does not scroll": (_inserted('<div style="width:900px">x</div>'), checks.width, "sideways"),
    "a bright panel": (_inserted('<div style="background:#fff;height:99px">x</div>'), checks.darkness, "bright"),
    "a picture without words": (_inserted('<img src="../_static/logo.svg">'), checks.pictures, "without a text"),
    "a picture that is not there": (
        _inserted('<img src="no.png" alt="A curve that falls from 1 to 0.">'),
        checks.pictures,
        "does not load",
    ),
    "a button without a name": (_inserted("<button></button>"), checks.accessibility, "button-name"),
    "text too pale to read": (
        _inserted('<p style="color:#ccc;background:#fff">pale</p>'),
        checks.accessibility,
        "color-contrast",
    ),
    "no way on": (('class="prev-next-area"', 'class="gone"'), checks.buttons, "no way"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, context: Open) -> None:
    """A copy of a page with one thing broken: the check that should notice does."""
    (old, new), check, message = FAULTS[fault]
    sound = (SITE / "chapters" / "notation.html").read_text("utf-8")
    assert sound.count(old) >= 1
    for entry in SITE.iterdir():
        os.symlink(entry, tmp_path / entry.name) if entry.name != "chapters" else None
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "broken.html").write_text(sound.replace(old, new, 1), encoding="utf-8")
    server = serve(tmp_path)
    try:
        mode = "dark" if check is checks.darkness else "phone" if check is checks.width else "light"
        visit = checks.Visit(context(mode), f"http://127.0.0.1:{server.server_port}", "chapters/broken.html")
        findings = check(visit)
    finally:
        server.shutdown()
        server.server_close()
    assert any(message in finding for finding in findings), findings


def test_links_between_pages_stay_on_this_site(address: str) -> None:
    """No page points at the address it was built at."""
    for path in PAGES:
        for target in re.findall(r'href="(http[^"]+)"', (SITE / path).read_text("utf-8")):
            assert urlparse(target).hostname not in ("localhost", "127.0.0.1"), (path, target)
