"""What strategies may ask for while the training set evolves: the Lab of strategies/base.py, metered."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from coevolve_jax.collect import Roller
from coevolve_jax.synthesis.explore import offered_names
from coevolve_jax.synthesis.pipeline import Admit, Elsewhere, SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Context, Evidence, Group, Task

EXPLORER = "explorer/"


@dataclasses.dataclass(frozen=True)
class Laboratory:
    """strategies.base.Lab. roller: gives `roll` of a step. ledger: counts of what each service has cost so far; what
    the explorer's roles have spent is EXPLORER + its own key, and is theirs again when a run goes on."""

    tasks: TaskPool
    scenarios: Sequence[Task]
    synthesizer: Synthesizer
    roller: Callable[[int], Roller]
    ledger: Counter[str]

    def __post_init__(self):
        spent = {k.removeprefix(EXPLORER): v for k, v in self.ledger.items() if k.startswith(EXPLORER)}
        if (costs := self.synthesizer.roles.costs) is not None:
            costs |= spent  # which they know already, unless they are those of a run that goes on
        self._book_roles()

    def beside(self, records: Mapping[str, Mapping] | None = None) -> Laboratory:
        """One for a thread of its own, with D_t as it is now and empty books. It does no rollouts. records: of the
        tasks, where they are to be others (TaskPool.fork)."""
        spent = Counter({k: v for k, v in self.ledger.items() if k.startswith(EXPLORER)})
        return dataclasses.replace(self, tasks=self.tasks.fork(records), roller=_no_rollouts, ledger=spent)

    def merge(self, beside: Laboratory) -> None:
        """Adds what was made and booked there, since which nothing was made here."""
        self.tasks.add(list(itertools.islice(beside.tasks, len(self.tasks), None)))
        for key, value in beside.ledger.items():
            self.ledger[key] = value if key.startswith(EXPLORER) else self.ledger[key] + value

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        self.ledger["reflections"] += len(evidence)
        contexts = self.synthesizer.reflect(evidence)
        self._book_roles()
        return contexts

    def offered(self, scenario: Task) -> frozenset[str]:
        return offered_names(self.synthesizer.tools(scenario))

    def grow(
        self,
        contexts: Sequence[Context],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> SynthesisStats:
        stats = self.synthesizer.grow(
            self.tasks, contexts,
            wanted=wanted, kind=kind, step=step, rng=rng, admit=admit, elsewhere=elsewhere,
        )  # fmt: skip
        return self._booked(kind, stats)

    def grow_unguided(
        self,
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        scenarios: Sequence[Task] | None = None,
    ) -> SynthesisStats:
        stats = self.synthesizer.explore_unguided(
            self.tasks, scenarios or self.scenarios, wanted=wanted, kind=kind, step=step, rng=rng
        )
        return self._booked(kind, stats)

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        roll = self.roller(step)
        groups = roll(tasks, k, role="probe")
        self.ledger.update(roll.costs)
        return groups

    def _booked(self, kind: str, stats: SynthesisStats) -> SynthesisStats:
        self.ledger[f"environment_steps/{kind}"] += stats.environment_steps
        self.ledger[f"tasks_proposed/{kind}"] += stats.proposed
        self.ledger[f"tasks_added/{kind}"] += stats.added
        self._book_roles()
        return stats

    def _book_roles(self) -> None:
        for key, value in (self.synthesizer.roles.costs or {}).items():
            self.ledger[EXPLORER + key] = value


def _no_rollouts(step: int) -> Roller:
    raise ValueError(
        "The strategy asks for rollouts while the training set evolves, but with config.evolution.overlap above 0 the "
        "policy is another one by then: set it to 0."
    )
