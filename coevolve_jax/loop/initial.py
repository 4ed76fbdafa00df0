"""The initial state of a run: held-out sets, D_0, and the success of the policy before RL."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build, names
from coevolve_jax import config as configs
from coevolve_jax.envs.base import canonical
from coevolve_jax.explorers.base import Answers
from coevolve_jax.loop.evaluate import evaluate_held_out
from coevolve_jax.loop.state import RunState
from coevolve_jax.loop.timing import timed
from coevolve_jax.preemption import interruptible
from coevolve_jax.records.costs import EXPLORER
from coevolve_jax.records.workdir import BEGINNING, BEGUN, MADE, WARM_START
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis import choice, lineage
from coevolve_jax.synthesis.leakage import REASON, LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisRequest, SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import execute, with_patterns
from coevolve_jax.types import QUERY, Lineage, Outcome, Task

EVALUATION_SCENARIO = "evaluation_scenario"  # refusal of a task from a file


def check_start(config: ConfigDict, scenarios: Sequence[Task], fresh: bool) -> None:
    """Checks what a run meets only after its expensive start, before its workdir is claimed.

    scenarios: of the training split. fresh: whether the run has yet to make D_0 and the held-out tasks.

    Raises ValueError for mistyped settings of the strategy, for tools that no scenario offers, and for tasks
    or splits that are not there.
    """
    c, testbed = config, config.get("testbed")
    build.strategy(build.training_luck(c))
    build.check_tool_call_format(c, scenarios)
    if testbed:
        tools = [tool["function"] for scenario in scenarios for tool in build.family(c).tools(scenario)]
        if strange := sorted({*testbed.weak_tools} - {tool["name"] for tool in tools}):
            raise ValueError(
                f"config.testbed.weak_tools names {strange[0]!r}, which no scenario of split "
                f"{c.environment.train_split!r} offers: leave it out, or mend its name."
            )
    for setting, keys in configs.scenario_keys(c).items():
        there = sorted(set.intersection(*({*s.scenario} for s in scenarios))) if scenarios else keys
        if strange := [key for key in keys if key not in there]:
            raise ValueError(
                f"config.strategy.{setting} names {strange[0]!r}, which is no key of every scenario of split "
                f"{c.environment.train_split!r}: use one of {', '.join(there)}, or leave it out."
            )
    if fresh:
        leak_guard(c, [])
        if _explores_held_out(c):
            build.held_out_scenarios(c)
        if c.data.initial_file:
            read_tasks(c, c.data.initial_file, "data.initial_file")


@interruptible()
def bootstrap(
    config: ConfigDict, synthesizer: Callable[..., Synthesizer], eval_agent: Agent, workdir: Path
) -> RunState:
    """Makes the state of a run before its first step.

    The held-out tasks are in scenarios of the evaluation split. Their answers are never trained on:

        held_out   config.evaluation.tasks from unguided exploration, made as D_0 is
        balanced   config.evaluation.balanced_tasks, in which all tools come about equally often
        query      config.evaluation.queries, made as `held_out` is and far from the others

    D_0 is config.data.initial_tasks from unguided exploration of the training split, or the tasks of
    config.data.initial_file. With config.data.own_tasks the environment's own tasks (`own_tasks`) are D_0 and
    `held_out`, and only what evolution adds is explored. D_0 then lacks those near an evaluation task. With a
    section config.testbed each weak tool comes `least` to `most` times in D_0. `Roles.initial` explores for
    all of these, if the explorer has it. After a warm start the held-out tasks are those that its tasks were
    kept apart from, and what its explorer cost counts, in the ledger and for a budget. Where the workdir has
    a folder BEGINNING, held-out tasks and D_0 are those of the run whose files lie there (`begun_elsewhere`).

    Args:
      synthesizer: (guard, fits) -> a Synthesizer. By default tasks fit the limits of training rollouts.
      eval_agent: from `build.evaluation_agent`. Held-out tasks fit its limits.
    """
    c, seconds, warm, unguarded = config, {}, workdir / WARM_START, synthesizer(None, eval_agent.fits)
    spent = unguarded.roles.costs
    if spent is not None and (warm / MADE).exists():
        spent.update(json.loads((warm / MADE).read_text())["costs"])  # of roles that are gone
    with timed(seconds, "other"):
        if (workdir / BEGINNING / BEGUN[-1]).exists():
            held_out, tasks, initial = begun_elsewhere(c, workdir / BEGINNING, unguarded)
        else:
            warmed = (warm / "held_out.jsonl").exists()
            held_out = read_held_out(warm) if warmed else held_out_tasks(c, unguarded)
            tasks, initial = _first_tasks(c, synthesizer(leak_guard(c, held_out)))
    with timed(seconds, "evaluation"):
        rows = evaluate_held_out(c, eval_agent, held_out, step=0, greedy=True, workdir=workdir)
    ledger = Counter({EXPLORER + key: n for key, n in (spent or {}).items()})
    return RunState(0, tasks, held_out, rows, initial, ledger=ledger, seconds=seconds)


def begun_elsewhere(
    config: ConfigDict, folder: Path, synthesizer: Synthesizer
) -> tuple[list[Task], TaskPool, SynthesisStats]:
    """The held-out tasks, D_0 and the statistics of making it, of the run whose files BEGUN lie in `folder`.

    They may be somebody else's, and none that this version of the code would explore. Raises ValueError for a
    task in a scenario of another split, one that does not pass in the environment, or that D_0 does not take.
    """
    held_out, tasks = read_held_out(folder), task_pool(config, config.data.max_tasks or None)
    first = [task for task in TaskPool.read(folder / "tasks.jsonl") if task.lineage.kind == "initial"]
    for found, scenarios in ((held_out, build.held_out_scenarios(config)), (first, build.scenarios(config))):
        own = {canonical(scenario.scenario) for scenario in scenarios}
        if strange := [task.id for task in found if canonical(task.scenario) not in own]:
            raise ValueError(
                f"Task {strange[0]} of {folder} is in no scenario of its split of the environment "
                f"{config.environment.name!r}: use the versions of the packages with which it was made."
            )
    refusals, given = [*(None for _ in held_out), *tasks.add(first)], [*held_out, *first]
    runs = execute(synthesizer.env_pool, given)
    for task, refusal, run in zip(given, refusals, runs, strict=True):
        if fault := refusal or _fault(*run):
            raise ValueError(
                f"Task {task.id} of {folder} does not pass in the environment {config.environment.name!r} "
                f"({fault}): use the versions of the packages with which it was made, or another workdir."
            )
    ledger = json.loads((folder / "ledger.json").read_text())
    return held_out, tasks, SynthesisStats.from_json(ledger["initial"])


def held_out_tasks(config: ConfigDict, synthesizer: Synthesizer) -> list[Task]:
    """The held-out tasks: kind "held_out", then "balanced", then "query"."""
    e, own = config.evaluation, config.data.own_tasks
    tasks, candidates, queries = task_pool(config), task_pool(config), task_pool(config)
    scenarios = build.held_out_scenarios(config) if _explores_held_out(config) else []
    if own:
        tasks.add(own_tasks(config)[1])
    else:
        explore(synthesizer, tasks, scenarios, e.tasks, "held_out", e.seed)
    found = list(tasks)
    if e.balanced_tasks:
        explore(synthesizer, candidates, scenarios, e.balanced_candidates, "balanced", e.seed)
        found += choice.balanced(list(candidates), e.balanced_tasks, rng_for(e.seed, "balanced choice"))
    if e.queries:
        guarded = dataclasses.replace(synthesizer, guard=leak_guard(config, found))
        explore(guarded, queries, scenarios, e.queries, QUERY, e.seed)
    return [*found, *queries]


def read_held_out(workdir: Path) -> list[Task]:
    """Reads the held-out tasks of a run. Raises ValueError if it has none, and as `TaskPool.read`."""
    path = workdir / "held_out.jsonl"
    if not path.exists():
        raise ValueError(f"{workdir} holds no held_out.jsonl: name the workdir of a run that has begun.")
    return list(TaskPool.read(path))


def _explores_held_out(config: ConfigDict) -> bool:
    """Whether some of the held-out tasks are explored."""
    return bool(not config.data.own_tasks or config.evaluation.balanced_tasks or config.evaluation.queries)


def add_queries(config: ConfigDict, tasks: TaskPool, held_out: Sequence[Task]) -> None:
    """Adds the held-out queries to D_t, without their calls, for a strategy that needs them.

    Those that D_t has stay as they are. Raises ValueError for one that D_t does not take.
    """
    asked = [task.without_calls() for task in held_out if task.is_query]
    if "queries" not in configs.needs(config):
        return
    for task, refusal in zip(asked, tasks.add(asked), strict=True):
        if refusal and task.id not in tasks.records:
            raise ValueError(
                f"Query {task.id} is held out, and D_t does not take it ({refusal}): lower "
                "config.evaluation.queries, or raise config.data.max_tasks."
            )


def kept_apart(config: ConfigDict, held_out: Sequence[Task]) -> list[Task]:
    """The held-out tasks that evolution stays away from: all but queries that the strategy learns from."""
    learned = "queries" in configs.needs(config)
    return [task for task in held_out if not (learned and task.is_query)]


def _first_tasks(config: ConfigDict, synthesizer: Synthesizer) -> tuple[TaskPool, SynthesisStats]:
    """D_0, and the statistics of making it."""
    c, d0, testbed = config, task_pool(config, config.data.max_tasks or None), config.get("testbed")
    found = task_pool(c) if testbed else d0  # a testbed selects D_0 from more candidates than it needs
    if path := c.data.initial_file:
        stats = tasks_from_file(c, path, synthesizer, found)
    elif c.data.own_tasks:
        own = own_tasks(c)[0]
        stats = SynthesisStats(proposed=len(own), accepted=len(own))
        stats.refused.update(filter(None, [synthesizer.add(d0, task)[0] for task in own]))
        _check_batch(c, "config.data.own_tasks", len(d0), stats)
    else:
        wanted = testbed.candidates if testbed else c.data.initial_tasks
        stats = explore(synthesizer, found, build.scenarios(c), wanted, "initial", c.seed)
    if testbed:
        rng, (least, most) = rng_for(c.seed, "testbed"), (testbed.least, testbed.most)
        size, tools = c.data.initial_tasks, testbed.weak_tools
        d0.add(choice.scarce(list(found), size, tools, least, most, rng))
    return d0, dataclasses.replace(stats, added=len(d0))


def own_tasks(config: ConfigDict) -> tuple[list[Task], list[Task]]:
    """The environment's own tasks: those of the training split, and some of the evaluation split.

    config.evaluation.tasks of the latter are drawn. A task of both splits is for training alone. So is one
    without reference calls that asks for the same in a world that begins alike, whatever made it. Raises
    ValueError where the training split has fewer than a batch, or the evaluation split no other ones.
    """
    family, c = build.family(config), config.environment

    def key(task: Task) -> str:
        begins = None if task.calls else task.scenario.get("begins")
        asked = [turn.query for turn in task.turns]
        return family.task_key(task) if begins is None else canonical([task.environment, begins, asked])

    by_key = lambda split: {key(task): task for task in family.tasks(split, c.to_dict())}
    train, held_out = by_key(c.train_split), by_key(c.eval_split)
    others = [task for key, task in held_out.items() if key not in train]
    wanted = config.rollout.tasks_per_step
    for split, found, least in ((c.train_split, train, wanted), (c.eval_split, others, 1)):
        if len(found) < least:
            raise ValueError(
                f"config.data.own_tasks is True, and split {split!r} of environment {c.name!r} has "
                f"{len(found)} tasks of its own, where {least} are needed: set it to False, and tasks are "
                "explored."
            )
    rng = rng_for(config.evaluation.seed, "own held-out tasks")
    drawn = sorted(rng.permutation(len(others))[: config.evaluation.tasks])
    named = lambda kind, tasks: [
        with_patterns(
            dataclasses.replace(task, id=f"{kind}-0-{n}", lineage=Lineage(kind, parent=task.id)),
            family.action_pattern,
        )
        for n, task in enumerate(tasks)
    ]
    return named("initial", train.values()), named("held_out", [others[i] for i in drawn])


def task_pool(config: ConfigDict, max_size: int | None = None) -> TaskPool:
    """Makes an empty pool for tasks of the config's environment family."""
    return TaskPool(max_size, build.family(config).task_key)


