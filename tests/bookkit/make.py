"""Tiny notebooks for the tests of the checks."""

from typing import Any


def markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": f"text-{abs(hash(source)) % 10**8}", "metadata": {}, "source": source}


def code(
    source: str, *outputs: dict[str, Any], tags: tuple[str, ...] = (), count: int | None = 1, **extra: Any
) -> dict:
    metadata = {**({"tags": list(tags)} if tags else {}), **extra}
    return {
        "cell_type": "code",
        "id": f"code-{abs(hash(source)) % 10**8}",
        "metadata": metadata,
        "execution_count": count,
        "source": source,
        "outputs": list(outputs),
    }


def stream(words: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": words}


def picture(png: str = "") -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": png, "text/plain": "<Figure>"}}


def notebook(*cells: dict[str, Any]) -> dict[str, Any]:
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code" and cell["execution_count"] is not None:
            count += 1
            cell["execution_count"] = count
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)}


def chapter(*middle: dict[str, Any]) -> dict[str, Any]:
    """Return a chapter that every hygiene check passes, with cells of your own in its middle."""
    exercises = [
        cell
        for number in range(1, 5)
        for cell in (
            markdown(f"### Exercise 1.{number}\n\nHow much is {number} + {number}?"),
            code(f"print({number} + {number})", stream(f"{2 * number}\n"), tags=("hide-cell",)),
        )
    ]
    return notebook(
        markdown(
            "# A tiny chapter\n\n:::{admonition} What you will be able to do\n- add\n\n*Reading time:* 3 minutes.\n:::"
        ),
        code("import torch"),
        *middle,
        markdown("## What we saw\n\n- Sums (C02)."),
        markdown("## Exercises"),
        *exercises,
        markdown("## Sources\n\nNone.\n\n## What comes next\n\nMore."),
    )
