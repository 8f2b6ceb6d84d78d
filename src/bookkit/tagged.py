"""What pages that are written from the chapters' tags share: the page is kept, and its cells can be linked to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes

Anchor = Callable[[str, int, int], str]
"""The anchor of a cell, from what its tag names, the chapter's number and the cell's count."""


def keep(target: Path, content: str) -> Path:
    """Write the page unless it says so already, so that a build has nothing to do again; return its path."""
    if not target.exists() or target.read_text(encoding="utf-8") != content:
        target.write_text(content, encoding="utf-8")
    return target


def give_anchors(app: Any, doctree: Any, tag: re.Pattern[str], anchor_of: Anchor) -> None:
    """Give each cell of a chapter whose tag matches, with what it names as its first group, an anchor and a label."""
    chapter = re.match(r"(\d\d)-", Path(app.env.docname).name)
    if chapter is None:
        return
    labels = app.env.get_domain("std")
    for container in doctree.findall(nodes.container):
        if container.get("nb_element") != "cell_code":
            continue
        for name in container["classes"]:
            if match := tag.fullmatch(name.removeprefix("tag_")):
                anchor = anchor_of(match[1], int(chapter[1]), container["exec_count"])
                container["ids"].append(anchor)
                labels.labels[anchor] = (app.env.docname, anchor, match[1])
                labels.anonlabels[anchor] = (app.env.docname, anchor)
