"""What strategies may ask for while the training set evolves: the Lab of strategies/base.py, metered."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coevolve_jax.explorers.base import LLMCall
from coevolve_jax.loop.collect import Roller
from coevolve_jax.synthesis.explore import offered_names
from coevolve_jax.synthesis.pipeline import SynthesisRequest, SynthesisStats, Synthesizer
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
    record: Callable[[Sequence[LLMCall]], None] | None = None
    _rollers: dict[int, Roller] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if (costs := self.synthesizer.roles.costs) is not None:
            costs |= explorer_costs(self.ledger)  # known already, unless they are those of a run that goes on
        self._book_roles()

    def fork(
        self, records: Mapping[str, Mapping] | None = None, roller: Callable[[int], Roller] | None = None
    ) -> Laboratory:
        """One with D_t as it is now and empty books, to be merged or dropped.

        records: of the tasks, where they are to be others (TaskPool.fork). roller: without it, it does no rollouts.
        """
        # The roles are shared and count on: a fork's books begin with their totals, or it would take them back.
        spent = Counter({EXPLORER + key: n for key, n in explorer_costs(self.ledger).items()})
        tasks = self.tasks.fork(records)
        return dataclasses.replace(
            self, tasks=tasks, roller=roller or _no_rollouts, ledger=spent, record=None
        )

    def merge(self, fork: Laboratory) -> None:
        """Adds what was made and booked there; nothing was made here meanwhile."""
        # The roles' own counts are totals, not those of the fork: they are booked once, by _book_roles.
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

    def synthesize(self, contexts: Sequence[Context], **wanted: Any) -> SynthesisStats:
        """wanted: the fields of a SynthesisRequest."""
        request = SynthesisRequest(**wanted)
        return self._booked(request, self.synthesizer.synthesize(self.tasks, contexts, request))

    def synthesize_unguided(
        self, *, scenarios: Sequence[Task] | None = None, all_or_none: bool = False, **wanted: Any
    ) -> SynthesisStats:
        """all_or_none: as Synthesizer.synthesize_unguided has it. wanted: the fields of a SynthesisRequest."""
        request = SynthesisRequest(**wanted)
        try:
            stats = self.synthesizer.synthesize_unguided(
                self.tasks, scenarios or self.scenarios, request, all_or_none=all_or_none
            )
        finally:
            self._book_roles()  # also what was spent in vain
        return self._booked(request, stats)

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        if step not in self._rollers:  # one for a step counts its calls, so that each has seeds of its own
            self._rollers.clear()
            self._rollers[step] = self.roller(step)
        roll = self._rollers[step]
        before = roll.costs.copy()
        groups = roll(tasks, k, role="probe")
        self.ledger.update(roll.costs - before)
        return groups

    def _booked(self, request: SynthesisRequest, stats: SynthesisStats) -> SynthesisStats:
        self.ledger.update(stats.costs(request.kind))
        self._book_roles()
        return stats

    def _book_roles(self) -> None:
        """Books what the roles have spent in all, and hands what they asked of a model to `record`, which a fork lacks."""
        roles = self.synthesizer.roles
        for key, value in (roles.costs or {}).items():
            self.ledger[EXPLORER + key] = value
        if roles.llm_calls and self.record:
            self.record(roles.llm_calls)
            roles.llm_calls.clear()


def _no_rollouts(step: int) -> Roller:
    raise ValueError(
        "The strategy asks for rollouts while the training set evolves, but with config.evolution.async_steps above 0 the "
        "policy is another one by then: set it to 0."
    )
