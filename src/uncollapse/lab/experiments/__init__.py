"""The experiments, one folder each: configuration, training, recipe, numbers of the paper."""
