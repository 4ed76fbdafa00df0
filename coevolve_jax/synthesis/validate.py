"""Validation: a proposal becomes a task only if it runs and is scored a success in a fresh environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.synthesis import abstract, explore
from coevolve_jax.synthesis.abstract import Proposal
from coevolve_jax.types import Context, Lineage, Observation, Outcome, Task


@dataclasses.dataclass(frozen=True)
class Verdict:
    """verdict: "accept", "retain" or "discard"; task is None where discarded. reason:

    reproduced     every call ran and answered as recorded, and the environment scores a success
    step_failed    a call came back as an error
    result_differs the judge found another answer than exploration recorded
    state_differs  the calls ran, but the environment does not score them a success
    too_short      what passes has fewer calls than a task must have
    environment    the infrastructure failed: nothing is known about the proposal
    """

    verdict: str
    reason: str
    task: Task | None


class Judge(Protocol):
    name: str

    def judge(self, proposal: Proposal, turn: int, observations: Sequence[Observation]) -> str | None:
        """Why the answers of this turn do not meet the goal, as a reason; None where they do."""


def validate(
    judge: Judge,
    pool: EnvPool,
    proposals: Sequence[Proposal],
    *,
    ids: Sequence[str],
    kind: str,
    step: int,
    min_calls: int = 2,
) -> list[Verdict]:
    """Executes every proposal in a fresh environment and passes a verdict on it.

    Everything passes: accept. The first turns pass and hold at least min_calls
    calls: retain, with the task cut to these turns. Otherwise: discard. ids[i] is
    the id of the task made of proposals[i]; kind and step go to its lineage.
    """
    tasks = [_task(p, id, kind, step, judge.name) for p, id in zip(proposals, ids, strict=True)]
    sessions = pool.reset(tasks)
    reasons: list[list[str | None]] = [[] for _ in tasks]
    for turn in range(max((len(t.turns) for t in tasks), default=0)):
        active = [n for n, t in enumerate(tasks) if turn < len(t.turns)]
        answers = pool.step([sessions[n] for n in active], [tasks[n].turns[turn].calls for n in active])
        pool.end_turn([sessions[n] for n in active])
        for n, observations in zip(active, answers):
            reasons[n].append(_turn_reason(judge, proposals[n], turn, observations))
    outcomes = pool.score(sessions)
    pool.close(sessions)
    return [_verdict(t, r, o, min_calls) for t, r, o in zip(tasks, reasons, outcomes)]


def synthesize(
    explorer,
    pool: EnvPool,
    contexts: Sequence[Context],
    *,
    rounds: int,
    steps: int,
    per_context: int,
    rng: np.random.Generator,
    kind: str,
    step: int = 0,
    first_id: int = 0,
    min_calls: int = 2,
    max_calls: int = 6,
    max_turns: int = 3,
) -> tuple[list[Verdict], int]:
    """explore -> abstract -> validate for a batch of contexts, per_context proposals each at most.

    Returns a verdict on each proposal, the first of every context before the second of any, and the number
    of environment steps explored. The n-th proposal's task has the id f"{kind}-{step}-{first_id + n}".
    """
    triplets = explore.explore_all(explorer, pool, contexts, rounds=rounds, steps=steps, rng=rng)
    groups = abstract.abstract_all(
        explorer,
        pool,
        contexts,
        triplets,
        rng=rng,
        count=per_context,
        min_calls=min_calls,
        max_calls=max_calls,
        max_turns=max_turns,
    )
    proposals = [group[i] for i in range(per_context) for group in groups if i < len(group)]
    ids = [f"{kind}-{step}-{first_id + n}" for n in range(len(proposals))]
    verdicts = validate(explorer, pool, proposals, ids=ids, kind=kind, step=step, min_calls=min_calls)
    return verdicts, sum(map(len, triplets))


def _task(proposal: Proposal, id: str, kind: str, step: int, explorer: str) -> Task:
    scenario = proposal.context.task
    lineage = Lineage(
        kind=kind,
        signal=proposal.context.signal,
        parent=scenario.id,
        context=proposal.context.id,
        explorer=explorer,
        triplets=proposal.triplets,
        step=step,
    )
    return dataclasses.replace(
        scenario, id=id, turns=proposal.turns, description=proposal.description, lineage=lineage
    )


def _turn_reason(
    judge: Judge, proposal: Proposal, turn: int, observations: Sequence[Observation]
) -> str | None:
    if not all(o.valid for o in observations):
        return "environment"
    if any(o.error for o in observations):
        return "step_failed"
    return judge.judge(proposal, turn, observations)


def _verdict(task: Task, reasons: Sequence[str | None], outcome: Outcome, min_calls: int) -> Verdict:
    """reasons: per turn, None where it passed."""
    if not outcome.valid or "environment" in reasons:
        return Verdict("discard", "environment", None)
    failure = next((r for r in reasons if r is not None), None if outcome.success else "state_differs")
    if failure is None and len(task.calls) >= min_calls:
        return Verdict("accept", "reproduced", _stamp(task, "accept", "reproduced"))
    clean = next((i for i, r in enumerate(reasons) if r is not None), len(reasons))
    passed = min(clean, round(outcome.progress * len(task.turns)))
    cut = dataclasses.replace(task, turns=task.turns[:passed])
    if failure is not None and passed and len(cut.calls) >= min_calls:
        return Verdict("retain", failure, _stamp(cut, "retain", failure))
    short = failure is None or passed > 0
    return Verdict("discard", "too_short" if short else failure, None)


def _stamp(task: Task, verdict: str, reason: str) -> Task:
    kept = task.lineage.triplets[: len(task.calls)]
    lineage = dataclasses.replace(task.lineage, verdict=verdict, reason=reason, triplets=kept)
    return dataclasses.replace(task, lineage=lineage)
