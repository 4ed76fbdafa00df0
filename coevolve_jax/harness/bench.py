"""Planted faults: what is wrong with a start, and which levers mend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A fault of the demo's settings.

    changes: dotted config key -> value. right: lever -> the moves that count as the right diagnosis.
    """

    changes: Mapping[str, Any]
    right: Mapping[str, tuple[str, ...]]


FAULTS: dict[str, Fault] = {
    "none": Fault({}, {}),
    "slow": Fault(
        {"learner.learning_rate": 1e-5}, {"learner.learning_rate": ("x3",), "learner.epochs": ("up",)}
    ),
    "hot": Fault(
        {"learner.learning_rate": 5e-4},
        {"learner.learning_rate": ("/3",), "learner.kl_coef": ("x3",), "learner.clip_high": ("/1.5",)},
    ),
    "leash": Fault({"learner.kl_coef": 3.0}, {"learner.kl_coef": ("/3", "0")}),
    "length_pay": Fault(
        {"reward.terms": ("length:0.3",)}, {"reward.terms": ("remove length", "halve length")}
    ),
    "brevity_pay": Fault(
        {"reward.terms": ("brevity:0.3",)}, {"reward.terms": ("remove brevity", "halve brevity")}
    ),
    "mixed_dropped": Fault({"learner.group_filter": True}, {"learner.group_filter": ("False",)}),
    "short": Fault({"rollout.max_length": 256}, {"rollout.max_length": ("x2",)}),
    "cold": Fault({"rollout.temperature": 0.4}, {"rollout.temperature": ("x1.25",)}),
    "few": Fault({"rollout.group_size": 2, "rollout.tasks_per_step": 64}, {"rollout.group_size": ("x2",)}),
    "stale": Fault({"rollout.max_staleness": 6}, {"rollout.max_staleness": ("down",)}),
    "narrow": Fault({"data.retire_after": 1}, {"data.retire_after": ("up",)}),
}
