"""The interface of environments for the agent, the explorer and the validator, with a family's defaults."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from coevolve_jax.types import Call, Group, Observation, Outcome, Task, Trajectory

# Maps (task id, calls[turn][step][call]) of many trajectories to a verdict on each. The workers compute them.
Judge = Callable[[Sequence[tuple[str, Sequence[Sequence[Sequence[Call]]]]]], list[dict]]


class Broken(Exception):
    """Raised by a world that has failed itself: neither a call nor its worker is to blame."""


class Environment(Protocol):
    """One world for one rollout. It lives inside a worker process.

    A world that can list the calls it accepts now may offer them to explorers: `options() -> list[Call]`.
    Every method may raise `Broken`. It costs the world, and the rollout counts as lost.
    """

    def reset(self, task: Task) -> None:
        """Builds the task's initial state afresh. Equal tasks give equal states."""

    def step(self, call: Call) -> Observation:
        """Executes one call. A mistake of the model comes back as an error observation.

        An observation with fatal=True says that the call has ended the world: its rollout has failed.
        """
        ...

    def end_turn(self) -> None:
        """Ends the current user turn and grades it against its reference."""

    def score(self) -> Outcome:
        """Returns the outcome so far. Turns that have not ended count as failed."""
        ...

    def fingerprint(self) -> str:
        """Hashes everything that `score` compares of the state."""
        ...

    def close(self) -> None:
        """Frees the world."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """The result of calls that ran one after the other in a fresh world.

    observations[i] answers calls[i]. fingerprints[i] is the state before calls[i]; fingerprints[-1] is the
    final state. There are len(calls) + 1 fingerprints, "" where the world was gone.
    valid: False where the infrastructure failed on the way. After a fatal call it is True.
    """

    observations: tuple[Observation, ...]
    fingerprints: tuple[str, ...]
    valid: bool = True


class EnvPool(Protocol):
    """Many worlds in isolated worker processes, used in batches.

    An env_id names an open world. A call that takes too long or kills its worker costs its own world and no
    other. That world answers fatal=True from then on, and its outcome is a valid failure.
    Where our infrastructure fails, the world answers valid=False, and its outcome is invalid.
    Several threads may use the pool at once. busy: mean seconds that a worker has spent on requests.
    size: number of workers.
    """

    @property
    def busy(self) -> float: ...

    @property
    def size(self) -> int: ...

    def reset(self, tasks: Sequence[Task]) -> list[int]: ...

    def step(self, env_ids: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]: ...

    def options(self, env_ids: Sequence[int]) -> list[list[Call]]:
        """Returns the calls that each world says it accepts now; none where it does not say."""
        ...

    def end_turn(self, env_ids: Sequence[int]) -> None: ...

    def fingerprint(self, env_ids: Sequence[int]) -> list[str]:
        """Returns `Environment.fingerprint` of each world; "" where the world is gone."""
        ...

    def score(self, env_ids: Sequence[int]) -> list[Outcome]: ...

    def close(self, env_ids: Sequence[int]) -> None: ...

    def execute(self, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
        """Runs each job's calls in a fresh world of its task."""
        ...

    def shutdown(self) -> None: ...


# Ops of a worker in which a family may load code, or make all reference calls of a turn.
LONG = ("reset", "end_turn")


def allowance(op: str, seconds: float) -> float:
    """Returns how many times as long as a call, which may take `seconds`, an op may take.

    Those in LONG may take 20 times as long, but not above a minute.
    """
    return max(1.0, min(20.0, 60.0 / seconds)) if op in LONG else 1.0


# A world calls it, inside an op, before it waits for a server that has a time limit of its own. It takes the
# most seconds by the clock of that wait, and they are added to the op's limit by the clock.
WAITS: ContextVar[Callable[[float], None]] = ContextVar("waits", default=lambda seconds: None)


# --- Defaults for what a family does not define itself ---------------------------------------------


CATEGORIES: Sequence[str] = ()  # parts of the benchmark that `tasks` takes as settings["categories"]
# Named protocols -> keys of config.rollout that each fixes. `tasks` takes the name: settings["protocol"].
PROTOCOLS: Mapping[str, Mapping[str, Any]] = {}
# Distributions in the family's interpreter whose versions a score depends on.
PACKAGES: Sequence[str] = ()
# Whether `scenarios`, `tasks` and `tools` execute code of the user's, and so run in a process of their own.
APART = False


def warm_up() -> None:
    """Runs in a worker before it reports ready: slow imports go here, so that no call waits for them."""


