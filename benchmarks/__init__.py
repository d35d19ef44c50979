"""Side by side with the plain formulas, in one process, as ratios."""
