"""A text adventure: one tool that takes free text, goals that are facts, and a package of its own.

The tests install `doorworld` in a virtual environment of its own and nowhere else. Its own tasks have no
reference calls: a turn passes when the facts of its line in scenario["goals"] hold. Explored tasks have
reference calls: a turn passes when the facts equal those that the calls lead to.
"""

import json
import os

from coevolve_jax.envs.base import digest
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.types import Observation, Outcome, Task, Turn

PACKAGES = ("doorworld", "a_package_that_is_not_there")

SEEDS = {"train": range(6), "test": range(4, 10)}
ACT = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Says what you do: go ROOM, open DOOR, take THING, look.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def scenarios(split, settings, apart_from=""):
    import doorworld

    if split not in SEEDS:
        raise ValueError(f"Unknown split {split!r}: use train or test.")
    seeds = [seed for seed in SEEDS[split] if seed not in SEEDS.get(apart_from, ())]
    return [
        Task(f"house_{seed}", "door_game", {"house": doorworld.house(seed), "goals": []}) for seed in seeds
    ]


def tasks(split, settings):
    out = []
    for bare in scenarios(split, settings):
        room, thing = bare.scenario["house"]["key_room"], bare.scenario["house"]["thing"]
        scenario = {**bare.scenario, "goals": [[f"open {room}"], [f"have {thing}"]]}
        turns = (Turn(f"Open the door of the {room}."), Turn(f"Now bring me the {thing}."))
        out.append(Task(bare.id.replace("house", "errand"), "door_game", scenario, turns))
    return out


def tools(task):
    return [ACT]


def make():
    import doorworld

    return House(doorworld)


def action_pattern(call):
    words = str(call.arguments.get("command", "")).split()
    return f"act:{words[0].lower()}" if words else call.name


class House:
    def __init__(self, game):
        self._game = game

    def reset(self, task):
        self._task = task
        self._facts, self._reference = (set(self._game.start(task.scenario["house"])) for _ in range(2))
        self._ended = self._passed = 0

    def step(self, call):
        return self._act(call, self._facts)

    def _act(self, call, facts):
        try:
            command = bind(call, signatures([ACT]))["command"]
            if command == "crash":
                os._exit(7)
            said = self._game.act(self._task.scenario["house"], facts, str(command))
        except ValueError as error:
            return Observation(json.dumps({"error": str(error)}), error=True)
        return Observation(json.dumps({"said": said}))

    def end_turn(self):
        if self._ended == len(self._task.turns):
            raise ValueError("All turns have ended.")
        calls = self._task.turns[self._ended].calls
        for call in calls:
            self._act(call, self._reference)
        goals = self._task.scenario["goals"]
        reached = self._facts == self._reference if calls else self._facts.issuperset(goals[self._ended])
        self._passed += self._passed == self._ended and reached
        self._ended += 1

    def score(self):
        if not self._task.turns:
            raise ValueError("A bare scenario cannot be scored.")
        share = self._passed / len(self._task.turns)
        return Outcome(share, share >= 0.5, progress=share)

    def fingerprint(self):
        return digest(sorted(self._facts))

    def close(self):
        self._facts = None
