"""What a folded cell says: a solution is called one, and a figure's code is called code."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

SAYS = {
    "tag_hide-cell": ("Show the solution", "Hide the solution"),
    "tag_hide-input": ("Show the code", "Hide the code"),
}


def reword(app: Sphinx, doctree: Any) -> None:
    """Give every cell that is folded by a tag the words of SAYS."""
    for cell in doctree.findall(nodes.container):
        for name in cell["classes"]:
            if name in SAYS and "prompt_show" in cell:
                cell["prompt_show"], cell["prompt_hide"] = SAYS[name]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", reword)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
