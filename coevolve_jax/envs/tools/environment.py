"""A user's object as a world: its methods are the tools, its state and its answers are what is graded.

Workers import this file: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from coevolve_jax import shipped
from coevolve_jax.envs.base import comparable, digest
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.envs.tools import source as sources
from coevolve_jax.envs.tools.schema import convert, hints_of
from coevolve_jax.envs.tools.source import Refused
from coevolve_jax.envs.tools.state import plain
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import SUCCESS, Call, Observation, Outcome, Task, Turn

SLACK = 1e-6  # by which a reward may miss [0, 1]
UNREADABLE = "The state cannot be read: "  # begins the fingerprint of such a world
MAX_ANSWER = 20_000  # characters of an answer; the rest is counted and cut


class Instance:
    """One object of the user's, in a file executed anew, with random numbers of its own.

    text: what reset returned. `random` and `numpy.random` are seeded by the arguments of reset, so that code
    which forgets to seed them answers alike in equal worlds. The current folder that the code changes into is
    the instance's own too.
    """

    def __init__(self, source: str, reset: Mapping[str, Any]):
        """Raises Refused where the user's code cannot be loaded or reset."""
        self._seed = digest(dict(reset))
        self._folder, self._module = os.getcwd(), None
        self.tools = self._loaded(source)
        self._module = self.tools.module
        with self._own_globals():
            self._world, self.text = sources.begin(self.tools, reset)
        self._allowed = signatures(self.tools.schemas())

    def _loaded(self, source: str) -> sources.Tools:
        while True:
            known = "numpy" in sys.modules
            self._random, self._numpy = random.Random(self._seed).getstate(), None
            with self._own_globals():
                tools = sources.load(source)
            if known or "numpy" not in sys.modules:
                return tools
            # The file has just imported NumPy, and what it drew of it was not seeded: load it again.

    def call(self, call: Call) -> Observation:
        """Executes one call. What the user's code raises comes back as an error, as in TRL."""
        pid = os.getpid()
        try:
            arguments = bind(call, self._allowed)
            with self._own_globals():
                hints = hints_of(self.tools.tools[call.name])
                arguments = {k: convert(hints.get(k), v) for k, v in arguments.items()}
                found = sources.run(getattr(self._world, call.name), arguments)
            text = answer(found)
            failed = isinstance(found, Mapping) and bool(found.get("error"))
        except (Exception, SystemExit) as error:
            said = sources.text_of(error)[:MAX_ANSWER] or type(error).__name__
            if isinstance(error, SystemExit):
                said = f"{call.name} ended the program (exit {sources.text_of(error) or 0})"
            return Observation(json.dumps({"error": said}, ensure_ascii=False), error=True)
        finally:
            if os.getpid() != pid:  # the tool forked: the child must not answer for its parent
                os._exit(0)
        return Observation(text, error=failed)

    def state(self) -> Any:
        """Returns the state as JSON values. Raises Refused where JSON cannot write it."""
        with self._own_globals():
            return sources.state_of(self.tools, self._world)

    def reward(self) -> float:
        """Returns get_reward(). Raises Refused for anything but a number from 0 to 1."""
        try:
            with self._own_globals():
                found = sources.run(self._world.get_reward, {})
            number = float(found)
        except (Exception, SystemExit) as error:
            raise Refused(f"{self.tools.name}.get_reward raises {sources.said(error)}.") from None
        if not -SLACK <= number <= 1 + SLACK:
            raise Refused(f"{self.tools.name}.get_reward returns {number}: return a number from 0 to 1.")
        return min(max(number, 0.0), 1.0)

    @contextlib.contextmanager
    def _own_globals(self) -> Iterator[None]:
        """Gives the block the world's own states of `random` and of `numpy.random`, and its own folder.

        Keeps these after the block, and puts back those of the process. The world's own execution of the file
        is what its name leads to: type hints, dataclasses and pickle look it up there.
        """
        folder = os.getcwd()
        if self._module:
            sys.modules[self._module.__name__] = self._module
        if self._folder != folder:
            with contextlib.suppress(OSError):  # it may be gone
                os.chdir(self._folder)
        numpy = _numpy_random()
        others = random.getstate(), numpy.get_state() if numpy else None
        random.setstate(self._random)
        if numpy:
            first = numpy.RandomState(int(self._seed[:8], 16)).get_state
            numpy.set_state(self._numpy or first())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._folder = os.getcwd()
            os.chdir(folder)
            self._random = random.getstate()
            random.setstate(others[0])
            if numpy:
                self._numpy = numpy.get_state()
                numpy.set_state(others[1])


