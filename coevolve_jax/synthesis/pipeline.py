"""From contexts to validated tasks in D_t: reflect -> explore -> abstract -> validate."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Exploration, Limits, Proposal, Roles
from coevolve_jax.synthesis.explore import Tools, explore, unguided
from coevolve_jax.synthesis.leakage import REASON, LeakGuard, Near
from coevolve_jax.synthesis.shorten import shorten
from coevolve_jax.synthesis.solve import solve
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Fits, Verdict, any_length, validate
from coevolve_jax.types import Context, Evidence, Task

Relocate = Callable[[Context], Context]


class Admission(NamedTuple):
    """The last word on a validated task. refusal: why it is not taken; None: it is. solved: the share of the rollouts
    that tried it which solved it, where any did."""

    refusal: str | None
    solved: float | None = None


Admit = Callable[[Sequence[Task]], Sequence[Admission]]

MAX_PASSES = 3  # over the same contexts, for as long as too few tasks are valid
MAX_PLACES = 5  # where such a context is explored as may be explored elsewhere, until it gives a task
SOMETIMES = ("solve_steps", "judge_agreement")  # fields of SynthesisStats that only some explorers have
OBSERVED = 400  # characters of an answer that explorations.jsonl keeps


@dataclasses.dataclass
class SynthesisStats:
    """What became of the proposals. refused: by reason, leaks and duplicates as well as what did not validate.

    environment_steps: of exploration; solve_steps: of solving. judge_agreement: counts of Verdict.agreement. explored:
    a row of explorations.jsonl for each context (`_explored`); it is logged, not kept with the counts.
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

    def add(self, other: SynthesisStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict:
        """What no explorer of the run does is left out where it is empty (SOMETIMES)."""
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

    roles: the explorer. tools: what the environment offers in a task; nothing else is executed. env_pool: the real
    environment. config: the run's; its sections evolution and data are read, and explorer.solve. guard: refuses near copies of
    evaluation tasks (None only while the evaluation tasks themselves are made). fits: whether a rollout can hold a task.
    """

    roles: Roles
    tools: Tools
    env_pool: EnvPool
    config: ConfigDict
    guard: LeakGuard | None
    fits: Fits = any_length

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """One context for each piece of evidence, in order."""
        return self.roles.reflector.reflect(evidence)

    def synthesize(
        self,
        tasks: TaskPool,
        contexts: Sequence[Context],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        relocate: Relocate | None = None,
    ) -> SynthesisStats:
        """Adds `wanted` tasks at most, made under these contexts in up to MAX_PASSES passes over all of them.

        kind and step go to their lineage and, with a number, make their ids. admit: has a last word on validated
        tasks. relocate: the same context in another place; with it each context is explored in MAX_PLACES places
        until it gives a task, before any gives a second ("over_quota"). What a full pool has no room for is not made; it
        is counted as refused, "pool_full".
        """
        total, wanted = self._within_capacity(tasks, wanted)

        def pass_over(contexts: Sequence[Context], max_per_context: float = math.inf) -> SynthesisStats:
            missing, first_id = wanted - total.added, total.proposed
            if not contexts or missing <= 0:
                return SynthesisStats()
            stats = self._one_pass(
                tasks, contexts, missing, kind, step, first_id, rng, admit, max_per_context
            )
            total.add(stats)
            return stats

        if relocate is not None:
            unproductive = list(contexts)
            for _ in range(MAX_PLACES):
                gave = pass_over(unproductive, max_per_context=1).productive
                unproductive = [relocate(context) for context in unproductive if context.id not in gave]
        for _ in range(MAX_PASSES):
            pass_over(contexts)
        return total

    def synthesize_unguided(
        self,
        tasks: TaskPool,
        scenarios: Sequence[Task],
        *,
        wanted: int,
        kind: str,
        step: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        all_or_none: bool = False,
        on_added: Callable[[int], object] = lambda n: None,
    ) -> SynthesisStats:
        """Unguided exploration of random scenarios until `wanted` tasks were added (this is how D_0 comes to be).

        What a full pool has no room for is not made, as in `synthesize`. Where 20 rounds on end give no new task it ends with
        those that it has, or with all_or_none it raises ValueError: at once where the first round was answered by nobody.
        """
        (total, wanted), empty = self._within_capacity(tasks, wanted), 0
        while total.added < wanted:
            missing, before = wanted - total.added, Counter(self.roles.costs)
            chosen = [scenarios[i] for i in rng.choice(len(scenarios), min(32, max(4, missing)))]
            contexts = [
                unguided(s, f"{kind}-{step}-context-{total.contexts + n}") for n, s in enumerate(chosen)
            ]
            stats = self._one_pass(tasks, contexts, missing, kind, step, total.proposed, rng, admit)
            total.add(stats)
            on_added(stats.added)
            empty = 0 if stats.added else empty + 1
            if all_or_none and not stats.proposed and (empty == 20 or not total.added):
                spent, unanswered = Counter(self.roles.costs) - before, self.roles.unanswered
                if unanswered and (why := unanswered(spent)):
                    raise ValueError(why)
            if empty == 20:
                if not all_or_none:
                    break
                costs = self.roles.costs or {}
                why = dict(total.refused) | {
                    key: n for key, n in costs.items() if "faults/" in key or "refused/" in key
                }
                raise ValueError(
                    f"Unguided exploration found {total.added} of {wanted} new tasks ({why}): let config.environment "
                    "offer more, widen data.min_calls..max_calls, mend the explorer, or ask for fewer tasks."
                )
        return total

    def admit(self, tasks: TaskPool, task: Task) -> tuple[str | None, Near | None]:
        """Adds a validated task, with its similarity to the evaluation tasks. Returns why not where it is refused, and
        for a leak the evaluation task that it is near."""
        if self.guard is not None:
            near = self.guard.nearest(task)
            if self.guard.refuses(near):
                return REASON, near
            cosine = round(near.similarity, 4)
            lineage = dataclasses.replace(
                task.lineage, similarity=cosine, nearest=near.task, measure=near.measure
            )
            task = dataclasses.replace(task, lineage=lineage)
        return tasks.add([task])[0], None

    def _solve(
        self, tasks: Sequence[Task], stats: SynthesisStats, rng: np.random.Generator
    ) -> list[Admission]:
        """Refuses, as "not_solved", what the explorer does not do from the words alone in config.explorer.solve attempts;
        as "environment" where that could not be found out."""
        done = solve(
            self.roles.explorer, self.tools, self.env_pool, tasks,
            attempts=self.config.explorer.solve, steps=2 * self.config.data.max_calls, rng=rng,
        )  # fmt: skip
        stats.solve_steps += sum(attempt.steps for attempt in done)
        word = lambda outcome: None if outcome.success else "not_solved" if outcome.valid else "environment"
        return [Admission(word(attempt.outcome)) for attempt in done]

    @staticmethod
    def _within_capacity(tasks: TaskPool, wanted: int) -> tuple[SynthesisStats, int]:
        """How many tasks can be added, and the stats that say how many can not."""
        fitting = int(min(wanted, tasks.remaining_capacity))
        return SynthesisStats(refused=+Counter(pool_full=wanted - fitting)), fitting

    def _one_pass(
        self,
        tasks: TaskPool,
        contexts: Sequence[Context],
        wanted: int,
        kind: str,
        step: int,
        first_id: int,
        rng: np.random.Generator,
        admit: Admit | None = None,
        max_per_context: float = math.inf,
    ) -> SynthesisStats:
        """explore -> abstract -> validate -> refuse leaks and duplicates -> D_t grows by `wanted` at most, by `max_per_context` at
        most from a context."""
        e, d = self.config.evolution, self.config.data
        made = synthesize(
            self.roles,
            self.tools,
            self.env_pool,
            contexts,
            Limits(e.proposals, d.min_calls, d.max_calls, d.max_turns),
            rounds=e.rounds,
            steps=e.steps,
            rng=rng,
            kind=kind,
            step=step,
            first_id=first_id,
            fits=self.fits,
            executions=e.get("executions", 1) if e.validate else 0,
            calibration=self.config.get("explorer", {}).get("calibration", 0),
        )
        rows = {e.context.id: _explored(e, step) for e in made.explorations}
        stats = SynthesisStats(len(contexts), made.environment_steps, explored=list(rows.values()))
        stats.judge_agreement.update(v.agreement for v in made.verdicts if v.agreement)
        verdicts = made.verdicts
        if self.config.get("explorer", {}).get("solve", 0):
            verdicts = _admitted(verdicts, lambda tasks: self._solve(tasks, stats, rng))
        if admit is not None:
            verdicts = _admitted(verdicts, admit)
        # Their order covers all contexts before it comes back to any, wherever `wanted` ends it.
        given: Counter[str] = Counter()
        for proposal, verdict in zip(made.proposals, verdicts, strict=True):
            if stats.added < wanted:
                stats.proposed += 1
                stats.accepted += verdict.verdict == "accept"
                stats.retained += verdict.verdict == "retain"
                stats.discarded += verdict.task is None
                refusal, leak = verdict.reason, None
                if verdict.task is not None:
                    over_quota = given[proposal.context.id] >= max_per_context
                    refusal, leak = ("over_quota", None) if over_quota else self.admit(tasks, verdict.task)
                stats.added += refusal is None
                given[proposal.context.id] += refusal is None
                stats.refused.update([refusal] if refusal else [])
                rows[proposal.context.id]["proposals"].append(
                    {
                        "task": verdict.task.id if verdict.task is not None and refusal is None else None,
                        "description": proposal.description,
                        "triplets": list(proposal.triplets),
                        "verdict": "refused" if verdict.task is not None and refusal else verdict.verdict,
                        "reason": refusal or verdict.reason,
                        **({"near": leak.to_json()} if leak else {}),
                        **({"solved": verdict.solved} if verdict.solved is not None else {}),
                    }
                )
        return stats


def _admitted(verdicts: Sequence[Verdict], admit: Admit) -> list[Verdict]:
    """The verdicts after `admit` had its word on the valid tasks."""
    valid = {n: v.task for n, v in enumerate(verdicts) if v.task is not None}
    after, words = list(verdicts), admit(list(valid.values())) if valid else ()
    for (n, task), (refusal, solved) in zip(valid.items(), words, strict=True):
        if refusal is not None:
            after[n] = Verdict("discard", refusal, None, solved=solved)
        elif solved is not None:
            told = dataclasses.replace(task, lineage=dataclasses.replace(task.lineage, solved=solved))
            after[n] = dataclasses.replace(after[n], task=told, solved=solved)
    return after


class Synthesis(NamedTuple):
    """What a batch of contexts led to; verdicts[i] is on proposals[i]."""

    explorations: list[Exploration]
    proposals: list[Proposal]
    verdicts: list[Verdict]

    @property
    def environment_steps(self) -> int:
        return sum(len(e.triplets) for e in self.explorations)


def synthesize(
    roles: Roles,
    tools: Tools,
    env_pool: EnvPool,
    contexts: Sequence[Context],
    limits: Limits,
    *,
    rounds: int,
    steps: int,
    rng: np.random.Generator,
    kind: str,
    fits: Fits = any_length,
    step: int = 0,
    first_id: int = 0,
    executions: int = 1,
    calibration: int = 0,
) -> Synthesis:
    """explore -> abstract -> validate for a batch of contexts.

    Proposals are in such an order that the first of every context comes before the second of any. The n-th one's
    task has the id f"{kind}-{step}-{first_id + n}".
    """
    explorations = explore(roles.explorer, tools, env_pool, contexts, rounds=rounds, steps=steps, rng=rng)
    groups = roles.abstractor.abstract(explorations, limits, functools.partial(shorten, env_pool))
    proposals = [group[i] for i in range(limits.proposals) for group in groups if i < len(group)]
    verdicts = validate(
        roles.validator,
        tools,
        env_pool,
        proposals,
        ids=[f"{kind}-{step}-{first_id + n}" for n in range(len(proposals))],
        kind=kind,
        step=step,
        explorer=roles.name,
        fits=fits,
        min_calls=limits.min_calls,
        executions=executions,
        calibration=calibration,
        rng=rng,
    )
    return Synthesis(explorations, proposals, verdicts)


def _explored(exploration: Exploration, step: int) -> dict:
    """A row of explorations.jsonl: the reflection, what was done under it, and (to be added) what was made of it."""
    context = exploration.context
    return {
        "step": step,
        "context": {
            "id": context.id,
            "signal": context.signal,
            "task": context.task.id,
            "summary": context.summary,
            "failure_cause": context.failure_cause,
            "instability_pattern": context.instability_pattern,
            "focus_pattern": list(context.focus_pattern),
            "avoid": list(context.avoid),
            "must": list(context.must),
        },
        "triplets": [
            {
                "index": t.index,
                "round": t.round,
                "call": t.call.to_json(),
                "observation": t.observation.text[:OBSERVED],
                "error": t.observation.error,
            }
            for t in exploration.triplets
        ],
        "proposals": [],
    }
