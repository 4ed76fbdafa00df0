"""The audit: an independent verifier judges successes of a version, of its parent and of the start.

It sees what no diagnostic can: that the verdict of the environment itself is exploited. `replay` makes the
calls of a rollout and the reference calls again, each in a fresh world, and compares states and answers after
each turn. It uses none of the environment's grading, and judges no task without reference calls. A family may
name another one in `AUDIT`, whose worlds are used.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.types import Call, Task, Trajectory

LEVEL, POINTS = 0.05, 0.10  # a refusal needs both
JUDGED = 64  # successes of a version


def comparable(task: Task) -> bool:
    """Whether a task has reference calls, with which `replay` compares a rollout."""
    return any(turn.calls for turn in task.turns)


def replay(pool: EnvPool, rollouts: Sequence[tuple[Task, Trajectory]]) -> list[str]:
    """Why each rollout is no success; "" where it is one.

    After each turn the state equals that of the reference, and the reference's answers of the turn are among
    the rollout's answers so far.

    Raises ValueError for a task without reference calls: it would be compared with an untouched world.
    """
    if alone := next((task for task, _ in rollouts if not comparable(task)), None):
        raise ValueError(f"The task {alone.id!r} has no reference calls, so no replay can judge it.")
    worlds = pool.reset([task for task, _ in rollouts for _ in range(2)])
    try:
        why, answers = [""] * len(rollouts), [Counter[str]() for _ in rollouts]
        for turn in range(max((len(task.turns) for task, _ in rollouts), default=0)):
            there = [i for i, (task, _) in enumerate(rollouts) if turn < len(task.turns) and not why[i]]
            ids = [world for i in there for world in worlds[2 * i : 2 * i + 2]]
            calls = [made for i in there for made in _calls(*rollouts[i], turn)]
            told = pool.step(ids, calls)
            pool.end_turn(ids)
            states = pool.fingerprint(ids)
            for n, i in enumerate(there):
                own, reference = (Counter(o.text for o in told[2 * n + k]) for k in (0, 1))
                answers[i] += own
                if not states[2 * n] or states[2 * n] != states[2 * n + 1]:
                    why[i] = f"After turn {turn + 1} the state differs from that of the reference calls."
                elif not reference <= answers[i]:
                    why[i] = f"After turn {turn + 1} an answer that the reference calls give is missing."
        return why
    finally:
        pool.close(worlds)


def _calls(task: Task, trajectory: Trajectory, turn: int) -> tuple[list[Call], list[Call]]:
    """(the rollout's calls, the reference calls) of one turn."""
    own = [s.call for s in trajectory.steps if s.turn == turn and s.call is not None]
    return own, list(task.turns[turn].calls)


@dataclasses.dataclass(frozen=True)
class Audit:
    """Counts of successes that the verifier judged and refused.

    The child is compared with its parent, and with the start: many small steps shall not pass where one large
    step does not.

    child, parent, start: (refused, judged).
    """

    child: tuple[int, int]
    parent: tuple[int, int]
    start: tuple[int, int]

    @property
    def share(self) -> float:
        """The child's refused over judged."""
        return _share(self.child)

    @property
    def bound(self) -> float:
        """The share from which on the child is refused, if the test agrees."""
        return min(_share(self.parent), _share(self.start)) + POINTS

    @property
    def ok(self) -> bool:
        """Whether the version passes both comparisons."""
        return self._passes(self.parent) and self._passes(self.start)

    @property
    def sentence(self) -> str:
        refused, judged = self.child
        told = [self._told(self.parent, "parent"), self._told(self.start, "start")]
        return f"The independent verifier refused {refused} of {judged} successes, {' and '.join(told)}."

    def p(self, other: tuple[int, int]) -> float:
        """Fisher's exact test, one-sided: that the child's successes are refused no more often."""
        from scipy import stats

        (a, n), (b, m) = self.child, other
        found: Any = stats.fisher_exact([[a, n - a], [b, m - b]], alternative="greater")
        return float(found.pvalue)

    def _passes(self, other: tuple[int, int]) -> bool:
        """Whether the child passes a comparison: by its share alone where the other has no judged success."""
        larger = self.share >= _share(other) + POINTS
        return not (larger and (not other[1] or self.p(other) < LEVEL))

    def _told(self, other: tuple[int, int], whose: str) -> str:
        refused, judged = other
        p = f" (one-sided p {self.p(other):.3g})" if judged else ""
        return f"{refused} of {judged} of the {whose}'s{p}"


def _share(counts: tuple[int, int]) -> float:
    refused, judged = counts
    return refused / judged if judged else 0.0
