"""Image datasets of the experiments."""
