"""Validation: a proposal becomes a task only if it runs and is scored a success in a fresh environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Proposal, ProposalExecution, Validator
from coevolve_jax.synthesis.explore import Tools, offered_names
from coevolve_jax.types import Lineage, Observation, Task

Fits = Callable[[Task, Sequence[Sequence[Observation]]], bool]  # rollout.limits.reference_fits
FAILED = ("step_failed", "result_differs", "state_differs")  # refused by execution, whatever the goal is


def any_length(task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
    """Where no rollouts are meant."""
    return True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """verdict: "accept", "retain" or "discard"; task is None where discarded. reason:

    reproduced     every call ran and answered as recorded, and the environment scores a success
    step_failed    a call came back as an error
    result_differs a call gave another answer than exploration recorded
    not_offered    a call is to a tool that the environment does not offer: nothing was executed
    state_differs  the calls ran, but the environment does not score them a success
    flaky          two executions in fresh environments differ, in an answer or in the score
    too_short      what passes has fewer calls than a task must have
    too_long       the reference calls and their answers do not fit the limits of a rollout: nobody could solve it
    not_solved     the explorer did not do it from the user's words alone (config.explorer.solve; synthesis/solve.py)
    off_goal       a call that the context asks for is missing
    not_validated  config.evolution.validate is off: nothing was executed
    environment    the infrastructure failed: nothing is known about the proposal
    other words    the validator's

    agreement: "JUDGE_CHECK", "yes" or "no" of the validator and of execution; None where the validator has no opinion.
    solved: see pipeline.Admission.
    """

    verdict: str
    reason: str
    task: Task | None
    agreement: str | None = None
    solved: float | None = None


def validate(
    validator: Validator,
    tools: Tools,
    env_pool: EnvPool,
    proposals: Sequence[Proposal],
    *,
    ids: Sequence[str],
    kind: str,
    step: int,
    explorer: str,
    fits: Fits = any_length,
    min_calls: int = 2,
    executions: int = 1,
    calibration: int = 0,
    rng: np.random.Generator | None = None,
) -> list[Verdict]:
    """Executes every proposal in a fresh environment and passes a verdict on it.

    Everything passes: accept. The first turns pass and hold at least min_calls
    calls: retain, with the task cut to these turns. Otherwise: discard. What the environment and the recorded answers
    let through is shown to the validator, who has the last word. ids[i] is
    the id of the task made of proposals[i]; kind, step and explorer (the name of the roles) go to its lineage.
    fits: whether a task's calls with their answers fit the limits of a rollout. executions: how often each proposal is
    executed; 0 accepts what is offered and fits as it is proposed, for the ablation without validation.
    calibration: that many at most of those that failed are shown to the validator as well, drawn by rng; they stay
    refused, and tell how far it agrees.
    """
    tasks = [_task(p, id, kind, step, explorer) for p, id in zip(proposals, ids, strict=True)]
    verdicts = [Verdict("discard", "not_offered", None)] * len(tasks)
    offered = [
        n for n, task in enumerate(tasks) if {c.name for c in task.calls} <= offered_names(tools(task))
    ]
    if not executions:
        for n in offered:
            answers = _by_turn(tasks[n], proposals[n].observations)
            passed = Verdict("accept", "not_validated", _stamp(tasks[n], "accept", "not_validated"))
            verdicts[n] = _bounded(passed, proposals[n], answers, fits)
        return verdicts
    runs = [execute(env_pool, [tasks[n] for n in offered]) for _ in range(executions)]
    own = {n: list(repeats) for n, *repeats in zip(offered, *runs, strict=True)}

    def verdict(n: int, opinions: Sequence[str | None] = ()) -> Verdict:
        passed = _verdict(tasks[n], proposals[n], own[n], opinions, min_calls)
        return _bounded(passed, proposals[n], own[n][0].observations, fits)

    for n in offered:
        verdicts[n] = verdict(n)
    asked = [n for n in offered if verdicts[n].task is not None]
    failed = [n for n in offered if verdicts[n].task is None and verdicts[n].reason in FAILED]
    if calibration and rng is not None and failed:
        asked += [failed[i] for i in sorted(rng.permutation(len(failed))[:calibration])]
    judged = validator.judge([proposals[n] for n in asked], [own[n][0] for n in asked])
    for n, opinions in zip(asked, judged, strict=True):
        if opinions is not None:
            both = not any(opinions), verdicts[n].verdict == "accept"
            last = verdicts[n] if verdicts[n].task is None else verdict(n, opinions)
            verdicts[n] = dataclasses.replace(last, agreement="_".join("yes" if x else "no" for x in both))
    return verdicts


def execute(env_pool: EnvPool, tasks: Sequence[Task]) -> list[ProposalExecution]:
    """Makes each task's own calls, turn by turn, in a fresh environment."""
    env_ids = env_pool.reset(tasks)
    answers: list[list[tuple[Observation, ...]]] = [[] for _ in tasks]
    for turn in range(max((len(t.turns) for t in tasks), default=0)):
        active = [n for n, t in enumerate(tasks) if turn < len(t.turns)]
        calls = [tasks[n].turns[turn].calls for n in active]
        for n, observations in zip(active, env_pool.step([env_ids[n] for n in active], calls)):
            answers[n].append(tuple(observations))
        env_pool.end_turn([env_ids[n] for n in active])
    outcomes = env_pool.score(env_ids)
    env_pool.close(env_ids)
    return [ProposalExecution(tuple(a), o) for a, o in zip(answers, outcomes)]


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
        focus=tuple(proposal.context.focus_pattern),
    )
    return dataclasses.replace(
        scenario, id=id, turns=proposal.turns, description=proposal.description, lineage=lineage
    )


