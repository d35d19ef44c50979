"""Configuration of Sphinx. `make docs` renders docs/ into build/pages first and then builds the site from there."""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import uncollapse
from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()  # before anything imports timm or transformers

project, author, copyright = "uncollapse", "The uncollapse authors", "The uncollapse authors"
release = uncollapse.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx_copybutton"]

# Markdown
myst_enable_extensions = ["attrs_block", "attrs_inline"]
myst_heading_anchors = 4
highlight_language = "bash"  # of indented blocks
default_role = "literal"  # docstrings have single backticks
smartquotes_action = "qe"  # no dashes: --flag in a sentence stays as it is

# Reference
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "extra_repr"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # as in the source: a function has no value that could be shown
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False

# Notebooks are run once; what they printed and drew is stored until their code changes.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "notebooks")
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars and warnings of other libraries

# Pages
html_theme = "furo"
html_title = "uncollapse"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_extra_path = ["../docs/llms.txt"]
html_show_sphinx = False
html_copy_source = False
copybutton_selector = "div:not(.printed) > div.highlight > pre"

INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "transformers": "https://huggingface.co/docs/transformers/main/en/",
    "torch_geometric": "https://pytorch-geometric.readthedocs.io/en/latest/",
}


def reachable(url: str) -> bool:
    """Whether the inventory of a site can be read now."""
    try:
        with urllib.request.urlopen(f"{url}objects.inv", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# Links into other libraries need the network: only if asked for, and only to the sites that answer.
asked = os.environ.get("UNCOLLAPSE_DOCS_INTERSPHINX") == "1"
intersphinx_mapping = {name: (url, None) for name, url in INVENTORIES.items() if asked and reachable(url)}


def escape_formulas(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep |x| and x_ in docstrings from being read as markup. Code and examples stay as they are."""
    for number, line in enumerate(lines):
        if line.lstrip().startswith(">>>"):
            break
        parts = re.split(r"(`[^`]*`)", line)
        parts[::2] = (re.sub(r"\||_(?!\w)", r"\\\g<0>", part) for part in parts[::2])
        lines[number] = "".join(parts)


def setup(app: Any) -> None:
    """Hear of each docstring before napoleon reads it."""
    app.connect("autodoc-process-docstring", escape_formulas, priority=400)