def judge(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """Judges calls[turn][step][call] officially.

    Returns {"valid": bool, "error_type": str, "error_message": str}.
    """
    raise ValueError(
        f"The environment of {task_id!r} has no official verdict: its report must not ask for one."
    )


# Above this share of invalid rollouts, `share` also reports success with the invalid ones as failures.
LOST = 0.01


def share(successes: int, trials: int, invalid: int) -> dict:
    """Returns a success rate for reports, with the number of rollouts that it leaves out.

    trials: number of valid rollouts. Returns {"success" (None without trials), "trials", "invalid"}. Where
    more than LOST of all rollouts are invalid, it adds "success_if_invalid_failed".
    """
    found = {"success": successes / trials if trials else None, "trials": trials, "invalid": invalid}
    if invalid > LOST * (trials + invalid):
        found["success_if_invalid_failed"] = successes / (trials + invalid)
    return found


def share_of(outcomes: Sequence[Outcome]) -> dict:
    """Computes `share` from outcomes."""
    valid = [outcome.success for outcome in outcomes if outcome.valid]
    return share(sum(valid), len(valid), len(outcomes) - len(valid))


def report(groups: Sequence[Group], judge: Judge) -> dict:
    """Returns the environment's own score: "benchmark", "scoring", and `share` of the rollouts."""
    return {
        "benchmark": groups[0].task.environment if groups else "",
        "scoring": "the environment",
        **share_of(outcomes_of(groups)),
    }


def outcomes_of(groups: Sequence[Group]) -> list[Outcome]:
    """Returns the outcomes of all rollouts, group by group."""
    return [t.outcome for group in groups for t in group.trajectories]


def success_by(part: str, groups: Sequence[Group]) -> dict[str, dict]:
    """Computes `share` of the rollouts for each value of task.scenario[part]."""
    by_value: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_value[str(group.task.scenario[part])].append(group)
    return {value: share_of(outcomes_of(own)) for value, own in sorted(by_value.items())}


def report_verdicts(groups: Sequence[Group], judge: Judge) -> dict:
    """Scores rollouts by a family's `judge`.

    Returns `share`, "failures": number of failures by error_type, "by_task": task id -> [successes, trials].
    A rollout that a limit ended fails ("force_terminated"). So does one that its own call ended
    ("call_failed"). "invalid" counts the rollouts that are left out: invalid ones, and those without a
    verdict. The latter are also among the failures, as "pool:timeout" and "pool:crash".
    """
    jobs, by_task, reasons = [], {group.task.id: [0, 0] for group in groups}, Counter()
    for group in groups:
        by_task[group.task.id][1] += len(group.valid)
        for t in group.valid:
            if t.stop == "done":
                jobs.append((group.task.id, _calls_by_turn(group.task, t)))
            else:
                reasons["call_failed" if t.stop == "call_failed" else "force_terminated"] += 1
    verdicts = judge(jobs)
    for (task_id, _), verdict in zip(jobs, verdicts, strict=True):
        by_task[task_id][0] += verdict["valid"]
        by_task[task_id][1] -= verdict["error_type"].startswith("pool:")
    reasons.update(v["error_type"] for v in verdicts if not v["valid"])
    trials = sum(n for _, n in by_task.values())
    return {
        **share(sum(v["valid"] for v in verdicts), trials, len(outcomes_of(groups)) - trials),
        "failures": dict(sorted(reasons.items())),
        "by_task": by_task,
    }


def _calls_by_turn(task: Task, trajectory: Trajectory) -> list[list[list[Call]]]:
    """Returns calls[turn][step][call] for a judge: each call of a rollout is a step of its own."""
    made = [(s.turn, s.call) for s in trajectory.steps if s.call is not None]
    return [[[call] for turn, call in made if turn == own] for own in range(len(task.turns))]


def action_pattern(call: Call) -> str:
    """Names the action of a call for the rare signal: its tool."""
    return call.name


UNDER_WAY = "\x1e"  # begins a line of a worker's standard error that says what it does, in case it dies


def wording(call: Call) -> str:
    """Says how a user asks for a call. "" leaves that to the tool's documentation and the arguments."""
    return ""


def task_key(task: Task) -> str:
    """Digests what makes two tasks the same: the scenario and each turn's reference calls.

    A turn without reference calls counts by its words. The id and the lineage do not count.
    """
    turns = [[call.to_json() for call in turn.calls] or turn.query for turn in task.turns]
    return digest([task.environment, task.scenario, turns])


def features(task: Task) -> Counter[str]:
    """Counts the features that leak control compares.

    They are words of the queries, tools, arguments with their values, and pairs of successive tools.
    """
    found: Counter[str] = Counter()
    for turn in task.turns:
        found.update(f"word {w}" for w in re.findall(r"\w+", turn.query.lower()))
    names = [call.name for call in task.calls]
    found.update(f"tool {name}" for name in names)
    found.update(f"next {a} {b}" for a, b in zip(names, names[1:]))
    for call in task.calls:
        found.update(f"value {call.name} {name}={canonical(v)}" for name, v in call.arguments.items())
    return found


def canonical(value: Any) -> str:
    """Returns JSON text that is equal for equal values: sorted keys, 5.0 as 5 (the tools compare by ==)."""
    return json.dumps(_integral(value), sort_keys=True, separators=(",", ":"))


def comparable(answer: str) -> str:
    """Returns a text that is equal for equal answers: of JSON without the order of keys, else the answer."""
    try:
        return canonical(json.loads(answer, parse_float=lambda text: rounded(float(text))))
    except (ValueError, OverflowError, RecursionError):
        return answer


GRAIN = 2.0**-70  # sums of floats above 1e-5 in size are multiples of it, and hardly any other small float is


def rounded(number: float) -> float:
    """Returns a float of 14 digits, 12 of them behind the point at most.

    Sums of the same numbers in another order are equal then, also where they come to 0. A small number that
    is no such remainder keeps its 14 digits wherever they stand: it is no multiple of GRAIN.
    """
    remainder = (number / GRAIN).is_integer()
    return float(f"{round(number, 12) if remainder else number:.14g}") + 0.0  # no -0.0


def digest(value: Any) -> str:
    """Returns the sha256 of the canonical JSON text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _integral(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _integral(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_integral(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
