"""One training loop for any task: settings, loop, checkpoints, log and run folder. Knows no kind of record."""
