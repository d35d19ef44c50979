"""Configuration, graph and model of the recipe `gcn-depth`."""
