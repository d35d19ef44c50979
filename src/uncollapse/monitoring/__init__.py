"""The parts of `uncollapse.monitor`: rules, records, the folder they go to, loggers, trainers and processes."""
