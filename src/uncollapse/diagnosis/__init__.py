"""Measure a model or embeddings layer by layer, and decide whether and where the representations collapse."""
