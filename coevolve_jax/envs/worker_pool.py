"""Many worlds in isolated worker processes: what a hanging or crashing call costs is its own session.

Every session keeps the log of what changed its world. When a worker is lost, a
new one starts and a session is replayed from its log when it is used next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import coevolve_jax
from coevolve_jax.envs.base import Execution
from coevolve_jax.envs.bfcl.tools import NOT_PLAIN, plain
from coevolve_jax.types import Call, Observation, Outcome, Task

START_SECONDS = 120.0  # a worker imports its packages in 0.3 s on an idle core
_END_TURN, _SCORE, _FINGERPRINT, _CLOSE = '["end_turn"]', '["score"]', '["fingerprint"]', '["close"]'


class _Lost(Exception):
    """The worker hangs or is dead; the message is the reason that the session's outcome carries."""


def _environ() -> dict[str, str]:
    """The worker finds this package from any folder, orders sets alike in every process, and starts no
    accelerator and no threads."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    root = str(pathlib.Path(coevolve_jax.__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (root, env.get("PYTHONPATH")) if p)
    return {**env, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "TZ": "UTC", "OPENBLAS_NUM_THREADS": "1"}


class _Worker:
    """A child process, started anew whenever it was lost. live: ids of the sessions that it holds.
    busy: seconds for which somebody waited for its answers."""

    def __init__(self, timeout: float, memory_gib: float):
        self.timeout, self.memory_gib = timeout, memory_gib
        self.lock = threading.Lock()
        self.busy = 0.0
        self.start()

    def start(self) -> None:
        self.live: set[int] = set()
        self._buffer = bytearray()
        self._ready = False
        # exec, never fork: the parent has threads. Its own session, so that Ctrl-C reaches the parent only.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coevolve_jax.envs.worker", str(self.timeout), str(self.memory_gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environ(),
            start_new_session=True,
        )
        self._poll = select.poll()
        self._poll.register(self.process.stdout, select.POLLIN)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def wait_until_ready(self) -> None:
        """RuntimeError when the worker does not start."""
        if self._ready:
            return
        try:
            self._read_line(START_SECONDS)
            self._ready = True
        except _Lost as lost:
            raise RuntimeError(
                f"An environment worker did not start ({lost}): its own message stands above, "
                "most often a package of requirements/bfcl.txt is not installed."
            ) from None

    def request(self, session: int, ops: Sequence[str]) -> Iterator[list]:
        """Yields the answer to each op (JSON text). Raises _Lost when one takes longer than the timeout."""
        if self.process.poll() is not None:
            raise _Lost(f"crash: the worker process ended with code {self.process.returncode}")
        try:
            data = memoryview(f"[{session},[{','.join(ops)}]]\n".encode())
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError:
            raise _Lost(f"crash: the worker process ended with code {self.process.wait()}") from None
        for op in ops:
            try:
                yield json.loads(self._read_line(self.timeout))
            except _Lost as lost:
                raise _Lost(f"{lost} in {op[:120]}") from None

    def _read_line(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _Lost(f"timeout: no answer within {timeout:g} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise _Lost(f"crash: the worker process ended with code {self.process.wait()}")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


@dataclasses.dataclass
class _Session:
    """log: ops (JSON text) that lead from nothing to the present state. failure: why it is invalid, or ""."""

    id: int
    worker: _Worker
    log: list[str] = dataclasses.field(default_factory=list)
    failure: str = ""


def _call_json(call: Call) -> dict:
    """A call that no JSON can carry travels as one whose arguments say why, which the worker refuses."""
    try:
        arguments = plain(call.arguments)
    except ValueError as error:
        arguments = str(error).removeprefix(NOT_PLAIN)
    return {"name": call.name[:200] if isinstance(call.name, str) else "", "arguments": arguments}


def _step(call: Call) -> str:
    return json.dumps(["step", _call_json(call)])


def _shut_down(workers: list[_Worker], threads: ThreadPoolExecutor) -> None:
    for worker in workers:
        worker.kill()
    threads.shutdown()


class ProcessPool:
    """EnvPool (envs/base.py) over `workers` child processes.

    timeout: seconds that one call may take. memory_gib: address space of one worker.
    A context manager; the children also end with the interpreter and when this process is killed.
    """

    def __init__(self, workers: int = 2, timeout: float = 5.0, memory_gib: float = 2.0):
        if workers < 1 or timeout <= 0 or memory_gib <= 0:
            raise ValueError(
                f"ProcessPool(workers={workers}, timeout={timeout}, memory_gib={memory_gib}): "
                "all three must be positive."
            )
        self._workers = [_Worker(timeout, memory_gib) for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers)
        self.shutdown = weakref.finalize(self, _shut_down, self._workers, self._threads)
        self._sessions: dict[int, _Session] = {}
        self._ids = itertools.count()
        for worker in self._workers:
            worker.wait_until_ready()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def busy(self) -> float:
        """Seconds that the workers have spent on requests, their mean."""
        return sum(worker.busy for worker in self._workers) / len(self._workers)

    def reset(self, tasks: Sequence[Task]) -> list[int]:
        """Opens a session per task, in its initial state. ValueError for a task that cannot be built."""
        sessions = [self._new() for _ in tasks]
        self._batch([(s, [op]) for s, op in zip(sessions, _resets(tasks))])
        self._sessions.update({s.id: s for s in sessions})
        return [s.id for s in sessions]

    def step(self, sessions: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]:
        """Executes calls[i] one after the other in sessions[i]."""
        opened = self._open(sessions)
        answers = self._batch([(s, [_step(c) for c in cs]) for s, cs in zip(opened, calls, strict=True)])
        return [_observations(s, replies, len(cs)) for s, replies, cs in zip(opened, answers, calls)]

    def end_turn(self, sessions: Sequence[int]) -> None:
        """Ends and grades the current user turn. ValueError where no turn is left."""
        self._batch([(s, [_END_TURN]) for s in self._open(sessions)])

    def score(self, sessions: Sequence[int]) -> list[Outcome]:
        """Outcome so far. ValueError for a bare scenario."""
        opened = self._open(sessions)
        answers = self._batch([(s, [_SCORE]) for s in opened], log=False)
        return [_outcome(session, replies) for session, replies in zip(opened, answers)]

    def close(self, sessions: Sequence[int]) -> None:
        """Frees the worlds; the handles mean nothing afterwards."""
        held = [s for s in self._open(sessions) if s.id in s.worker.live]
        self._batch([(s, [_CLOSE]) for s in held], log=False)
        for session in held:
            session.worker.live.discard(session.id)
        for session in sessions:
            self._sessions.pop(session, None)

    def execute(self, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
        """Runs each job's calls in a fresh world of its task."""
        ops = [
            [reset, _FINGERPRINT, *(op for call in calls for op in (_step(call), _FINGERPRINT)), _CLOSE]
            for reset, (_, calls) in zip(_resets([task for task, _ in jobs]), jobs)
        ]
        sessions = [self._new() for _ in jobs]
        answers = self._batch(list(zip(sessions, ops)), log=False)
        return [_execution(s, replies, len(calls)) for s, replies, (_, calls) in zip(sessions, answers, jobs)]

    def check(self, jobs: Sequence[tuple[str, Sequence[Sequence[Sequence[Call]]]]]) -> list[dict]:
        """BFCL's official verdict for each (benchmark task id, calls[turn][step][call]).

        Returns {"valid", "error_type", "error_message"}; error_type "pool:timeout" or "pool:crash" where no
        verdict was reached. ValueError for an unknown task id or too many turns.
        """
        ops = [
            json.dumps(
                ["check", task_id, [[[_call_json(call) for call in step] for step in turn] for turn in turns]]
            )
            for task_id, turns in jobs
        ]
        sessions = [self._new() for _ in jobs]
        answers = self._batch([(s, [op]) for s, op in zip(sessions, ops)], log=False)
        return [
            replies[0]
            if replies
            else {"valid": False, "error_type": "pool:" + s.failure.split(":")[0], "error_message": s.failure}
            for s, replies in zip(sessions, answers)
        ]

    def _new(self) -> _Session:
        index = next(self._ids)
        return _Session(index, self._workers[index % len(self._workers)])

    def _open(self, sessions: Sequence[int]) -> list[_Session]:
        closed = [s for s in sessions if s not in self._sessions]
        if closed:
            raise ValueError(f"Session {closed[0]} is not open: use the handles that reset returned.")
        return [self._sessions[s] for s in sessions]

    def _batch(self, jobs: Sequence[tuple[_Session, Sequence[str]]], log: bool = True) -> list[list[Any]]:
        """Values of the answers per job, fewer than its ops where the session was lost. Runs the workers in
        parallel."""
        groups = collections.defaultdict(list)
        for index, (session, _) in enumerate(jobs):
            groups[id(session.worker)].append(index)
        answers: list[list[Any]] = [[] for _ in jobs]

        def run(indices: list[int]) -> None:
            for index in indices:
                self._ask(*jobs[index], answers[index], log)

        if len(groups) == 1:  # here and now: a thread of its own may be one that a hanging worker holds
            run(*groups.values())
        else:
            list(self._threads.map(run, groups.values()))
        for value in itertools.chain.from_iterable(answers):
            if value[0] == "refused":
                raise ValueError(value[1])
        return [[value for _, value in replies] for replies in answers]

    def _ask(self, session: _Session, ops: Sequence[str], answers: list[list], log: bool) -> None:
        """Appends the answers to `ops`; when the worker is lost on the way, the session is invalid."""
        worker = session.worker
        with worker.lock, _adding_to(worker):
            if session.failure:
                return
            if worker.process.poll() is not None:  # died while idle: nobody's fault
                worker.restart()
            worker.wait_until_ready()
            past = [] if session.id in worker.live else list(session.log)
            try:
                for index, reply in enumerate(worker.request(session.id, [*past, *ops])):
                    if index >= len(past):
                        answers.append(reply)
                        if log and reply[0] == "ok":
                            session.log.append(ops[index - len(past)])
                if session.log:  # one that will be asked again
                    worker.live.add(session.id)
            except _Lost as lost:
                session.failure = str(lost)
                worker.restart()


