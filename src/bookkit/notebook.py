"""Notebooks as files: read, normalise, write. The same content always gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import nbformat

Cell = dict[str, Any]
Notebook = dict[str, Any]

# Kept in a cell's metadata; everything else there is an editor's memory of how it last showed the cell.
_CELL_METADATA = ("tags", "mystnb", "name")
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# An id of eight hex digits or a UUID was drawn at random by an editor or converter. Ours begin with the cell's kind,
# so that an id once given is kept when the cell is edited later.
_RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8}")
_VALID_ID = re.compile(r"[a-zA-Z0-9-_]{1,64}")


def text(source: str | list[str]) -> str:
    """Return a cell's source or an output's text as one string (files hold either a string or a list of lines)."""
    return source if isinstance(source, str) else "".join(source)


def tags(cell: Cell) -> list[str]:
    """Return the cell's tags, an empty list when it has none."""
    return list(cell.get("metadata", {}).get("tags", []))


def code_cells(notebook: Notebook) -> list[Cell]:
    """Return the code cells in order; a cell without code is no cell."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def output_text(output: dict[str, Any]) -> str:
    """Return what an output says in plain text: a stream's text, a result's text/plain, an error's message."""
    if output["output_type"] == "stream":
        return text(output["text"])
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    return text(output.get("data", {}).get("text/plain", ""))


def read(path: Path | str) -> Notebook:
    """Read a notebook of format 4; ids that are missing are given as `normalise` gives them, not at random.

    Raises ValueError, naming the file, when it is not a notebook of format 4.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error
    if not isinstance(raw, dict) or raw.get("nbformat") != 4:
        raise ValueError(f"{path} is not a notebook of format 4")
    _give_ids(raw["cells"])
    raw["nbformat_minor"] = 5
    notebook: Notebook = nbformat.reads(json.dumps(raw), as_version=4)  # joins the lines of sources and outputs
    return notebook


def write(notebook: Notebook, path: Path | str) -> bool:
    """Write the notebook and return whether the file's bytes changed; an unchanged file is not touched."""
    nbformat.validate(notebook)
    path = Path(path)
    content = nbformat.writes(nbformat.from_dict(notebook)).rstrip("\n") + "\n"
    if path.exists() and path.read_bytes() == content.encode():
        return False
    partial = path.with_suffix(".ipynb.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)
    return True


def normalise(notebook: Notebook) -> Notebook:
    """Take out, in place, all that changes without the content changing, and return the notebook.

    Counts become 1…N, streams of one name that follow each other become one, ids that an editor drew at random become
    a digest of the source, and metadata keeps tags and figure descriptions. Outputs keep their words and pictures: an
    output that is not the same twice is refused by the checks, never painted over.
    """
    notebook["metadata"] = {key: dict(value) for key, value in _METADATA.items()}
    notebook["nbformat"], notebook["nbformat_minor"] = 4, 5
    _give_ids(notebook["cells"])
    count = 0
    for cell in notebook["cells"]:
        metadata = cell.get("metadata", {})
        cell["metadata"] = {key: metadata[key] for key in _CELL_METADATA if metadata.get(key)}
        cell["source"] = "\n".join(line.rstrip() for line in text(cell["source"]).split("\n")).strip("\n")
        if cell["cell_type"] != "code":
            continue
        cell["outputs"] = _coalesce(cell.get("outputs", []))
        if not cell["source"]:
            cell["execution_count"] = None  # nbclient never runs an empty cell; the hygiene check refuses it
            continue
        if cell.get("execution_count") is None:
            continue  # not run: numbering it would hide that
        count += 1
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
    return notebook


def _give_ids(cells: list[Cell]) -> None:
    taken: set[str] = set()
    for cell in cells:
        known = cell.get("id", "")
        if _VALID_ID.fullmatch(known) and not _RANDOM_ID.fullmatch(known) and known not in taken:
            taken.add(known)
    given: set[str] = set()
    for cell in cells:
        known = cell.get("id", "")
        if known in taken and known not in given:
            given.add(known)
            continue
        kind = {"code": "code", "markdown": "text"}.get(cell["cell_type"], "raw")
        source = text(cell["source"]).strip()
        repeat = 0
        while True:
            digest = hashlib.sha256(f"{kind}\n{source}\n{repeat}".encode()).hexdigest()[:10]
            if f"{kind}-{digest}" not in taken | given:
                break
            repeat += 1
        cell["id"] = f"{kind}-{digest}"
        given.add(cell["id"])


def _coalesce(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream":
            output["text"] = text(output["text"])
            if merged and merged[-1]["output_type"] == "stream" and merged[-1]["name"] == output["name"]:
                merged[-1]["text"] += output["text"]
                continue
        output.pop("transient", None)
        merged.append(output)
    return merged
