"""Weakness signals: forgetting, boundary and rare, as plain statistics over rollouts (CoEvolve, section 3).

An invalid rollout (our own infrastructure failed) takes no part: it adds to
no score and no count, and it carries no signal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from coevolve_jax.types import SIGNAL_KINDS, SUCCESS, Group, Signal


@dataclasses.dataclass(frozen=True)
class History:
    """What the signals remember of all steps so far; goes into the checkpoint.

    scores: by task id, its last W scores, oldest first (bounded by the window). The records of the task pool keep the first
    and the last score alone, and `observe` is not given the pool.
    action_counts: by action pattern, how often it was taken in valid rollouts.
    """

    scores: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    action_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def n_actions(self) -> int:
        """N_actions: all actions of all valid rollouts so far."""
        return sum(self.action_counts.values())

    def to_json(self) -> dict:
        """Sorted by name, so that equal histories give equal text; floats survive bit for bit."""
        return {
            "scores": {task: list(self.scores[task]) for task in sorted(self.scores)},
            "action_counts": {p: self.action_counts[p] for p in sorted(self.action_counts)},
        }

    @classmethod
    def from_json(cls, data: Mapping) -> History:
        return cls({task: tuple(s) for task, s in data["scores"].items()}, dict(data["action_counts"]))


def task_scores(groups: Iterable[Group]) -> dict[str, float]:
    """Score of each task by its id (Group.score); a task without a valid rollout has none."""
    return {group.task.id: score for group in groups if (score := group.score) is not None}


def extract(
    history: History, groups: Sequence[Group], step: int, *, window: int, theta: float
) -> tuple[list[Signal], History]:
    """Signals of one GRPO step, and the history that includes it. `history` itself is not changed.

    forgetting: some of the task's last `window` scores before this step is a
    success and its score now is not; carried by its failed rollouts.
    boundary: the task's rollouts hold both outcomes; carried by all of them,
    since the contrast between them is what is to be explored.
    rare: the rollout took an action p with c_p / N_actions < theta / 100.
    This step's actions are counted first, so c_p > 0 always holds. The signal
    names the rarest such pattern, the alphabetically first of equals.

    Args:
      groups: the rollouts of the step, one group a task.
      step: the GRPO step that the signals are labelled with.
      window: W, in scores of the same task (steps that did not visit it do not count).
      theta: rare threshold in percent of all actions.

    Returns:
      (signals, new history). Signals are in the order of the rollouts, at
      most one per kind and trajectory, kinds in the order of SIGNAL_KINDS.

    Raises:
      ValueError: a threshold, a reward, or two rollouts of one name.
    """
    _check(groups, window, theta)
    valid = [t for group in groups for t in group.valid]
    now = task_scores(groups)
    counts = Counter(history.action_counts)
    for t in valid:
        counts.update(t.actions)
    n_actions = sum(counts.values())

    forgotten = {
        task
        for task, score in now.items()
        if score < SUCCESS and any(s >= SUCCESS for s in history.scores.get(task, ())[-window:])
    }
    mixed = {group.task.id for group in groups if group.mixed}

    signals = []
    for t in valid:
        rare = min(set(t.actions), key=lambda p: (counts[p], p), default=None)
        if t.task_id in forgotten and not t.outcome.success:
            signals.append(Signal("forgetting", t.task_id, t.rollout_index, step))
        if t.task_id in mixed:
            signals.append(Signal("boundary", t.task_id, t.rollout_index, step))
        if rare is not None and counts[rare] / n_actions < theta / 100:
            signals.append(Signal("rare", t.task_id, t.rollout_index, step, pattern=rare))

    scores = dict(history.scores)
    for task, score in now.items():
        scores[task] = (*scores.get(task, ()), score)[-window:]
    return signals, History(scores, dict(counts))


def shuffle(found: Sequence[Signal], groups: Sequence[Group], rng: np.random.Generator) -> list[Signal]:
    """The placebo: as many signals of each kind on as many tasks, but on tasks that are drawn at random.

    The tasks of the step change places, all at once; a signal goes with its task's place, to the valid rollout of
    the same number there, or else to a random one. A rare pattern becomes one that the rollout did take; a rollout
    without actions carries no rare signal.
    """
    present = [group for group in groups if group.valid]
    place = {group.task.id: i for i, group in enumerate(present)}
    order = rng.permutation(len(present))
    moved = []
    for s in found:
        there = present[order[place[s.task_id]]].valid
        t = next((t for t in there if t.rollout_index == s.rollout_index), there[rng.integers(len(there))])
        patterns = sorted(set(t.actions))
        if s.kind != "rare":
            moved.append(Signal(s.kind, t.task_id, t.rollout_index, s.step))
        elif patterns:
            pattern = patterns[rng.integers(len(patterns))]
            moved.append(Signal(s.kind, t.task_id, t.rollout_index, s.step, pattern))
    return moved


def kinds(text: str) -> tuple[str, ...]:
    """Kinds of signals from "forgetting,rare". Raises ValueError for one that is not there, or none."""
    named = tuple(filter(None, text.split(",")))
    if not named or not set(named) <= set(SIGNAL_KINDS):
        raise ValueError(
            f"config.strategy.signals is {text!r}: name one or more of {', '.join(SIGNAL_KINDS)}, separated by commas."
        )
    return named


def count_by_kind(signals: Iterable[Signal]) -> dict[str, int]:
    """Number of signals of every kind, zero included, in the order of SIGNAL_KINDS."""
    found = Counter(s.kind for s in signals)
    return {kind: found[kind] for kind in SIGNAL_KINDS}


def annotated(signals: Iterable[Signal]) -> int:
    """Number of distinct trajectories that carry at least one signal (the kinds are OR-ed)."""
    return len({(s.step, s.task_id, s.rollout_index) for s in signals})


def _check(groups: Sequence[Group], window: int, theta: float) -> None:
    if window < 1:
        raise ValueError(f"The forgetting window is {window}; it counts scores and must be at least 1.")
    if not 0 < theta <= 100:
        raise ValueError(f"The rare threshold theta is {theta}; it is a percentage above 0 and up to 100.")
    seen = set()
    for t in (t for group in groups for t in group.trajectories):
        if t.outcome.valid and not 0 <= t.outcome.reward <= 1:
            raise ValueError(
                f"Rollout {t.rollout_index} of task {t.task_id} has reward {t.outcome.reward}; rewards "
                "lie between 0 and 1 (mark what could not be scored as valid=False)."
            )
        if (t.task_id, t.rollout_index) in seen:
            raise ValueError(
                f"Task {t.task_id} has two rollouts numbered {t.rollout_index} in one step; number the "
                "rollouts of a task consecutively, also where the batch holds the task twice."
            )
        seen.add((t.task_id, t.rollout_index))
