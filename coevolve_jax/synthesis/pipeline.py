"""One evolution of the training set: reflect -> explore -> abstract -> validate -> D_{t+1}."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.reflect import unguided
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import synthesize
from coevolve_jax.types import Context, Evidence, Task

MAX_PASSES = 3  # over the same contexts, for as long as too few tasks are valid


@dataclasses.dataclass
class SynthesisStats:
    """What became of the proposals. refused: by reason, leaks and duplicates as well as what did not validate."""

    contexts: int = 0
    environment_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    retained: int = 0
    discarded: int = 0
    added: int = 0
    refused: Counter = dataclasses.field(default_factory=Counter)

    def add(self, other: SynthesisStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict:
        passed = (self.accepted + self.retained) / self.proposed if self.proposed else None
        return {**vars(self), "refused": dict(sorted(self.refused.items())), "pass_rate": passed}

    @classmethod
    def from_json(cls, data: Mapping) -> SynthesisStats:
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        return cls(**{**fields, "refused": Counter(data["refused"])})


@dataclasses.dataclass(frozen=True)
class Synthesizer:
    """Makes validated tasks and puts them into D_t.

    explorer: plays the four roles (scripted, or an LLM). env_pool: the real environment. guard: refuses near
    copies of evaluation tasks (None only while the evaluation tasks themselves are made).
    config: the run's.
    """

    explorer: object
    env_pool: EnvPool
    config: ConfigDict
    guard: LeakGuard | None

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        return [self.explorer.reflect(e.signal, e.task, e.trajectory, e.siblings) for e in evidence]

    def grow(
        self,
        tasks: TaskPool,
        contexts: Sequence[Context],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
    ) -> SynthesisStats:
        """D_t grows by about `wanted` validated tasks, found under the contexts."""
        total = SynthesisStats()
        for _ in range(MAX_PASSES if contexts else 0):
            missing = wanted - total.added
            if missing:
                total.add(self._grow(tasks, contexts, missing, kind, step, total.proposed, rng))
        return total

    def explore_unguided(
        self,
        tasks: TaskPool,
        scenarios: Sequence[Task],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        on_added: Callable[[int], object] = lambda n: None,
    ) -> SynthesisStats:
        """Unguided exploration of random scenarios until `wanted` tasks were added (this is how D_0 comes to be).

        Raises ValueError where the scenarios give no more new tasks.
        """
        total, empty = SynthesisStats(), 0
        while total.added < wanted:
            missing = wanted - total.added
            chosen = [scenarios[i] for i in rng.choice(len(scenarios), min(32, max(4, missing)))]
            contexts = [
                unguided(s, f"{kind}-{step}-context-{total.contexts + n}") for n, s in enumerate(chosen)
            ]
            stats = self._grow(tasks, contexts, missing, kind, step, total.proposed, rng)
            total.add(stats)
            on_added(stats.added)
            empty = 0 if stats.added else empty + 1
            if empty == 20:
                raise ValueError(
                    f"Unguided exploration found {total.added} of {wanted} new tasks ({dict(total.refused)}): "
                    "widen config.environment.toolsets or data.min_calls..max_calls, or ask for fewer tasks."
                )
        return total

    def _grow(
        self,
        tasks: TaskPool,
        contexts: Sequence[Context],
        wanted: int,
        kind: str,
        step: int,
        first_id: int,
        rng: np.random.Generator,
    ) -> SynthesisStats:
        """explore -> abstract -> validate -> refuse leaks and duplicates -> D_t grows by `wanted` at most."""
        e, d = self.config.evolution, self.config.data
        verdicts, explored = synthesize(
            self.explorer,
            self.env_pool,
            contexts,
            rounds=e.rounds,
            steps=e.steps,
            per_context=e.proposals,
            rng=rng,
            kind=kind,
            step=step,
            first_id=first_id,
            min_calls=d.min_calls,
            max_calls=d.max_calls,
            max_turns=d.max_turns,
        )
        stats = SynthesisStats(len(contexts), explored)
        # Their order covers all contexts before it comes back to any, wherever `wanted` ends it.
        for verdict in verdicts:
            if stats.added < wanted:
                stats.proposed += 1
                stats.accepted += verdict.verdict == "accept"
                stats.retained += verdict.verdict == "retain"
                stats.discarded += verdict.task is None
                refusal = verdict.reason if verdict.task is None else self._offer(tasks, verdict.task)
                stats.added += refusal is None
                stats.refused.update([refusal] if refusal else [])
        return stats

    def _offer(self, tasks: TaskPool, task: Task) -> str | None:
        """Adds a validated task; returns why not where it is refused."""
        if self.guard is not None:
            similarity, nearest = self.guard.nearest(task)
            lineage = dataclasses.replace(
                task.lineage, similarity=round(float(similarity), 4), nearest=nearest
            )
            task = dataclasses.replace(task, lineage=lineage)
            if refusal := self.guard.check(task):
                return refusal
        return tasks.add([task])[0]
