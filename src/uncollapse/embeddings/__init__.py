"""Mend embeddings without training: transforms that are fitted to their geometry."""
