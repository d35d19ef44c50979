"""Does acting on the geometry of embeddings help? Scores of real encoders before and after each transform."""
