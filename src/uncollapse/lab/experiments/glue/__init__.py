"""Text encoders fine-tuned on GLUE."""
