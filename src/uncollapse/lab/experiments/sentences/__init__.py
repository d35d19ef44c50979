"""Sentence encoders trained on neighbouring sentences."""
