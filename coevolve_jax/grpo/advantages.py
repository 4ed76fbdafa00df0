"""Advantages of the members of a group over each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float32

from coevolve_jax.types import spread

EPS = 1e-6  # bounds the advantage in a group of small spread
_Key = TypeVar("_Key", bound=Hashable)


def group_advantages(rewards: Sequence[float], *, estimator: str = "group_std") -> Float32[np.ndarray, " G"]:
    """Advantages of one group's rollouts over each other.

    Args:
      rewards: [G], of the valid rollouts of one task.
      estimator: of each reward R_i,
        "group_std": (R_i - mean) / (std + EPS) (GRPO, arXiv 2402.03300, section 4.1.2);
        "group_mean": R_i - mean (Dr. GRPO, arXiv 2503.20783, section 3.2);
        "leave_one_out": R_i - mean of the others = G / (G - 1) (R_i - mean) (RLOO, arXiv 2402.14740, eq. 7).

    Returns:
      exactly 0 in a group without spread, so also in a group of one.
    """
    r = np.asarray(rewards, np.float64)
    std = spread(rewards)
    if std == 0:
        return np.zeros(len(r), np.float32)
    unit = {"group_std": std + EPS, "group_mean": 1.0, "leave_one_out": (len(r) - 1) / len(r)}[estimator]
    return ((r - r.mean()) / unit).astype(np.float32)


def drop_zero_variance(spreads: Mapping[_Key, float]) -> dict[_Key, float]:
    """Drops zero-variance groups: with equal rewards no rollout has an advantage. Keeps the order."""
    return {group: value for group, value in spreads.items() if value > 0}
