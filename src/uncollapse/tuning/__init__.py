"""What `uc.tune` and `uncollapse tune` share: what may vary, the study that remembers, what came of it, its page."""
