"""Command line: parse the arguments, call the library, print the result."""

from uncollapse.cli.app import app

__all__ = ["app"]
