"""Rows: what a trajectory or a step shows, as plain values that formulas read.

A row is a dict by the names of FIELDS. It lacks the names whose values are unknown. The outcome is the label
of the diagnostics of trajectories, so no row of a trajectory has it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax.diagnosis import trends
from coevolve_jax.types import GIVEN, Group, Task, TrainingSample, Trajectory

Row = dict[str, Any]

UNITS = ("trajectory", "step", "trend")
LABELS = ("reward", "success", "progress", "shaped", "advantage")  # no fields of a trajectory
_ONE, _STEP, _BOTH = UNITS[:1], UNITS[1:2], UNITS[:2]


class Field(NamedTuple):
    """A value of a row.

    type: in CEL. units: the rows that have it. In a step's, an int is the sum over the valid rollouts and a
    double a mean, unless the meaning says otherwise.
    """

    name: str
    type: str
    units: tuple[str, ...]
    meaning: str


FIELDS = (
    Field("rollouts", "int", _BOTH, "valid rollouts; 1 in the row of a trajectory"),
    Field("calls", "int", _BOTH, "tool calls that could be read"),
    Field("errors", "int", _BOTH, "calls that came back as errors"),
    Field("malformed", "int", _BOTH, "texts that could not be parsed as a call"),
    Field("tokens", "int", _BOTH, "tokens of the conversation"),
    Field("policy_tokens", "int", _BOTH, "tokens that the policy sampled"),
    Field("logprob_mean", "double", _BOTH, "log-probability of a sampled token, in nats, over all of them"),
    Field("turns", "int", _BOTH, "user turns that were begun"),
    Field("truncated", "int", _BOTH, "rollouts that a limit ended"),
    Field("stop", "string", _ONE, "why the rollout ended"),
    Field("stops", "map(string, int)", _STEP, "rollouts by Trajectory.stop"),
    Field("tools", "list(string)", _ONE, "the tool of each call, in order"),
    Field("tool_calls", "map(string, int)", _STEP, "calls by tool"),
    Field("actions", "list(string)", _ONE, "the action pattern of each call to a tool of the task, in order"),
    Field("distinct_tools", "int", _BOTH, "different tools called; not a sum"),
    Field("repeated_pairs", "int", _BOTH, "pairs of consecutive calls that the same rollout made before"),
    Field("pairs", "int", _BOTH, "pairs of consecutive calls"),
    Field("longest_run", "int", _BOTH, "most consecutive calls with one action pattern; a maximum"),
    Field("reference_calls", "int", _BOTH, "reference calls of the task"),
    Field("missed_reference", "int", _BOTH, "reference calls whose action was not taken as often"),
    Field("extra_calls", "int", _BOTH, "actions beyond those of the reference calls"),
    Field("staleness", "double", _BOTH, "age of the weights that sampled a token, in updates"),
    Field("is_new_task", "bool", _ONE, "evolution made the task"),
    Field("new_tasks", "double", _STEP, "share of groups whose task evolution made"),
    Field("groups", "int", _STEP, "groups"),
    Field("invalid", "int", _STEP, "rollouts that our own infrastructure failed"),
    Field("success", "double", _STEP, "share of rollouts that succeed"),
    Field("reward", "double", _STEP, "the environment's own reward"),
    Field("shaped_mean", "double", _STEP, "reward with the terms of config.reward"),
    Field("spread", "double", _STEP, "standard deviation of the rewards within a group"),
    Field("zero_variance", "double", _STEP, "share of groups with equal rewards"),
    Field("mixed", "double", _STEP, "share of groups with successes and failures"),
    Field("live", "double", _STEP, "share of groups that are learned from"),
    Field("kept_share", "double", _STEP, "share of mixed groups that are learned from"),
    Field("tool_entropy", "double", _STEP, "entropy of the tools called, in bits"),
    Field("length_reward", "double", _STEP, "correlation of the conversation's tokens with the reward"),
    Field("kl", "double", _STEP, "KL to the start, in nats per token, as the learner measures it"),
    Field("grad_norm", "double", _STEP, "norm of the gradient"),
    Field("clip_fraction", "double", _STEP, "share of tokens whose ratio is clipped"),
    Field("entropy", "double", _STEP, "entropy of the policy's next token, in nats"),
    Field("mismatch", "double", _STEP, "difference of learner and sampler, in nats per token"),
)
# The values of a whole run from its first to its last quarter have a table of their own (trends.py).
TREND = {name: Field(name, "double", UNITS[2:], meaning) for name, meaning in trends.MEANINGS.items()}
LEARNED = {  # field -> name in metrics.jsonl
    "kl": "kl", "grad_norm": "grad_norm", "clip_fraction": "clip_fraction", "entropy": "entropy",
    "mismatch": "mismatch_mean",
}  # fmt: skip


def fields(unit: str) -> dict[str, Field]:
    """The fields of a unit's rows, by name."""
    return TREND if unit == "trend" else {f.name: f for f in FIELDS if unit in f.units}


