"""What a built page must be, each check as a function from an open page to a list of findings; empty is good."""

from pathlib import Path
from urllib.parse import urlparse

from playwright.sync_api import BrowserContext, Page, Request

AXE = Path(__file__).with_name("vendor") / "axe.min.js"


class Visit:
    """One page, opened and settled, with everything it asked for and complained about on the way."""

    def __init__(self, context: BrowserContext, address: str, path: str) -> None:
        self.host = urlparse(address).netloc
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("request", self._note_request)
        self.page.on("console", lambda said: self._complain("console", said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self._complain("script", str(error)))
        self.page.on("response", lambda got: self._complain(str(got.status), got.url) if got.status >= 400 else None)
        self.page.goto(f"{address}/{path}")
        self.page.evaluate("async () => { if (window.MathJax?.startup?.promise) await window.MathJax.startup.promise }")
        self.page.evaluate("() => document.fonts.ready.then(() => null)")

    def _is_outside(self, url: str) -> bool:
        return urlparse(url).scheme in ("http", "https", "ws", "wss") and urlparse(url).netloc != self.host

    def _note_request(self, request: Request) -> None:
        if self._is_outside(request.url):
            self.outside.append(request.url)

    def _complain(self, kind: str, text: str) -> None:
        self.complaints.append(f"{kind}: {text}")


def requests(visit: Visit) -> list[str]:
    """Nothing is asked of another host, and what is asked of ours is there."""
    return [f"request to another host: {url}" for url in visit.outside] + visit.complaints


def maths(visit: Visit) -> list[str]:
    """Every formula is drawn, none as an error."""
    found = visit.page.evaluate(
        """() => ({
            written: document.querySelectorAll(".math").length,
            drawn: [...document.querySelectorAll(".math")].filter(m => m.querySelector("mjx-container")).length,
            // A macro that MathJax does not know is written out in red instead.
            wrong: [...document.querySelectorAll("mjx-merror, [data-mjx-error], mjx-container [style*='color: red']")]
                .map(e => e.textContent),
            raw: [...document.querySelectorAll("article p, article li, article td")]
                .map(e => e.innerText).filter(t => /\\\\(frac|sqrt|begin|mathbf|mathsf|operatorname)\\b/.test(t))
                .map(t => t.slice(0, 80)),
        })"""
    )
    findings = [f"formula drawn as an error: {text}" for text in found["wrong"]]
    findings += [f"TeX left as text: {text}" for text in found["raw"]]
    if found["written"] != found["drawn"]:
        findings.append(f"{found['drawn']} of {found['written']} formulas drawn")
    return findings


def width(visit: Visit) -> list[str]:
    """The page never scrolls sideways; wide tables, code and formulas scroll inside themselves."""
    found = visit.page.evaluate(
        """() => {
            const page = document.scrollingElement, wide = [];
            const inside = e => {
                for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
                    if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(p).overflowX)) return true;
                return false;
            };
            for (const e of document.querySelectorAll("article *")) {
                const box = e.getBoundingClientRect();
                if (box.width && box.right > innerWidth + 1 && !inside(e)) wide.push(e.tagName + "." + e.className);
            }
            return {scroll: page.scrollWidth, view: page.clientWidth, wide: wide.slice(0, 5)};
        }"""
    )
    findings = [f"reaches past the right edge: {name}" for name in found["wide"]]
    if found["scroll"] > found["view"]:
        findings.append(f"scrolls sideways: {found['scroll']} px of content in {found['view']} px")
    return findings


def darkness(visit: Visit) -> list[str]:
    """In dark mode the page and every panel on it are dark; only pictures carry their own paper."""
    found = visit.page.evaluate(
        """() => {
            const light = colour => {
                const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
                return a > 0.5 ? (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255 : null;
            };
            const bright = [];
            for (const e of document.querySelectorAll("body, body *")) {
                const box = e.getBoundingClientRect();
                if (e.tagName === "IMG" || e.closest("svg") || box.width * box.height < 400) continue;
                const value = light(getComputedStyle(e).backgroundColor);
                if (value !== null && value > 0.35) bright.push(e.tagName + "." + e.className + " " + value.toFixed(2));
            }
            const body = light(getComputedStyle(document.body).backgroundColor);
            return {theme: document.documentElement.dataset.theme, body, bright: bright.slice(0, 5)};
        }"""
    )
    findings = [f"bright in dark mode: {name}" for name in found["bright"]]
    if found["theme"] != "dark" or found["body"] is None or found["body"] > 0.2:
        findings.append(f"not dark: theme {found['theme']}, background {found['body']}")
    return findings


def pictures(visit: Visit) -> list[str]:
    """Every picture loads and has a text of its own that says what is seen, not the name of a file."""
    found = visit.page.evaluate(
        """() => [...document.querySelectorAll("article img")].map(i => ({
            source: i.getAttribute("src"), text: i.getAttribute("alt"), loaded: i.complete && i.naturalWidth > 0}))"""
    )
    findings, seen = [], set()
    for picture in found:
        text = (picture["text"] or "").strip()
        if not picture["loaded"]:
            findings.append(f"picture does not load: {picture['source']}")
        if len(text) < 20 or text.endswith((".png", ".svg", ".jpg")):
            findings.append(f"picture without a text that says what is seen: {picture['source']}, {text!r}")
        if text in seen:
            findings.append(f"two pictures share the text {text!r}")
        seen.add(text)
    return findings


def accessibility(visit: Visit) -> list[str]:
    """axe finds nothing serious or critical."""
    visit.page.add_script_tag(path=str(AXE))
    results = visit.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    findings = []
    for violation in results["violations"]:
        if violation["impact"] not in ("serious", "critical"):
            continue
        nodes = violation["nodes"]
        for node in nodes[:4]:
            findings.append(f"axe {violation['id']}: {node['target'][-1]}: {' '.join(node['html'].split())[:160]}")
        if len(nodes) > 4:
            findings.append(f"axe {violation['id']}: and {len(nodes) - 4} more")
    return findings


def buttons(visit: Visit) -> list[str]:
    """Every code cell has its copy button; a page made from a notebook offers the notebook; pages lead on and back."""
    found = visit.page.evaluate(
        """() => ({
            cells: document.querySelectorAll("div.cell_input div.highlight").length,
            copies: document.querySelectorAll("div.cell_input button.copybtn").length,
            notebook: document.querySelectorAll("div.cell").length > 0,
            download: document.querySelector(".dropdown-download-buttons a[href$='.ipynb']")?.href ?? null,
            leads: document.querySelectorAll(".prev-next-area a").length,
        })"""
    )
    findings = []
    if found["cells"] != found["copies"]:
        findings.append(f"{found['copies']} copy buttons for {found['cells']} code cells")
    if found["notebook"] and not found["download"]:
        findings.append("the notebook cannot be downloaded")
    if found["download"]:
        answer = visit.page.request.get(found["download"])
        if not answer.ok or not answer.json().get("cells"):
            findings.append(f"the download is no notebook: {found['download']}")
    if not found["leads"]:
        findings.append("no way to the previous or the next page")
    return findings
