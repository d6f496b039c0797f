"""Sphinx's settings: ``make docs`` builds the site in this folder into out/site.

The tutorials and how-to pages are notebooks in Markdown. Their cells run during the build, in
temporary folders, so every output on the site was printed by the code beside it.
"""

import os
import sys
import tempfile
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import check  # noqa: E402
import generate  # noqa: E402

# Cells call ``privpart``, and must neither see nor change what this user has trained and cached.
_state = tempfile.mkdtemp(prefix="privpart-docs-")
_strict = Path(_state) / "strict.sh"
# A command that fails in a shell cell fails the build. Kernels ask for colours; pages have none.
_strict.write_text(
    "set -eo pipefail\nunset FORCE_COLOR CLICOLOR_FORCE CLICOLOR\nexport TERM=dumb\n"
)
# IPython's own %%bash hands over pieces of lines as they come; this one waits for the whole output.
_startup = Path(_state) / "ipython" / "profile_default" / "startup" / "bash.py"
_startup.parent.mkdir(parents=True)
_startup.write_text("""
import os
import subprocess
import tempfile

from IPython import get_ipython

# A page shows the runs of its own cells: another page's about the same people would count as well.
os.environ["PRIVPART_STATE_DIR"] = tempfile.mkdtemp(dir=os.path.dirname(os.environ["IPYTHONDIR"]))


def bash(_line, cell):
    command = ["bash"]
    done = subprocess.run(
        command, input=cell, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout, end="")
    done.check_returncode()


get_ipython().register_magic_function(bash, "cell")
""")
os.environ |= {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PRIVPART_CACHE_DIR": f"{_state}/cache",
    "IPYTHONDIR": f"{_state}/ipython",
    "PRIVPART_EXAMPLES": str(HERE.parent / "examples"),
    "BASH_ENV": str(_strict),
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

project = "privpart"
author = "the privpart authors"
copyright = "the privpart authors, Apache-2.0"  # noqa: A001  Sphinx's name
version = release = version_of("privpart")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "formulas",
]
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = f"privpart {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"  # docs/formulas.py
python_maximum_signature_line_length = 88

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = os.environ.get("PRIVPART_DOCS_EXECUTION", "force")
nb_execution_cache_path = os.environ.get("PRIVPART_DOCS_CACHE", "")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_number_source_lines = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["flwr"]  # its versions do not go with ours; see docs/how-to/flower.md
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


class ShellCells(SphinxTransform):
    """Show a cell that starts with ``%%bash`` as the commands alone, ready to be copied."""

    default_priority = 900

    def apply(self) -> None:
        """Drop the first line, and highlight the others as shell."""
        for block in self.document.findall(nodes.literal_block):
            text = block.astext()
            if text.startswith("%%bash\n"):
                shown = text.removeprefix("%%bash\n")
                block.rawsource = shown
                block.children = [nodes.Text(shown)]
                block["language"] = "bash"


def _write_pages(_: Sphinx) -> None:
    generate.all_pages(HERE / "generated")


def _spread(_: Sphinx, _env: object, pages: list[str]) -> None:
    """Deal the notebooks, which are neighbours by name, evenly to processes that read in chunks."""
    pages[:] = [page for first in range(8) for page in pages[first::8]]


def _leave_evidence_out_of_the_search(app: Sphinx, _: nodes.document) -> None:
    """Sphinx's own metadata: search finds the title of such a page, and nothing of its text."""
    if app.env.docname in check.evidence_pages():
        app.env.metadata[app.env.docname]["nosearch"] = True


def _nest_lists_of_modules(
    _: Sphinx, page: str, __: str, context: dict[str, str], ___: object
) -> None:
    """Put the inner lists of the page of modules into items, as HTML wants them."""
    if page == "_modules/index":
        body = context["body"].replace("</li>\n<ul>", "<ul>").replace("</ul>", "</ul></li>\n")
        context["body"] = body.removesuffix("</li>\n")


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages."""
    app.connect("builder-inited", _write_pages)
    app.connect("env-before-read-docs", _spread)
    app.connect("doctree-read", _leave_evidence_out_of_the_search)
    app.connect("html-page-context", _nest_lists_of_modules)
    app.add_transform(ShellCells)
