"""Success rates: evaluation of a policy on tasks, and the rows of the held-out sets."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax.analysis import stats
from coevolve_jax.records.rollout_log import RolloutLog
from coevolve_jax.records.rollouts import write_evaluation
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import check_logprobs
from coevolve_jax.rollout.utilization import serving, slow_note
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Help, trajectories_of
from coevolve_jax.types import Group, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Result:
    """Numbers of an evaluation with num_rollouts rollouts per task.

    Attributes:
      success: mean over the valid rollouts; None if none is valid.
      invalid: number of invalid rollouts.
      mixed_groups: share of tasks whose valid rollouts include both outcomes, among those with a valid one;
        None without such a task.
      by_task: task id -> [successes, trials].
      by_calls: number of reference calls -> [successes, trials].
      stops: Trajectory.stop -> number of rollouts.
      slow_retries: messages that took too long and were sampled again, which favours short ones.
    """

    temperature: float
    num_rollouts: int
    success: float | None
    invalid: int
    mixed_groups: float | None
    by_task: dict[str, list[int]]
    by_calls: dict[str, list[int]]
    stops: dict[str, int]
    slow_retries: int = 0

    def to_json(self) -> dict:
        """A row of evaluations.jsonl. There num_rollouts is called "samples", as in the published files.

        slow_retries stands in it only where there were some.
        """
        row = {"samples" if k == "num_rollouts" else k: v for k, v in dataclasses.asdict(self).items()}
        return row if self.slow_retries else {k: v for k, v in row.items() if k != "slow_retries"}


def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    *,
    num_rollouts: int,
    temperature: float,
    seed: int,
    title: str = "evaluation",
    hints: Help | None = None,
    log: RolloutLog | None = None,
) -> tuple[Result, list[Group]]:
    """Rolls every task out `num_rollouts` times.

    `seed` determines the sampling noise: equal weights, seeds and hints give equal results. A hint is asked
    for by a task without its reference calls. If servers were too slow for many messages, stderr says so.

    log: keeps each rollout as it ends. Its groups are not rolled out again, and have no tokens.

    Raises FloatingPointError if the policy's log-probabilities are not finite. Only this check sees a run's
    last update.
    """
    seeds = rng_for(seed, "evaluation").integers(2**32, size=(len(tasks), num_rollouts)).tolist()
    ask = hints and (lambda task, rollout_index: hints(task.without_calls(), rollout_index))
    kept = log.groups if log else []
    before, retried = Counter(agent.counts), log.slow_retries if log else 0
    slow_retries = lambda: retried + int((agent.counts - before)["slow_retries"])

    def on_done(trajectory: Trajectory) -> None:
        check_logprobs([trajectory])
        if log:
            log.add(trajectory, slow_retries())
        bar.update()

    total, done = len(tasks) * num_rollouts, len(kept) * num_rollouts
    with tqdm(total=total, initial=done, desc=title, unit="rollout", leave=False) as bar:
        left = tasks[len(kept) :], seeds[len(kept) :]
        groups = [*kept, *agent.rollout_groups(*left, temperature, ask, on_done=on_done)]
    if slow := slow_note(serving(agent.counts - before)):
        print(slow.replace("serving", title, 1), file=sys.stderr)
    return dataclasses.replace(tally(groups, num_rollouts, temperature), slow_retries=slow_retries()), groups


def tally(groups: Sequence[Group], num_rollouts: int, temperature: float) -> Result:
    """Counts the outcomes of groups that have `num_rollouts` rollouts each."""
    by_task = {group.task.id: [0, 0] for group in groups}
    by_calls: dict[int, list[int]] = {len(group.task.calls): [0, 0] for group in groups}
    for group in groups:
        for count in (by_task[group.task.id], by_calls[len(group.task.calls)]):
            count[0] += sum(t.outcome.success for t in group.valid)
            count[1] += len(group.valid)
    trajectories = trajectories_of(groups)
    trials = sum(n for _, n in by_task.values())
    mixed = [group.mixed for group in groups if group.valid]
    return Result(
        temperature=temperature,
        num_rollouts=num_rollouts,
        success=sum(s for s, _ in by_task.values()) / trials if trials else None,
        invalid=len(trajectories) - trials,
        mixed_groups=float(np.mean(mixed)) if mixed else None,
        by_task=by_task,
        by_calls={str(n): by_calls[n] for n in sorted(by_calls)},
        stops=dict(sorted(Counter(t.stop for t in trajectories).items())),
    )


def evaluate_held_out(
    config: ConfigDict,
    agent: Agent,
    tasks: Sequence[Task],
    *,
    step: int,
    greedy: bool = False,
    last: bool = False,
    workdir: Path | None = None,
    help: Help | None = None,
) -> list[dict]:
    """Rows of evaluations.jsonl: the policy's success on each held-out set after `step` GRPO steps.

    The sets are "iid" and, if the run has them, "balanced" and "queries". With `help` each comes once more,
    under its name and stats.HELP: the same tasks and seeds, with hints. A row holds a Result's numbers and:

        step, set
        split                           the environment split of the scenarios
        scenarios                       task id -> scenario; tasks of one scenario are alike
        weak_tools, macro_weak, others  see `by_weakness`; only with a section config.testbed
        greedy_success, greedy_invalid  only with `greedy`, for "iid": one greedy rollout per task
        hinted                          only with `help`: number of rollouts that were given a hint

    last: the evaluation after training, which takes config.evaluation.last_rollouts where that is set.
    workdir: where config.logging.evaluations keeps the rollouts (records/rollouts.py); None: nowhere.
    """
    c, rows, rolled = config.evaluation, [], dict[str, list[Group]]()
    num_rollouts = (last and c.last_rollouts) or c.num_rollouts
    weak = tuple(config.get("testbed", {}).get("weak_tools", ()))
    sets = [(kind, name, None) for name, kind in stats.SETS.items()]
    sets += [(kind, name + stats.HELP, help) for kind, name, _ in sets if help]
    for kind, name, hints in sets:
        chosen = [t for t in tasks if t.lineage.kind == kind]
        if not chosen:
            continue
        how = dict(num_rollouts=num_rollouts, temperature=c.temperature, seed=c.seed)
        result, rolled[name] = evaluate(agent, chosen, **how, title=name, hints=hints)
        row = {
            "step": step,
            "set": name,
            "split": config.environment.eval_split,
            **result.to_json(),
            "scenarios": {t.id: t.lineage.parent for t in chosen},
        }
        if weak:
            row |= by_weakness(chosen, result.by_task, weak)
        if greedy and name == "iid":
            decoded, rolled["greedy"] = evaluate(
                agent, chosen, num_rollouts=1, temperature=0.0, seed=c.seed, title="greedy"
            )
            row |= {"greedy_success": decoded.success, "greedy_invalid": decoded.invalid}
        if hints:
            row["hinted"] = sum(bool(t.hints) for t in trajectories_of(rolled[name]))
        rows.append(row)
    if workdir and config.logging.evaluations:
        write_evaluation(workdir, step, rolled)
    return rows


def by_weakness(
    tasks: Sequence[Task], by_task: Mapping[str, Sequence[int]], weak_tools: Sequence[str]
) -> dict[str, Any]:
    """Success on tasks with and without weak tools.

    Returns:
      weak_tools: tool -> [successes, trials] of the tasks that call it.
      macro_weak: mean of these tools' rates, so every weak tool counts the same. None if there are no such
        tasks, or if a tool with tasks has no valid trial: its rate is unknown.
      others: success on the tasks that call no weak tool; None without valid trials.
    """

    def total(chosen: Sequence[Task]) -> list[int]:
        return [sum(by_task[t.id][i] for t in chosen) for i in (0, 1)]

    calling = {tool: [t for t in tasks if any(c.name == tool for c in t.calls)] for tool in weak_tools}
    named = {tool: total(own) for tool, own in calling.items()}
    known = all(n for tool, (_, n) in named.items() if calling[tool])
    rates = [s / n for s, n in named.values() if n] if known else []
    s, n = total([t for t in tasks if not any(c.name in weak_tools for c in t.calls)])
    return {
        "weak_tools": named,
        "macro_weak": float(np.mean(rates)) if rates else None,
        "others": s / n if n else None,
    }
