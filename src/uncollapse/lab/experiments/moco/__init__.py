"""MoCo with alignment and uniformity losses."""
