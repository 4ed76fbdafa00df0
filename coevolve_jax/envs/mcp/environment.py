"""One rollout's world: calls go to its server, and a turn is graded by the folder that they lead to."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from coevolve_jax.envs import calls as call_checks
from coevolve_jax.envs.base import Broken, comparable, digest
from coevolve_jax.envs.mcp import answers
from coevolve_jax.envs.mcp.client import Failed
from coevolve_jax.envs.mcp.spares import spares
from coevolve_jax.envs.mcp.spec import Spec
from coevolve_jax.envs.mcp.state import too_large
from coevolve_jax.envs.mcp.world import World, listed
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn


class Environment:
    """One rollout's world. A turn passes on two conditions.

    The folder's content is as after the reference calls. And each answer of theirs that came without an error
    and without a change of the folder was also an answer to the agent.

    spec_of: reads the server and its world from a scenario.
    """

    def __init__(self, spec_of: Callable[[Mapping[str, Any]], Spec] = Spec.of):
        self._spec_of = spec_of

    def reset(self, task: Task) -> None:
        """Starts a server on a fresh copy of the template. ValueError where there is none such."""
        self._spec, self._turns, self._task = self._spec_of(task.scenario), Turns(task), task
        self._made: list[tuple[str, dict]] = []
        self._told: set[str] = set()
        self._world = begun(self._spec)
        try:
            self._signatures = call_checks.signatures(listed(self._spec, self._world))
        except (Failed, answers.Unfit) as error:
            self._world.close()
            raise Broken(f"the server {error}") from None

    def step(self, call: Call) -> Observation:
        try:
            arguments = call_checks.bind(call, self._signatures)
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return answers.error("The arguments hold half of a character, which is no text.")
        except ValueError as error:
            return answers.error(str(error))
        try:
            observation = self._world.call(call.name, arguments)
        except Failed as failed:
            observation = self._again(call.name, arguments, failed)
        self._made.append((call.name, arguments))
        self._told.add(comparable(observation.text))
        return observation

    def _again(self, name: str, arguments: Mapping[str, Any], failed: Failed) -> Observation:
        """Makes a call once more in a world that is built anew, since the machine may be to blame.

        Where it fails again, the call is.
        """
        self._world.close()
        try:
            self._world = begun(self._spec)
            for made in self._made:
                self._world.call(*made)
        except Failed as again:
            raise Broken(f"the server {failed}, and started again it {again}") from None
        try:
            return self._world.call(name, arguments)
        except Failed as again:
            return Observation(f"the server {again}", error=True, fatal=True)

    def end_turn(self) -> None:
        """Grades the turn. ValueError when all turns have ended."""
        self._turns.end(self._grade)

    def _grade(self, turn: Turn) -> str:
        """Returns why the turn fails, "" where it passes."""
        calls = json.dumps([[call.to_json() for call in each.calls] for each in self._task.turns])
        state, told = references(self._spec, calls)[self._turns.ended]
        found = self.state()
        if digest(found) != state:
            return "state_too_large" if too_large(found) else "state_differs"
        return "" if told <= self._told else "answer_missing"

    def score(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed. ValueError for a bare scenario."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        return digest(self.state())

    def state(self) -> dict[str, str]:
        """Returns a digest of each file of the world's folder, by path."""
        return self._world.state()

    def close(self) -> None:
        spares().give(self._world)


def begun(spec: Spec) -> World:
    """Returns a fresh world whose server has started. Broken where it does not, twice in a row."""
    for attempt in range(2):
        world = spares().take(spec)
        try:
            world.begin()
            return world
        except Failed as failed:
            world.close()
            if attempt:
                raise Broken(f"the server {failed} at its start") from None
    raise AssertionError


@functools.lru_cache(maxsize=256)
def references(spec: Spec, calls: str) -> list[tuple[str, frozenset[str]]]:
    """Plays reference calls in a world of their own, once for all rollouts of a task.

    calls: calls[turn][n] as JSON text. Returns for each turn the fingerprint after it, and the answers of its
    calls that gave no error and changed nothing. Broken where the server is lost on the way, or leaves more
    than can be read.
    """
    world = begun(spec)
    try:
        content = world.state()
        found, before, known = [], digest(content), too_large(content)
        for turn in json.loads(calls):
            told = set()
            for call in turn:
                observation = world.call(call["name"], call["arguments"])
                content = world.state()
                if made := too_large(content) - known:
                    raise Failed(f"makes {min(made)!r} too large to compare")
                after = digest(content)
                if after == before and not observation.error:
                    told.add(comparable(observation.text))
                before = after
            found.append((before, frozenset(told)))
    except Failed as failed:
        raise Broken(f"the server {failed} in the reference calls") from None
    finally:
        spares().give(world)
    return found
