"""The multi-turn agent loop: tasks in, groups of token-exact trajectories out."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from coevolve_jax import event_loop
from coevolve_jax.envs.base import EnvPool, action_pattern, digest
from coevolve_jax.rollout import macros
from coevolve_jax.rollout.batch_scheduler import BatchScheduler
from coevolve_jax.rollout.chat import Chat, tool_name
from coevolve_jax.rollout.engine import Completion, Engine, Request, Sampling
from coevolve_jax.rollout.limits import Limits, reference_fits
from coevolve_jax.rollout.tool_call_format import ParsedCall
from coevolve_jax.rollout.utilization import Usage, UsageMeter
from coevolve_jax.types import Call, Group, Hint, Macro, Observation, Outcome, Step, Task, Trajectory


class _Rollout:
    """One conversation: the lists that become a Trajectory.

    The rollouts of a group start from the same environment state. They differ only in their seeds and hints.
    Tokens are only ever appended: tokenizing the text again may give other ids than the engine sampled.
    """

    def __init__(self, task: Task, rollout_index: int, seed: int, hint: Hint | None = None):
        self.task, self.rollout_index, self.seed, self.hint = task, rollout_index, seed, hint
        self.conversation_id = self.env_id = -1  # set when the conversation begins
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.routing: np.ndarray | None = None  # of the tokens that were fed, where the engine records it
        self.turn_starts = [0]
        self.steps: list[Step] = []
        self.turn = 0
        self.steps_in_turn = 0
        self.messages = 0
        self.stop: str | None = None
        self.hints: list[tuple[int, str]] = []
        self.offered: frozenset[str] = frozenset()
        self.macros: dict[str, Macro] = {}
        self.answer = ""  # the last good answer in this turn
        self.endings: list[tuple[str, str]] = []  # (fingerprint, last good answer) at each end

    def hinted(self, hint: str, text: str, *, first: bool) -> str:
        """Returns the text with the hint before (first) or after it, and records the hint."""
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
            # Keep the known routing: newer weights may route the earlier tokens differently.
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
            ending=digest(self.endings) if self.endings and all(state for state, _ in self.endings) else "",
        )


class Agent:
    """Runs tasks in an environment with an engine.

    Up to `concurrency` conversations run at once, each at its own pace. An engine that serves batches is
    asked in rounds (batch_scheduler.py). Conversations of an earlier call come first.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        pool: EnvPool,
        tools: Callable[[Task], list[dict]],
        limits: Limits,
        concurrency: int,
        action_pattern: Callable[[Call], str] = action_pattern,
        endings: bool = False,
    ):
        """tools, action_pattern: the functions of the environment family.

        endings: give trajectories their `ending`, which costs a request per turn.
        """
        self._action_pattern, self._endings = action_pattern, endings
        self._engine, self._chat, self._pool, self._tools = engine, chat, pool, tools
        self._limits, self._concurrency = limits, concurrency
        self._slots = asyncio.Semaphore(concurrency)  # first come, first served
        self._alone = asyncio.Lock()  # held by the one call that an engine with batches serves
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="environment")
        self._running: set[asyncio.Task] = set()
        self._conversation_ids = itertools.count()
        self._meter = UsageMeter(pool)
        self._counted: Counter[str] = Counter()  # the engine's counts at the last `usage`

    def rollout_groups(
        self,
        tasks: Sequence[Task],
        seeds: Sequence[Sequence[int]],
        temperature: float,
        hints: Callable[[Task, int], Hint | None] | None = None,
        on_done: Callable[[Trajectory], object] = lambda trajectory: None,
    ) -> list[Group]:
        """Returns a group of rollouts for each task, in the order of the tasks.

        Args:
          tasks: the tasks to roll out.
          seeds: seeds[i][m] is the seed of rollout m of tasks[i].
          temperature: 0 is greedy.
          hints: (task, rollout_index) -> help for that rollout.
          on_done: called with each rollout as it ends. What it raises ends the call.

        Raises:
          EngineError: the engine cannot go on.
        """
        help = hints or (lambda task, rollout_index: None)
        rollouts = [
            [_Rollout(task, m, seed, help(task, m)) for m, seed in enumerate(row)]
            for task, row in zip(tasks, seeds, strict=True)
        ]
        with self._meter.of(calls=1):
            done = event_loop.run(self._rollouts(rollouts, temperature, on_done))
        return [Group(task, tuple(row)) for task, row in zip(tasks, done)]

    def with_limits(self, limits: Limits) -> Agent:
        """An agent with other limits that shares engine, worlds and slots. Close this one alone."""
        other = copy.copy(self)
        other._limits = limits
        return other

    def fits(self, task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
        """Says whether the task's reference calls fit this agent's limits (limits.reference_fits)."""
        return reference_fits(self._limits, self._chat, self._tools, task, answers)

    @property
    def batches(self) -> bool:
        """`Engine.batches` of this agent's engine."""
        return self._engine.batches

    @property
    def counts(self) -> Counter[str]:
        """`Engine.counts` of this agent's engine so far."""
        return Counter(getattr(self._engine, "counts", {}))

    def usage(self) -> Usage:
        """Returns the usage by the rollouts since the last call."""
        seconds, asked, acted = self._meter.take()
        shares = {"engine": asked / (self._concurrency * seconds), "workers": min(1.0, acted / seconds)}
        now = self.counts
        counts, self._counted = now - self._counted, now
        if sent := counts["cached_tokens"] + counts["prefill_tokens"]:
            shares["cached"] = counts["cached_tokens"] / sent
        return Usage(shares, counts)

    def close(self) -> None:
        """Cancels running rollouts, and waits until they have given back their worlds."""
        event_loop.run(self._cancel())
        self._threads.shutdown()

    async def _cancel(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _rollouts(self, rollouts, temperature, on_done) -> list[list[Trajectory]]:
        running = asyncio.current_task()
        assert running is not None
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        if not self._engine.batches:
            return await self._converse_all(rollouts, temperature, on_done)
        # Serialise calls: two at once would keep evicting each other's conversations (livelock).
        async with self._alone:
            return await self._converse_all(rollouts, temperature, on_done)

    async def _converse_all(self, rollouts, temperature, on_done) -> list[list[Trajectory]]:
        """Returns the trajectory of rollouts[i][m] in the same place."""
        left = sum(map(len, rollouts))
        slots = min(self._concurrency, left)
        ask, free = self._ask, self._slots
        scheduler = BatchScheduler(
            partial(self._timed, getattr(self._engine, "advance", self._engine.generate)), slots
        )
        # A round waits for all slots of its call. `_alone` ensures that no other call holds one.
        if self._engine.batches:
            ask = scheduler.ask

        async def converse(r: _Rollout) -> Trajectory:
            nonlocal left
            async with free:
                trajectory = await self._converse(ask, r, temperature)
            on_done(trajectory)
            left -= 1
            if left < slots:  # no conversation is left to take the free slot
                scheduler.done()
            return trajectory

        for r in itertools.chain.from_iterable(rollouts):
            r.conversation_id = next(self._conversation_ids)
        rows = [[asyncio.ensure_future(converse(r)) for r in row] for row in rollouts]
        conversations = list(itertools.chain.from_iterable(rows))
        try:
            await asyncio.gather(*conversations)
        finally:  # where one fails, cancel the others: they give back their requests and worlds
            for task in conversations:
                task.cancel()
            await asyncio.gather(*conversations, return_exceptions=True)
        return [[conversation.result() for conversation in row] for row in rows]

    async def _ask(self, request: Request) -> Completion:
        return (await self._timed(self._engine.generate, [request]))[0]

    async def _timed(self, call: Callable[..., Awaitable[Any]], requests: Sequence[Request]) -> Any:
        with self._meter.of(requests=len(requests)):
            return await call(requests)

    async def _in_env(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the pool in a thread: it blocks its own conversation and no other."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, operation, *arguments)

    async def _converse(self, ask, r: _Rollout, temperature: float) -> Trajectory:
        """Runs one whole conversation."""
        (r.env_id,) = await self._in_env(self._pool.reset, [r.task])
        try:
            query = r.hinted(r.hint.before_task if r.hint else "", r.task.turns[0].query, first=True)
            tools = self._tools(r.task)
            r.offered = frozenset(tool_name(t) for t in tools)
            r.macros = macros.offered(r.hint, tools)
            r.hints += [(0, f"{m.name}({', '.join(m.parameters)})") for m in r.macros.values()]
            tools = [*tools, *(macros.document(macro, tools) for macro in r.macros.values())]
            r.feed(self._chat.prompt(tools, query, r.task.system, r.task.examples))
            sampling = Sampling(temperature, self._limits.max_new_tokens, self._chat.stop_ids)
            self._check_limits(r)  # the prompt alone may leave no room for a message
            while r.stop is None:
                ids = np.asarray(r.ids, np.int32)
                completion = await ask(Request(r.conversation_id, ids, sampling, r.seed))
                r.sampled(completion)
                await self._react(r, completion)
                self._check_limits(r)
            if r.stop == "engine":  # the policy's message was lost: the world's score says nothing about it
                return r.finish(Outcome(0.0, False, valid=False, reason=completion.reason))
            await self._note_ending(r)
            return r.finish((await self._in_env(self._pool.score, [r.env_id]))[0])
        finally:
            self._engine.release([r.conversation_id])
            await self._in_env(self._pool.close, [r.env_id])

    def _check_limits(self, r: _Rollout) -> None:
        """Ends a conversation that may not have, or has no room for, another assistant message."""
        if r.stop is None and 0 < self._limits.max_messages == r.messages:
            r.stop = "step_limit"
        if r.stop is None and not self._limits.leaves_room(len(r.ids)):
            r.stop = "context_limit"
        surplus = len(r.ids) - self._limits.max_length
        if surplus > 0:  # an observation did not fit: the learner has no room for its tail
            for tokens in (r.ids, r.mask, r.logprobs, r.versions):
                del tokens[-surplus:]

    async def _react(self, r: _Rollout, completion: Completion) -> None:
        """Acts on one assistant message: executes calls, begins the next user turn, or ends."""
        if completion.finish != "stop":
            r.stop = "token_limit" if completion.finish == "length" else "engine"
            return
        parsed = self._chat.parse(completion.ids)
        if all(map(self._passed_over, parsed)):
            for p in parsed:
                self._pass_over(r, p)
            await self._end_turn(r)
        elif r.steps_in_turn == self._limits.max_steps:
            r.stop = "step_limit"
        else:
            r.steps_in_turn += 1
            await self._act(r, parsed)

    async def _act(self, r: _Rollout, parsed: Sequence[ParsedCall]) -> None:
        """Executes the calls of a message one after the other. A macro's end with the first that fails.

        A call that ends the turn is the last: the turn is graded in that state. A call that costs the world
        ends the conversation.
        """
        texts, ended = [], False
        for p in parsed:
            if self._passed_over(p):
                self._pass_over(r, p)
                continue
            macro = r.macros.get(p.call.name) if p.call else None
            answers: list[Observation] = []
            for call in macro.expand(p.call) if macro and p.call else [p.call]:
                answers.append(await self._execute(r, p, call, macro.name if macro else ""))
                if r.stop is not None:
                    return
                if answers[-1].ends or (macro and answers[-1].error):
                    break
            told = [self._limits.shown(answer.text) for answer in answers]
            texts.append(self._limits.shown(f"[{', '.join(told)}]") if macro else told[0])
            ended = ended or any(answer.ends or answer.last_message for answer in answers)
            if answers[-1].ends:
                break
        if ended:
            await self._end_turn(r)
            return
        # Append to the last answer: a message of its own would start another turn.
        texts[-1] = r.hinted(self._help(r), texts[-1], first=False)
        r.feed(self._chat.observations(texts))

    def _passed_over(self, p: ParsedCall) -> bool:
        """Says whether a text that is no call is ignored."""
        return p.call is None and self._limits.malformed == "end_turn"

    @staticmethod
    def _pass_over(r: _Rollout, p: ParsedCall) -> None:
        """Records a text that is ignored. The policy reads no answer to it."""
        r.steps.append(Step(r.turn, p.text, None, "", error=True, message=r.messages - 1))

    async def _execute(self, r: _Rollout, p: ParsedCall, call: Call | None, macro: str) -> Observation:
        """Executes one call and records its step. None stands for a text that is no call."""
        answer = Observation(json.dumps({"error": p.error}, ensure_ascii=False), error=True)
        if call:
            ((answer,),) = await self._in_env(self._pool.step, [r.env_id], [[call]])
        text, pattern, message = self._limits.shown(answer.text), self._pattern(r, call), r.messages - 1
        r.steps.append(Step(r.turn, p.text, call, text, answer.error, pattern, message, macro))
        r.answer = r.answer if answer.error else answer.text
        if answer.fatal or not answer.valid:
            r.stop = "call_failed" if answer.valid else "environment"
        return answer

    def _pattern(self, r: _Rollout, call: Call | None) -> str | None:
        """Returns Step.pattern of a call. None stands for the tool's name, which keeps most rows small."""
        if call is None:
            return None
        pattern = self._action_pattern(call) if call.name in r.offered else ""
        return None if pattern == call.name else pattern

    @staticmethod
    def _help(r: _Rollout) -> str:
        """Returns the hint before the next message, "" for none."""
        return r.hint.before_step(r.steps) if r.hint and r.hint.before_step else ""

    async def _note_ending(self, r: _Rollout) -> None:
        if self._endings:
            (state,) = await self._in_env(self._pool.fingerprint, [r.env_id])
            r.endings.append((state, r.answer))
            r.answer = ""

    async def _end_turn(self, r: _Rollout) -> None:
        await self._note_ending(r)
        await self._in_env(self._pool.end_turn, [r.env_id])
        r.turn += 1
        r.steps_in_turn = 0
        if r.turn == len(r.task.turns):
            r.stop = "done"
        else:
            r.turn_starts.append(len(r.ids))
            query = r.hinted(self._help(r), r.task.turns[r.turn].query, first=True)
            r.feed(self._chat.user(query))
