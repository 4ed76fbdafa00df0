"""Conformance suites: what every implementation of a seam must do, for you to run on yours.

Each module has one function that takes what makes your implementation and raises AssertionError, in one sentence,
for the first thing that it does wrong; and `CHECKS`, the same as named functions, for pytest to parametrise over:

    engine.py   check_engine(make, policy): what generates (rollout/engine.py)
"""
