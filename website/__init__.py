"""Builds the documentation: pages of docs/ with their tables, output of code, reference and notebooks filled in."""
