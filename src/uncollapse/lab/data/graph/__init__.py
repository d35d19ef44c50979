"""Graph datasets of the experiments."""
