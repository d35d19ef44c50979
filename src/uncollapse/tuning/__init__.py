"""Hyperparameter search for `uc.tune` and `uncollapse tune`: search space, Optuna study, trial loop, results, page."""
