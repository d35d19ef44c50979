"""Hyperparameter search over a recipe."""
