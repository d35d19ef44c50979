"""Points on the sphere and the limit of InfoNCE, without training."""
