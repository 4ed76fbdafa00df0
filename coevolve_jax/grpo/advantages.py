"""Advantages of the members of a group over each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence,
    valid: Sequence[bool],
    *,
    estimator: str = "group_std",
    eps: float = 1e-6,
) -> np.ndarray:
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
      float32 [N]; exactly 0 in a group without spread, so also in a group of one.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros(len(rewards), np.float32)
    for index in members(groups, valid).values():
        r = rewards[index]
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


def spreads(rewards: Sequence[float], groups: Sequence, valid: Sequence[bool]) -> dict:
    """group -> standard deviation of its valid members' rewards, exactly 0 where they are equal."""
    rewards = np.asarray(rewards, np.float64)
    by_group = {group: rewards[index] for group, index in members(groups, valid).items()}
    return {group: float(r.std()) if r.max() > r.min() else 0.0 for group, r in by_group.items()}