def trajectory_row(trajectory: Trajectory, task: Task, step: int | None = None) -> Row:
    """The row of one rollout.

    step: the GRPO step that learns from it, for `staleness`. None counts from its newest token.
    """
    t, calls = trajectory, [s for s in trajectory.steps if s.call is not None]
    done, asked, ages = Counter(t.actions), Counter(task.actions), t.versions[t.mask]
    pairs = [(a.text, b.text) for a, b in itertools.pairwise(calls)]
    row = {
        "rollouts": 1,
        "calls": len(calls),
        "errors": sum(s.error for s in calls),
        "malformed": len(t.steps) - len(calls),
        "tokens": len(t.ids),
        "policy_tokens": int(t.mask.sum()),
        "turns": len(t.turn_starts),
        "truncated": int(t.truncated),
        "stop": t.stop,
        "tools": [s.call.name for s in calls if s.call],
        "actions": list(t.actions),
        "distinct_tools": len({s.call.name for s in calls if s.call}),
        "repeated_pairs": len(pairs) - len(set(pairs)),
        "pairs": len(pairs),
        "longest_run": max(
            (len(list(run)) for _, run in itertools.groupby(calls, key=lambda s: s.action)), default=0
        ),
        "reference_calls": len(task.calls),
        "missed_reference": (asked - done).total(),
        "extra_calls": (done - asked).total(),
        "is_new_task": task.lineage.kind not in GIVEN,
    }
    if len(ages):
        row["logprob_mean"] = float(np.mean(t.logprobs[t.mask]))
        row["staleness"] = float(np.mean((int(ages.max()) if step is None else step) - ages))
    return row


def step_row(
    groups: Sequence[Group],
    samples: Sequence[TrainingSample] = (),
    *,
    metrics: Mapping[str, Any] | None = None,
    rewards: Callable[[Group], Sequence[float]] = lambda group: group.rewards,
    step: int | None = None,
) -> Row:
    """The row of a step's groups.

    Args:
      samples: what the learner was given for them.
      metrics: the step's row of metrics.jsonl, for the values of the learner.
      rewards: those of `diagnosis.rewards.rewards_of`, for `shaped_mean`.
      step: as in `trajectory_row`.
    """
    scored, live = [g for g in groups if g.valid], taught(groups, samples)
    valid = [(t, g.task) for g in scored for t in g.valid]
    rows = [trajectory_row(t, task, step) for t, task in valid]
    won = [t.outcome.success for t, _ in valid]
    reward = [t.outcome.reward for t, _ in valid]
    spreads = [g.spread for g in scored]
    tools = Counter(tool for row in rows for tool in row["tools"])
    by_tokens = lambda name: _weighted([(r[name], r["policy_tokens"]) for r in rows if name in r])
    row = {
        **{f.name: sum(r[f.name] for r in rows) for f in FIELDS if f.type == "int" and f.units == _BOTH},
        "longest_run": max((r["longest_run"] for r in rows), default=0),
        "distinct_tools": len(tools),
        "logprob_mean": by_tokens("logprob_mean"),
        "staleness": by_tokens("staleness"),
        "stops": dict(Counter(t.stop for t, _ in valid)),
        "tool_calls": dict(tools),
        "new_tasks": _mean([g.task.lineage.kind not in GIVEN for g in groups]),
        "groups": len(groups),
        "invalid": sum(len(g.trajectories) for g in groups) - len(valid),
        "success": _mean(won),
        "reward": _mean(reward),
        "shaped_mean": _mean([r for g in scored for r in rewards(g)]),
        "spread": _mean(spreads),
        "zero_variance": _mean([s == 0 for s in spreads]),
        "mixed": _mean([g.mixed for g in scored]),
        "live": _mean(live),
        "kept_share": _mean([kept for g, kept in zip(groups, live, strict=True) if g.mixed]),
        "tool_entropy": _entropy(tools),
        "length_reward": correlation([r["tokens"] for r in rows], reward),
        **{field: (metrics or {}).get(name) for field, name in LEARNED.items()},
    }
    return {name: value for name, value in row.items() if value is not None}


def taught(groups: Sequence[Group], samples: Sequence[TrainingSample]) -> list[bool]:
    """Whether the learner learns from each group: from its own rollouts, not earlier ones of its task.

    With learner.skip_zero_variance_groups off there are also samples with zero advantage; those teach
    nothing.
    """
    teaches = lambda s: s.advantages is None or np.any(s.advantages) or s.ce_weights is not None
    learned = {id(s.trajectory) for s in samples if teaches(s)}
    return [any(id(t) in learned for t in g.trajectories) for g in groups]


def correlation(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    """Pearson's correlation; None where one of the two is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _weighted(pairs: Sequence[tuple[float, int]]) -> float | None:
    if not pairs:
        return None
    values, weights = zip(*pairs)
    return float(np.average(values, weights=weights))


def _entropy(counts: Counter[str]) -> float | None:
    shares = [n / counts.total() for n in counts.values()]
    return -sum(p * math.log2(p) for p in shares) if shares else None
