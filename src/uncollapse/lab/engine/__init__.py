"""The training loop of all recipes, on Accelerate."""