def _by_turn(task: Task, answers: Sequence[Observation]) -> list[tuple[Observation, ...]]:
    left = iter(answers)
    return [tuple(next(left) for _ in turn.calls) for turn in task.turns]


def _bounded(
    verdict: Verdict, proposal: Proposal, answers: Sequence[Sequence[Observation]], fits: Fits
) -> Verdict:
    """The verdict, unless its task leaves out what the context asks for or is too long to be solved."""
    task = verdict.task
    if task is None:
        return verdict
    if not set(proposal.context.must) <= {call.name for call in task.calls}:
        return Verdict("discard", "off_goal", None)
    if not fits(task, answers):
        return Verdict("discard", "too_long", None)
    return verdict


def _failures(task: Task, proposal: Proposal, execution: ProposalExecution) -> list[str | None]:
    """What is wrong with the answers of each turn, whatever the goal is."""
    recorded = _by_turn(task, proposal.observations)
    return [
        "step_failed" if any(o.error for o in answers)
        else "result_differs" if [o.text for o in answers] != [o.text for o in known]
        else None
        for answers, known in zip(execution.observations, recorded, strict=True)
    ]  # fmt: skip


def _verdict(
    task: Task,
    proposal: Proposal,
    runs: Sequence[ProposalExecution],
    opinions: Sequence[str | None],
    min_calls: int,
) -> Verdict:
    """opinions: the validator's, for each turn; () where it was not asked."""
    if not all(run.valid for run in runs):
        return Verdict("discard", "environment", None)
    if any(run != runs[0] for run in runs):
        return Verdict("discard", "flaky", None)
    outcome, failures = runs[0].outcome, _failures(task, proposal, runs[0])
    opinions = opinions or [None] * len(failures)
    reasons = [ours or theirs for ours, theirs in zip(failures, opinions, strict=True)]
    failure = next((r for r in reasons if r is not None), None if outcome.success else "state_differs")
    if failure is None and len(task.calls) >= min_calls:
        return Verdict("accept", "reproduced", _stamp(task, "accept", "reproduced"))
    clean = next((i for i, r in enumerate(reasons) if r is not None), len(reasons))
    passed = min(clean, round(outcome.progress * len(task.turns)))
    cut = dataclasses.replace(task, turns=task.turns[:passed])
    if failure is not None and passed and len(cut.calls) >= min_calls:
        return Verdict("retain", failure, _stamp(cut, "retain", failure))
    if failure is None or passed:
        return Verdict("discard", "too_short", None)
    return Verdict("discard", failure, None)


def _stamp(task: Task, verdict: str, reason: str) -> Task:
    kept = task.lineage.triplets[: len(task.calls)]
    lineage = dataclasses.replace(task.lineage, verdict=verdict, reason=reason, triplets=kept)
    return dataclasses.replace(task, lineage=lineage)
