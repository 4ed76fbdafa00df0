"""SLEA-RL (arXiv 2603.18079): advantages for each message, and a library of lessons read before each one.

Credit: a message earns its return less the mean return at its anchor (strategies/step_credit.py).

Library: the best and the worst rollouts of a step give lessons by rules, the default of the authors' code.
A success says which action followed a situation; a failure, which action was an error there. The situation is
(error, action, turn) of the last call. Strategies stand in three zones, by how much of it they ask for;
warnings have a zone of their own. A full zone lets a lesson in that scores better than its weakest, which
leaves. A strategy scores its message's discounted return, a warning the mean reward of its task.

Reading: after a warm-up, each message but a task's first is preceded by a line with two strategies and one
warning of its situation, from the narrowest zone that has any.

Read against the authors' code. Faithful: the credit, zones, scores, novelty, retrieval before each step. The
code divides no advantage by a standard deviation: set learner.advantage to group_mean, as the arm does.
Missing: anchors that are only alike are not joined. Lessons name actions and have no text of a model's. The
growth of D_t is that of `random`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.strategies import hints
from coevolve_jax.strategies.base import SIGNALS, StepReport, check_least, check_shares, must_be
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.strategies.step_credit import credited
from coevolve_jax.types import Group, Hint, Step, Task, TrainingSample, Trajectory

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"help"})
FIDELITY = "F: the credit and the library by rules are the code's; lessons name actions and have no text."
DEFAULTS = {
    "step_credit": True,  # advantages for each message; False: GRPO's
    "weight": 1.0,  # of a message's own advantage
    "discount": 0.95,  # of the reward, for each message that follows
    "anchor": "observation",  # what the policy read last; "state": with the calls of the turn before it
    "library": True,  # lessons before each message; False: no hints
    "warm_up": 5,  # GRPO steps before the first hints
    "capacity": 100,  # strategies of a zone
    "warnings": 50,  # of their zone
    "best": 5,  # rollouts of a step that give strategies, and as many that give warnings
    "novelty": 0.85,  # an action at least so alike to one of the zone's, in the same situation, is no other
    "strategies_read": 2,  # before a message
    "warnings_read": 1,  # before a message
    "characters": 160,  # of a hint; the code's 60 tokens
}
NEW_STRATEGIES, NEW_WARNINGS = 10, 5  # lessons of a step at most
ZONES = ("turn", "action", "error")  # of strategies: which part of a situation they ask for, narrowest first

Lesson = list  # [situation, action, score]
Situation = list  # [whether the last call was an error, its action, its turn], or its beginning


class SleaRL(Static):
    """`Static` with other advantages, and with hints (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the lessons of each zone, best first, and the steps done.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_shares(config, "discount")
        least = {"weight": 0, "warm_up": 0, "capacity": 1, "warnings": 1, "best": 0}
        check_least(config, {**least, "strategies_read": 0, "warnings_read": 0, "characters": 0})
        anchor = config.strategy.anchor
        must_be(config, "anchor", anchor in ("observation", "state"), "observation or state")
        super().__init__(config, state, synthesize_freely, hints=self.help)
        empty = {name: [] for name in (*ZONES, "warnings")}
        self._zones: dict[str, list[Lesson]] = (
            {name: list(state["zones"][name]) for name in empty} if state else empty
        )
        self._steps = state["steps"] if state else 0

    def help(self, task: Task, rollout_index: int) -> Hint | None:
        own = self._config.strategy
        ready = own.library and self._steps >= own.warm_up and any(self._zones.values())
        return Hint(before_step=self.advice) if ready else None

    def advice(self, steps: Sequence[Step]) -> str:
        """The line before the message that follows these steps; "" if no lesson is about their situation."""
        own, now = self._config.strategy, situation(steps)
        known = [
            [action for about, action, _ in self._zones[zone] if about == now[:n]]
            for zone, n in (*zip(ZONES, (3, 2, 1)), ("warnings", 3))
        ]
        strategies = next((actions for actions in known[:3] if actions), [])
        return hints.line(strategies[: own.strategies_read], known[3][: own.warnings_read], own.characters)

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        samples = super().compute_advantages(groups)
        return credited(self._config, samples, groups) if self._config.strategy.step_credit else samples

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, own, entered = super().observe(step, groups), self._config.strategy, 0
        good, bad = lessons(groups, own.best, own.discount)
        for (about, action, score), n in [(lesson, n) for lesson in good for n in (3, 2, 1)]:
            entered += self._enter(ZONES[3 - n], [about[:n], action, score], own.capacity)
        for lesson in bad:
            entered += self._enter("warnings", lesson, own.warnings)
        self._steps += 1
        hinted = sum(bool(t.hints) for g in groups for t in g.trajectories)
        return StepReport({**found.counts, "hinted": hinted, "entered": entered}, found.rows)

    def _enter(self, zone: str, lesson: Lesson, capacity: int) -> bool:
        """Takes a lesson that scores better than the one that leaves: one alike, or the weakest."""
        kept, (about, action, score) = self._zones[zone], lesson
        near = [
            x for x in kept if x[0] == about and hints.alike(x[1], action) >= self._config.strategy.novelty
        ]
        leaves = near[:1] or (kept[-1:] if len(kept) >= capacity else [])
        if leaves and score <= leaves[0][2]:
            return False
        rest = [x for x in kept if x not in leaves]
        self._zones[zone] = sorted([*rest, lesson], key=lambda x: (-x[2], x[0], x[1]))
        return True

    def to_json(self) -> dict:
        return {**super().to_json(), "zones": self._zones, "steps": self._steps}


make = SleaRL


def situation(steps: Sequence[Step]) -> Situation:
    """The situation of the next message: [whether the last call was an error, its action, its turn]."""
    return [int(steps[-1].error), steps[-1].action, steps[-1].turn] if steps else [0, "", 0]


def lessons(groups: Sequence[Group], best: int, discount: float) -> tuple[list[Lesson], list[Lesson]]:
    """Returns the strategies and the warnings that a step's rollouts teach, best first.

    best: how many rollouts teach strategies, and how many warnings. Successes with few calls come first among
    the former, failures of tasks that others solve among the latter.
    """
    rolled = [(g, t) for g in groups for t in g.valid if t.steps]
    mean = lambda g: g.score or 0.0
    won = sorted((x for x in rolled if x[1].outcome.success), key=lambda x: len(x[1].steps))[:best]
    lost = sorted((x for x in rolled if not x[1].outcome.success), key=lambda x: -mean(x[0]))[:best]
    value = lambda t, left: t.outcome.reward * discount**left
    good = [[a, b, value(t, left)] for _, t in won for a, b, wrong, left in taken(t) if not wrong]
    bad = [[a, b, mean(g)] for g, t in lost for a, b, wrong, _ in taken(t) if wrong]
    first = lambda found, count: sorted(found, key=lambda x: -x[2])[:count]
    return first(good, NEW_STRATEGIES), first(bad, NEW_WARNINGS)


def taken(trajectory: Trajectory) -> list[tuple[Situation, str, bool, int]]:
    """The calls of a rollout but its first: (situation, action, whether it was an error, calls after it)."""
    steps = trajectory.steps
    return [
        (situation(steps[:i]), s.action, s.error, len(steps) - 1 - i)
        for i, s in enumerate(steps)
        if i and s.action
    ]
