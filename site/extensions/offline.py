"""Nothing from another host: take sphinx-thebe out again.

jupyter-book always loads sphinx-thebe, which writes a CDN's address and the name of somebody else's repository into
every page, even where thebe is switched off. Its listeners and its stylesheet are removed before the build starts.
"""

from sphinx.application import Sphinx


def remove_thebe(app: Sphinx) -> None:
    """Forget every listener and static file that sphinx-thebe registered."""
    for name, listeners in app.events.listeners.items():
        app.events.listeners[name] = [one for one in listeners if not one.handler.__module__.startswith("sphinx_thebe")]
    app.registry.css_files[:] = [file for file in app.registry.css_files if "thebe" not in file[0]]


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx_thebe")
    remove_thebe(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
