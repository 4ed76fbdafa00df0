"""Validation: a proposal becomes a task only if it runs and is scored a success in a fresh environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Proposal, ProposalExecution, Validator
from coevolve_jax.synthesis.explore import Tools, offered_names
from coevolve_jax.types import Lineage, Observation, Outcome, Task

Fits = Callable[[Task, Sequence[Sequence[Observation]]], bool]  # rollout.agent.Agent.fits


def any_length(task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
    """Where no rollouts are meant."""
    return True


@dataclasses.dataclass(frozen=True)
class Verdict:
    """verdict: "accept", "retain" or "discard"; task is None where discarded. reason:

    reproduced     every call ran and answered as recorded, and the environment scores a success
    step_failed    a call came back as an error
    not_offered    a call is to a tool that the environment does not offer: nothing was executed
    state_differs  the calls ran, but the environment does not score them a success
    too_short      what passes has fewer calls than a task must have
    too_long       the reference calls and their answers do not fit the limits of a rollout: nobody could solve it
    not_solved     the explorer did not do it from the user's words alone (config.explorer.solve; synthesis/solve.py)
    off_goal       a call that the context asks for is missing
    not_validated  config.evolution.validate is off: nothing was executed
    environment    the infrastructure failed: nothing is known about the proposal
    other words    the validator's, such as the scripted one's "result_differs": another answer than exploration recorded
    """

    verdict: str
    reason: str
    task: Task | None


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
    executed: bool = True,
) -> list[Verdict]:
    """Executes every proposal in a fresh environment and passes a verdict on it.

    Everything passes: accept. The first turns pass and hold at least min_calls
    calls: retain, with the task cut to these turns. Otherwise: discard. ids[i] is
    the id of the task made of proposals[i]; kind, step and explorer (the name of the roles) go to its lineage.
    fits: whether a task's calls with their answers fit the limits of a rollout. executed: False accepts what is
    offered and fits as it is proposed, for the ablation without validation.
    """
    tasks = [_task(p, id, kind, step, explorer) for p, id in zip(proposals, ids, strict=True)]
    verdicts = [Verdict("discard", "not_offered", None)] * len(tasks)
    offered = [
        n for n, task in enumerate(tasks) if {c.name for c in task.calls} <= offered_names(tools(task))
    ]
    if not executed:
        for n in offered:
            answers = _by_turn(tasks[n], proposals[n].observations)
            verdicts[n] = _bounded(
                Verdict("accept", "not_validated", _stamp(tasks[n], "accept", "not_validated")),
                proposals[n], answers, fits,
            )  # fmt: skip
        return verdicts
    executions = dict(zip(offered, execute(env_pool, [tasks[n] for n in offered])))
    reasons = {n: [_failure(answers) for answers in e.observations] for n, e in executions.items()}
    asked = [n for n in offered if executions[n].outcome.valid and reasons[n][:1] == [None]]
    judged = validator.judge([proposals[n] for n in asked], [executions[n] for n in asked])
    for n, opinions in zip(asked, judged, strict=True):
        reasons[n] = [ours or theirs for ours, theirs in zip(reasons[n], opinions, strict=True)]
    for n in offered:
        passed = _verdict(tasks[n], reasons[n], executions[n].outcome, min_calls)
        verdicts[n] = _bounded(passed, proposals[n], executions[n].observations, fits)
    return verdicts


def execute(env_pool: EnvPool, tasks: Sequence[Task]) -> list[ProposalExecution]:
    """Makes each task's own calls, turn by turn, in a fresh environment."""
    sessions = env_pool.reset(tasks)
    answers: list[list[tuple[Observation, ...]]] = [[] for _ in tasks]
    for turn in range(max((len(t.turns) for t in tasks), default=0)):
        active = [n for n, t in enumerate(tasks) if turn < len(t.turns)]
        calls = [tasks[n].turns[turn].calls for n in active]
        for n, observations in zip(active, env_pool.step([sessions[n] for n in active], calls)):
            answers[n].append(tuple(observations))
        env_pool.end_turn([sessions[n] for n in active])
    outcomes = env_pool.score(sessions)
    env_pool.close(sessions)
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


def _failure(observations: Sequence[Observation]) -> str | None:
    """What is wrong with the answers of one turn, whatever the goal is."""
    if not all(o.valid for o in observations):
        return "environment"
    return "step_failed" if any(o.error for o in observations) else None


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
    if failure is None or passed:
        return Verdict("discard", "too_short", None)
    return Verdict("discard", failure, None)


def _stamp(task: Task, verdict: str, reason: str) -> Task:
    kept = task.lineage.triplets[: len(task.calls)]
    lineage = dataclasses.replace(task.lineage, verdict=verdict, reason=reason, triplets=kept)
    return dataclasses.replace(task, lineage=lineage)
