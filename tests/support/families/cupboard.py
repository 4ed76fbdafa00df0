"""A cupboard with two shelves: the sound family from which the suite's tests derive broken ones."""

import dataclasses
import json

from coevolve_jax.envs.base import digest
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

SPLITS = {"train": ("cup", "bowl", "pan"), "test": ("jug", "lid", "pan")}
PLACE = {"thing": {"type": "string"}, "shelf": {"type": "string", "enum": ["top", "bottom"]}}
PUT = {
    "type": "function",
    "function": {
        "name": "put",
        "description": "Puts a thing on a shelf.",
        "parameters": {"type": "object", "properties": PLACE, "required": ["thing", "shelf"]},
    },
}


def scenarios(split, settings, apart_from=""):
    if split not in SPLITS:
        raise ValueError(f"Unknown split {split!r}: use train or test.")
    things = [thing for thing in SPLITS[split] if thing not in SPLITS.get(apart_from, ())]
    return [
        Task(f"cupboard_{thing}", "cupboard", {"thing": [thing, "plate", "fork", "spoon"]})
        for thing in things
    ]


def tasks(split, settings):
    return [
        dataclasses.replace(
            s,
            id=f"tidy_{i}",
            turns=(
                Turn(
                    f"Put the {s.scenario['thing'][0]} on the bottom shelf.",
                    (Call("put", {"thing": s.scenario["thing"][0], "shelf": "bottom"}),),
                ),
            ),
        )
        for i, s in enumerate(scenarios(split, settings))
    ]


def tools(task):
    return [PUT]


class Cupboard:
    def reset(self, task):
        self.task, self.ended, self.passed = task, 0, 0
        self.shelves, self.goal = (dict.fromkeys(task.scenario["thing"], "top") for _ in range(2))

    def step(self, call):
        return self.put(self.shelves, call)

    def put(self, shelves, call):
        try:
            place = bind(call, signatures([PUT]))
            if place["thing"] not in list(shelves) or place["shelf"] not in PLACE["shelf"]["enum"]:
                raise ValueError("There is no such thing or shelf.")
        except ValueError as error:
            return Observation(json.dumps({"error": str(error)}), error=True)
        shelves[place["thing"]] = place["shelf"]
        return Observation(json.dumps(shelves))

    def end_turn(self):
        if self.ended == len(self.task.turns):
            raise ValueError("All turns have ended.")
        for call in self.task.turns[self.ended].calls:
            self.put(self.goal, call)
        self.passed += self.passed == self.ended and self.shelves == self.goal
        self.ended += 1

    def score(self):
        if not self.task.turns:
            raise ValueError("A bare scenario cannot be scored.")
        share = self.passed / len(self.task.turns)
        return Outcome(float(share == 1), share == 1, progress=share)

    def fingerprint(self):
        return digest(self.shelves)

    def close(self):
        self.shelves = None


make = Cupboard