def explore(
    synthesizer: Synthesizer, tasks: TaskPool, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
) -> SynthesisStats:
    """Adds `wanted` tasks from unguided exploration. Raises ValueError if it finds fewer."""
    roles = synthesizer.roles.initial or synthesizer.roles
    request = SynthesisRequest(wanted, kind, step=0, rng=rng_for(seed, kind))
    with tqdm(total=wanted, desc=f"{kind} tasks", unit="task", leave=False) as bar:
        return dataclasses.replace(synthesizer, roles=roles).synthesize_unguided(
            tasks, scenarios, request, all_or_none=True, on_added=bar.update
        )


def tasks_from_file(
    config: ConfigDict, path: str, synthesizer: Synthesizer, tasks: TaskPool
) -> SynthesisStats:
    """Adds the good tasks of a tasks.jsonl as D_0.

    A task is good if it still reproduces, fits into a rollout, is near no evaluation task, and is not in a
    scenario of the evaluation ("evaluation_scenario").

    Raises ValueError for a file without tasks, tasks of another environment, or fewer good tasks than a batch
    needs.
    """
    found, action_pattern = read_tasks(config, path, "data.initial_file"), build.family(config).action_pattern
    stats, apart = SynthesisStats(proposed=len(found)), build.evaluation_scenarios(config)
    for n, (task, run) in enumerate(zip(found, execute(synthesizer.env_pool, found), strict=True)):
        renamed = dataclasses.replace(task, id=f"initial-0-{n}", lineage=lineage.from_file(task.lineage))
        refusal = EVALUATION_SCENARIO if canonical(task.scenario) in apart else None
        refusal = refusal or _fault(*run) or (None if synthesizer.fits(renamed, run[0]) else "too_long")
        refusal = refusal or synthesizer.add(tasks, with_patterns(renamed, action_pattern))[0]
        stats.refused.update([refusal] if refusal else [])
    stats.added = stats.accepted = len(tasks)
    _check_batch(config, path, len(tasks), stats)
    return stats


