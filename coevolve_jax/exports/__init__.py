"""Files that other tools read: tables of tasks and rollouts, and the card of a trained policy."""
