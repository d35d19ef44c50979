"""Monitor a model while it trains: rules, records and their folder, loggers, and callbacks of trainers."""
