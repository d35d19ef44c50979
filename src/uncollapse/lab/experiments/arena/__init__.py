"""All cures under one protocol: nine trials or more for each, fresh seeds, one look at the test data."""