def _check_batch(config: ConfigDict, source: str, good: int, stats: SynthesisStats) -> None:
    """Raises ValueError if a source gives fewer good tasks than a batch needs."""
    if good < config.rollout.tasks_per_step:
        unlike = " whose words, calls or world are unlike those of the evaluation"
        near = unlike if stats.refused[REASON] else ""
        raise ValueError(
            f"{source} gives {good} good tasks of {stats.proposed} (refused: {dict(stats.refused)}), "
            f"fewer than the {config.rollout.tasks_per_step} of a batch: "
            f"give more{near}, or lower config.rollout.tasks_per_step."
        )


def read_tasks(config: ConfigDict, path: str, key: str) -> list[Task]:
    """Reads the tasks.jsonl that config.KEY names. Held-out queries in it are left out: they have no answers.

    Raises ValueError for no such file, one without tasks, a line that is no task, a task without turns, or a
    task of another environment.
    """
    if not os.path.isfile(path):
        raise ValueError(f"config.{key} is {path!r}, which is no file: name a run's tasks.jsonl.")
    found = [task for task in TaskPool.read(path) if not task.is_query]
    if not found:
        raise ValueError(f"config.{key} is {path!r}, which holds no task: name a run's tasks.jsonl.")
    for task in found:
        if task.environment != config.environment.name:
            raise ValueError(
                f"Task {task.id} of {path} belongs to the environment {task.environment!r}, and "
                f"config.environment.name is {config.environment.name!r}: give tasks that were made in it."
            )
        if not task.turns:
            raise ValueError(f"Task {task.id} of {path} has no turns: give it some, or remove its line.")
    return found


def _fault(answers: Answers, outcome: Outcome) -> str | None:
    """Returns why a task from a file did not pass (`execute`), in the words of Verdict, or None."""
    if not outcome.valid:
        return "environment"
    if any(answer.error for turn in answers for answer in turn):
        return "step_failed"
    return None if outcome.success else "state_differs"


def leak_guard(config: ConfigDict, held_out: Sequence[Task]) -> LeakGuard:
    """Leak control against the held-out tasks and the benchmark's own tasks (`build.benchmark_tasks`)."""
    data, model = config.data, config.data.leak_embedding
    return LeakGuard(
        [*build.benchmark_tasks(config), *held_out],
        data.leak_threshold,
        features=build.family(config).features,
        query_threshold=data.leak_query_threshold,
        embed=names.function(model, "data.leak_embedding") if model else None,
        embedding_threshold=data.leak_embedding_threshold,
        call_threshold=data.leak_call_threshold,
        tools=build.family(config).tools,
    )
