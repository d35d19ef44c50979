"""Demonstrations on real models and data, each a module that measures one thing: `python -m experiments.NAME`."""
