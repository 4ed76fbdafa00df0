"""The smoke run: the first steps of a version, before it is trained in full.

A backtest names what it cannot see (`not_covered`): a temperature, a limit, how the policy answers. Such a
version first runs FIRST steps of its first seed. A run that crashes or is not finite ends there, and so does
one that learns from less than LEAST of the parent's groups in the same steps. Otherwise the training goes on
from these steps, so they cost nothing more.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from coevolve_jax.diagnosis import trends
from coevolve_jax.records.files import read_lines

FIRST = 3  # steps
LEAST = 0.5  # share of the groups learned from, over the parent's share in the same steps


def compared(parent: Path, child: Path) -> dict[str, Any]:
    """Compares the first steps of a run with those of its parent's run of the same seed.

    Returns:
      parent, live: shares of groups that are learned from. refused: why the child is not trained in full, or
        None.
    """
    before, after = (_live(run) for run in (parent, child))
    why = None
    if before is not None and after is not None and after < LEAST * before:
        why = (
            f"Its first {FIRST} steps learn from {after:.0%} of the groups, less than {LEAST:.0%} of the "
            f"parent's {before:.0%}."
        )
    return {"parent": before, "live": after, "refused": why}


def _live(run: Path) -> float | None:
    steps = itertools.islice(read_lines(run / "metrics.jsonl"), FIRST)
    return trends.mean(step["health"]["active_groups"] for step in steps)
