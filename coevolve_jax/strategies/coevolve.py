"""CoEvolve (arXiv 2604.15840): the training set grows where the policy's own rollouts show that it is weak.

    every step      extract weakness signals from the rollouts (synthesis/signals.py); keep them as evidence
    every F steps   select evidence -> reflect -> explore again in the environment -> abstract -> validate

`CoEvolve` below holds both halves: `observe` and `evolve`. Training itself is plain GRPO (static.py).

DEFAULTS is the paper's method. Every other value is an ablation or an option of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config.schedule import still_evolves
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SHARED, Lab, StepReport, evolves
from coevolve_jax.strategies.growth import solvable
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis import signals
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Evidence, Group, Signal, Task, Trajectory

READS = SHARED
FIDELITY = "F: signals, contexts and validation are the paper's; a scripted explorer stands in for its model."
DEFAULTS = {
    "signals": "forgetting,boundary,rare",  # kinds that evolution uses; all three are counted
    "shuffled": False,  # placebo: the same signals, moved to tasks drawn at random
    "unsolved": False,  # drop signals of a task if all rollouts of its latest visit succeeded
    "probe": 0,  # admit only tasks that this many rollouts solve sometimes, not always; 0: every valid task
}


class CoEvolve(Static):
    """`Static` with another `observe` and `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the evidence gathered since the last evolution, and the ids of tasks
    of which all valid rollouts at their latest visit since then succeeded.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        super().__init__(config, state)
        self._kinds = signals.kinds(config.strategy.signals)
        self._evidence = evidence_from_json(state["evidence"]) if state else []
        self._solved: set[str] = set(state.get("solved", ())) if state else set()

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found = self._signals(step, groups)
        used = [s for s in found if s.kind in self._kinds]
        if self._config.strategy.shuffled:
            used = signals.shuffle(used, groups, rng_for(self._config.seed, "placebo", step))
        if still_evolves(self._config, step):  # later evidence would never be reflected on
            self._evidence += join_evidence(used, groups)
            visited = [g for g in groups if g.valid]
            self._solved -= {g.task.id for g in visited}
            self._solved |= {g.task.id for g in visited if all(t.outcome.success for t in g.valid)}
        # Count the signals found, but log those used: for the placebo signals.jsonl holds the shuffled ones.
        return StepReport(signals.count_by_kind(found), [s.to_json() for s in used])

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c = self._config
        if not evolves(c, step):
            return None
        evidence, self._evidence = self._evidence, []
        solved, self._solved = self._solved, set()
        if c.strategy.unsolved:
            evidence = [e for e in evidence if e.task.id not in solved]
        rng = rng_for(c.seed, "evolve", step)
        if not lab.tasks.remaining_capacity:
            evidence = []  # no model is asked to reflect in vain
        contexts = lab.reflect(select_signals(evidence, c.evolution.contexts, rng))
        admit = solvable(lab, step, c.strategy.probe)
        return lab.synthesize(
            contexts, wanted=c.evolution.tasks, kind="signal", step=step, rng=rng, admit=admit
        )

    def to_json(self) -> dict:
        evidence = evidence_to_json(self._evidence)
        return {**super().to_json(), "evidence": evidence, "solved": sorted(self._solved)}


make = CoEvolve


def join_evidence(found: Sequence[Signal], groups: Sequence[Group]) -> list[Evidence]:
    """Joins one step's signals with the valid rollouts of their groups. The token arrays are dropped."""
    shown = {s.task_id for s in found}
    owner: dict[tuple[str, int], Group] = {}
    for group in groups:
        if group.task.id in shown:
            kept = Group(group.task, tuple(t.without_tokens() for t in group.valid))
            owner.update({(t.task_id, t.rollout_index): kept for t in group.valid})
    return [Evidence(signal, owner[signal.task_id, signal.rollout_index]) for signal in found]


def select_signals(found: Sequence[Evidence], count: int, rng: np.random.Generator) -> list[Evidence]:
    """Selects at most `count` pieces of evidence, taking the kinds in turn.

    Each (kind, task) comes once, by a failed rollout if there is one. `rng` orders the tasks within a kind.
    """
    order = sorted(rng.permutation(len(found)).tolist(), key=lambda i: found[i].trajectory.outcome.success)
    queues: dict[str, dict[str, Evidence]] = {}
    for i in order:
        queues.setdefault(found[i].signal.kind, {}).setdefault(found[i].signal.task_id, found[i])
    ranked = [list(queues[kind].values()) for kind in sorted(queues)]
    in_turn = [q[i] for i in range(max(map(len, ranked), default=0)) for q in ranked if i < len(q)]
    return in_turn[:count]


def evidence_to_json(evidence: Sequence[Evidence]) -> dict:
    """JSON values in which each task and each group is stored once, without tokens."""
    groups = list({id(e.group): e.group for e in evidence}.values())
    index = {id(group): i for i, group in enumerate(groups)}
    return {
        "tasks": [task.to_json() for task in {g.task.id: g.task for g in groups}.values()],
        "groups": [[g.task.id, [t.to_json() for t in g.trajectories]] for g in groups],
        "signals": [[index[id(e.group)], e.signal.to_json()] for e in evidence],
    }


def evidence_from_json(data: Mapping) -> list[Evidence]:
    tasks = {task["id"]: Task.from_json(task) for task in data["tasks"]}
    groups = [Group(tasks[id], tuple(map(Trajectory.from_json, rows))) for id, rows in data["groups"]]
    return [Evidence(Signal.from_json(signal), groups[i]) for i, signal in data["signals"]]
