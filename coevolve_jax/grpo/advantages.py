"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float], groups: Sequence, valid: Sequence[bool], *, eps: float = 1e-6
) -> np.ndarray:
    """A_i = (R_i - mean) / (std + eps) within each group, over its valid members.

    Args:
      rewards: [N].
      groups: [N] hashable, members of one group are equal (the task's id).
      valid: [N]; an invalid rollout has advantage 0 and does not move its group's mean.
      eps: keeps a group without spread at exactly 0.

    Returns:
      float32 [N].
    """
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid, bool)
    members: dict = {}
    for i, group in enumerate(groups):
        if valid[i]:
            members.setdefault(group, []).append(i)
    advantages = np.zeros(len(rewards), np.float32)
    for index in members.values():
        r = rewards[index]
        advantages[index] = (r - r.mean()) / (r.std() + eps)
    return advantages
