"""What strategies may ask for while the training set evolves: the Lab of strategies/base.py, metered."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from coevolve_jax.explorers.base import Dialogue
from coevolve_jax.loop.collect import Roller
from coevolve_jax.synthesis.explore import offered_names
from coevolve_jax.synthesis.pipeline import Admit, Relocate, SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Context, Evidence, Group, Task

EXPLORER = "explorer/"


def explorer_costs(ledger: Mapping[str, float]) -> Counter:
    """What the explorer's roles have spent, by their own keys."""
    return Counter({k.removeprefix(EXPLORER): v for k, v in ledger.items() if k.startswith(EXPLORER)})


@dataclasses.dataclass(frozen=True)
class Laboratory:
    """strategies.base.Lab. roller: gives `roll` of a step. ledger: counts of what each service has cost so far; what
    the explorer's roles have spent is EXPLORER + its own key, and is theirs again when a run goes on. record: takes
    what the roles asked of a model and were answered; None: they keep it."""

    tasks: TaskPool
    scenarios: Sequence[Task]
    synthesizer: Synthesizer
    roller: Callable[[int], Roller]
    ledger: Counter[str]
    record: Callable[[Sequence[Dialogue]], None] | None = None
    _rollers: dict[int, Roller] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if (costs := self.synthesizer.roles.costs) is not None:
            costs |= explorer_costs(self.ledger)  # known already, unless they are those of a run that goes on
        self._book_roles()

    def fork(
        self, records: Mapping[str, Mapping] | None = None, roller: Callable[[int], Roller] | None = None
    ) -> Laboratory:
        """One with D_t as it is now and empty books, to be merged or dropped. records: of the tasks, where they are to be
        others (TaskPool.fork). roller: without it, it does no rollouts."""
        spent = Counter({EXPLORER + key: n for key, n in explorer_costs(self.ledger).items()})
        tasks = self.tasks.fork(records)
        return dataclasses.replace(
            self, tasks=tasks, roller=roller or _no_rollouts, ledger=spent, record=None
        )

    def merge(self, fork: Laboratory) -> None:
        """Adds what was made and booked there, since which nothing was made here."""
        self.tasks.add(list(itertools.islice(fork.tasks, len(self.tasks), None)))
        self.ledger.update({key: n for key, n in fork.ledger.items() if not key.startswith(EXPLORER)})
        self._book_roles()

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        self.ledger["reflections"] += len(evidence)
        contexts = self.synthesizer.reflect(evidence)
        self._book_roles()
        return contexts

    def offered(self, scenario: Task) -> frozenset[str]:
        return offered_names(self.synthesizer.tools(scenario))

    def synthesize(
        self,
        contexts: Sequence[Context],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        relocate: Relocate | None = None,
    ) -> SynthesisStats:
        stats = self.synthesizer.synthesize(
            self.tasks, contexts,
            wanted=wanted, kind=kind, step=step, rng=rng, admit=admit, relocate=relocate,
        )  # fmt: skip
        return self._booked(kind, stats)

    def synthesize_unguided(
        self,
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        scenarios: Sequence[Task] | None = None,
        admit: Admit | None = None,
        all_or_none: bool = False,
    ) -> SynthesisStats:
        """all_or_none: as Synthesizer.synthesize_unguided has it."""
        try:
            stats = self.synthesizer.synthesize_unguided(
                self.tasks, scenarios or self.scenarios,
                wanted=wanted, kind=kind, step=step, rng=rng, admit=admit, all_or_none=all_or_none,
            )  # fmt: skip
        finally:
            self._book_roles()  # also what was spent in vain
        return self._booked(kind, stats)

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        if step not in self._rollers:  # one for a step counts its calls, so that each has seeds of its own
            self._rollers.clear()
            self._rollers[step] = self.roller(step)
        roll = self._rollers[step]
        before = roll.costs.copy()
        groups = roll(tasks, k, role="probe")
        self.ledger.update(roll.costs - before)
        return groups

    def _booked(self, kind: str, stats: SynthesisStats) -> SynthesisStats:
        self.ledger[f"environment_steps/{kind}"] += stats.environment_steps
        if stats.solve_steps:
            self.ledger["environment_steps/solve"] += stats.solve_steps
        self.ledger[f"tasks_proposed/{kind}"] += stats.proposed
        self.ledger[f"tasks_added/{kind}"] += stats.added
        self._book_roles()
        return stats

    def _book_roles(self) -> None:
        roles = self.synthesizer.roles
        for key, value in (roles.costs or {}).items():
            self.ledger[EXPLORER + key] = value
        if roles.dialogues and self.record:
            self.record(roles.dialogues)
            roles.dialogues.clear()


def _no_rollouts(step: int) -> Roller:
    raise ValueError(
        "The strategy asks for rollouts while the training set evolves, but with config.evolution.overlap above 0 the "
        "policy is another one by then: set it to 0."
    )
