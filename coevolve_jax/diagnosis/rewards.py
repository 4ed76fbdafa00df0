"""Reward terms: what a rollout is worth to the learner besides its outcome (config.reward.terms).

    shaped reward = reward + sum over terms of weight * value,   each value within 0 and 1

The sum is not clipped: at a cap, a bonus would pay failures alone. Outcomes stay as they are, so success,
scores, signals and evaluation see no term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.features import Row, trajectory_row
from coevolve_jax.types import Group, Trajectory

Rewards = Callable[[Group], Sequence[float]]  # group -> rewards of its valid trajectories, in their order


class Term(NamedTuple):
    """A term. what: a name of TERMS, or a formula about a trajectory. str(term) is its text in the config."""

    what: str
    weight: float

    def __str__(self) -> str:
        return f"{self.what}:{self.weight:g}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# most: config.rollout.max_length, in tokens.
TERMS: dict[str, Callable[[Trajectory, Row, int], float]] = {
    "progress": lambda t, row, most: t.outcome.progress,
    "length": lambda t, row, most: row["tokens"] / most,
    "brevity": lambda t, row, most: 1 - row["tokens"] / most,
    # 0 up to four fifths of `most`. DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) has rewards of
    # 1 and -1, so that it is overlong:-0.5 here.
    "overlong": lambda t, row, most: 5 * row["tokens"] / most - 4,
    "errors": lambda t, row, most: _share(row["errors"], row["calls"]),
    "repeats": lambda t, row, most: _share(row["repeated_pairs"], row["pairs"]),
    "malformed": lambda t, row, most: _share(row["malformed"], row["calls"] + row["malformed"]),
    # 0 for no tool, 1/2 for one, 2/3 for two: each further one adds less.
    "distinct_tools": lambda t, row, most: row["distinct_tools"] / (1 + row["distinct_tools"]),
}


def outcome_rewards(group: Group) -> Sequence[float]:
    """The environment's own rewards."""
    return group.rewards


def rewards_of(config: ConfigDict, rewards: Rewards = outcome_rewards) -> Rewards:
    """Returns `rewards` with the terms of config.reward.terms added; itself where there are none.

    Values are clipped to 0 and 1. A formula's value is 0 where it is missing.
    """
    terms = parse(config.reward.terms)
    if not terms:
        return rewards
    values = [(_value(term.what, config.rollout.max_length), term.weight) for term in terms]

    def shaped(group: Group) -> list[float]:
        rows = [(t, trajectory_row(t, group.task)) for t in group.valid]
        added = [sum(weight * value(t, row) for value, weight in values) for t, row in rows]
        return [reward + more for reward, more in zip(rewards(group), added, strict=True)]

    return shaped


def parse(texts: Sequence[str]) -> tuple[Term, ...]:
    """Reads config.reward.terms. Raises ValueError, in one sentence, for a text that is no term."""
    terms = []
    for text in texts:
        what, _, weight = (part.strip() for part in text.rpartition(":"))
        try:
            term = Term(what, float(weight))
            if not math.isfinite(term.weight) or not term.weight:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"config.reward.terms has {text!r}: a term is WHAT:WEIGHT, such as length:0.1, with a weight "
                "other than 0."
            ) from None
        if what in {other.what for other in terms}:
            raise ValueError(f"config.reward.terms has {what!r} twice: add up the weights.")
        try:
            _value(what, 1)
        except expressions.ExpressionError as error:
            raise ValueError(
                f"config.reward.terms has {text!r}, and {what!r} is none of {', '.join(TERMS)}, "
                f"nor a formula: {error}"
            ) from None
        terms.append(term)
    return tuple(terms)


def size(texts: Sequence[str]) -> float:
    """Sum of the sizes of the terms' weights.

    Below 1, no failure of reward 0 is worth as much as a success of reward 1.
    """
    return math.fsum(abs(term.weight) for term in parse(texts))


def _value(what: str, most: int) -> Callable[[Trajectory, Row], float]:
    if what in TERMS:
        found = lambda t, row: TERMS[what](t, row, most)
    else:
        formula = expressions.compile(what, "trajectory")
        found = lambda t, row: formula.value(row) or 0.0
    return lambda t, row: min(max(found(t, row), 0.0), 1.0)
