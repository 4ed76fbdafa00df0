"""The trend of a run: its values over the first and the last quarter of its steps, from metrics.jsonl.

Formulas of the unit "trend" read such a row (expressions.py). All of its values are of training rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

# Value -> (its place in a row of metrics.jsonl, its meaning with the unit).
METRICS: dict[str, tuple[str, str]] = {
    "success": ("success", "share of rollouts that succeed"),
    "reward": ("reward", "the environment's own reward, 0 to 1"),
    "shaped": ("shaped", "reward with the terms of config.reward"),
    "mixed": ("mixed_groups", "share of groups with successes and failures"),
    "dead": ("health.zero_variance_groups", "share of groups with equal rewards"),
    "spread": ("health.group_std", "standard deviation of the rewards in a group"),
    "active": ("health.active_groups", "share of groups that are learned from"),
    "logprob": ("health.logprob", "log-probability of a sampled token, in nats"),
    "steps": ("health.steps", "calls of a rollout"),
    "truncated": ("health.truncated", "share of rollouts that a limit ended"),
    "malformed": ("health.malformed", "share of calls that could not be read"),
    "length": ("length", "tokens of a rollout"),
    "length_reward": ("health.length_reward", "correlation of length with the environment's own reward"),
    "length_paid": ("length_paid", "correlation of length with the advantage, over the samples"),
    "kl": ("kl", "divergence from the start, in nats per token"),
    "clipped": ("clip_fraction", "share of tokens whose ratio is clipped"),
    "grad_norm": ("grad_norm", "norm of the gradient before it is bounded"),
    "entropy": ("entropy", "entropy of the policy, in nats per token"),
    "mismatch": ("mismatch_k3", "learner against sampler, in nats per token"),
    "staleness": ("staleness_mean", "age of the weights that sampled, in updates"),
}
DERIVED = {
    "gain": "success_last - success_first",
    "kept": "share of the groups with spread that are learned from",
    "kept_last": "the same over the last quarter",
}
# Settings of the run that formulas may read.
SETTINGS = {
    "learning_rate": "learner.learning_rate", "kl_coef": "learner.kl_coef", "epochs": "learner.epochs",
    "max_grad_norm": "learner.max_grad_norm", "temperature": "rollout.temperature",
    "group_size": "rollout.group_size", "retire_after": "data.retire_after",
}  # fmt: skip
_PARTS = {"": "", "_first": " in the first quarter of the steps", "_last": " in the last quarter"}

# Name -> meaning, of every value of a trend.
MEANINGS: dict[str, str] = {
    **{
        name + part: meaning + when for name, (_, meaning) in METRICS.items() for part, when in _PARTS.items()
    },
    **DERIVED,
    **{name: f"config.{key}" for name, key in SETTINGS.items()},
}


def trend(config: ConfigDict, steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The values of MEANINGS for one run; None for those that no step has.

    steps: the rows of metrics.jsonl, in order.
    """
    quarter = max(1, len(steps) // 4)
    spans = {"": steps, "_first": steps[:quarter], "_last": steps[-quarter:]}
    found = {
        name + part: mean(value_at(step, place) for step in span)
        for name, (place, _) in METRICS.items()
        for part, span in spans.items()
    }
    first, last = found["success_first"], found["success_last"]
    found["gain"] = None if first is None or last is None else last - first
    for part in ("", "_last"):
        dead, active = found[f"dead{part}"], found[f"active{part}"]
        live = None if dead is None else 1 - dead
        found[f"kept{part}"] = active / live if live and active is not None else None
    for name, key in SETTINGS.items():
        section, _, own = key.partition(".")
        found[name] = float(config[section][own])
    return found


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the finite values; None if there are none."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return float(np.mean(known)) if known else None


def value_at(row: Mapping[str, Any], place: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    value: Any = row
    for part in place.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
