"""TextWorld's lessons: commands that exploration made in training games. A habit belongs to a verb."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from coevolve_jax import envs
from coevolve_jax.envs.textworld import commands
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Goal
from coevolve_jax.explorers.base import Limits as TaskLimits
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.synthesis.explore import explore, unguided
from coevolve_jax.types import Call, Task

PYTHON = ".textworld/bin/python"
LIMITS = Limits(max_length=512, max_new_tokens=64, max_observation=100)
GAMES = {"difficulty": (1, 2), "games": 12}  # as in configs/textworld_tiny.py, of the train split
FOCUSED = 0.5  # share of explorations that favour one verb, drawn evenly; otherwise rare verbs hardly come

# Verb -> (pattern of its command, the command of the verb that it is mistaken for).
SIBLINGS = {
    "look": (r"look", "inventory"),
    "inventory": (r"inventory", "look"),
    "examine": (r"examine (.+)", r"take \1"),
    "go": (r"go .+", "look"),
    "open": (r"open (.+)", r"close \1"),
    "close": (r"close (.+)", r"open \1"),
    "take": (r"take (.+?)(?: from .+)?", r"examine \1"),
    "drop": (r"drop (.+)", r"take \1"),
    "put": (r"put (.+) on (.+)", r"insert \1 into \2"),
    "insert": (r"insert (.+) into (.+)", r"put \1 on \2"),
    "lock": (r"lock (.+) with (.+)", r"unlock \1 with \2"),
    "unlock": (r"unlock (.+) with (.+)", r"lock \1 with \2"),
    "eat": (r"eat (.+)", r"take \1"),
}
DIRECTIONS = ("north", "south", "east", "west")
COMMAND = re.compile(r'"command": "([a-z]+) ([^"]+)"')
BETWEEN = re.compile(r" (?:from|on|into|with) ")  # the things of a command

tools = lambda task: [commands.ACT]
action = commands.verb


def actions() -> frozenset[str]:
    return frozenset(commands.VERBS)


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Makes tasks of a round's first commands, worded by the scripted abstractor. They replay as played."""
    family = envs.load("textworld", PYTHON)
    games, roles = family.scenarios("train", GAMES), scripted.make(None, family)
    tasks: dict[str, Task] = {}
    made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            contexts = []
            for _ in range(min(64, count)):
                context = unguided(games[rng.integers(len(games))], f"pretrain-{made}")
                focus = (str(rng.choice(commands.VERBS)),) if rng.random() < FOCUSED else ()
                contexts.append(dataclasses.replace(context, focus_pattern=focus))
                made += 1
            found = explore(roles.explorer, family.tools, pool, contexts, rounds=3, steps=6, rng=rng)
            before = len(tasks)
            for proposals in roles.abstractor.abstract(found, TaskLimits(proposals=6), as_played):
                for n, proposal in enumerate(proposals):
                    game = proposal.context.task
                    task = dataclasses.replace(game, id=f"{proposal.context.id}-{n}", turns=proposal.turns)
                    tasks.setdefault(family.task_key(task), task)
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


def as_played(goals: Sequence[Goal]) -> list[Goal | None]:
    """Replaces a goal's own steps, which depend on others, by as many first steps of its round.

    So nothing has to be executed again.
    """
    rounds = [(goal, goal.exploration.triplets[goal.wanted[0]].round) for goal in goals]
    steps = [[t for t in goal.exploration.triplets if t.round == number] for goal, number in rounds]
    return [
        dataclasses.replace(goal, steps=tuple(played[: len(goal.wanted)]))
        for goal, played in zip(goals, steps)
    ]


def sibling(call: Call) -> Call:
    command = call.arguments["command"]
    pattern, instead = SIBLINGS[command.split()[0]]
    return Call("act", {"command": re.sub(pattern, instead, command)})


def wrong_argument(call: Call, task: Task, rng: np.random.Generator) -> Call:
    """Replaces a thing by another thing of the task, or a direction by another direction."""
    verb, _, rest = call.arguments["command"].partition(" ")
    own = things(rest)
    if verb == "go":
        others = [d for d in DIRECTIONS if d != rest]
    else:
        about = [c.arguments["command"].partition(" ") for c in task.calls]
        others = sorted({thing for v, _, r in about if v != "go" for thing in things(r)} - set(own))
    if not own or not others:
        return sibling(call)
    wrong = others[rng.integers(len(others))]
    return Call("act", {"command": f"{verb} {rest.replace(own[rng.integers(len(own))], wrong, 1)}"})


def things(rest: str) -> list[str]:
    """The things in a command's words after the verb, such as ["old key", "wooden box"]."""
    return BETWEEN.split(rest) if rest else []


def retell(text: str, another: Callable[[str], str]) -> str:
    """Replaces the names in commands. Queries and answers hold them unchanged."""
    found = {thing for verb, rest in COMMAND.findall(text) if verb != "go" for thing in things(rest)}
    # Longest first: a name may be part of another.
    for name in sorted(found, key=lambda n: (-len(n), n)):
        other = another(name)
        text = re.sub(rf"\b{re.escape(name)}\b", lambda _: other, text)
    return text
