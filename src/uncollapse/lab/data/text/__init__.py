"""Text datasets of the experiments."""
