"""The health of a run: what its rollouts say beside their rewards, and when that is alarming (EvoTrainer, arXiv 2606.03108).

Values are of one step, over its valid rollouts, None where there are none. A threshold of config.health is for the value
of its name; an alert names the value, the threshold and what it usually means.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.types import Group, TrainingSample, Trajectory

# Threshold in config.health -> (value, whether more than it is alarming, what it means).
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
    """Values of one step, for metrics.jsonl.

    zero_variance_groups: share of groups whose rewards are all equal (Group.spread is 0). These are the groups in which the learner
    finds no advantage. A spread above 0, however small, is not counted: the estimator group_std scales it up. group_std: mean standard deviation within groups.
    logprob: mean log-probability, in nats, of the tokens that the policy wrote. steps: calls per rollout. truncated:
    share of rollouts that a limit ended. active_groups: share of groups that are learned from. length_reward:
    correlation of tokens with reward. malformed: share of steps that are no call. invalid: share of rollouts.
    By outcome, "success" and "failure": tool_failures (share of calls that came back as errors), tool_entropy (of the
    tools called, in bits), repeated (share of pairs of calls in a row, of any rollout, that it made before),
    longest_run (calls of one tool in a row), and stops (counts of reasons why they ended).
    """
    everything = [t for g in groups for t in g.trajectories]
    valid = [t for t in everything if t.outcome.valid]
    spreads = [g.spread for g in groups if g.valid]
    written = np.concatenate([t.logprobs[t.mask] for t in valid] or [np.zeros(0)])
    return {
        "zero_variance_groups": _mean([s == 0 for s in spreads]),
        "group_std": _mean(spreads),
        "logprob": _mean(written),
        "steps": _mean([len(t.steps) for t in valid]),
        "truncated": _mean([t.stop in ("token_limit", "step_limit", "context_limit") for t in valid]),
        "active_groups": len(taught(samples)) / len(groups),
        "length_reward": _correlation([len(t.ids) for t in valid], [t.outcome.reward for t in valid]),
        "malformed": _mean([s.call is None for t in valid for s in t.steps]),
        "invalid": 1 - len(valid) / len(everything),
        **{
            name: behaviour([t for t in valid if t.outcome.success == success])
            for name, success in (("success", True), ("failure", False))
        },
    }


def taught(samples: Sequence[TrainingSample]) -> set[str]:
    """The tasks that something is learned from: with learner.skip_zero_variance_groups off there are samples of others too."""
    teaches = lambda s: s.advantages is None or np.any(s.advantages) or s.ce_weights is not None
    return {s.trajectory.task_id for s in samples if teaches(s)}


def behaviour(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What the rollouts of one outcome do; see `diagnose`."""
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
    """Names of the thresholds that are passed."""
    passed = []
    for name, (key, above, _) in RULES.items():
        value, bound = values[key], thresholds[name]
        if value is not None and (value > bound if above else value < bound):
            passed.append(name)
    return passed


def explain(name: str, values: Mapping[str, Any], thresholds: ConfigDict) -> str:
    """An alert as a sentence."""
    key, above, meaning = RULES[name]
    return (
        f"health: {key} is {values[key]:.3g}, {'above' if above else 'below'} config.health.{name} = "
        f"{thresholds[name]:g}: {meaning}"
    )


class Watch:
    """Says an alert once it has been raised in config.health.patience steps in a row, and once again when it was gone
    in between."""

    def __init__(self, thresholds: ConfigDict):
        self._thresholds, self._rows = thresholds, Counter[str]()

    def __call__(self, values: Mapping[str, Any], raised: Sequence[str]) -> list[str]:
        self._rows = Counter({name: self._rows[name] + 1 for name in raised})
        due = [name for name in raised if self._rows[name] == self._thresholds.patience]
        return [explain(name, values, self._thresholds) for name in due]


def _seen_before(items: Sequence[Any]) -> list[int]:
    """How often each item came before it in the list."""
    seen: Counter[Any] = Counter()
    found = []
    for item in items:
        found.append(seen[item])
        seen[item] += 1
    return found


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
