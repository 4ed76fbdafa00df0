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
from coevolve_jax.types import Call, Observation, Outcome, Task

HELD = 8  # worlds that a worker holds at once while tasks are executed: each may have a server of its own
FAILED = ("step_failed", "result_differs", "state_differs")  # refused by execution, whatever the goal is


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision whether a proposal becomes a task, or whether a validated task is admitted.

    Attributes:
      refusal: why not; None: it is taken. See below.
      solved: share of probing rollouts that solved the task; None: it was not probed.
      task: the task made from the proposal. None if it is refused, or if the verdict is on an existing task.
      agreement: "yes" or "no" of the validator, "_", "yes" or "no" of execution; None: the validator has no
        opinion.

    Refusals:

        step_failed     a call came back as an error
        result_differs  a call gave another answer than exploration recorded
        not_offered     a call is to a tool that the environment does not offer; nothing was executed
        state_differs   the calls ran, but the environment does not score them a success
        flaky           two executions in fresh environments differ, in an answer or in the score
        too_short       the part that passes has fewer calls than a task must have
        too_long        reference calls and answers exceed a rollout's limits, so no policy could solve it
        not_solved      the explorer failed to solve it from the user's words alone (synthesis/solve.py)
        off_goal        a call that the context asks for is missing
        environment     the infrastructure failed: nothing is known about the proposal
        other words     the validator's, or the strategy's
    """

    refusal: str | None
    solved: float | None = None
    task: Task | None = None
    agreement: str | None = None

    @property
    def verdict(self) -> str:
        """ "accept" (the whole proposal is taken), "retain" (its first turns) or "discard"."""
        if self.refusal is not None:
            return "discard"
        return (self.task and self.task.lineage.verdict) or "accept"

    @property
    def reason(self) -> str:
        """The refusal; for a task "reproduced", "not_validated" (not executed) or why turns were cut."""
        return self.refusal or (self.task.lineage.reason if self.task else "")


Admit = Callable[[Sequence[Task]], Sequence[Verdict]]  # validated tasks -> a final verdict for each


def admitted(
    verdicts: Sequence[Verdict], admit: Admit, unless: Callable[[Task], bool] = lambda task: False
) -> list[Verdict]:
    """Updates the verdicts by `admit`, which sees the valid tasks: it may refuse them, or set `solved`.

    unless: tasks that `admit` does not see, so no rollout is spent on them: the pipeline names those that
      leak control refuses. Duplicates, and tasks beyond the number wanted, do cost rollouts.
    """
    after = list(verdicts)
    valid = [(n, v.task) for n, v in enumerate(verdicts) if v.task is not None and not unless(v.task)]
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

        accept    all turns pass
        retain    the first turns pass, with at least limits.min_calls calls; the task is cut to them
        discard   otherwise

    The validator judges the proposals that pass execution, and may still refuse turns.

    Args:
      birth: numbers the tasks in the order of proposals.
      rng: draws the failed proposals that the validator also judges (settings.calibration). They stay
        refused, and measure how far it agrees with execution.
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
            least = settings.limits.of(proposal.context).min_calls
            word, reason, turns = _check(tasks[n], proposal, own[n], opinions, least)
        else:
            answers = _by_turn(tasks[n], proposal.observations)
            word, reason, turns = "accept", "not_validated", len(tasks[n].turns)
        if word == "discard":
            return Verdict(reason)
        task = dataclasses.replace(tasks[n], turns=tasks[n].turns[:turns])
        task = with_patterns(task, settings.action_pattern)
        if (refusal := _out_of_bounds(task, proposal, answers, settings.fits)) is not None:
            return Verdict(refusal)
        line = lineage.at_birth(
            proposal, birth, explorer=roles.name, verdict=word, reason=reason, turns=turns
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
    """Makes each task's reference calls, turn by turn, in a fresh environment, and scores them.

    The outcome is invalid if the infrastructure failed in any call. HELD environments of a worker are open at
    once.
    """
    runs, count = list[tuple[Answers, Outcome]](), HELD * env_pool.size
    for start in range(0, len(tasks), count):
        runs += _execute(env_pool, tasks[start : start + count])
    return runs


def _execute(env_pool: EnvPool, tasks: Sequence[Task]) -> list[tuple[Answers, Outcome]]:
    """Does what `execute` does, with all environments open at once."""
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


def with_patterns(task: Task, action_pattern: Callable[[Call], str]) -> Task:
    """Returns the task with the action pattern of each reference call (Task.patterns).

    action_pattern: the environment family's.
    """
    patterns, names = tuple(map(action_pattern, task.calls)), tuple(call.name for call in task.calls)
    return dataclasses.replace(task, patterns=() if patterns == names else patterns)


def _task(proposal: Proposal, id: str) -> Task:
    """The task to execute: the proposal's turns in its scenario. The lineage comes with the verdict."""
    scenario = proposal.context.task
    return Task(
        id,
        scenario.environment,
        scenario.scenario,
        proposal.turns,
        proposal.description,
        system=scenario.system,
    )


def _by_turn(task: Task, answers: Sequence[Observation]) -> Answers:
    left = iter(answers)
    return tuple(tuple(next(left) for _ in turn.calls) for turn in task.turns)


def _out_of_bounds(
    task: Task, proposal: Proposal, answers: Sequence[Sequence[Observation]], fits: Fits
) -> str | None:
    """Refuses a task that passes execution: it lacks a call that the context asks for, or is too long."""
    if not set(proposal.context.must) <= set(task.actions):
        return "off_goal"
    return None if fits(task, answers) else "too_long"


def _failures(task: Task, proposal: Proposal, answers: Answers) -> list[str | None]:
    """For each turn, what is wrong with its answers, independent of the goal; None if nothing is."""
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
    """Returns (verdict, reason, number of turns that pass).

    opinions: the validator's, one per turn; () if it was not asked.
    """
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
