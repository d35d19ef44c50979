"""Text encoders of any depth."""
