"""The library's docstrings are plain text (|q|, x*, s_ij = …); this turns them into markup that means the same.

A paragraph that is one formula becomes a literal block, an `Args:` section a list of fields, `name` in single
backticks becomes code, and every sign that reStructuredText would take for markup is escaped.
"""

import re
import textwrap
from typing import Any

from sphinx.application import Sphinx

SECTION = re.compile(r"^(Args|Arguments|Attributes|Returns|Raises|Example|Examples|Source|Cost):\s*$")
ARGUMENT = re.compile(r"^(?P<names>[*\w]+(?:, [*\w]+)*): (?P<text>.*)$")


def escape(text: str) -> str:
    """`text` as reStructuredText that prints as it stands; code in single backticks becomes a literal."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    made = []
    for index, part in enumerate(parts):
        if index % 2:
            code = part.strip("`")
            # A literal may touch no letter and no bracket: the escaped spaces leave no trace.
            made.append(f"\\ ``{code}``\\ ")
        else:
            made.append(re.sub(r"([\\*|_`])", r"\\\1", part))
    return "".join(made).strip()


def is_formula(paragraph: list[str]) -> bool:
    """A short paragraph that states an equation and ends without a full stop."""
    text = " ".join(paragraph)
    return " = " in text and not text.rstrip().endswith((".", ":", ";")) and len(paragraph) <= 2


def section(name: str, block: list[str]) -> list[str]:
    """The lines of a section such as `Args:`, whose entries start at its own indentation."""
    body = textwrap.dedent("\n".join(block)).splitlines()
    entries: list[list[str]] = []
    for line in body:
        if ARGUMENT.match(line) or not entries:
            entries.append([line])
        else:
            entries[-1].append(line)
    made = [f"**{name}**", ""]
    for entry in entries:
        text = " ".join(part.strip() for part in entry)
        match = ARGUMENT.match(text)
        if match:
            made += [f"- ``{match['names']}``: {escape(match['text'])}"]
        else:
            made += [f"- {escape(text)}"]
    return [*made, ""]


def rewrite(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText."""
    made: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if not line.strip():
            index += 1
            continue
        heading = SECTION.match(line)
        end = index + 1
        if heading:
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            if heading[1] in ("Example", "Examples"):
                made += [f"**{heading[1]}**", "", "::", "", *("   " + text for text in lines[index + 1 : end]), ""]
            else:
                made += section(heading[1], [text for text in lines[index + 1 : end] if text.strip()])
        elif line.startswith("    "):
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
                end += 1
            made += ["::", "", *("   " + text for text in lines[index:end]), ""]
        else:
            while end < len(lines) and lines[end].strip() and not SECTION.match(lines[end]):
                end += 1
            paragraph = lines[index:end]
            if is_formula(paragraph):
                made += ["::", "", *("   " + text for text in textwrap.dedent("\n".join(paragraph)).splitlines()), ""]
            else:
                made += [escape(" ".join(text.strip() for text in paragraph)), ""]
        index = end
    return made


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if name.startswith("matchkernel"):
        lines[:] = rewrite(list(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
