"""`Laboratory`: the Lab of strategies/base.py, which counts in a ledger what each service costs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coevolve_jax.envs.base import action_pattern
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import Question
from coevolve_jax.loop.collect import Roller
from coevolve_jax.records.costs import EXPLORER, under
from coevolve_jax.strategies.base import Branch
from coevolve_jax.synthesis.explore import offered_names
from coevolve_jax.synthesis.pipeline import SynthesisRequest, SynthesisStats, Synthesizer, TooFew
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Context, Evidence, Group, Task

if TYPE_CHECKING:  # synthesis alone needs no learner
    from coevolve_jax.loop.services import Services


@dataclasses.dataclass(frozen=True)
class Laboratory:
    """strategies.base.Lab, with a ledger of costs.

    Attributes:
      roller: step -> the `Roller` of that step.
      ledger: cost of each service so far. Explorer costs are stored under EXPLORER + the roles' key, and
        handed back to the roles on resume.
      record: receives the roles' LLM calls; None: the roles keep them.
      services: compute with the learner; None: `influence` and `branch` raise ValueError.
    """

    tasks: TaskPool
    scenarios: Sequence[Task]
    synthesizer: Synthesizer
    roller: Callable[[int], Roller]
    ledger: Counter[str]
    record: Callable[[Sequence[LLMCall]], None] | None = None
    services: Services | None = None
    _rollers: dict[int, Roller] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _numbers: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self):
        if (costs := self.synthesizer.roles.costs) is not None:
            costs |= under(self.ledger, EXPLORER)  # after a resume the roles start at 0, the ledger does not
        self._book_roles()

    def fork(
        self, records: Mapping[str, Mapping] | None = None, roller: Callable[[int], Roller] | None = None
    ) -> Laboratory:
        """Returns a copy with the current D_t and an empty ledger, to be merged or dropped.

        Args:
          records: other records for the tasks (TaskPool.fork).
          roller: None: rollouts raise ValueError.
        """
        # The roles are shared, and their costs are totals. The fork's ledger must start from these totals:
        # __post_init__ hands the ledger's costs to the roles.
        spent = Counter({key: n for key, n in self.ledger.items() if key.startswith(EXPLORER)})
        tasks = self.tasks.fork(records)
        return dataclasses.replace(
            self, tasks=tasks, roller=roller or _no_rollouts, ledger=spent, record=None
        )

    def merge(self, fork: Laboratory) -> None:
        """Adds the tasks and costs of a fork. No tasks may have been added here meanwhile."""
        # The roles' costs are totals, so adding the fork's would count them twice: _book_roles sets them.
        self.tasks.add(list(itertools.islice(fork.tasks, len(self.tasks), None)))
        self.ledger.update({key: n for key, n in fork.ledger.items() if not key.startswith(EXPLORER)})
        self._book_roles()

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        self.ledger["reflections"] += len(evidence)
        contexts = self.synthesizer.reflect(evidence)
        self._book_roles()
        return contexts

    def ask(self, role: str, questions: Sequence[Question], *, reader: str = "") -> list[str | None]:
        by_rules = reader and self.synthesizer.config.explorer.get(reader) == "scripted"
        ask = None if by_rules else self.synthesizer.roles.ask
        found: list[str | None] = ask(role, questions) if ask else [None] * len(questions)
        self._book_roles()
        return found

    def offered(self, scenario: Task) -> frozenset[str]:
        return offered_names(self.synthesizer.tools(scenario))

    @property
    def own_patterns(self) -> bool:
        return self.synthesizer.action_pattern is not action_pattern

    def synthesize(
        self, contexts: Sequence[Context], *, into: TaskPool | None = None, **wanted: Any
    ) -> SynthesisStats:
        """wanted: the fields of a SynthesisRequest."""
        request = self._request(**wanted)
        pool = self.tasks if into is None else into
        return self._booked(request, self.synthesizer.synthesize(pool, contexts, request))

    def synthesize_unguided(
        self,
        *,
        scenarios: Sequence[Task] | None = None,
        into: TaskPool | None = None,
        all_or_none: bool = False,
        **wanted: Any,
    ) -> SynthesisStats:
        """wanted: the fields of a SynthesisRequest. all_or_none: as in Synthesizer.synthesize_unguided."""
        request = self._request(**wanted)
        pool = self.tasks if into is None else into
        try:
            stats = self.synthesizer.synthesize_unguided(
                pool, scenarios or self.scenarios, request, all_or_none=all_or_none
            )
        except TooFew as error:
            self._booked(request, error.stats)
            raise
        finally:
            self._book_roles()  # also costs that led to no task
        return self._booked(request, stats)

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        with self._rolling(step) as roll:
            return roll(tasks, k, role="probe")

    def influence(
        self, goal: Sequence[Group], groups: Sequence[Group], *, preconditioned: bool = True
    ) -> list[float]:
        found, gradients = self._learner.influence(goal, groups, preconditioned)
        self.ledger["gradients/influence"] += gradients
        return found

    def branch(
        self, tasks: Sequence[Task], goal: Sequence[Task], *, updates: int, batch: int, k: int, step: int
    ) -> Branch:
        number = self._numbers["branch", step]
        self._numbers["branch", step] += 1
        with self._rolling(step) as roll:
            found, made = self._learner.branch(
                roll, tasks, goal, number, updates=updates, batch=batch, k=k, step=step
            )
        self.ledger["updates/branch"] += made
        return found

    @property
    def _learner(self) -> Services:
        if self.services is None:
            raise ValueError(
                "The strategy asks for gradients, and nothing trains here: name another strategy."
            )
        return self.services

    @contextlib.contextmanager
    def _rolling(self, step: int) -> Iterator[Roller]:
        """The step's Roller: it counts its calls, and each gets new seeds. Its costs are booked."""
        if step not in self._rollers:
            self._rollers.clear()
            self._rollers[step] = self.roller(step)
        roll = self._rollers[step]
        before = roll.costs.copy()
        try:
            yield roll
        finally:
            self.ledger.update(roll.costs - before)

    def adopt(
        self, tasks: Sequence[Task], *, kind: str, solved: Mapping[str, float] | None = None
    ) -> SynthesisStats:
        stats = self.synthesizer.adopt(self.tasks, tasks, kind, solved or {})
        self.ledger.update(stats.costs(kind))
        return stats

    def _request(self, **wanted: Any) -> SynthesisRequest:
        request = SynthesisRequest(**wanted)
        first_id = request.first_id + self._numbers[request.kind, request.step]
        return dataclasses.replace(request, first_id=first_id)

    def _booked(self, request: SynthesisRequest, stats: SynthesisStats) -> SynthesisStats:
        self._numbers[request.kind, request.step] += max(stats.proposed, stats.contexts)
        self.ledger.update(stats.costs(request.kind))
        self._book_roles()
        return stats

    def _book_roles(self) -> None:
        """Sets the roles' total costs in the ledger, and hands their LLM calls to `record`.

        A fork has no `record`: its calls wait for the merge.
        """
        roles = self.synthesizer.roles
        for key, value in (roles.costs or {}).items():
            self.ledger[EXPLORER + key] = value
        if roles.llm_calls and self.record:
            self.record(roles.llm_calls)
            roles.llm_calls.clear()


def _no_rollouts(step: int) -> Roller:
    raise ValueError(
        "The strategy asks for rollouts while the training set evolves, "
        "but with config.evolution.async_steps above 0 the policy is another one by then: set it to 0."
    )
