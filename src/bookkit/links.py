"""Every link of the built site leads somewhere, to the anchor it names, and nothing is loaded from another host.

`python -m bookkit.links _build/html` reads the files alone: no server, no network. Links that a reader may follow to
another host are left alone; a script, style, picture or frame from one is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser fetch, as opposed to those that a reader follows.
_LOADED = {
    ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src"),
    ("embed", "src"), ("object", "data"), ("image", "href"), ("use", "href"), ("input", "src"), ("video", "poster"),
}  # fmt: skip
_LOADED_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}
_IN_STYLE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])([^'\")\s]+)")


class _Page(HTMLParser):
    """What a page defines (anchors), leads to (links) and fetches (loads)."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._style = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and "href" in given:
            fetched = _LOADED_RELATIONS & set(given.get("rel", "").lower().split())
            (self.loads if fetched else self.links).append(given["href"])
        self.loads += [given[name] for kind, name in _LOADED if kind == tag and given.get(name)]
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.loads += _IN_STYLE.findall(given.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += _IN_STYLE.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links and resources of the site in folder `site`, one sentence each."""
    site = site.resolve()
    written = (
        path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts
    )  # a theme's templates lie there
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in written}
    if not pages:
        return [f"{site} holds no page; build the site first"]
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site)
        for address in page.loads:
            if _elsewhere(address):
                wrong.append(f"{here} loads {address} from another host")
            else:
                wrong += _missing(address, path, site, pages, here)
        for address in page.links:
            if not _elsewhere(address):
                wrong += _missing(address, path, site, pages, here)
    for path in sorted(site.rglob("*.css")):
        for address in _IN_STYLE.findall(path.read_text(encoding="utf-8")):
            if _elsewhere(address):
                wrong.append(f"{path.relative_to(site)} loads {address} from another host")
    return wrong


def _elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in {"http", "https"}


def _missing(address: str, path: Path, site: Path, pages: dict[Path, _Page], here: Path) -> list[str]:
    parts = urlsplit(address)
    if parts.scheme in {"mailto", "data"}:
        return []
    if parts.scheme:
        return [f"{here} links to {address}, which only works on the machine that built it"]
    target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.exists():
        return [f"{here} links to {address}, which is not there"]
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors and anchor != "top":
        return [f"{here} links to {address}, and that page has no such anchor"]
    return []


def main(arguments: Sequence[str]) -> int:
    """Check the site in the folder named on the command line; return 1 when anything is wrong."""
    site = Path(arguments[0] if arguments else "_build/html")
    wrong = problems(site)
    print("\n".join(wrong) if wrong else f"{site}: every link leads somewhere, and nothing comes from another host")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
