"""Runs several methods on the same tasks, seeds and budget, and tests how their results differ.

Read plan.py, cells.py and results.py, in this order.
"""
