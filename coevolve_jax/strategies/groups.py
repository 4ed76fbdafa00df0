"""The share of a group that is solved, agreement without a reference, and the tokens of messages."""

from __future__ import annotations

from collections import Counter

import numpy as np

from coevolve_jax.types import Group, Trajectory


def solve_rate(group: Group) -> float | None:
    """The share of the valid rollouts that succeed; None if no rollout is valid."""
    valid = group.valid
    return sum(t.outcome.success for t in valid) / len(valid) if valid else None


def majority(group: Group) -> tuple[float, str, list[bool]]:
    """The ending that most valid rollouts share, found without the task's reference calls.

    A rollout that did not end by itself, or whose world was lost, agrees with none. Ties go to the ending
    that came first.

    Returns:
      (share of the valid rollouts that agree, their ending or "", for each valid rollout whether it agrees)
    """
    own = [t.ending if t.stop == "done" else "" for t in group.valid]
    counts = Counter(ending for ending in own if ending)
    if not counts:
        return 0.0, "", [False] * len(own)
    ending, count = counts.most_common(1)[0]
    return count / len(own), ending, [e == ending for e in own]


def spans(trajectory: Trajectory) -> list[slice]:
    """The tokens of each message that the policy wrote, in order. Step.message is an index of this list."""
    edges = np.flatnonzero(np.diff(np.pad(trajectory.mask.astype(np.int8), 1)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]
