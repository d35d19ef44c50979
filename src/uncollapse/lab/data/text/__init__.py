"""Text data sets of the experiments."""
