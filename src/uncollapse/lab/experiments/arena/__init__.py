"""All cures under one protocol: the same number of trials for each, fresh seeds, one look at the test data."""
