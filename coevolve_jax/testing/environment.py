"""The conformance suite of environment families. Run it on your own:

from coevolve_jax.testing.environment import check_environment
check_environment("my_package.my_environment", python="/path/to/its/bin/python")
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax import envs
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.testing.probe import (
    SAMPLE,
    STRANGERS,
    VALUES,
    Worker,
    answering,
    junk_arguments,
    name_of,
    play,
    require,
    require_valid,
    some,
)
from coevolve_jax.types import Call, Group, Lineage, Outcome, Step, Task, Trajectory, Turn

HEAVY = ("jax", "numpy", "torch")


def check_environment(
    name: str,
    python: str = "",
    settings: Mapping[str, Any] | None = None,
    *,
    calls: Sequence[Call] = (),
    timeout: float = 5.0,
    allowed: Sequence[str] = (),
) -> None:
    """Raises AssertionError, with one sentence that names the fault, unless the family keeps its contract.

    Args:
      name, python: like config.environment.name and config.environment.python.
      settings: the section config.environment. train_split is "train" and eval_split is "test" by default.
      calls: calls to try in every world. They are needed where the tasks have no reference calls. At least
        one must change some world.
      timeout: seconds of processor time that one call may take.
      allowed: the packages of HEAVY that the environment itself needs, so that workers may import them.
    """
    settings = {"train_split": "train", "eval_split": "test", **(settings or {})}
    with answering(f"The environment {name!r}"):
        family = envs.load(name, python)
    train, held_out, tasks = _lists(family, settings)
    jobs = [(task, task.calls or tuple(calls)) for task in some(tasks)]
    spare = tuple(calls) or next((played for _, played in jobs if played), ())
    require(spare, "The tasks have no reference calls: give the suite `calls` to try.")
    jobs += [(scenario, spare) for scenario in some(train)]
    _check_tools(family, [task for task, _ in jobs])
    with contextlib.closing(Worker(name, python, timeout)) as worker:
        _check_light(family, worker, [*tasks, *train], [c for _, played in jobs for c in played])
    with ProcessPool(name, workers=2, timeout=timeout, python=python) as pool:
        _check_worlds(pool, jobs)
        _check_apart(family, pool, train, held_out)
        _check_junk(family, pool, [task for task, _ in jobs])
        _check_grading(pool, some(tasks), some(train)[0])
        _check_grown(pool, [(dataclasses.replace(task, turns=()), played) for task, played in jobs])
        _check_report(family, pool, some(tasks))
        _check_isolation(pool, *max(jobs, key=lambda job: len(job[1])), stopped=timeout + 1)
    with contextlib.closing(Worker(name, python, timeout)) as worker:
        worker.play(*jobs[0])
        heavy = [m for m in worker.ask("imported", *HEAVY) if m not in allowed]
        require(
            not heavy,
            f"A worker imports {', '.join(heavy)}: import it inside the functions that need it, or allow it "
            "here if the environment itself is made of it.",
        )


# --- The family's functions -----------------------------------------------------------------------


def _lists(family: envs.Family, settings: Mapping) -> tuple[list[Task], list[Task], list[Task]]:
    """Checks and returns the training scenarios, the evaluation scenarios, and the benchmark's tasks."""
    train_split, eval_split = settings["train_split"], settings["eval_split"]
    questions = {
        f"scenarios({train_split!r})": lambda: family.scenarios(train_split, settings),
        f"scenarios({eval_split!r}, apart_from={train_split!r})": lambda: family.scenarios(
            eval_split, settings, apart_from=train_split
        ),
        f"tasks({eval_split!r})": lambda: family.tasks(eval_split, settings),
    }
    lists = []
    for what, ask in questions.items():
        with answering(what):
            found, again = ask(), ask()
        require(isinstance(found, list) and found, f"{what} gives no tasks.")
        require(found == again, f"{what} gives other tasks when it is asked again.")
        require(len({t.id for t in found}) == len(found), f"{what} gives two tasks of the same id.")
        bare = what.startswith("scenarios")
        for task in found:
            require(bare != bool(task.turns), f"{what}: {task.id!r} has {len(task.turns)} user turns.")
            require(_survives_json(task), f"{what}: {task.id!r} is not the same after a trip through JSON.")
        lists.append(found)
    for what, ask in (("scenarios", family.scenarios), ("tasks", family.tasks)):
        try:
            ask("no such split", settings)
        except ValueError:
            continue
        except Exception as error:
            raise AssertionError(f"{what} of an unknown split raises {error!r}, not a ValueError.") from error
        raise AssertionError(f"{what} of an unknown split gives an answer, not a ValueError.")
    return tuple(lists)


