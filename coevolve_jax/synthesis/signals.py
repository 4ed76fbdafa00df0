"""The three weakness signals of CoEvolve (section 3), as plain statistics over rollouts.

    forgetting   the task was a success in recent steps and is a failure now
    boundary     the rollouts of the task disagree: some succeed, some fail
    rare         the rollout took an action that the policy hardly ever takes

`extract` computes them; `shuffle` makes the placebo. An invalid rollout (our own infrastructure failed) adds
to no score and no count, and carries no signal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from coevolve_jax.types import SIGNAL_KINDS, SUCCESS, Group, Signal


@dataclasses.dataclass(frozen=True)
class History:
    """Statistics over all steps so far; part of the checkpoint.

    The task pool's records cannot serve: they keep only the first and last score, and `observe` gets no pool.

    Attributes:
      scores: task id -> its last W scores, oldest first.
      action_counts: action pattern -> how often valid rollouts took it.
    """

    scores: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    action_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict:
        """JSON values sorted by name: equal histories give equal text. Floats survive bit for bit."""
        return {
            "scores": {task: list(self.scores[task]) for task in sorted(self.scores)},
            "action_counts": {p: self.action_counts[p] for p in sorted(self.action_counts)},
        }

    @classmethod
    def from_json(cls, data: Mapping) -> History:
        return cls({task: tuple(s) for task, s in data["scores"].items()}, dict(data["action_counts"]))


def task_scores(groups: Iterable[Group]) -> dict[str, float]:
    """Maps task id to Group.score. Tasks without a valid rollout are left out."""
    return {group.task.id: score for group in groups if (score := group.score) is not None}


def extract(
    history: History, groups: Sequence[Group], step: int, *, window: int, theta: float
) -> tuple[list[Signal], History]:
    """Extracts the signals of one GRPO step and updates the history.

    forgetting: one of the task's last `window` scores before this step is a success, and its score now is
        not. Its failed rollouts carry the signal.
    boundary: the task's rollouts include both outcomes. All of them carry the signal, since exploration needs
        the contrast between them.
    rare: the rollout took an action pattern p with c_p / N_actions < theta / 100, where c_p counts p. This
        step's actions are counted first, so c_p > 0. The signal names the rarest pattern; ties go to the
        alphabetically first.

    Args:
      history: statistics of the steps before; left unchanged.
      groups: the rollouts of the step, one group per task.
      step: the GRPO step that the signals are labelled with.
      window: W, in scores of the same task (steps that did not visit it do not count).
      theta: rare threshold in percent of all actions.

    Returns:
      (signals, history with this step). Signals are in the order of the rollouts, at most one per kind and
      trajectory, kinds in the order of SIGNAL_KINDS.

    Raises:
      ValueError: a threshold or a reward is out of range, or two rollouts of a task have one index.
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
    """The placebo: moves the signals to tasks drawn at random, with equal counts of kinds and of tasks.

    One permutation exchanges the tasks of the step. Each signal moves to the valid rollout of the same index
    in the new group, or else to a random one. A rare signal names a random pattern of its new rollout; it is
    dropped if that rollout has no actions.
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
    """Parses kinds of signals, such as "forgetting,rare". Raises ValueError for none or an unknown one."""
    named = tuple(filter(None, text.split(",")))
    if not named or not set(named) <= set(SIGNAL_KINDS):
        raise ValueError(
            f"config.strategy.signals is {text!r}: name one or more of {', '.join(SIGNAL_KINDS)}, "
            "separated by commas."
        )
    return named


def count_by_kind(signals: Iterable[Signal]) -> dict[str, int]:
    """Counts the signals of every kind, zeros included, in the order of SIGNAL_KINDS."""
    found = Counter(s.kind for s in signals)
    return {kind: found[kind] for kind in SIGNAL_KINDS}


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
