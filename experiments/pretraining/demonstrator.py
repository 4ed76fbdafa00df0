"""The demonstrator that the tiny policies imitate.

It knows each task's reference calls, and has a bad habit with some of the actions (tools, or verbs).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

import numpy as np

from coevolve_jax.rollout.tool_call_format import render_call
from coevolve_jax.types import Call, Task

ERRORS = ("wrong_argument", "sibling_tool", "skip", "swap", "give_up")
ERROR_SHARES = (0.4, 0.25, 0.15, 0.1, 0.1)  # probability of each error in `drawn_habits`


@dataclasses.dataclass(frozen=True)
class Habit:
    """A bad habit with an action. error: one of ERRORS. rate: its probability per call."""

    error: str
    rate: float

    def __post_init__(self):
        if self.error not in ERRORS:
            raise ValueError(f"The error {self.error!r} of a weak tool is unknown: use {', '.join(ERRORS)}.")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"The rate {self.rate} of a weak tool is no probability: use 0 to 1.")


def named_habits(texts: Sequence[str], known: Collection[str]) -> dict[str, Habit]:
    """Parses habits, each "action:error:rate". Raises ValueError for another form or an unknown action."""
    habits = {}
    for text in texts:
        name, error, rate = [*text.split(":"), "", ""][:3]
        if name not in known:
            raise ValueError(
                f"--weak_tools names {name!r}, which the environment does not have: use NAME:ERROR:RATE with "
                f"a name of {', '.join(sorted(known))}."
            )
        try:
            habits[name] = Habit(error, float(rate))
        except ValueError as wrong:
            raise ValueError(f"--weak_tools={text} cannot be read as NAME:ERROR:RATE ({wrong})") from None
    return habits


def drawn_habits(share: float, names: Collection[str], rng: np.random.Generator) -> dict[str, Habit]:
    """Draws a habit for every action. The share errs in 40 to 80% of the calls, the others in up to 8%."""
    names = sorted(names)
    weak = set(rng.permutation(names)[: round(share * len(names))])
    rates = [float(rng.uniform(0.4, 0.8) if n in weak else rng.uniform(0, 0.08)) for n in names]
    errors = [str(rng.choice(ERRORS, p=ERROR_SHARES)) for _ in names]
    return {name: Habit(error, rate) for name, error, rate in zip(names, errors, rates)}


def to_json(habits: Mapping[str, Habit]) -> str:
    """The habits as JSON text: {"action": {"error": "skip", "rate": 0.5}}."""
    return json.dumps({name: dataclasses.asdict(habit) for name, habit in habits.items()}, indent=1) + "\n"


class Demonstrator:
    """Plays a task's reference calls as assistant messages, with its bad habits."""

    def __init__(self, habits: Mapping[str, Habit], lessons: ModuleType):
        """habits: by action; an action without one never fails. lessons: the family's module of lessons/."""
        self._habits, self._lessons = dict(habits), lessons

    def messages(self, task: Task, rng: np.random.Generator, heeded: Collection[str] = ()) -> list[str]:
        """Returns the assistant's messages in order: one per call, and one that ends each user turn.

        heeded: actions without bad habits this time.
        """
        said, habits = [], {name: own for name, own in self._habits.items() if name not in heeded}
        for turn in task.turns:
            said += [render_call(c) for c in self._play(turn.calls, task, rng, habits)] + ["Done."]
        return said

    def _play(
        self, calls: Sequence[Call], task: Task, rng: np.random.Generator, habits: Mapping[str, Habit]
    ) -> list[Call]:
        played = list(calls)
        i = 0
        while i < len(played):
            call, habit = played[i], habits.get(self._lessons.action(played[i]))
            if habit and rng.random() < habit.rate:
                if habit.error == "skip" or (habit.error == "swap" and i + 1 == len(played)):
                    del played[i]
                    continue
                if habit.error == "give_up":
                    return played[:i]
                if habit.error == "swap":
                    played[i : i + 2] = [played[i + 1], call]
                    i += 1
                elif habit.error == "sibling_tool":
                    played[i] = self._lessons.sibling(call)
                else:
                    played[i] = self._lessons.wrong_argument(call, task, rng)
            i += 1
        return played