def _survives_json(task: Task) -> bool:
    try:
        return Task.from_json(json.loads(json.dumps(task.to_json(), allow_nan=False))) == task
    except (TypeError, ValueError):
        return False


def _check_tools(family: envs.Family, tasks: Sequence[Task]) -> None:
    for task in tasks:
        with answering(f"tools({task.id!r})"):
            docs, again = family.tools(task), family.tools(task)
            elsewhere = family.tools(Task("other", task.environment, task.scenario))
            functions = [doc["function"] for doc in docs]
            names = [f["name"] for f in functions]
            plain = json.loads(json.dumps(docs)) == docs
            shaped = all(
                doc["type"] == "function"
                and isinstance(f["description"], str)
                and f["parameters"]["type"] == "object"
                for doc, f in zip(docs, functions)
            )
        require(docs and plain and shaped, f"tools({task.id!r}) are no function schemas of plain JSON.")
        require(docs == again, f"tools({task.id!r}) are others when asked again.")
        alike = docs == elsewhere
        require(alike, f"tools({task.id!r}) depend on more than its environment and its scenario.")
        require(
            len(set(names)) == len(names), f"tools({task.id!r}) has two tools of one name: {sorted(names)}."
        )


def _check_light(family: envs.Family, worker: Worker, tasks: Sequence[Task], calls: Sequence[Call]) -> None:
    """Checks that task_key, features and action_pattern depend on their argument and on nothing else."""
    with answering("task_key"):
        keys = [family.task_key(task) for task in tasks]
    require(all(isinstance(k, str) for k in keys), "task_key gives something that is no text.")
    require(len(set(keys)) > 1 or len(keys) == 1, "task_key gives all tasks the same key.")
    for task, key in zip(tasks, keys):
        before = json.dumps(task.to_json())
        other = dataclasses.replace(task, id="other", description="other", lineage=Lineage("initial", step=7))
        again = Task.from_json(json.loads(before))
        with answering(f"task_key or features of {task.id!r}"):
            same = key == family.task_key(other) == family.task_key(again)
            found, twice = family.features(task), family.features(again)
        require(same, f"task_key of {task.id!r} depends on more than its scenario and turns.")
        counts = all(isinstance(k, str) and math.isfinite(v) and v > 0 for k, v in found.items())
        require(counts, f"features of {task.id!r} are no counts by name.")
        require(found == twice, f"features of {task.id!r} are others for an equal task.")
        require(json.dumps(task.to_json()) == before, f"task_key or features changes the task {task.id!r}.")
    for task, key in zip(some(tasks), some(keys)):
        there = worker.ask("task_key", task.to_json()), worker.ask("features", task.to_json())
        here = key, dict(family.features(task))
        require(here == there, f"task_key or features of {task.id!r} is another in another process.")
    for call in (*calls[:SAMPLE], *(Call(n, {"a": v}) for n in STRANGERS for v in VALUES)):
        with answering(f"action_pattern of {call.name[:60]!r}"):
            pattern, again = family.action_pattern(call), family.action_pattern(call)
        require(
            isinstance(pattern, str) and pattern == again, f"action_pattern of {call} gives no fixed text."
        )


# --- Its worlds -----------------------------------------------------------------------------------


