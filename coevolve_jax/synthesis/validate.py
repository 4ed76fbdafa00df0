"""Validation: a proposal becomes a task only if it runs and is scored a success in a fresh environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Answers, Proposal, Roles
from coevolve_jax.synthesis import lineage
from coevolve_jax.synthesis.explore import Tools, offered_names
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.settings import Fits, Settings
from coevolve_jax.types import Observation, Outcome, Task

FAILED = ("step_failed", "result_differs", "state_differs")  # refused by execution, whatever the goal is


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a proposal becomes a task, or a validated task is admitted. refusal: why not; None: it is. One of

    step_failed    a call came back as an error
    result_differs a call gave another answer than exploration recorded
    not_offered    a call is to a tool that the environment does not offer: nothing was executed
    state_differs  the calls ran, but the environment does not score them a success
    flaky          two executions in fresh environments differ, in an answer or in the score
    too_short      what passes has fewer calls than a task must have
    too_long       the reference calls and their answers do not fit the limits of a rollout: nobody could solve it
    not_solved     the explorer did not do it from the user's words alone (config.explorer.solve; synthesis/solve.py)
    off_goal       a call that the context asks for is missing
    environment    the infrastructure failed: nothing is known about the proposal
    other words    the validator's, or the strategy's

    solved: the share of the rollouts that tried the task which solved it; None: nobody tried.
    task: what validation made of the proposal; None where it refused, and where the verdict is on a task at hand.
    agreement: "JUDGE_CHECK", "yes" or "no" of the validator and of execution; None: the validator has no opinion.
    """

    refusal: str | None
    solved: float | None = None
    task: Task | None = None
    agreement: str | None = None

    @property
    def verdict(self) -> str:
        """What is taken: all of it ("accept"), its first turns ("retain") or nothing ("discard")."""
        if self.refusal is not None:
            return "discard"
        return (self.task and self.task.lineage.verdict) or "accept"

    @property
    def reason(self) -> str:
        """The refusal. Of a task "reproduced", or why the turns after it were cut; "not_validated": nothing was executed."""
        return self.refusal or (self.task.lineage.reason if self.task else "")


Admit = Callable[[Sequence[Task]], Sequence[Verdict]]  # a last word on validated tasks, one for each


def admitted(verdicts: Sequence[Verdict], admit: Admit) -> list[Verdict]:
    """The verdicts after `admit` had its word on the valid tasks: it refuses them, or says how often they are solved."""
    after, valid = list(verdicts), [(n, v.task) for n, v in enumerate(verdicts) if v.task is not None]
    words = admit([task for _, task in valid]) if valid else ()
    for (n, _), word in zip(valid, words, strict=True):
        if word.refusal is not None:
            after[n] = word
        elif word.solved is not None:
            after[n] = dataclasses.replace(after[n], solved=word.solved)
    return after


def validate(
    roles: Roles,
    tools: Tools,
    env_pool: EnvPool,
    proposals: Sequence[Proposal],
    settings: Settings,
    birth: Birth,
    rng: np.random.Generator | None = None,
) -> list[Verdict]:
    """Executes every proposal in a fresh environment and passes a verdict on it.

    Everything passes: accept. The first turns pass and hold at least limits.min_calls
    calls: retain, with the task cut to these turns. Otherwise: discard. What the environment and the recorded answers
    let through is shown to the validator, who has the last word. birth numbers the tasks in the order of proposals.
    rng: draws the failed proposals that the validator sees as well (settings.calibration); they stay
    refused, and tell how far it agrees.
    """
    tasks = [_task(p, birth.task_id(n)) for n, p in enumerate(proposals)]
    verdicts = [Verdict("not_offered")] * len(tasks)
    offered = [
        n for n, task in enumerate(tasks) if {c.name for c in task.calls} <= offered_names(tools(task))
    ]
    runs = [execute(env_pool, [tasks[n] for n in offered]) for _ in range(settings.executions)]
    own = {n: list(repeats) for n, *repeats in zip(offered, *runs, strict=True)}

    def passed(n: int, opinions: Sequence[str | None] = ()) -> Verdict:
        proposal = proposals[n]
        if settings.executions:
            answers = own[n][0][0]
            word, reason, turns = _check(tasks[n], proposal, own[n], opinions, settings.limits.min_calls)
        else:
            answers = _by_turn(tasks[n], proposal.observations)
            word, reason, turns = "accept", "not_validated", len(tasks[n].turns)
        if word == "discard":
            return Verdict(reason)
        task = dataclasses.replace(tasks[n], turns=tasks[n].turns[:turns])
        if (refusal := _out_of_bounds(task, proposal, answers, settings.fits)) is not None:
            return Verdict(refusal)
        line = lineage.at_birth(
            proposal, birth, explorer=roles.name, verdict=word, reason=reason, calls=len(task.calls)
        )
        return Verdict(None, task=dataclasses.replace(task, lineage=line))

    for n in offered:
        verdicts[n] = passed(n)
    if not settings.executions:
        return verdicts
    asked = [n for n in offered if verdicts[n].task is not None]
    failed = [n for n in offered if verdicts[n].refusal in FAILED]
    if settings.calibration and rng is not None and failed:
        asked += [failed[i] for i in sorted(rng.permutation(len(failed))[: settings.calibration])]
    judged = roles.validator.judge([proposals[n] for n in asked], [own[n][0][0] for n in asked])
    for n, opinions in zip(asked, judged, strict=True):
        if opinions is not None:
            both = not any(opinions), verdicts[n].verdict == "accept"
            last = verdicts[n] if verdicts[n].task is None else passed(n, opinions)
            verdicts[n] = dataclasses.replace(last, agreement="_".join("yes" if x else "no" for x in both))
    return verdicts


