"""Measure a model or a set of embeddings layer by layer, and judge what was measured."""
