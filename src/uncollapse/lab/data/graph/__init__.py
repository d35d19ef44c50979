"""Graph data sets of the experiments."""
