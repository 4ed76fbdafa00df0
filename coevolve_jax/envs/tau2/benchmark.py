"""tau2's benchmark: tasks, splits, scenarios, and the verdict of the package's own evaluators."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs.tau2.package import load
from coevolve_jax.envs.tau2.protocol import OPENING, PROTOCOLS, SOLO, TELL_USER
from coevolve_jax.envs.tau2.records import OWNED
from coevolve_jax.envs.tau2.values import values
from coevolve_jax.envs.tau2.world import World, begin, environment, original
from coevolve_jax.types import Call, Task, Turn

SPLITS = ("train", "development", "test", "shared")
FOURTH = 4  # every fourth group of the package's train split is for development


@functools.cache
def official(domain: str) -> dict[str, dict]:
    """Returns the package's tasks by id, as they are on disk and in the package's order."""
    path = getattr(load(f"domains.{domain}.utils"), f"{domain.upper()}_TASK_SET_PATH")
    return {task["id"]: task for task in load("utils").load_file(path)}


@functools.cache
def ids(domain: str, split: str) -> tuple[str, ...]:
    """Returns the task ids of a split, in the package's order. ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"tau2 has no split {split!r}: use one of {', '.join(SPLITS)}.")
    return tuple(id for id in official(domain) if _split_of(domain).get(id) == split)


@functools.cache
def _split_of(domain: str) -> dict[str, str]:
    """Assigns each task to a split. Train, development and test share no user and no initial state.

    Test is the package's. Tasks of its train split are grouped by shared users, directly or through others.
    A group that shares a user with test is "shared". Every fourth other group is for development.
    """
    sides = load(f"domains.{domain}.environment").get_tasks_split()
    test, train = set(sides["test"]), set(sides["train"])
    groups = grouped({id: starts(domain, id) for id in official(domain) if id in test | train})
    apart = [group for group in groups if not test & set(group)]
    found = {id: "shared" for group in groups for id in group}
    for n, group in enumerate(apart):
        found |= dict.fromkeys(group, "train" if n % FOURTH else "development")
    return found | dict.fromkeys(test, "test")


def starts(domain: str, id: str) -> list[str]:
    """Returns a task's users. In telecom, where all tasks have the same user: its initial state's digest."""
    if domain in OWNED:
        return _users(domain, id)
    return [begin({"domain": domain, "actions": _actions(domain, id)}).fingerprint()]


def grouped(shared: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Groups the keys so that no two groups share a value. Groups are in the order of their first keys."""
    groups: list[tuple[list[str], set[str]]] = []
    for key, of_key in shared.items():
        met = [group for group in groups if group[1] & set(of_key)]
        rest = [group for group in groups if group not in met]
        keys = [k for known, _ in met for k in known] + [key]
        groups = [*rest, (keys, set(of_key).union(*(of_group for _, of_group in met)))]
    place = {key: n for n, key in enumerate(shared)}
    return sorted(
        (sorted(keys, key=place.__getitem__) for keys, _ in groups), key=lambda keys: place[keys[0]]
    )


def tasks(domain: str, split: str) -> list[Task]:
    """Returns the benchmark's tasks with the package's reference calls.

    A task has no reference calls where the package scores doing nothing as a success.
    """
    made = []
    for id in ids(domain, split):
        scenario = {"domain": domain, "actions": _actions(domain, id), "official": official(domain)[id]}
        idle = min(verdict(scenario, ()).values()) == 1
        turn = Turn(query(domain, scenario["official"]), () if idle else reference(scenario["official"]))
        made.append(Task(f"{domain}_{id}", "tau2", scenario, (turn,)))
    return made


def _actions(domain: str, id: str) -> list[dict]:
    return (official(domain)[id].get("initial_state") or {}).get("initialization_actions") or []


def reference(task: dict) -> tuple[Call, ...]:
    """Returns the package's own calls for a task, and a message where the user has to be told something."""
    criteria = task["evaluation_criteria"]
    calls = [Call(action["name"], action["arguments"]) for action in criteria["actions"] or ()]
    if told := criteria["communicate_info"]:
        calls.append(Call(TELL_USER["function"]["name"], {"message": ", ".join(told)}))
    return tuple(calls)


def query(domain: str, task: dict) -> str:
    """Returns the first message, in the parts of the package's prompts: instructions, policy, user's wish."""
    wanted = task.get("ticket") if domain in SOLO else str(_parsed(task).user_scenario.instructions)
    return OPENING[PROTOCOLS[domain]].format(
        policy=original(domain).policy.strip(), wanted=(wanted or "").strip()
    )


def asks_officially(scenario: Mapping[str, Any], turn: Turn) -> bool:
    """Says whether a turn asks for a scenario's official task, in its words."""
    return "official" in scenario and turn.query == query(scenario["domain"], scenario["official"])


@functools.cache
def scenarios(domain: str, split: str) -> tuple[Task, ...]:
    """Returns the initial states of a split, each once.

    In telecom they are those of its tasks. Elsewhere each user whom its tasks' reference calls touch gives
    one, without the records of other users.
    """
    if domain in OWNED:
        users = {user: None for id in ids(domain, split) for user in _users(domain, id)}
        found = [(user, {"domain": domain, "user_id": user}) for user in users]
    else:
        found = [(id, {"domain": domain, "actions": _actions(domain, id)}) for id in ids(domain, split)]
    made = {}
    for name, scenario in found:
        world = begin(scenario)
        known = values(domain, world.database, world.phone_number)
        task = Task(f"start_{domain}_{name}", "tau2", {**scenario, "values": known})
        made.setdefault(world.fingerprint(), task)
    return tuple(made.values())


def _users(domain: str, id: str) -> list[str]:
    """Returns the users of a task: those whose records its reference calls touch."""
    world = World(domain)
    for call in reference(official(domain)[id]):
        world.call(call)
    database = world.database
    return sorted({r.user_id for table in ("users", OWNED[domain]) for r in getattr(database, table).touched})


def _parsed(task: dict) -> Any:
    return load("data_model.tasks").Task(**task)


def verdict(scenario: dict, messages: Sequence[Any]) -> dict[str, float]:
    """Returns the package's scores, 0 or 1, by component of a task's reward (evaluator.py multiplies them).

    messages: World.messages.
    """
    domain, task, said = scenario["domain"], _parsed(scenario["official"]), list(messages)
    build = functools.partial(environment, domain)
    found = [
        load("evaluator.evaluator_env").EnvironmentEvaluator.calculate_reward(
            build, task, said, solo_mode=domain in SOLO
        ),
        load("evaluator.evaluator_action").ActionEvaluator.calculate_reward(task, said),
        load("evaluator.evaluator_communicate").CommunicateEvaluator.calculate_reward(task, said),
    ]
    scores = {kind: score for one in found for kind, score in (one.reward_breakdown or {}).items()}
    return {kind.value: scores[kind] for kind in task.evaluation_criteria.reward_basis}
