"""The multi-turn agent loop: tasks in, token-exact trajectories out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax import event_loop
from coevolve_jax.envs.base import EnvPool, action_pattern
from coevolve_jax.rollout.chat import Chat, tool_name
from coevolve_jax.rollout.engine import Completion, Engine, Request, Sampling
from coevolve_jax.rollout.tool_call_format import ParsedCall
from coevolve_jax.types import Call, Hint, Observation, Outcome, Step, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Limits:
    """max_length: tokens of a whole trajectory. max_new_tokens: of one assistant message.
    max_steps: assistant messages with tool calls per user turn (BFCL: 20; one more fails the task).
    max_observation: characters of a tool result that the policy gets to read.
    max_messages: assistant messages of the whole conversation; 0: no bound.
    malformed: what a tool call that cannot be read leads to: "answer", an error that the policy reads, or "end_turn",
    nothing and no step, so that a message without any other call ends its turn (as in BFCL's own harness)."""

    max_length: int
    max_new_tokens: int
    max_steps: int = 20
    max_observation: int = 400
    max_messages: int = 0
    malformed: str = "answer"

    def shown(self, answer: str) -> str:
        """What the policy gets to read of a tool's answer."""
        return answer if len(answer) <= self.max_observation else answer[: self.max_observation] + "..."


class Job(NamedTuple):
    """One rollout to do. Those of a group start from the same environment state and differ in their seed, and in
    their hints, alone."""

    task: Task
    rollout_index: int
    seed: int
    hint: Hint | None = None


class _Rollout:
    """One conversation in progress: the lists that become a Trajectory."""

    def __init__(self, job: Job, session: int, world: int):
        self.task, self.rollout_index, self.seed, self.hint = job
        self.session, self.world = session, world
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.routing: np.ndarray | None = None  # of what was fed, where the engine records it
        self.turn_starts = [0]
        self.steps: list[Step] = []
        self.turn = 0
        self.steps_in_turn = 0
        self.messages = 0
        self.stop: str | None = None
        self.hints: list[tuple[int, str]] = []
        self.offered: frozenset[str] = frozenset()

    def hinted(self, hint: str, text: str, *, first: bool) -> str:
        """The text with the hint before (first) or after it; the hint is recorded."""
        if not hint:
            return text
        self.hints.append((len(self.steps), hint))
        return f"{hint}\n{text}" if first else f"{text}\n{hint}"

    def feed(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not write."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Appends tokens that the policy wrote, exactly as the engine returned them."""
        self.messages += 1
        self.ids += completion.ids.tolist()
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        if completion.routing is not None:
            # What is known stays: weights that came since may have routed the earlier tokens in another way.
            known = completion.routing[:0] if self.routing is None else self.routing
            self.routing = np.concatenate([known, completion.routing[len(known) :]])

    def finish(self, outcome: Outcome) -> Trajectory:
        assert self.stop is not None  # a conversation goes on until it has one
        routing = self.routing
        if routing is not None:
            unfed = len(self.ids) - len(routing)
            routing = np.pad(routing, ((0, unfed), (0, 0), (0, 0)), constant_values=-1)
        return Trajectory(
            task_id=self.task.id,
            rollout_index=self.rollout_index,
            ids=np.asarray(self.ids, np.int32),
            mask=np.asarray(self.mask, bool),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            turn_starts=tuple(self.turn_starts),
            steps=tuple(self.steps),
            stop=self.stop,
            outcome=outcome,
            routing=routing,
            hints=tuple(self.hints),
        )


class _Rounds:
    """Asks an engine that serves batches: once every conversation that is going on waits for it. So a round is the same
    however long the environment took."""

    def __init__(
        self, advance: Callable[[Sequence[Request]], Awaitable[Sequence[Completion | None]]], seats: int
    ):
        self._advance, self._seats = advance, seats
        self._waiting: list[tuple[Request, asyncio.Future]] = []
        self._serving: asyncio.Task | None = None

    async def ask(self, request: Request) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._start_if_complete()
        return await answer

    def leave(self) -> None:
        """A conversation has ended and no other takes its seat."""
        self._seats -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._seats:
            round = sorted(
                self._waiting, key=lambda asked: asked[0].session
            )  # whoever came first: equal runs
            self._waiting = []
            self._serving = asyncio.ensure_future(self._serve(round))

    async def _serve(self, round: Sequence[tuple[Request, asyncio.Future]]) -> None:
        try:
            completions = await self._advance([request for request, _ in round])
            answered = list(zip(round, completions, strict=True))
        except BaseException as error:
            for _, answer in round:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (request, answer), completion in answered:
            if answer.done():  # it was cancelled
                continue
            if completion is None:
                self._waiting.append((request, answer))
            else:
                answer.set_result(completion)
        self._start_if_complete()


class Usage(NamedTuple):
    """utilization: "engine", requests in flight over the most that there may be, and "workers", those of the environment
    that were busy, both averaged over the time in which rollouts ran; where the engine tells, "cached": of the tokens sent
    to it, those that it had. All 0 to 1. counts: the engine's own (Engine.counts)."""

    utilization: dict[str, float]
    counts: Counter[str]


class _Use:
    """How busy engine and workers are, over the time in which rollouts run; from several threads."""

    def __init__(self, pool: EnvPool):
        self._pool, self._lock = pool, threading.Lock()
        self._calls = self._requests = 0  # under way
        self._seconds = self._asked = self._acted = 0.0
        self._last = time.perf_counter(), pool.busy

    @contextlib.contextmanager
    def of(self, *, calls: int = 0, requests: int = 0) -> Iterator[None]:
        """These are under way inside."""
        self._count(calls, requests)
        try:
            yield
        finally:
            self._count(-calls, -requests)

    def take(self) -> tuple[float, float, float]:
        """Since the last call: seconds in which rollouts ran, request seconds, worker seconds."""
        self._count()
        with self._lock:
            taken = max(self._seconds, 1e-9), self._asked, self._acted
            self._seconds = self._asked = self._acted = 0.0
        return taken

    def _count(self, calls: int = 0, requests: int = 0) -> None:
        with self._lock:
            (then, acted), self._last = self._last, (time.perf_counter(), self._pool.busy)
            if self._calls:
                self._seconds += self._last[0] - then
                self._acted += self._last[1] - acted
                self._asked += self._requests * (self._last[0] - then)
            self._calls, self._requests = self._calls + calls, self._requests + requests


class Agent:
    """Runs tasks in an environment with an engine. Keeps `concurrency` conversations going, each at its own
    pace; an engine that serves batches is asked in rounds. Those of an earlier call come first."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        pool: EnvPool,
        tools: Callable[[Task], list[dict]],
        limits: Limits,
        concurrency: int,
        action_pattern: Callable[[Call], str] = action_pattern,
    ):
        """tools, action_pattern: the environment family's."""
        self._action_pattern = action_pattern
        self._engine, self._chat, self._pool, self._tools = engine, chat, pool, tools
        self._limits, self._concurrency = limits, concurrency
        self._seats = asyncio.Semaphore(concurrency)  # first come, first served
        self._alone = asyncio.Lock()  # of a call whose engine serves batches
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="environment")
        self._running: set[asyncio.Task] = set()
        self._sessions = 0
        self._use = _Use(pool)
        self._counted: Counter[str] = Counter()  # of the engine, when it was last looked at

    def rollouts(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_done: Callable[[], object] = lambda: None,
    ) -> list[Trajectory]:
        """One trajectory per job, in the order of the jobs.

        Args:
          jobs: what to roll out.
          temperature: 0 is greedy.
          on_done: called as each trajectory ends.

        Raises:
          EngineError: the engine cannot go on.
        """
        with self._use.of(calls=1):
            return event_loop.run(self._rollouts(jobs, temperature, on_done))

    def fits(self, task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
        """Whether the reference calls, one per message, fit the limits. answers[turn][i]: to the i-th call of a turn.

        A family without reference calls has no path to measure: True.
        """
        limits, chat = self._limits, self._chat
        if 0 < limits.max_messages < len(task.calls) + len(task.turns):
            return False
        length, turns = len(chat.prompt(self._tools(task), task.turns[0].query)), enumerate(task.turns)
        room = lambda: length + limits.max_new_tokens <= limits.max_length  # as of _check_limits
        for i, turn in turns:
            length += len(chat.user(turn.query)) if i else 0
            if len(turn.calls) > limits.max_steps:
                return False
            for call, answer in zip(turn.calls, answers[i], strict=True):
                message = len(chat.message([call]))
                if message > limits.max_new_tokens or not room():
                    return False
                length += message + len(chat.observations([limits.shown(answer.text)]))
            if not room():
                return False
            length += len(chat.message([]))
        return True

    @property
    def batches(self) -> bool:
        """As of `Engine`."""
        return self._engine.batches

    def usage(self) -> Usage:
        """Of the rollouts since the last call."""
        seconds, asked, acted = self._use.take()
        shares = {"engine": asked / (self._concurrency * seconds), "workers": min(1.0, acted / seconds)}
        now = Counter(getattr(self._engine, "counts", {}))
        counts, self._counted = now - self._counted, now
        if sent := counts["cached_tokens"] + counts["prefill_tokens"]:
            shares["cached"] = counts["cached_tokens"] / sent
        return Usage(shares, counts)

    def close(self) -> None:
        """Cancels rollouts that are under way, and waits until they have given back their worlds."""
        event_loop.run(self._cancel())
        self._threads.shutdown()

    async def _cancel(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _rollouts(self, jobs, temperature, on_done) -> list[Trajectory]:
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        if not self._engine.batches:
            return await self._converse_all(jobs, temperature, on_done)
        # Side by side one call's conversations would push the other's out of the cache, by turns, for ever.
        async with self._alone:
            return await self._converse_all(jobs, temperature, on_done)

    async def _converse_all(self, jobs, temperature, on_done) -> list[Trajectory]:
        done: dict[int, Trajectory] = {}
        first, seats = self._sessions, min(self._concurrency, len(jobs))
        self._sessions += len(jobs)
        ask, free = self._ask, self._seats
        rounds = _Rounds(partial(self._timed, getattr(self._engine, "advance", self._engine.generate)), seats)
        if self._engine.batches:  # a round waits for all seats of its call: none may be another call's
            ask = rounds.ask

        async def converse(i: int, job: Job) -> None:
            async with free:
                done[i] = await self._converse(ask, job, first + i, temperature)
            on_done()
            if len(done) > len(jobs) - seats:
                rounds.leave()

        conversations = [asyncio.ensure_future(converse(i, job)) for i, job in enumerate(jobs)]
        try:
            await asyncio.gather(*conversations)
        finally:  # where one fails, the others' requests and worlds are given back
            for task in conversations:
                task.cancel()
            await asyncio.gather(*conversations, return_exceptions=True)
        return [done[i] for i in range(len(jobs))]

    async def _ask(self, request: Request) -> Completion:
        return (await self._timed(self._engine.generate, [request]))[0]

    async def _timed(self, call: Callable[..., Awaitable[Any]], requests: Sequence[Request]) -> Any:
        with self._use.of(requests=len(requests)):
            return await call(requests)

    async def _in_world(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """A call of the pool, which blocks its own conversation and no other."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, operation, *arguments)

    async def _converse(self, ask, job: Job, session: int, temperature: float) -> Trajectory:
        """One whole conversation."""
        (world,) = await self._in_world(self._pool.reset, [job.task])
        try:
            r = _Rollout(job, session, world)
            query = r.hinted(job.hint.before_task if job.hint else "", job.task.turns[0].query, first=True)
            tools = self._tools(job.task)
            r.offered = frozenset(tool_name(t) for t in tools)
            r.feed(self._chat.prompt(tools, query))
            sampling = Sampling(temperature, self._limits.max_new_tokens, self._chat.stop_ids)
            self._check_limits(r)
            while r.stop is None:
                completion = await ask(Request(session, np.asarray(r.ids, np.int32), sampling, job.seed))
                r.sampled(completion)
                await self._react(r, completion)
                self._check_limits(r)
            if r.stop == "engine":
                return r.finish(Outcome(0.0, False, valid=False, reason=completion.reason))
            return r.finish((await self._in_world(self._pool.score, [world]))[0])
        finally:
            self._engine.release([session])
            await self._in_world(self._pool.close, [world])

    def _check_limits(self, r: _Rollout) -> None:
        """Ends a conversation that may not have, or has no room for, one more assistant message."""
        if r.stop is None and 0 < self._limits.max_messages == r.messages:
            r.stop = "step_limit"
        if r.stop is None and len(r.ids) + self._limits.max_new_tokens > self._limits.max_length:
            r.stop = "context_limit"
            surplus = len(r.ids) - self._limits.max_length
            if surplus > 0:  # an observation that did not fit: its tail is never shown to anyone
                for tokens in (r.ids, r.mask, r.logprobs, r.versions):
                    del tokens[-surplus:]

    async def _react(self, r: _Rollout, completion: Completion) -> None:
        """What follows from one assistant message: calls, the next user turn, or the end."""
        if completion.finish != "stop":
            r.stop = "token_limit" if completion.finish == "length" else "engine"
            return
        parsed = self._chat.parse(completion.ids)
        if self._limits.malformed == "end_turn":
            parsed = [p for p in parsed if p.call]
        if not parsed:
            await self._end_turn(r)
        elif r.steps_in_turn == self._limits.max_steps:
            r.stop = "step_limit"
        else:
            r.steps_in_turn += 1
            await self._act(r, parsed)

    async def _act(self, r: _Rollout, parsed: Sequence[ParsedCall]) -> None:
        """One call after the other: none after one that ends the turn, which is graded as it was then. One that costs the
        world is the end of the conversation."""
        texts, ended = [], False
        for p in parsed:
            answer = Observation(f'{{"error": "{p.error}"}}', error=True)
            if p.call:
                ((answer,),) = await self._in_world(self._pool.step, [r.world], [[p.call]])
            text = self._limits.shown(answer.text)
            texts.append(text)
            r.steps.append(Step(r.turn, p.text, p.call, text, answer.error, self._pattern(r, p.call)))
            if answer.fatal or not answer.valid:
                r.stop = "call_failed" if answer.valid else "environment"
                return
            if ended := answer.ends:
                break
        if ended:
            await self._end_turn(r)
            return
        if r.hint and r.hint.before_step:
            texts[-1] = r.hinted(r.hint.before_step(r.steps), texts[-1], first=False)
        r.feed(self._chat.observations(texts))

    def _pattern(self, r: _Rollout, call: Call | None) -> str | None:
        """types.Step.pattern of a call."""
        if call is None:
            return None
        pattern = self._action_pattern(call) if call.name in r.offered else ""
        return None if pattern == call.name else pattern

    async def _end_turn(self, r: _Rollout) -> None:
        await self._in_world(self._pool.end_turn, [r.world])
        r.turn += 1
        r.steps_in_turn = 0
        if r.turn == len(r.task.turns):
            r.stop = "done"
        else:
            r.turn_starts.append(len(r.ids))
            r.feed(self._chat.user(r.task.turns[r.turn].query))
