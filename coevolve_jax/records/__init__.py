"""What a run writes: its folder, logs, checkpoints, alerts, trackers, and the questions asked of a model."""
