"""What the tools write that trips people who listen to a page or speak to it, mended in the finished files.

A person who says "click Search" needs a button whose name begins with what it shows; `aria-label` hides what is shown.
"""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

MENDED = (
    # myst-nb: the summary shows "Show code cell source" and would be announced as something else.
    ('<summary aria-label="Toggle hidden content">', "<summary>"),
    # The theme: the field shows "Search Ctrl+K".
    (
        'search-button-field search-button__button pst-js-only" title="Search" aria-label="Search"',
        'search-button-field search-button__button pst-js-only"',
    ),
    # The theme: the icon's own title ("Light") is no part of the button's name ("Color mode").
    ('data-mode="light" title="Light"', 'data-mode="light" aria-hidden="true"'),
    ('data-mode="dark"  title="Dark"', 'data-mode="dark" aria-hidden="true"'),
    ('data-mode="auto"  title="System Settings"', 'data-mode="auto" aria-hidden="true"'),
    # docutils: role="list" allows no children but list items, and doc-biblioentry is withdrawn.
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),
    (' role="doc-biblioentry"', ""),
)


def mend(app: Sphinx, exception: Exception | None) -> None:
    """Apply MENDED to every page; one that no page needs is a warning, for then a tool has changed its ways."""
    if exception is not None or app.builder.format != "html":
        return
    unused = {old for old, _ in MENDED}
    for page in Path(app.outdir).rglob("*.html"):
        text = mended = page.read_text(encoding="utf-8")
        for old, new in MENDED:
            if old in mended:
                unused.discard(old)
                mended = mended.replace(old, new)
        if mended != text:
            page.write_text(mended, encoding="utf-8")
    for old in sorted(unused):
        logging.getLogger(__name__).warning("site/extensions/accessible.py mends %r, which no page has any more", old)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
