"""Runs several methods on the same tasks, seeds and budget, and says what differs: plan.py, cells.py, results.py."""
