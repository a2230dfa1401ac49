"""A run from its command to its folder: the console script, checkpoints, logs, the dashboard."""
