"""One run and many: results, grids, sweeps, worker processes, saved models."""
