"""Tools of the conformance suite of environments: worlds to play, junk calls, assertions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coevolve_jax.envs import calls as call_checks
from coevolve_jax.envs.base import Execution
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.envs.worker_process import WorkerProcess
from coevolve_jax.types import Call, Outcome, Task

SAMPLE = 12  # the number of tasks, and of scenarios, to play
VALUES = (None, True, -1, 0.5, "", "x" * 5000, "{0.__class__}", "\x00\ud800", [], [[1]], {}, {"a": {}})
STRANGERS = ("no_such_tool", "", "__class__", "reset", "__import__('os').system('true')")


class Worker:
    """One worker, asked directly."""

    def __init__(self, name: str, python: str, timeout: float):
        self._process = WorkerProcess(name, python, timeout, memory_gib=0)
        self.close = self._process.kill
        self._process.wait_until_ready()

    def ask(self, *question: Any) -> Any:
        (reply,) = self._process.request(0, [json.dumps(["ask", *question])])
        return reply[1]

    def play(self, task: Task, calls: Sequence[Call]) -> None:
        ops = [["reset", task.to_json()], *(["step", call_checks.to_json(c)] for c in calls)]
        list(self._process.request(1, [json.dumps(op) for op in (*ops, ["fingerprint"])]))


def play(
    pool: ProcessPool, tasks: Sequence[Task], turns: Sequence[Sequence[Sequence[Call]]]
) -> list[Outcome]:
    """Returns the outcomes of tasks[i] after the calls turns[i][turn]."""
    env_ids = pool.reset(tasks)
    for turn in range(max(map(len, turns), default=0)):
        on = [i for i, t in enumerate(turns) if turn < len(t)]
        pool.step([env_ids[i] for i in on], [turns[i][turn] for i in on])
        pool.end_turn([env_ids[i] for i in on])
    outcomes = pool.score(env_ids)
    pool.close(env_ids)
    return outcomes


def some(items: Sequence[Any]) -> list[Any]:
    """Returns at most SAMPLE of the items, spread evenly."""
    return list(items[:: max(1, -(-len(items) // SAMPLE))])


def name_of(call: Call) -> str:
    return f"{call.name[:40]}({str(call.arguments)[:80]})"


def require(holds: object, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def require_valid(execution: Execution, task: Task, calls: Sequence[Call]) -> None:
    for call, observation in zip(calls, execution.observations):
        if observation.fatal or not observation.valid:
            raise AssertionError(
                f"The call {name_of(call)} lost its world of {task.id!r} ({observation.text[:200]}): "
                "step must answer any call with an observation, within `timeout` seconds of processor time."
            )
    require(execution.valid, f"A world of {task.id!r} was lost in reset, fingerprint or close: see above.")


@contextlib.contextmanager
def answering(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


def junk_arguments(schema: Mapping) -> list[dict]:
    """Returns no arguments, unknown ones, and each strange value for one parameter and for all at once."""
    parameters = list(schema.get("properties", {}))
    everywhere = [dict.fromkeys(parameters, value) for value in VALUES]
    single = [{**dict.fromkeys(parameters, "x"), p: value} for p in parameters for value in VALUES]
    return [{}, {"no_such_parameter": 1}, {"": 1}, *everywhere, *single]
