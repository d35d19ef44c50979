"""Results as tables next to the numbers of the papers."""
