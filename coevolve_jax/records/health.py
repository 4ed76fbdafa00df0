"""Health of a run: statistics of the rollouts besides rewards, and alerts (EvoTrainer, arXiv 2606.03108).

A value covers the valid rollouts of one step; it is None if there are none. An alert is raised when a value
passes its threshold in config.health. It names the value, the threshold and the usual cause.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.diagnosis.features import correlation, taught
from coevolve_jax.types import Group, TrainingSample, Trajectory

# Threshold in config.health -> (name of the value, whether too high (True) or too low is alarming, the
# meaning).
RULES: dict[str, tuple[str, bool, str]] = {
    "zero_variance_groups": (
        "zero_variance_groups",
        True,
        "tasks are too easy or too hard, or the reward is too coarse",
    ),
    "group_std": ("group_std", False, "rollouts of a task end alike"),
    "logprob": ("logprob", True, "the policy is nearly certain of every token: exploration collapses"),
    "few_steps": ("steps", False, "the policy gives up early"),
    "many_steps": ("steps", True, "the policy goes round in circles"),
    "truncated": ("truncated", True, "conversations are cut: raise the limits or shorten the tasks"),
    "active_groups": ("active_groups", False, "hardly anything is left to learn from"),
    "length_reward": ("length_reward", True, "longer conversations are paid better"),
    "malformed": ("malformed", True, "tool calls cannot be read"),
    "invalid": ("invalid", True, "our own infrastructure fails"),
}


def diagnose(groups: Sequence[Group], samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Health values of one step, for metrics.jsonl.

        zero_variance_groups  share of groups with equal rewards (Group.spread is 0), which give no advantage
        group_std             mean standard deviation of the rewards within groups
        logprob               mean log-probability, in nats, of the tokens that the policy sampled
        steps                 mean number of steps per rollout
        truncated             share of rollouts that a limit ended
        active_groups         share of groups that are learned from
        length_reward         correlation of length in tokens with reward
        malformed             share of steps whose text could not be parsed as a call
        invalid               share of rollouts that are invalid
        success, failure      `behaviour` of the rollouts of each outcome

    A spread above 0, however small, is no zero variance: the advantage estimator group_std scales it up.
    What rests on rewards leaves out held-out queries, whose reward is not told (Task.is_query).
    """
    everything = [t for g in groups for t in g.trajectories]
    valid = [t for t in everything if t.outcome.valid]
    told = [g for g in groups if not g.task.is_query]
    scored, spreads = [t for g in told for t in g.valid], [g.spread for g in told if g.valid]
    written = np.concatenate([t.logprobs[t.mask] for t in valid] or [np.zeros(0)])
    return {
        "zero_variance_groups": _mean([s == 0 for s in spreads]),
        "group_std": _mean(spreads),
        "logprob": _mean(written),
        "steps": _mean([len(t.steps) for t in valid]),
        "truncated": _mean([t.truncated for t in valid]),
        "active_groups": _mean(taught(groups, samples)),
        "length_reward": correlation([len(t.ids) for t in scored], [t.outcome.reward for t in scored]),
        "malformed": _mean([s.call is None for t in valid for s in t.steps]),
        "invalid": 1 - len(valid) / len(everything),
        **{
            name: behaviour([t for t in scored if t.outcome.success == success])
            for name, success in (("success", True), ("failure", False))
        },
    }


def behaviour(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Behaviour of the rollouts of one outcome.

    The values, over all rollouts given:

        rollouts       their number
        tool_failures  share of calls that came back as errors
        tool_entropy   entropy of the tools called, in bits
        repeated       share of pairs of consecutive calls that the same rollout made before
        longest_run    most consecutive calls with one action pattern
        stops          Trajectory.stop -> number of rollouts
    """
    called = [[s for s in t.steps if s.call is not None] for t in trajectories]
    calls = [s for steps in called for s in steps]
    tools = Counter(s.call.name for s in calls if s.call)
    pairs = [[(a.text, b.text) for a, b in itertools.pairwise(steps)] for steps in called]
    runs = [len(list(run)) for steps in called for _, run in itertools.groupby(steps, key=lambda s: s.action)]
    shares = [n / len(calls) for n in tools.values()]
    return {
        "rollouts": len(trajectories),
        "tool_failures": _mean([s.error for s in calls]),
        "tool_entropy": -sum(p * math.log2(p) for p in shares) if shares else None,
        "repeated": _mean([n > 0 for own in pairs for n in _seen_before(own)]),
        "longest_run": max(runs, default=0),
        "stops": dict(sorted(Counter(t.stop for t in trajectories).items())),
    }


def alerts(values: Mapping[str, Any], thresholds: ConfigDict) -> list[str]:
    """Returns the names of the thresholds that are passed."""
    passed = []
    for name, (key, above, _) in RULES.items():
        value, bound = values[key], thresholds[name]
        if value is not None and (value > bound if above else value < bound):
            passed.append(name)
    return passed


def explain(name: str, values: Mapping[str, Any], thresholds: ConfigDict) -> str:
    """Returns an alert as a sentence."""
    key, above, meaning = RULES[name]
    return (
        f"health: {key} is {values[key]:.3g}, {'above' if above else 'below'} config.health.{name} = "
        f"{thresholds[name]:g}: {meaning}"
    )


class Watch:
    """Reports an alert when it has been raised in config.health.patience consecutive steps.

    It reports the alert once, and again only if it was absent in between.
    """

    def __init__(self, thresholds: ConfigDict):
        self._thresholds, self._rows = thresholds, Counter[str]()

    def __call__(self, values: Mapping[str, Any], raised: Sequence[str]) -> list[str]:
        self._rows = Counter({name: self._rows[name] + 1 for name in raised})
        due = [name for name in raised if self._rows[name] == self._thresholds.patience]
        return [explain(name, values, self._thresholds) for name in due]


def _seen_before(items: Sequence[Any]) -> list[int]:
    """For each item, the number of equal items before it."""
    seen: Counter[Any] = Counter()
    found = []
    for item in items:
        found.append(seen[item])
        seen[item] += 1
    return found


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
