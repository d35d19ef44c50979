"""Training and evaluation of the recipe `gcn-depth`: the loss, the optimizer, metrics, and the record of a run."""
