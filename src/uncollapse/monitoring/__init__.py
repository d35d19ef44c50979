"""The parts of `Monitor`: rules, records, the folder they go to, loggers, trainers and processes."""
