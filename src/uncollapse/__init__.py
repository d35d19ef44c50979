"""Find, mend and prove mended the collapse of representations in deep networks."""
