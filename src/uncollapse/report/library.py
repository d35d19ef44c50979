"""What goes into the page beside its content: our own style and scripts, and plotly.js."""

import base64
import functools
import gzip
from importlib.resources import files

NEEDED = 'The report needs plotly for its interactive figures: pip install "uncollapse[report]"'


def asset(name: str) -> str:
    """The text of a file of the folder `assets`."""
    return (files("uncollapse.report") / "assets" / name).read_text(encoding="utf-8")


def plotly() -> str:
    """The source of plotly.js, from the installed package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(NEEDED) from error
    source: str = get_plotlyjs()
    return source


@functools.cache
def packed_plotly() -> str:
    """plotly.js as the page carries it: 2 MB in place of 5. The browser unpacks it in a fraction of a second."""
    return base64.b64encode(gzip.compress(plotly().encode(), mtime=0)).decode()
