"""Experiment configuration: typed fields, files, and the identity of a run."""
