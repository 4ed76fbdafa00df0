"""Many worlds in isolated worker processes: a hanging or crashing call costs its own world and no other.

The pool logs the ops that changed each world. When a worker is lost, a new one starts; each world is replayed
from its log at its next use.

Whose failure is a lost worker?
* An op that uses up its processor time would do so again. A call that does is the caller's failure at once.
  So is grading that does once calls were made: a cheap call can make a state too large to grade.
* A crash or a wait without end may be the machine's fault. The request is made once more in a new worker.
* Where that worker is lost too, a call is the caller's failure. The rest (reset, grading, replay) is ours.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from coevolve_jax.envs import calls as call_checks
from coevolve_jax.envs.base import Execution
from coevolve_jax.envs.worker_process import Gone, Lost, WorkerProcess
from coevolve_jax.types import Call, Observation, Outcome, Task

if TYPE_CHECKING:  # needs Ray
    from coevolve_jax.envs.ray_workers import RayWorker

    Worker = WorkerProcess | RayWorker

_END_TURN, _SCORE, _FINGERPRINT, _CLOSE = '["end_turn"]', '["score"]', '["fingerprint"]', '["close"]'
_OPTIONS, _STEP = '["options"]', '["step"'
_GRADING = _END_TURN, _SCORE, _FINGERPRINT


@dataclasses.dataclass
class _World:
    """The pool's record of a world.

    id: its env_id. log: the ops (JSON text) that build its present state from nothing. failure: why it is
    gone, or "". by_call: True where a call is to blame for that, False where our infrastructure is.
    """

    id: int
    worker: Worker
    log: list[str] = dataclasses.field(default_factory=list)
    failure: str = ""
    by_call: bool = False

    def lose(self, reason: str, op: str = "", settled: bool = False, before: Sequence[str] = ()) -> None:
        """Marks the world as gone.

        op: the caller's op in which the worker was lost, or "". settled: whether it used up its processor
        time. before: the ops of the same request that were answered.
        """
        called = any(done.startswith(_STEP) for done in (*self.log, *before))
        self.failure = reason
        self.by_call = op.startswith(_STEP) or (settled and called and op in _GRADING)


def _step(call: Call) -> str:
    return f"{_STEP}, {json.dumps(call_checks.to_json(call))}]"


class Closed(RuntimeError):
    """Raised by a request to a pool that is shut down."""

    def __init__(self):
        super().__init__("The pool of worker processes is shut down: make another one.")


def _shut_down(closed: threading.Event, workers: Sequence[Worker], threads: ThreadPoolExecutor) -> None:
    """Ends the workers for good: a request under way ends with its worker, and restarts none."""
    closed.set()
    for worker in workers:
        worker.kill()
    threads.shutdown()


class ProcessPool:
    """EnvPool (envs/base.py) over `workers` processes.

    family: name of the environment family. python: the workers' interpreter, "" for this one.
    timeout: seconds of processor time that one call may take. memory_gib: address space of one worker.
    backend: "local" starts children of this process. "ray" starts `workers` processes on each node of the Ray
    cluster that runs here (ray_workers.py).
    A context manager. The processes also end with the interpreter and when this process is killed.
    """

    def __init__(
        self,
        family: str,
        workers: int = 2,
        timeout: float = 5.0,
        memory_gib: float = 2.0,
        python: str = "",
        backend: str = "local",
    ):
        if workers < 1 or timeout <= 0 or memory_gib <= 0:
            raise ValueError(
                f"ProcessPool(workers={workers}, timeout={timeout}, memory_gib={memory_gib}): "
                "all three must be positive."
            )
        settings = family, python, timeout, memory_gib
        self._workers: Sequence[Worker] = (
            _on_ray(workers, *settings)
            if backend == "ray"
            else [WorkerProcess(*settings) for _ in range(workers)]
        )
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._closed = threading.Event()
        self.shutdown = weakref.finalize(self, _shut_down, self._closed, self._workers, self._threads)
        self._worlds: dict[int, _World] = {}
        self._ids = itertools.count()
        for worker in self._workers:
            worker.wait_until_ready()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def busy(self) -> float:
        """Mean seconds that a worker has spent on requests."""
        return sum(worker.busy for worker in self._workers) / len(self._workers)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Present process ids of the workers, each on its own machine."""
        return [worker.pid for worker in self._workers]

    @property
    def restarts(self) -> int:
        """How often a lost worker was restarted."""
        return sum(worker.restarts for worker in self._workers)

    def reset(self, tasks: Sequence[Task]) -> list[int]:
        """Opens a world per task and returns the ids. ValueError where an initial state cannot be built."""
        worlds = [self._new() for _ in tasks]
        self._batch([(w, [op]) for w, op in zip(worlds, _resets(tasks))])
        self._worlds.update({w.id: w for w in worlds})
        return [w.id for w in worlds]

    def step(self, env_ids: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]:
        """Executes calls[i] one after the other in the world env_ids[i]."""
        opened = self._open(env_ids)
        answers = self._batch([(w, [_step(c) for c in cs]) for w, cs in zip(opened, calls, strict=True)])
        return [_observations(w, replies, len(cs)) for w, replies, cs in zip(opened, answers, calls)]

    def options(self, env_ids: Sequence[int]) -> list[list[Call]]:
        """Returns the calls that each world says it accepts now; none where it does not say or is lost."""
        answers = self._batch([(w, [_OPTIONS]) for w in self._open(env_ids)], log=False)
        return [[Call.from_json(call) for call in replies[0]] if replies else [] for replies in answers]

    def end_turn(self, env_ids: Sequence[int]) -> None:
        """Ends and grades the current user turn. ValueError where no turn is left."""
        self._batch([(w, [_END_TURN]) for w in self._open(env_ids)])

    def fingerprint(self, env_ids: Sequence[int]) -> list[str]:
        """Returns the fingerprint of each world; "" where it is lost."""
        answers = self._batch([(w, [_FINGERPRINT]) for w in self._open(env_ids)], log=False)
        return [replies[0] if replies else "" for replies in answers]

    def score(self, env_ids: Sequence[int]) -> list[Outcome]:
        """Returns the outcomes so far. ValueError for a bare scenario."""
        opened = self._open(env_ids)
        answers = self._batch([(w, [_SCORE]) for w in opened], log=False)
        return [_outcome(world, replies) for world, replies in zip(opened, answers)]

    def close(self, env_ids: Sequence[int]) -> None:
        """Frees the worlds; the ids mean nothing afterwards. After `shutdown` they are free already."""
        held = [w for w in self._open(env_ids) if w.id in w.worker.live and not self._closed.is_set()]
        self._batch([(w, [_CLOSE]) for w in held], log=False)
        for world in held:
            world.worker.live.discard(world.id)
        for env_id in env_ids:
            self._worlds.pop(env_id, None)

    def execute(self, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
        """Runs each job's calls in a fresh world of its task."""
        ops = [
            [reset, _FINGERPRINT, *(op for call in calls for op in (_step(call), _FINGERPRINT)), _CLOSE]
            for reset, (_, calls) in zip(_resets([task for task, _ in jobs]), jobs)
        ]
        worlds = [self._new() for _ in jobs]
        answers = self._batch(list(zip(worlds, ops)), log=False)
        return [_execution(w, replies, len(calls)) for w, replies, (_, calls) in zip(worlds, answers, jobs)]

    def judge(self, jobs: Sequence[tuple[str, Sequence[Sequence[Sequence[Call]]]]]) -> list[dict]:
        """Returns the family's official verdict for each (benchmark task id, calls[turn][step][call]).

        Where no verdict was reached, it is {"valid": False, "error_type": "pool:timeout" or "pool:crash",
        "error_message"}. ValueError where the family refuses, for example an unknown task id.
        A verdict has the time limit of one call, plus that of all calls of the longest job.
        """
        ops = [
            json.dumps(
                [
                    "judge",
                    task_id,
                    [[[call_checks.to_json(call) for call in step] for step in turn] for turn in turns],
                ]
            )
            for task_id, turns in jobs
        ]
        worlds = [self._new() for _ in jobs]
        longest = max((sum(len(step) for turn in turns for step in turn) for _, turns in jobs), default=0)
        answers = self._batch([(w, [op]) for w, op in zip(worlds, ops)], log=False, scale=1 + longest)
        return [
            replies[0]
            if replies
            else {"valid": False, "error_type": "pool:" + w.failure.split(":")[0], "error_message": w.failure}
            for w, replies in zip(worlds, answers)
        ]

    def _new(self) -> _World:
        index = next(self._ids)
        return _World(index, self._workers[index % len(self._workers)])

    def _open(self, env_ids: Sequence[int]) -> list[_World]:
        closed = [i for i in env_ids if i not in self._worlds]
        if closed:
            raise ValueError(f"Environment {closed[0]} is not open: use the ids that reset returned.")
        return [self._worlds[i] for i in env_ids]

    def _batch(
        self, jobs: Sequence[tuple[_World, Sequence[str]]], log: bool = True, scale: float = 1.0
    ) -> list[list[Any]]:
        """Runs the jobs, the workers in parallel. Returns the answered values of each job.

        A job has fewer values than ops where its world was lost. log: whether the ops change the worlds, and
        so belong in their logs. scale: multiplies the time limit of an op. Raises Closed after `shutdown`.
        """
        if jobs and self._closed.is_set():
            raise Closed
        groups = collections.defaultdict(list)
        for index, (world, _) in enumerate(jobs):
            groups[id(world.worker)].append(index)
        answers: list[list[Any]] = [[] for _ in jobs]

        def run(indices: list[int]) -> None:
            for index in indices:
                self._ask(*jobs[index], answers[index], log, scale)

        if len(groups) == 1:  # in this thread: a hanging worker may hold the thread that the executor gives
            run(*groups.values())
        else:
            list(self._threads.map(run, groups.values()))
        for value in itertools.chain.from_iterable(answers):
            if value[0] == "refused":
                raise ValueError(value[1])
        return [[value for _, value in replies] for replies in answers]

    def _ask(self, world: _World, ops: Sequence[str], answers: list[list], log: bool, scale: float) -> None:
        """Appends the answers of `ops` to `answers`. Sets world.failure where the world is lost.

        Raises Closed after `shutdown`, also where that comes while the worker answers.
        """
        worker, known, tried = world.worker, len(world.log), False
        with worker.lock, _adding_to(worker):
            while not world.failure:
                if self._closed.is_set():
                    raise Closed
                worker.wait_until_ready()
                del answers[:], world.log[known:]  # a second attempt starts from the same log
                past = [] if world.id in worker.live else list(world.log)
                asked = [*past, *ops]
                replies = 0
                try:
                    for reply in worker.request(world.id, asked, scale):
                        replies += 1
                        if reply[0] in ("broken", "fatal"):  # the ops after it get the same answer
                            if not world.failure:
                                now = reply[0] == "fatal" and replies > len(past)  # no replay
                                by = asked[replies - 1] if now else ""
                                world.lose(f"environment: {reply[1]}", by)
                        elif replies > len(past):
                            answers.append(reply)
                            if log and reply[0] == "ok":
                                world.log.append(asked[replies - 1])
                except Gone:
                    self._restart(worker)
                    continue
                except Lost as lost:
                    self._restart(worker)
                    if lost.settled or tried:
                        op = asked[replies] if replies >= len(past) else ""
                        world.lose(str(lost), op, lost.settled, asked[:replies])
                    tried = True
                    continue
                except BaseException as error:  # Ctrl-C: the next request must not read a pending answer
                    world.lose("interrupted")
                    worker.kill()  # the next request restarts it
                    if isinstance(error, ValueError) and self._closed.is_set():  # as were its pipes
                        raise Closed from None
                    raise
                if world.failure:
                    worker.live.discard(world.id)
                elif world.log:  # a world that stays open, unlike those of `execute` and `judge`
                    worker.live.add(world.id)
                return

    def _restart(self, worker: Worker) -> None:
        """Starts a lost worker again. Raises Closed after `shutdown`, which lets none live."""
        if not self._closed.is_set():
            worker.restart()
            if not self._closed.is_set():
                return
            worker.kill()
        raise Closed from None


def _on_ray(workers: int, *settings: Any) -> list[RayWorker]:
    try:
        from coevolve_jax.envs import ray_workers
    except ImportError as error:
        raise ValueError(
            f"config.environment.backend is 'ray', which is not installed ({error}): "
            "pip install 'coevolve_jax[ray]'."
        ) from None
    return ray_workers.start(workers, *settings)


@contextlib.contextmanager
def _adding_to(worker: Worker) -> Iterator[None]:
    """Adds the time that its body takes to worker.busy."""
    start = time.monotonic()
    try:
        yield
    finally:
        worker.busy += time.monotonic() - start


def _resets(tasks: Sequence[Task]) -> list[str]:
    """Returns the reset op of each task. A task that occurs several times is encoded once."""
    encoded: dict[int, str] = {}
    for task in tasks:
        if id(task) not in encoded:
            encoded[id(task)] = json.dumps(["reset", task.to_json()])
    return [encoded[id(task)] for task in tasks]


def _observations(world: _World, replies: Sequence[list], count: int) -> list[Observation]:
    said, ours = json.dumps({"error": f"{world.failure}: the world is gone"}), not world.by_call
    lost = Observation(said, error=True, valid=not ours, fatal=not ours)
    told = [Observation(text, error, ends=ends, last_message=last) for text, error, ends, last in replies]
    return told + [lost] * (count - len(told))


def _outcome(world: _World, replies: Sequence[list]) -> Outcome:
    if not replies:
        return Outcome(0.0, False, valid=world.by_call, reason=world.failure)
    reward, success, valid, progress, reason = replies[0]
    return Outcome(reward, success, valid, progress, reason)


def _execution(world: _World, replies: Sequence[Any], count: int) -> Execution:
    """Builds an Execution. replies: of reset, the first fingerprint, step and fingerprint in turn, close."""
    fingerprints = replies[1 : 2 * count + 2 : 2]
    observations = _observations(world, replies[2 : 2 * count + 2 : 2], count)
    return Execution(
        tuple(observations),
        tuple(fingerprints) + ("",) * (count + 1 - len(fingerprints)),
        valid=world.by_call or not world.failure,
    )
