"""One local server and one browser for all tests of the built site.

The site is `_build/html`, as `make site` leaves it; BOOK_SITE names another folder. Every context is fresh: an empty
profile, no cache.
"""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("BOOK_SITE", ROOT / "_build" / "html"))
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
# Other hosts do not exist here: what a page asks of one fails at once, and checks.Visit has written it down.
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
MODES = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True},
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A test's output holds findings, not requests."""


def serve(folder: Path) -> http.server.ThreadingHTTPServer:
    """A server of `folder` on a free port of this machine, running until its shutdown() is called."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of the built site, without a slash at its end."""
    assert (SITE / "intro.html").exists(), f"{SITE} holds no built site: run `make site` first"
    server = serve(SITE)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The machine's Chromium; one process for the whole run."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "no Chromium on this machine: install it (Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Open a context in one of MODES; closed when the test ends."""
    opened: list[BrowserContext] = []

    def make(mode: str = "light") -> BrowserContext:
        opened.append(browser.new_context(**MODES[mode]))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
