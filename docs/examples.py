"""A Griffe extension: the interactive examples in docstrings are shown as code.

The docstrings end in lines that start with >>>, without a heading. Markdown would take them for quotations.
"""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts an `Examples:` heading above the first >>> line of each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring is None:
            return
        before, mark, after = obj.docstring.value.partition("\n>>> ")
        if mark:
            lines = [f"    {line}".rstrip() for line in f">>> {after}".splitlines()]
            obj.docstring.value = "\n".join([before, "Examples:", *lines])