def execute(env_pool: EnvPool, tasks: Sequence[Task]) -> list[tuple[Answers, Outcome]]:
    """Makes each task's own calls, turn by turn, in a fresh environment, which scores them.

    The outcome is invalid where the infrastructure failed in any call.
    """
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
    return [
        (
            tuple(own),
            outcome
            if all(o.valid for turn in own for o in turn)
            else dataclasses.replace(outcome, valid=False),
        )
        for own, outcome in zip(answers, outcomes)
    ]


def _task(proposal: Proposal, id: str) -> Task:
    """What is executed: the proposal's turns in its scenario. The lineage comes with the verdict."""
    scenario = proposal.context.task
    return Task(id, scenario.environment, scenario.scenario, proposal.turns, proposal.description)


def _by_turn(task: Task, answers: Sequence[Observation]) -> Answers:
    left = iter(answers)
    return tuple(tuple(next(left) for _ in turn.calls) for turn in task.turns)


def _out_of_bounds(
    task: Task, proposal: Proposal, answers: Sequence[Sequence[Observation]], fits: Fits
) -> str | None:
    """Why the task is refused though it passes: it leaves out what the context asks for, or is too long to be solved."""
    if not set(proposal.context.must) <= {call.name for call in task.calls}:
        return "off_goal"
    return None if fits(task, answers) else "too_long"


def _failures(task: Task, proposal: Proposal, answers: Answers) -> list[str | None]:
    """What is wrong with the answers of each turn, whatever the goal is."""
    recorded = _by_turn(task, proposal.observations)
    return [
        "step_failed" if any(o.error for o in turn)
        else "result_differs" if [o.text for o in turn] != [o.text for o in known]
        else None
        for turn, known in zip(answers, recorded, strict=True)
    ]  # fmt: skip


def _check(
    task: Task,
    proposal: Proposal,
    runs: Sequence[tuple[Answers, Outcome]],
    opinions: Sequence[str | None],
    min_calls: int,
) -> tuple[str, str, int]:
    """The verdict, its reason, and how many turns pass. opinions: the validator's, for each turn; () where it was not
    asked."""
    if not all(outcome.valid for _, outcome in runs):
        return "discard", "environment", 0
    if any(run != runs[0] for run in runs):
        return "discard", "flaky", 0
    answers, outcome = runs[0]
    failures = _failures(task, proposal, answers)
    opinions = opinions or [None] * len(failures)
    reasons = [ours or theirs for ours, theirs in zip(failures, opinions, strict=True)]
    failure = next((r for r in reasons if r is not None), None if outcome.success else "state_differs")
    if failure is None and len(task.calls) >= min_calls:
        return "accept", "reproduced", len(task.turns)
    clean = next((i for i, r in enumerate(reasons) if r is not None), len(reasons))
    passed = min(clean, round(outcome.progress * len(task.turns)))
    cut = sum(len(turn.calls) for turn in task.turns[:passed])
    if failure is not None and passed and cut >= min_calls:
        return "retain", failure, passed
    if failure is None or passed:
        return "discard", "too_short", 0
    return "discard", failure, 0
