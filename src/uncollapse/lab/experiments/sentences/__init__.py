"""Sentence encoders trained on neighboring sentences."""
