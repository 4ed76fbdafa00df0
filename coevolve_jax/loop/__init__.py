"""The loop of a run: its first tasks, rollouts, evolution, evaluation and record, on one host or several."""
