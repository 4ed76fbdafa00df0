"""A run's files: workdir, logs, checkpoints, health alerts, trackers and LLM calls."""