def _check_worlds(pool: ProcessPool, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> None:
    """Checks that equal tasks give equal worlds, in any process and after any events in other worlds."""
    (once,) = pool.execute(jobs[:1])
    require_valid(once, *jobs[0])
    copies = [(task, played) for task, played in jobs for _ in range(3)]
    executed = pool.execute(copies)
    for i, (task, _) in enumerate(jobs):
        first, *others = executed[3 * i : 3 * i + 3]
        require_valid(first, *jobs[i])
        starts = {e.fingerprints[0] for e in (first, *others)}
        require(all(isinstance(f, str) and f for f in first.fingerprints), "fingerprint gives no text.")
        require(len(starts) == 1, f"Equal tasks ({task.id!r}) start in different states.")
        require(
            all(o == first for o in others),
            f"The same calls in equal worlds of {task.id!r} give other observations or states.",
        )
    changed = any(e.fingerprints[0] != e.fingerprints[-1] for e in executed)
    require(changed, "No call that was tried changes the fingerprint of a world: it does not see the state.")


def _check_apart(
    family: envs.Family, pool: ProcessPool, train: Sequence[Task], held_out: Sequence[Task]
) -> None:
    """Checks that no initial state of the training split occurs in the other split."""
    states = [
        {e.fingerprints[0] for e in pool.execute([(s, ()) for s in side])} for side in (train, held_out)
    ]
    keys = [{family.task_key(s) for s in side} for side in (train, held_out)]
    shared = not states[0].isdisjoint(states[1]) or not keys[0].isdisjoint(keys[1])
    require(not shared, "apart_from leaves scenarios that start as one of the training split.")


def _check_junk(family: envs.Family, pool: ProcessPool, tasks: Sequence[Task]) -> None:
    """Checks that any call that a model may write comes back as an observation."""
    seen: set[str] = set()
    for task in tasks:
        for doc in family.tools(task):
            function = doc["function"]
            if function["name"] in seen:
                continue
            seen.add(function["name"])
            junk = [Call(function["name"], arguments) for arguments in junk_arguments(function["parameters"])]
            (execution,) = pool.execute([(task, junk)])
            require_valid(execution, task, junk)
    task = tasks[0]
    strangers = [Call(n, {}) for n in STRANGERS if n not in seen]
    wrong: list[Any] = [None, [], {"a": float("nan")}, {"a": {1, 2}}]
    unplain = [Call(n, a) for n in sorted(seen)[:1] for a in wrong]
    (execution,) = pool.execute([(task, [*strangers, *unplain])])
    require_valid(execution, task, [*strangers, *unplain])
    for call, observation in zip([*strangers, *unplain], execution.observations):
        require(observation.error, f"The call {name_of(call)} is answered without an error.")
    require(len(set(execution.fingerprints)) == 1, "A call that names no tool of the task changes the world.")


def _check_grading(pool: ProcessPool, tasks: Sequence[Task], scenario: Task) -> None:
    """Checks that references succeed, that doing nothing fails, and that ungradable requests are refused."""
    idle = play(pool, tasks, [[()] * len(t.turns) for t in tasks])
    for task, outcome in zip(tasks, idle):
        _require_outcome(task, outcome)
        wrong = outcome.success and bool(task.calls)
        require(not wrong, f"{task.id!r} is a success although none of its reference calls was made.")
    require(not all(o.success for o in idle), "Every task is a success although nothing was done.")
    referred = [t for t in tasks if t.calls]
    for task, outcome in zip(referred, play(pool, referred, [[u.calls for u in t.turns] for t in referred])):
        _require_outcome(task, outcome)
        require(outcome.success, f"The reference calls of {task.id!r} are no success: {outcome.reason!r}.")
    env_ids = pool.reset(tasks)
    for task, outcome in zip(tasks, pool.score(env_ids)):
        require(not outcome.success, f"{task.id!r} is a success before a turn has ended.")
    pool.close(env_ids)
    _require_refused(pool, tasks[0], len(tasks[0].turns) + 1, "end_turn of a task whose turns have all ended")
    _require_refused(pool, scenario, 0, "score of a bare scenario")


def _check_grown(pool: ProcessPool, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> None:
    """Checks the grading of tasks that exploration makes: scenarios with turns of reference calls."""
    for (scenario, played), execution in zip(jobs, pool.execute(jobs)):
        good = tuple(c for c, o in zip(played, execution.observations) if not o.error)
        (again,) = pool.execute([(scenario, good)])
        if again.fingerprints[0] == again.fingerprints[-1] or any(o.error for o in again.observations):
            continue
        task = dataclasses.replace(scenario, id=f"explored in {scenario.id}", turns=(Turn("Do it.", good),))
        done, idle = play(pool, [task] * 2, [[good], [()]])
        sound = done.valid and idle.valid and done.success and not idle.success
        require(
            sound,
            f"A task with reference calls, made of {scenario.id!r}, is not graded by what they lead to.",
        )
        return
    raise AssertionError(
        "No call that was tried changes a world of a scenario: give the suite other `calls`."
    )


def _require_refused(pool: ProcessPool, task: Task, turns: int, what: str) -> None:
    """Checks that ending `turns` turns raises a ValueError; 0 turns asks for the score instead."""
    restarts = pool.restarts
    env_ids = pool.reset([task])
    try:
        for _ in range(turns):
            pool.end_turn(env_ids)
        if not turns:
            pool.score(env_ids)
    except ValueError:
        pool.close(env_ids)
        return
    how = "ends the worker" if pool.restarts > restarts else "is accepted"
    raise AssertionError(f"{what} {how}: it must raise a ValueError.")


def _require_outcome(task: Task, outcome: Outcome) -> None:
    require(outcome.valid, f"score of {task.id!r} lost its world: {outcome.reason!r}.")
    sound = 0 <= outcome.reward <= 1 and 0 <= outcome.progress <= 1 and isinstance(outcome.reason, str)
    require(sound, f"score of {task.id!r} is {outcome}: reward and progress lie between 0 and 1.")
    require(outcome.success == (outcome.reward >= 0.5), f"score of {task.id!r}: success is reward >= 0.5.")


def _check_report(family: envs.Family, pool: ProcessPool, tasks: Sequence[Task]) -> None:
    """Checks the official score of the references, and of doing nothing."""
    shares = []
    for turns in ([[u.calls for u in t.turns] for t in tasks], [[()] * len(t.turns) for t in tasks]):
        outcomes = play(pool, tasks, turns)
        groups = [Group(one[0], (_trajectory(*one),)) for one in zip(tasks, turns, outcomes)]
        with answering("report"):
            found = family.report(groups, pool.judge)
            json.dumps(found)
            shares.append(float(found["success"]))
        texts = all(isinstance(found.get(k), str) for k in ("benchmark", "scoring"))
        require(texts, "report does not say which benchmark it is and how it was scored.")
        require(0 <= shares[-1] <= 1, f"report gives the success {shares[-1]}: it is a share.")
    if all(t.calls for t in tasks):
        require(
            shares == [1.0, 0.0],
            f"report gives {shares[0]} to the reference and {shares[1]} to doing nothing.",
        )


def _trajectory(task: Task, turns: Sequence[Sequence[Call]], outcome: Outcome) -> Trajectory:
    steps = [Step(n, "", c, "", False).to_json() for n, calls in enumerate(turns) for c in calls]
    fields = {"task_id": task.id, "rollout_index": 0, "stop": "done", "hints": [], "steps": steps}
    return Trajectory.from_json({**fields, "outcome": dataclasses.asdict(outcome)})


def _check_isolation(pool: ProcessPool, task: Task, played: Sequence[Call], stopped: float) -> None:
    """Checks that worlds share nothing and survive their workers.

    A worker may die. It may also get no processor for longer than a call may compute. stopped: seconds for
    which one gets none.
    """
    (alone,) = pool.execute([(task, played)])
    expected = list(alone.observations)
    env_ids = pool.reset([task] * 6)
    first = pool.step(env_ids[:1], [played])
    require(first == [expected], f"A world of {task.id!r} answers otherwise beside others.")
    both = pool.step(env_ids[1:3], [played[:1]] * 2)
    require(all(o == expected[:1] for o in both), f"Worlds of {task.id!r} share state.")
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # wait for its death; the pool still reaps it
    rest = pool.step(env_ids[1:3], [played[1:]] * 2)
    require(
        all(o == expected[1:] for o in rest), f"A world of {task.id!r} is another when it is built again."
    )
    restarts, starved = pool.restarts, pool.pids[0]
    os.kill(starved, signal.SIGSTOP)
    wake = threading.Timer(stopped, os.kill, (starved, signal.SIGCONT))
    wake.start()
    answers = pool.step(env_ids[3:], [played] * 3)
    wake.join()
    sound = all(a == expected for a in answers)
    require(sound, f"A world of {task.id!r} answers otherwise where its worker had to wait for a processor.")
    pool.close(env_ids)
    pool.close(pool.reset([task] * 2))
    require(pool.restarts == restarts, "close ends the worker.")