def _numpy_random() -> Any:
    """Returns numpy.random where NumPy is loaded, which loads that part when it is first asked for it."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def answer(value: Any) -> str:
    """Returns what a tool returned as the agent reads it: text as it is, else JSON, else str(value).

    Raises RuntimeError for an iterator, also within an answer: its text would be its address in memory.
    """
    if not isinstance(value, str):
        try:
            value = json.dumps(_keyed(value), ensure_ascii=False, default=_inside)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    more = len(value) - MAX_ANSWER
    text = sources.clean(value[:MAX_ANSWER])
    return f"{text}… ({more} more characters)" if more > 0 else text


def _keyed(value: Any) -> Any:
    """Returns an answer in which the values of an Enum's members stand for members that are keys."""
    if isinstance(value, dict) and any(isinstance(key, enum.Enum) for key in value):
        value = {key.value if isinstance(key, enum.Enum) else key: each for key, each in value.items()}
    if isinstance(value, dict):
        return {key: _keyed(each) for key, each in value.items()}
    return [_keyed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _inside(value: Any) -> Any:
    """Returns a part of an answer that JSON does not know as JSON values."""
    if isinstance(value, (Iterator, AsyncIterator)):
        kind = type(value).__name__
        raise RuntimeError(f"The tool returns a {kind}, which can be read once: return a list.")
    return list(value) if isinstance(value, (KeysView, ValuesView, ItemsView)) else plain(value, "the answer")


class World:
    """One rollout's world. A turn passes on two conditions.

    The state equals the one that the reference calls lead to. And the answers of those reference calls that
    changed no state were also answers to the agent, in this turn or an earlier one. A turn without reference
    calls is scored by the class's own get_reward.
    """

    def reset(self, task: Task) -> None:
        """Begins the task's world. ValueError where the user's code raises, or begins in another state."""
        self._task, scenario = task, task.scenario
        self._own = Instance(scenario["source"], scenario["reset"])
        begins = digest([self._own.state(), self._own.text])
        if begins != scenario["begins"]:
            raise ValueError(
                f"{task.id!r}: {scenario['source']} begins in another state than when this scenario was "
                "made. Its reset depends on more than its arguments (a clock, unseeded random numbers, "
                "a file or module that worlds share), or the file was changed: "
                f"{shipped.command('check-tools')} tells which."
            )
        self._reference: Instance | None = None
        self._told: set[str] = set()
        self._turns = Turns(task)
        self._reward: float | None = None

    def step(self, call: Call) -> Observation:
        observation = self._own.call(call)
        self._told.add(comparable(observation.text))
        return observation

    def end_turn(self) -> None:
        """Grades the turn. ValueError when all turns have ended."""
        self._turns.end(self._grade)

    def _grade(self, turn: Turn) -> str:
        """Returns why the turn fails, "" where it passes."""
        if not turn.calls:
            return self._rewarded()
        try:
            mine = self._own.state()
            if self._reference is None:
                scenario = self._task.scenario
                self._reference = Instance(scenario["source"], scenario["reset"])
            seen, told = [self._own.state()], []
            for call in turn.calls:
                before = self._reference.state()
                said = self._reference.call(call).text
                if before == self._reference.state():
                    told.append(comparable(said))
            seen.append(self._own.state())
            if seen != [mine, mine]:  # the reference's reset or calls have reached the agent's world
                return "state_shared"
            if mine != self._reference.state():
                return "state_differs"
        except Refused:
            return "state_unreadable"
        return "" if self._told.issuperset(told) else "answer_missing"

    def _rewarded(self) -> str:
        if self._own.tools.own("get_reward") is None:
            return "nothing_to_grade"
        try:
            self._reward = self._own.reward()
        except Refused:
            return "reward_unreadable"
        return "" if self._reward >= SUCCESS else "reward_below_half"

    def score(self) -> Outcome:
        """Returns reward 1 where all turns passed, or get_reward's. ValueError for a bare scenario."""
        outcome = self._turns.outcome()
        if self._reward is None or any(turn.calls for turn in self._task.turns):
            return outcome
        reward = self._reward if self._turns.ended == len(self._task.turns) else 0.0
        return Outcome(reward, reward >= SUCCESS, progress=outcome.progress, reason=outcome.reason)

    def fingerprint(self) -> str:
        try:
            return digest(self._own.state())
        except Refused as why:
            return f"{UNREADABLE}{why}"

    def close(self) -> None:
        self._reference = None