@contextlib.contextmanager
def _adding_to(worker: _Worker) -> Iterator[None]:
    """Adds the time that its body takes to worker.busy."""
    start = time.monotonic()
    try:
        yield
    finally:
        worker.busy += time.monotonic() - start


def _resets(tasks: Sequence[Task]) -> list[str]:
    """The reset op of each task; a task that stands several times in the list is encoded once."""
    encoded: dict[int, str] = {}
    for task in tasks:
        if id(task) not in encoded:
            encoded[id(task)] = json.dumps(["reset", task.to_json()])
    return [encoded[id(task)] for task in tasks]


def _observations(session: _Session, replies: Sequence[list], count: int) -> list[Observation]:
    lost = Observation(json.dumps({"error": session.failure}), error=True, valid=False)
    return [Observation(text, error) for text, error in replies] + [lost] * (count - len(replies))


def _outcome(session: _Session, replies: Sequence[list]) -> Outcome:
    if not replies:
        return Outcome(0.0, False, valid=False, reason=session.failure)
    reward, success, progress, reason = replies[0]
    return Outcome(reward, success, progress=progress, reason=reason)


def _execution(session: _Session, replies: Sequence[Any], count: int) -> Execution:
    """Replies: of reset, of the first fingerprint, of step and fingerprint in turn, of close."""
    fingerprints = replies[1 : 2 * count + 2 : 2]
    observations = _observations(session, replies[2 : 2 * count + 2 : 2], count)
    return Execution(
        tuple(observations),
        tuple(fingerprints) + ("",) * (count + 1 - len(fingerprints)),
        valid=not session.failure,
    )
