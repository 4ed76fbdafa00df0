"""From contexts to validated tasks in D_t: reflect -> explore -> abstract -> validate -> admit.

A task passes through ten types. Each is made from the one before:

    Context      the reflection on a weakness, or a bare scenario          explorers: reflect
    Episode      the context at one step of a round                        explore.py
    Call         the explorer's action there                               explorers: act
    Triplet      the call with the environment's answer                    explore.py
    Exploration  all triplets under the context                            explore.py
    Goal         triplets to reproduce; then also the steps they need      explorers: abstract; shorten.py
    Proposal     the goal in a user's words                                explorers: abstract
    Verdict      the result of execution, validator, leak guard, strategy  validate.py
    Task         the proposal with its lineage                             validate.py, lineage.py
    Record       its history in D_t                                        task_pool.py

`Synthesizer` runs this for a D_t; `run_pipeline` runs explore -> abstract -> validate for one batch of
contexts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.envs.base import EnvPool, action_pattern
from coevolve_jax.explorers.base import Exploration, Proposal, Roles
from coevolve_jax.synthesis import lineage
from coevolve_jax.synthesis.explore import Tools, explore, unguided
from coevolve_jax.synthesis.leakage import REASON, LeakGuard, Near
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.rows import exploration_row, proposal_row
from coevolve_jax.synthesis.settings import Fits, Settings, any_length
from coevolve_jax.synthesis.shorten import shorten
from coevolve_jax.synthesis.solve import solve
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Admit, Verdict, admitted, validate
from coevolve_jax.types import Call, Context, Evidence, Task

Relocate = Callable[[Context], Context]  # moves a context to another scenario

MAX_PASSES = 3  # over the same contexts, while tasks are missing
MAX_PLACES = 5  # scenarios to try per context before giving up, if it can be relocated
MAX_FRUITLESS = 20  # consecutive rounds of unguided exploration without a new task, before giving up
SOMETIMES = ("solve_steps", "judge_agreement")  # fields of SynthesisStats that only some explorers have


@dataclasses.dataclass(frozen=True)
class SynthesisRequest:
    """A request for new tasks.

    Attributes:
      wanted: how many, at most.
      kind, step: for their lineage; with a number they make the ids.
      admit: may refuse tasks of each validated batch.
      relocate: moves a context to another scenario. With it, each context gives one task before any gives a
        second.
      once: explore each context once, and take at most one task of each.
      first_id: the first number of the ids. Two requests of one kind in one step need different ones.
    """

    wanted: int
    kind: str
    step: int
    rng: np.random.Generator
    admit: Admit | None = None
    relocate: Relocate | None = None
    once: bool = False
    first_id: int = 0

    def left(self, made: SynthesisStats) -> SynthesisRequest:
        """The request for the tasks that are still missing. Its ids continue after the proposals made."""
        wanted, first_id = self.wanted - made.added, self.first_id + made.proposed
        return dataclasses.replace(self, wanted=wanted, first_id=first_id)


class TooFew(ValueError):
    """Exploration found fewer tasks than were needed. stats: of what it did find."""

    def __init__(self, why: str, stats: SynthesisStats):
        super().__init__(why)
        self.stats = stats


@dataclasses.dataclass
class SynthesisStats:
    """Statistics of the proposals.

    Attributes:
      contexts: contexts explored.
      environment_steps: calls made by exploration.
      proposed, accepted, retained, discarded: proposals, by their verdict.
      added: tasks that D_t took.
      solve_steps: calls made by solving (synthesis/solve.py).
      refused: counts by reason: failed validation, leaks, duplicates, over_quota, pool_full, the strategy's.
      judge_agreement: counts of Verdict.agreement.
      explored: a row of explorations.jsonl per context (synthesis/rows.py). It is logged, not saved with the
        counts.
    """

    contexts: int = 0
    environment_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    retained: int = 0
    discarded: int = 0
    added: int = 0
    solve_steps: int = 0
    refused: Counter = dataclasses.field(default_factory=Counter)
    judge_agreement: Counter = dataclasses.field(default_factory=Counter)
    explored: list[dict] = dataclasses.field(default_factory=list, repr=False, compare=False)

    @property
    def productive(self) -> set[str]:
        """Ids of the contexts that gave a task."""
        return {row["context"]["id"] for row in self.explored if any(p["task"] for p in row["proposals"])}

    def count(self, verdict: Verdict, refusal: str | None) -> None:
        """Counts a proposal. refusal: why D_t does not take it; None: it does."""
        self.proposed += 1
        self.accepted += verdict.verdict == "accept"
        self.retained += verdict.verdict == "retain"
        self.discarded += verdict.task is None
        self.added += refusal is None
        self.refused.update([] if refusal is None else [refusal])

    def add(self, other: SynthesisStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def costs(self, kind: str) -> dict[str, int]:
        """The counts under their names in the ledger of a run. kind: of the tasks."""
        solving = {"environment_steps/solve": self.solve_steps} if self.solve_steps else {}
        return {
            f"environment_steps/{kind}": self.environment_steps,
            f"tasks_proposed/{kind}": self.proposed,
            f"tasks_added/{kind}": self.added,
            **solving,
        }

    def adopting(self, adopted: SynthesisStats, tasks: TaskPool) -> SynthesisStats:
        """Returns these statistics of drafts, with what D_t took of them.

        The drafts that D_t does not hold count as refused, in the rows of `explored` as "not_adopted".
        """
        refused = self.refused + adopted.refused + Counter(not_adopted=self.added - adopted.proposed)
        left = {"task": None, "verdict": "refused", "reason": "not_adopted"}
        explored = [
            {
                **row,
                "proposals": [
                    p if p["task"] in ids else {**p, **left} if p["task"] else p for p in row["proposals"]
                ],
            }
            for ids in [{None, *(task.id for task in tasks)}]
            for row in self.explored
        ]
        return dataclasses.replace(self, added=adopted.added, refused=+refused, explored=explored)

    def to_json(self) -> dict:
        """JSON values with the pass rate. Leaves out empty fields of SOMETIMES."""
        passed = (self.accepted + self.retained) / self.proposed if self.proposed else None
        counts = {k: n for k, n in vars(self).items() if k != "explored" and (n or k not in SOMETIMES)}
        return {**counts, "refused": dict(sorted(self.refused.items())), "pass_rate": passed}

    @classmethod
    def from_json(cls, data: Mapping) -> SynthesisStats:
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        counters = {name: Counter(data.get(name, {})) for name in ("refused", "judge_agreement")}
        return cls(**{**fields, **counters})


@dataclasses.dataclass(frozen=True)
class Synthesizer:
    """Makes validated tasks and puts them into D_t.

    Attributes:
      roles: the explorer's roles.
      tools: task -> tools that the environment offers in it; calls to others are not executed.
      env_pool: the real environment.
      config: the run's config; the sections evolution, data and explorer are read.
      guard: refuses near copies of evaluation tasks. None only while these are made themselves.
      fits: whether a rollout can hold a task.
      action_pattern: the environment family's.
    """

    roles: Roles
    tools: Tools
    env_pool: EnvPool
    config: ConfigDict
    guard: LeakGuard | None
    fits: Fits = any_length
    action_pattern: Callable[[Call], str] = action_pattern

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """Returns one context for each piece of evidence, in order."""
        return self.roles.reflector.reflect(evidence)

    def synthesize(
        self, tasks: TaskPool, contexts: Sequence[Context], request: SynthesisRequest
    ) -> SynthesisStats:
        """Adds tasks made under these contexts, in up to MAX_PASSES passes over all of them.

        With request.relocate each context is first explored in up to MAX_PLACES scenarios until it gives a
        task. A second task of a context counts as refused, "over_quota", meanwhile, and so it does with
        request.once. Tasks beyond the pool's capacity are not made; they count as refused, "pool_full". A
        pass in which nothing answers the explorer's questions is the last one.
        """
        (total, request), silent = self._within_capacity(tasks, request), False

        def pass_over(contexts: Sequence[Context], max_per_context: float = math.inf) -> SynthesisStats:
            nonlocal silent
            left, before = request.left(total), Counter(self.roles.costs)
            if silent or not contexts or left.wanted <= 0:
                return SynthesisStats()
            stats = self._one_pass(tasks, contexts, left, max_per_context)
            total.add(stats)
            silent = not stats.proposed and bool(self._unanswered(before))
            return stats

        if request.once:
            pass_over(contexts, max_per_context=1)
            return total
        if request.relocate is not None:
            unproductive = list(contexts)
            for _ in range(MAX_PLACES):
                gave = pass_over(unproductive, max_per_context=1).productive
                unproductive = [request.relocate(c) for c in unproductive if c.id not in gave]
        # Repeat the same contexts: request.rng has moved on, so exploration finds other steps.
        for _ in range(MAX_PASSES):
            pass_over(contexts)
        return total

    def synthesize_unguided(
        self,
        tasks: TaskPool,
        scenarios: Sequence[Task],
        request: SynthesisRequest,
        *,
        all_or_none: bool = False,
        on_added: Callable[[int], object] = lambda n: None,
    ) -> SynthesisStats:
        """Adds tasks from unguided exploration of random scenarios, as for D_0, until there are enough.

        Ends early after MAX_FRUITLESS consecutive rounds without a new task. Without all_or_none it also ends
        after a round in which nothing answers the explorer's questions. Tasks beyond the pool's capacity are
        not made, as in `synthesize`.

        Args:
          all_or_none: raise if fewer than request.wanted are found.
          on_added: called after each round with the number of tasks that it added.

        Raises:
          ValueError: there are no scenarios.
          TooFew: with all_or_none, too few were found, or the explorer's model answers nothing. The latter is
            raised after the first round, and whenever a budget is spent.
        """
        (total, request), fruitless = self._within_capacity(tasks, request), 0
        if not scenarios and request.wanted > 0:
            raise ValueError(
                f"There is no scenario to explore for tasks of kind {request.kind!r}: name other splits in "
                "config.environment."
            )
        while total.added < request.wanted and fruitless < MAX_FRUITLESS:
            left, before = request.left(total), Counter(self.roles.costs)
            # At least 4, since not every scenario gives a task; at most 32, to limit waste in the last round.
            count = min(32, max(4, left.wanted))
            chosen = [scenarios[i] for i in request.rng.choice(len(scenarios), count)]
            name = f"{request.kind}-{request.step}-context"
            number = request.first_id + total.contexts
            contexts = [unguided(s, f"{name}-{number + n}") for n, s in enumerate(chosen)]
            stats = self._one_pass(tasks, contexts, left)
            total.add(stats)
            on_added(stats.added)
            fruitless = 0 if stats.added else fruitless + 1
            why = "" if stats.proposed else self._unanswered(before)
            if why and not all_or_none:
                break
            # A server may come back, a spent budget does not.
            spent = Counter(self.roles.costs)["llm_faults/budget"] > before["llm_faults/budget"]
            if why and (spent or fruitless == MAX_FRUITLESS or not total.added):
                raise TooFew(why, total)
        if all_or_none and total.added < request.wanted:
            raise TooFew(self._too_few(total, request.wanted), total)
        return total

    def _unanswered(self, before: Counter) -> str:
        """Says why the explorer's model, if it has one, gave no answer since its costs were `before`."""
        unanswered = self.roles.unanswered
        return unanswered(Counter(self.roles.costs) - before) if unanswered else ""

    def _too_few(self, total: SynthesisStats, wanted: int) -> str:
        costs = self.roles.costs or {}
        faults = {key: n for key, n in costs.items() if "faults/" in key or "refused/" in key}
        longer = (
            "raise max_length or max_new_tokens of config.rollout, for held-out tasks config.evaluation, "
        )
        return (
            f"Unguided exploration found {total.added} of {wanted} new tasks "
            f"({dict(total.refused) | faults}): {longer if total.refused['too_long'] else ''}"
            "let config.environment offer more, widen data.min_calls..max_calls, mend the explorer, "
            "or ask for fewer tasks."
        )

    def add(self, tasks: TaskPool, task: Task, solved: float | None = None) -> tuple[str | None, Near | None]:
        """Adds a validated task, with its similarity to the evaluation tasks in the lineage.

        solved: share of rollouts that solved it; None: it was not probed.

        Returns:
          (refusal or None, for a leak the evaluation task that it is near).
        """
        near = self.guard.nearest(task) if self.guard is not None else None
        if self.guard is not None and near is not None and self.guard.refuses(near):
            return REASON, near
        task = dataclasses.replace(task, lineage=lineage.in_pool(task.lineage, near, solved))
        return tasks.add([task])[0], None

    def adopt(
        self, tasks: TaskPool, drafts: Sequence[Task], kind: str, solved: Mapping[str, float]
    ) -> SynthesisStats:
        """Adds validated tasks of another pool. kind: their new Lineage.kind. solved: by id, as in `add`."""
        stats = SynthesisStats(proposed=len(drafts), accepted=len(drafts))
        for task in drafts:
            task = dataclasses.replace(task, lineage=dataclasses.replace(task.lineage, kind=kind))
            refusal, _ = self.add(tasks, task, solved.get(task.id))
            stats.added += refusal is None
            stats.refused.update([] if refusal is None else [refusal])
        return stats

    def _leaks(self, task: Task) -> bool:
        return self.guard is not None and self.guard.check(task) is not None

    @staticmethod
    def _within_capacity(
        tasks: TaskPool, request: SynthesisRequest
    ) -> tuple[SynthesisStats, SynthesisRequest]:
        """Limits the request to the pool's capacity. The stats count the rest as refused, "pool_full"."""
        fitting = int(min(request.wanted, tasks.remaining_capacity))
        refused = +Counter(pool_full=request.wanted - fitting)
        return SynthesisStats(refused=refused), dataclasses.replace(request, wanted=fitting)

    def _one_pass(
        self,
        tasks: TaskPool,
        contexts: Sequence[Context],
        request: SynthesisRequest,
        max_per_context: float = math.inf,
    ) -> SynthesisStats:
        """Works through the contexts once."""
        made = run_pipeline(
            self.roles, self.tools, self.env_pool, contexts,
            Settings.of_run(self.config, self.fits, self.action_pattern),
            Birth(request.kind, request.step, request.first_id), request.rng,
        )  # fmt: skip
        rows = {e.context.id: exploration_row(e, request.step) for e in made.explorations}
        stats = SynthesisStats(len(contexts), made.environment_steps, explored=list(rows.values()))
        stats.judge_agreement.update(v.agreement for v in made.verdicts if v.agreement)
        verdicts = made.verdicts
        if self.config.explorer.get("solve", 0) and getattr(self.roles.explorer, "SOLVES", True):
            solve = lambda tasks: self._solve(tasks, stats, request.rng)
            verdicts = admitted(verdicts, solve, unless=self._leaks)
        if request.admit is not None:
            verdicts = admitted(verdicts, request.admit, unless=self._leaks)
        judged = zip(made.proposals, verdicts, strict=True)
        self._take(tasks, judged, request.wanted, max_per_context, stats)
        return stats

    def _solve(self, tasks: Sequence[Task], stats: SynthesisStats, rng: np.random.Generator) -> list[Verdict]:
        """Refuses tasks that the explorer does not solve from their words in config.explorer.solve attempts.

        The refusal is "not_solved", or "environment" if the infrastructure failed.
        """
        done = solve(
            self.roles.explorer, self.tools, self.env_pool, tasks,
            attempts=self.config.explorer.solve, steps=2 * self.config.data.max_calls, rng=rng,
        )  # fmt: skip
        stats.solve_steps += sum(attempt.steps for attempt in done)
        word = lambda outcome: None if outcome.success else "not_solved" if outcome.valid else "environment"
        return [Verdict(word(attempt.outcome)) for attempt in done]

    def _take(
        self,
        tasks: TaskPool,
        judged: Iterable[tuple[Proposal, Verdict]],
        wanted: int,
        max_per_context: float,
        stats: SynthesisStats,
    ) -> None:
        """Adds valid tasks that are no leak and no duplicate, up to `wanted`. Counts them in `stats`.

        `judged` covers all contexts before it returns to any, so wherever `wanted` ends it, contexts share
        fairly.
        """
        rows = {row["context"]["id"]: row["proposals"] for row in stats.explored}
        given: Counter[str] = Counter()
        for proposal, verdict in judged:
            if stats.added >= wanted:  # the remaining proposals are neither examined nor counted
                break
            context, refusal, leak = proposal.context.id, verdict.refusal, None
            if verdict.task is not None and given[context] >= max_per_context:
                refusal = "over_quota"
            elif verdict.task is not None:
                refusal, leak = self.add(tasks, verdict.task, verdict.solved)
            given[context] += refusal is None
            stats.count(verdict, refusal)
            rows[context].append(proposal_row(proposal, verdict, refusal, leak))


class Synthesis(NamedTuple):
    """The results of a batch of contexts; verdicts[i] is on proposals[i]."""

    explorations: list[Exploration]
    proposals: list[Proposal]
    verdicts: list[Verdict]

    @property
    def environment_steps(self) -> int:
        return sum(len(e.triplets) for e in self.explorations)


def run_pipeline(
    roles: Roles,
    tools: Tools,
    env_pool: EnvPool,
    contexts: Sequence[Context],
    settings: Settings,
    birth: Birth,
    rng: np.random.Generator,
) -> Synthesis:
    """Runs explore -> abstract -> validate for a batch of contexts, without a D_t.

    Proposals are ordered in rounds: the first of every context comes before the second of any.
    """
    explorations = explore(
        roles.explorer, tools, env_pool, contexts, rounds=settings.rounds, steps=settings.steps, rng=rng
    )
    limits, find_steps = settings.limits, functools.partial(shorten, env_pool)
    groups = roles.abstractor.abstract(explorations, limits, find_steps)
    proposals = [group[i] for i in range(limits.proposals) for group in groups if i < len(group)]
    verdicts = validate(roles, tools, env_pool, proposals, settings, birth, rng)
    return Synthesis(explorations, proposals, verdicts)
