"""What the theme leaves unlabelled for people who listen to a page or walk it by keyboard."""

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    return {"parallel_read_safe": True, "parallel_write_safe": True}
