"""Gather statistics of a stream of rows that merge exactly over processes."""
