"""The multi-turn agent loop: tasks in, token-exact trajectories out."""
from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion, Engine, Request, Sampling
from coevolve_jax.types import Observation, Outcome, Step, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Limits:
    """max_length: tokens of a whole trajectory. max_new_tokens: of one assistant message.
    max_steps: assistant messages with tool calls per user turn (BFCL: 20; one more fails the task).
    max_observation: characters of a tool result that the policy gets to read."""

    max_length: int
    max_new_tokens: int
    max_steps: int = 20
    max_observation: int = 400


class _Rollout:
    """One conversation in progress: the lists that become a Trajectory."""

    def __init__(self, task: Task, member: int, seed: int, session: int, world: int, prompt: list[int]):
        self.task, self.member, self.seed, self.session, self.world = task, member, seed, session, world
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turn_starts = [0]
        self.steps: list[Step] = []
        self.turn = 0
        self.steps_in_turn = 0
        self.stop: str | None = None
        self.feed(prompt)

    def feed(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not write."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Appends tokens that the policy wrote, exactly as the engine returned them."""
        self.ids += completion.ids.tolist()
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()

    def finish(self, outcome: Outcome) -> Trajectory:
        return Trajectory(
            task_id=self.task.id,
            member=self.member,
            ids=np.asarray(self.ids, np.int32),
            mask=np.asarray(self.mask, bool),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            turn_starts=tuple(self.turn_starts),
            steps=tuple(self.steps),
            stop=self.stop,
            outcome=outcome,
        )


class Agent:
    """Runs tasks in an environment with an engine. Keeps `concurrency` conversations going."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        pool: EnvPool,
        tools: Callable[[Task], list[dict]],
        limits: Limits,
        concurrency: int,
    ):
        self._engine, self._chat, self._pool, self._tools = engine, chat, pool, tools
        self._limits, self._concurrency = limits, concurrency
        self._sessions = 0

    def rollouts(
        self,
        jobs: Sequence[tuple[Task, int, int]],
        temperature: float,
        on_done: Callable[[], None] = lambda: None,
    ) -> list[Trajectory]:
        """One trajectory per job, in the order of the jobs.

        Args:
          jobs: (task, member, seed); members of one group start from the same environment state
            and differ in their seed alone.
          temperature: 0 is greedy.
          on_done: called as each trajectory ends.
        """
        waiting = deque(enumerate(jobs))
        live: dict[int, _Rollout] = {}
        done: dict[int, Trajectory] = {}
        while waiting or live:
            starting = [waiting.popleft() for _ in range(min(self._concurrency - len(live), len(waiting)))]
            worlds = self._pool.reset([task for _, (task, _, _) in starting])
            for (i, (task, member, seed)), world in zip(starting, worlds, strict=True):
                prompt = self._chat.prompt(self._tools(task), task.turns[0].query)
                live[i] = _Rollout(task, member, seed, self._sessions, world, prompt)
                self._sessions += 1
                self._check_room(live[i])
            self._advance([r for r in live.values() if r.stop is None], temperature)
            ended = [i for i, r in live.items() if r.stop is not None]
            outcomes = self._pool.score([live[i].world for i in ended])
            self._pool.close([live[i].world for i in ended])
            self._engine.release([live[i].session for i in ended])
            for i, outcome in zip(ended, outcomes, strict=True):
                done[i] = live.pop(i).finish(outcome)
                on_done()
        return [done[i] for i in range(len(jobs))]

    def _check_room(self, r: _Rollout) -> None:
        """Ends a conversation that has no room for one more assistant message."""
        if r.stop is None and len(r.ids) + self._limits.max_new_tokens > self._limits.max_length:
            r.stop = "context_limit"
            surplus = len(r.ids) - self._limits.max_length
            if surplus > 0:  # an observation that did not fit: its tail is never shown to anyone
                for tokens in (r.ids, r.mask, r.logprobs, r.versions):
                    del tokens[-surplus:]

    def _advance(self, live: Sequence[_Rollout], temperature: float) -> None:
        """One assistant message for each conversation, and the environment's answers."""
        if not live:
            return
        sampling = Sampling(temperature, self._limits.max_new_tokens, self._chat.stop_ids)
        completions = self._engine.generate(
            [Request(r.session, np.asarray(r.ids, np.int32), sampling, r.seed) for r in live]
        )
        acting, ending = [], []
        for r, completion in zip(live, completions, strict=True):
            r.sampled(completion)
            if completion.finish != "stop":
                r.stop = "token_limit" if completion.finish == "length" else "environment"
                continue
            parsed = self._chat.parse(completion.ids)
            if not parsed:
                ending.append(r)
            elif r.steps_in_turn == self._limits.max_steps:
                r.stop = "step_limit"
            else:
                r.steps_in_turn += 1
                acting.append((r, parsed))
        self._act(acting)
        self._end_turns(ending)
        for r in live:
            self._check_room(r)

    def _act(self, acting) -> None:
        answers = self._pool.step(
            [r.world for r, _ in acting], [[p.call for p in parsed if p.call] for _, parsed in acting]
        )
        for (r, parsed), observed in zip(acting, answers, strict=True):
            observed = iter(observed)
            texts = []
            for p in parsed:
                answer = next(observed) if p.call else Observation('{"error": "%s"}' % p.error, error=True)
                if not answer.valid:
                    r.stop = "environment"
                text = answer.text
                if len(text) > self._limits.max_observation:
                    text = text[: self._limits.max_observation] + "..."
                texts.append(text)
                r.steps.append(Step(r.turn, p.text, p.call, text, answer.error))
            r.feed(self._chat.observations(texts))

    def _end_turns(self, ending: Sequence[_Rollout]) -> None:
        self._pool.end_turn([r.world for r in ending])
        for r in ending:
            r.turn += 1
            r.steps_in_turn = 0
            if r.turn == len(r.task.turns):
                r.stop = "done"
            else:
                r.turn_starts.append(len(r.ids))
                r.feed(self._chat.user(r.task.turns[r.turn].query))
