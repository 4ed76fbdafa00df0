"""The smallest world that can go wrong in every way, for tests of the loop: lamps with levels 0 to 2.

`set` returns the previous level, `look` the present one. `spin` keeps its turn from passing. `smash` fails
in our own infrastructure. A scenario names the lamps that exist and the tools on offer.
"""

from collections import Counter

from coevolve_jax.envs.base import digest
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

# Scenario 2 starts like one of the evaluation split.
SPLITS = {"train": (0, 1, 2, 3), "test": (2, 4, 5, 6)}


def scenario(n):
    lamps = {name: (n + i) % 3 for i, name in enumerate("abcde"[: 2 + n % 3])}
    return {"lamps": lamps, "tools": ["set", "look"] + ["spin"] * (n % 2) + ["smash"] * (n in (1, 5))}


def scenarios(split, settings=None, apart_from=""):
    barred = [scenario(n) for n in SPLITS.get(apart_from, ())]
    bare = [Task(f"{split}_{n}", "lamps", scenario(n)) for n in SPLITS[split]]
    return [s for s in bare if s.scenario not in barred]


def tasks(split, settings=None):
    """The benchmark's own tasks of a split."""
    wanted = [["set a 2", "look a"], ["look b", "look b", "set a 1"], ["set b 0", "set a 0"]]
    bare = scenarios(split)
    return [
        Task(f"own_{split}_{i}", "lamps", s.scenario, (Turn("; ".join(texts), tuple(map(call, texts))),))
        for i, (s, texts) in enumerate(zip(bare, wanted))
    ]


def tools(task):
    return [{"type": "function", "function": {"name": name}} for name in task.scenario["tools"]]


def call(text):
    """The call that a text such as "set a 2" stands for, or None."""
    words = text.split(" ")
    if len(words) < 2 or not words[0].isalpha():
        return None
    return Call(words[0], {"lamp": words[1], **({"level": int(words[2])} if len(words) == 3 else {})})


def text(call):
    return " ".join(str(value) for value in (call.name, *call.arguments.values()))


def action_pattern(call):
    return f"{call.name} {call.arguments['lamp']}"


def task_key(task):
    """A key that ignores how the calls are spread over turns."""
    return digest([task.scenario, [c.to_json() for c in task.calls]])


def features(task):
    found = Counter(text(c) for c in task.calls)
    found.update(action_pattern(c) for c in task.calls)
    return found


class Lamps:
    def reset(self, task):
        self.task = task
        self.lit, self.goal = dict(task.scenario["lamps"]), dict(task.scenario["lamps"])
        self.ended = self.passed = 0
        self.broken = self.spun = False

    def step(self, call):
        self.broken |= call.name == "smash" and "smash" in self.task.scenario["tools"]
        if self.broken:
            return Observation("lost", error=True, valid=False)
        self.spun |= call.name == "spin"
        return self.act(call, self.lit)

    def act(self, call, lit):
        lamp = call.arguments["lamp"]
        if call.name not in self.task.scenario["tools"] or lamp not in lit:
            return Observation("no", error=True)
        answer = Observation(f"level {lit[lamp]}")
        if call.name == "set":
            lit[lamp] = call.arguments.get("level", 0)
        return answer

    def end_turn(self):
        for call in self.task.turns[self.ended].calls:
            self.act(call, self.goal)
        good = self.lit == self.goal and not self.spun
        self.passed += self.passed == self.ended and good
        self.ended += 1
        self.spun = False

    def score(self):
        if self.broken:
            return Outcome(0.0, False, valid=False, reason="smashed")
        share = self.passed / len(self.task.turns)
        return Outcome(share, share >= 0.5, progress=share)

    def fingerprint(self):
        return digest(self.lit)

    def close(self):
        self.lit = None


make = Lamps
