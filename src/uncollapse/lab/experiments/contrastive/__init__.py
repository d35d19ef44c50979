"""Small image encoders trained with contrastive losses."""
