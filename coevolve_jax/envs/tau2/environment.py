"""A tau2 world for one rollout, graded turn by turn."""

from __future__ import annotations

from coevolve_jax.envs.tau2 import benchmark
from coevolve_jax.envs.tau2.world import begin
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn


class Environment:
    """One rollout's world. The package's evaluators grade the turn of an official task, in its own words.

    Another turn, also of a new task in an official scenario, passes on two conditions. Its reference calls
    lead to the same state. And each of their answers that came without a change of state was also an answer
    to the agent.
    """

    def reset(self, task: Task) -> None:
        self._task, self._turns = task, Turns(task)
        self._world, self._reference = begin(task.scenario), None
        self._told: list[str] = []

    def step(self, call: Call) -> Observation:
        observation = self._world.call(call)
        self._told.append(observation.text)
        return observation

    def end_turn(self) -> None:
        """Grades the turn. ValueError when all turns have ended."""
        self._turns.end(self._grade)

    def _grade(self, turn: Turn) -> str:
        """Returns why the turn fails, "" where it passes."""
        scenario = dict(self._task.scenario)
        if benchmark.asks_officially(scenario, turn):
            scores = benchmark.verdict(scenario, self._world.messages)
            return ", ".join(kind for kind, score in scores.items() if score < 1)
        reference = self._reference = self._reference or begin(self._task.scenario)
        told = []
        for call in turn.calls:
            before, answer = reference.fingerprint(), reference.call(call).text
            if reference.fingerprint() == before:
                told.append(answer)
        if reference.fingerprint() != self._world.fingerprint():
            return "state_differs"
        return "" if set(told) <= set(self._told) else "answer_missing"

    def score(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed. ValueError for a bare scenario."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        return self._world.fingerprint()

    def close(self) -> None:
        self._reference = None
