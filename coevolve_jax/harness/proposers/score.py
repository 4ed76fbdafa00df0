"""Greedy search on the selection score alone: random moves, no backtest, no diagnostic, no audit.

Source: the loop of autoresearch (Karpathy, 2026), which keeps an edit if its score is better.
"""

from coevolve_jax.harness.proposers.placebo import make as make

RULES = ("score",)
BACKTEST = False
