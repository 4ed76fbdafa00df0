"""Advantages of the members of a group over each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float32

_Group = TypeVar("_Group", bound=Hashable)


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence,
    valid: Sequence[bool],
    *,
    estimator: str = "group_std",
    eps: float = 1e-6,
) -> Float32[np.ndarray, " N"]:
    """Advantages within each group, over its valid members.

    Args:
      rewards: [N].
      groups: [N] hashable, members of one group are equal (the task's id).
      valid: [N]; an invalid rollout has advantage 0 and does not move its group's mean.
      estimator: of G valid members,
        "group_std": (R_i - mean) / (std + eps) (GRPO, arXiv 2402.03300, section 4.1.2);
        "group_mean": R_i - mean (Dr. GRPO, arXiv 2503.20783, section 3.2);
        "leave_one_out": R_i - mean of the others = G / (G - 1) (R_i - mean) (RLOO, arXiv 2402.14740, eq. 7).
      eps: bounds the advantage in a group of small spread.

    Returns:
      exactly 0 in a group without spread, so also in a group of one.
    """
    values = np.asarray(rewards, np.float64)
    advantages = np.zeros(len(values), np.float32)
    for index in members(groups, valid).values():
        r = values[index]
        if r.max() == r.min():  # r - r.mean() may be a rounding error instead of 0
            continue
        unit = {"group_std": r.std() + eps, "group_mean": 1.0, "leave_one_out": (len(r) - 1) / len(r)}[
            estimator
        ]
        advantages[index] = (r - r.mean()) / unit
    return advantages


def members(groups: Sequence, valid: Sequence[bool]) -> dict:
    """group -> indices of its valid members, in order of first appearance."""
    index: dict = {}
    for i, group in enumerate(groups):
        if valid[i]:
            index.setdefault(group, []).append(i)
    return index


def spread(rewards: Sequence[float]) -> float:
    """Standard deviation of one group's rewards, exactly 0 where they are equal or none."""
    return float(np.std(np.asarray(rewards, np.float64))) if len(set(rewards)) > 1 else 0.0


def live_groups(spreads: Mapping[_Group, float]) -> dict[_Group, float]:
    """The groups that have a spread, in their order. In the others all rewards are equal, so that nobody has an
    advantage: they are dead."""
    return {group: value for group, value in spreads.items() if value > 0}
