"""A proposer without a language model: a softmax policy over the settings of a context, learnt by REINFORCE.

It stands where a paper trains a model to write tasks. The settings are factors such as the number of calls.
Each has a softmax of its own over its values, so a few dozen rewards can move it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special

from coevolve_jax.envs.base import canonical
from coevolve_jax.types import Context, Task

KEYS = ("toolsets", "level", "domain")  # of scenarios; the first in which they differ is a factor
MOST = 16  # values of such a key, beyond which it is none


class KnobPolicy:
    """Independent softmax distributions, one per factor.

    factors: name -> values (JSON). state: of `to_json`; a value that it does not have begins with logit 0.

    Raises ValueError for a factor without values.
    """

    def __init__(self, factors: Mapping[str, Sequence[Any]], state: Mapping | None = None):
        if empty := [name for name, values in factors.items() if not values]:
            raise ValueError(f"Factor {empty[0]!r} of the proposer has no values: give it at least one.")
        self.factors = {name: tuple(values) for name, values in factors.items()}
        old = {name: {canonical(v): logit for v, logit in of} for name, of in (state or {}).items()}
        self._logits = {
            name: np.array([old.get(name, {}).get(canonical(v), 0.0) for v in values], np.float64)
            for name, values in self.factors.items()
        }

    def shares(self, factor: str) -> np.ndarray:
        """Returns the probability of each value of a factor [values]."""
        logits = self._logits[factor]
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    def sample(self, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Draws `count` settings: factor -> value."""
        drawn = {f: rng.choice(len(v), size=count, p=self.shares(f)) for f, v in self.factors.items()}
        return [{f: self.factors[f][int(drawn[f][i])] for f in self.factors} for i in range(count)]

    def update(
        self,
        drawn: Sequence[Mapping[str, Any]],
        advantages: Sequence[float] | np.ndarray,
        learning_rate: float = 1.0,
        kl_coef: float = 0.0,
    ) -> None:
        """Takes one policy-gradient step on all factors, with a KL penalty towards the uniform distribution.

        advantages: one per setting of `drawn`. Without settings nothing changes.
        """
        if not drawn:
            return
        weights = np.asarray(advantages, np.float64)
        for factor, values in self.factors.items():
            pi = self.shares(factor)
            chosen = np.array([values.index(d[factor]) for d in drawn])
            gain = np.mean(weights[:, None] * (np.eye(len(values))[chosen] - pi), axis=0)
            each = scipy.special.entr(pi)  # -pi log(pi), 0 at 0
            pull = pi * each.sum() - each  # gradient of KL(pi || uniform) by the logits
            self._logits[factor] += learning_rate * (gain - kl_coef * pull)

    def to_json(self) -> dict:
        """Returns the logit of each value: factor -> [[value, logit], ...]."""
        return {f: [[v, x] for v, x in zip(vs, self._logits[f].tolist())] for f, vs in self.factors.items()}


def standardised(rewards: Sequence[float]) -> np.ndarray:
    """Returns (reward - mean) / standard deviation; zeros where all are equal [n]."""
    values = np.asarray(rewards, np.float64)
    spread = values.std() if len(set(values.tolist())) > 1 else 0.0
    return (values - values.mean()) / spread if spread else np.zeros(len(values))


def factors(
    scenarios: Sequence[Task], calls: Sequence[int] = (), turns: Sequence[int] = ()
) -> dict[str, tuple]:
    """Returns the settings that a proposer chooses, with their values: calls, turns, and a key of scenarios.

    A factor without values is left out.
    """
    found: dict[str, tuple] = {"calls": tuple(calls), "turns": tuple(turns)}
    for key in KEYS:
        values = sorted({canonical(s.scenario[key]) for s in scenarios if key in s.scenario})
        if 1 < len(values) <= MOST:
            found[key] = tuple(values)
            break
    return {name: values for name, values in found.items() if values}


def context(
    drawn: Mapping[str, Any], scenarios: Sequence[Task], rng: np.random.Generator, *, id: str, signal: str
) -> Context:
    """Returns the context that asks for a task with these settings, in a random scenario that has its key.

    drawn: a setting of `KnobPolicy.sample` over `factors`.
    """
    keys = [key for key in KEYS if key in drawn]
    able = [s for s in scenarios if all(canonical(s.scenario.get(k)) == drawn[k] for k in keys)]
    calls = drawn.get("calls")
    return Context(
        id, signal, able[int(rng.integers(len(able)))], "A task of this size and place is wanted.",
        calls=None if calls is None else (calls, calls), turns=drawn.get("turns"),
    )  # fmt: skip
