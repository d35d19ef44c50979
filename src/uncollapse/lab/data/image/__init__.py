"""Image data sets of the experiments."""
