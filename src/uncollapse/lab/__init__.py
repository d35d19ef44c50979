"""Experiments: they import the library, never the reverse."""
