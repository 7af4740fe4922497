"""The documentation site: `make docs` builds it from these pages and the docstrings."""

import re
from importlib import import_module
from importlib.metadata import version as _version
from inspect import ismodule

from sphinx.errors import ExtensionError

project = "sigmanens"
author = "the sigmanens team"
version = release = _version("sigmanens")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["results/*/notes.md"]
html_theme = "furo"
html_title = f"sigmanens {version}"

myst_heading_anchors = 3  # links to headings, as hosts of code make them
suppress_warnings = ["myst.header"]  # tables written by programs begin at the level of their page

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
napoleon_use_ivar = True

PACKAGES = ("sigmanens", "sigmanens.diversity", "sigmanens.evaluation", "sigmanens.baselines")


def setup(app):
    """Links of included files that hold from this folder, and a check that no name is missing."""

    def outside(app, relative_path, parent_docname, content):
        text = content[0].replace("](CONTRIBUTING.md)", "](contributing.md)")
        content[0] = re.sub(r"\]\((?!http|#|docs/|contributing)", "](../", text)

    def complete(app, error):
        known = {name.rpartition(".")[2] for name in app.env.domaindata["py"]["objects"]}
        for package in map(import_module, PACKAGES):
            public = (n for n in package.__all__ if not ismodule(getattr(package, n)))
            missing = set(public) - known - {"__version__"}
            if error is None and missing:
                raise ExtensionError(
                    f"{package.__name__}: {sorted(missing)} are not in docs/api.md"
                )

    app.connect("include-read", outside)
    app.connect("build-finished", complete)
