"""BFCL's benchmark (v4, bfcl-eval 2026.3.23): tasks, fixed splits, scenarios, and the official verdict."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context

from coevolve_jax.envs.bfcl.scenario import scenario
from coevolve_jax.envs.bfcl.toolsets import TOOLSETS, documented, parse, read_data, render
from coevolve_jax.types import Call, Task, Turn

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SPLITS = ("train", "evaluation", "development", "test", "sequential_train", "sequential_test")
SPLIT_SEED = 2604

# The official inference loop says this when the functions held out in multi_turn_miss_func arrive
# (bfcl_eval.constants.default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING).
_ANNOUNCEMENT = "{functions}\nI have updated some more functions you can choose from. What about now?"
_serial = itertools.count()


def _check_category(category: str) -> None:
    if category not in CATEGORIES:
        raise ValueError(f"Unknown BFCL category {category!r}: use one of {', '.join(CATEGORIES)}.")


@functools.cache
def _entries(category: str) -> dict[str, tuple[dict, list[list[str]]]]:
    """Returns the official entry and the official answer by task id."""
    _check_category(category)
    answers = read_data("possible_answer", f"BFCL_v4_{category}.json")
    return {
        entry["id"]: (entry, answer["ground_truth"])
        for entry, answer in zip(read_data(f"BFCL_v4_{category}.json"), answers, strict=True)
    }


def _query(entry: Mapping, turn: int, messages: Sequence[Mapping]) -> str:
    """Returns the user's words. Where held-out functions arrive: the official sentence with their docs."""
    arriving = entry.get("missed_function", {}).get(str(turn), [])
    if not arriving:
        (message,) = messages
        return message["content"]
    docs = documented(entry["involved_classes"])
    return _ANNOUNCEMENT.format(functions=[docs[name].official for name in arriving])


def _task(entry: Mapping, answer: Sequence[Sequence[str]], environment: str, documents: str) -> Task:
    turns = tuple(
        Turn(_query(entry, i, messages), tuple(parse(text) for text in calls))
        for i, (messages, calls) in enumerate(zip(entry["question"], answer, strict=True))
    )
    # The data's excluded_function is ignored: the official harness offers those tools too.
    announced = [name for names in entry.get("missed_function", {}).values() for name in names]
    start = entry["involved_classes"], entry["initial_config"]
    return Task(
        id=entry["id"],
        environment=environment,
        scenario=scenario(*start, announced=announced, documents=documents),
        turns=turns,
    )


@functools.cache
def _tasks(category: str, documents: str) -> tuple[Task, ...]:
    environment = "bfcl_long_context" if category == "multi_turn_long_context" else "bfcl"
    return tuple(
        _task(entry, answer, environment, documents) for entry, answer in _entries(category).values()
    )


def load(category: str = "multi_turn_base", documents: str = "") -> list[Task]:
    """Returns the 200 tasks of a category. Task i has the id "<category>_<i>".

    documents: see `scenario.scenario`. ValueError for an unknown category.
    """
    return list(_tasks(category, documents))


@functools.cache
def split(name: str) -> frozenset[int]:
    """Returns the indices (0 to 199, in every category) of one side of a fixed split.

    train, evaluation: 25 of each block of 50; a block has one main class.
    development, test: every second index of evaluation. Tuning uses development, so that test is read once.
    sequential_train, sequential_test: first and second half, which hold different classes. Other papers use
    it. ValueError for an unknown name.
    """
    import numpy as np  # here, so that workers start without it

    if name not in SPLITS:
        raise ValueError(f"Unknown split {name!r}: use one of {', '.join(SPLITS)}.")
    if name.startswith("sequential"):
        return frozenset(range(100) if name.endswith("train") else range(100, 200))
    rng = np.random.default_rng(SPLIT_SEED)
    train = frozenset(int(50 * block + i) for block in range(4) for i in rng.permutation(50)[:25])
    evaluation = sorted(frozenset(range(200)) - train)
    sides = {
        "train": train,
        "evaluation": evaluation,
        "development": evaluation[::2],
        "test": evaluation[1::2],
    }
    return frozenset(sides[name])


def scenarios(
    split_name: str, toolsets: Sequence[str] | None = None, category: str = "multi_turn_base"
) -> list[Task]:
    """Returns the bare scenarios of one side of a split: initial states and tools without user turns.

    toolsets: keeps only these (None: all) and drops scenarios that have none left. Ids are "scenario_17", or
    "scenario_long_context_17" and the like outside multi_turn_base. ValueError for unknown names.
    """
    documented(toolsets or ())
    indices = split(split_name)
    prefix = "scenario" if category == "multi_turn_base" else category.replace("multi_turn", "scenario")
    out = []
    for index, task in enumerate(load(category)):
        kept = [t for t in task.scenario["toolsets"] if toolsets is None or t in toolsets]
        if index in indices and kept:
            state = {name: value for name, value in task.scenario["initial_state"].items() if name in kept}
            out.append(Task(f"{prefix}_{index}", task.environment, scenario(kept, state)))
    return out


def starts(scenario: Task) -> set[str]:
    """Returns the initial state of each tool class, as text. BFCL repeats some of them across its entries."""
    state = scenario.scenario["initial_state"]
    return {json.dumps([t, state.get(t)], sort_keys=True) for t in scenario.scenario["toolsets"]}


def official_check(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """Gives BFCL's own verdict on the calls turns[turn][step][call] for a benchmark task.

    Returns {"valid": bool, "error_type": str, "error_message": str}; the strings are empty where valid. Fewer
    turns than the task has count as force-terminated. ValueError for an unknown task id or too many turns.
    """
    category = task_id.rpartition("_")[0]
    _check_category(category)
    if task_id not in _entries(category):
        raise ValueError(f"BFCL has no task {task_id!r}: the ids of {category} end in 0 to 199.")
    entry, answer = _entries(category)[task_id]
    if len(turns) > len(answer):
        raise ValueError(f"{task_id} has {len(answer)} turns, but calls for {len(turns)} turns are given.")
    if len(turns) < len(answer):
        return {
            "valid": False,
            "error_type": "multi_turn:force_terminated",
            "error_message": f"{len(turns)} of {len(answer)} turns were finished.",
        }
    # The official executor keeps worlds in its globals by this name: it must be new, and cleared afterwards.
    model = f"model{next(_serial)}"
    allowed = documented(entry["involved_classes"])
    decoded = [[[_render_or_refuse(call, allowed) for call in step] for step in turn] for turn in turns]
    with _sharing_undone():
        try:
            verdict = checker.multi_turn_checker(decoded, answer, entry, category, model)
        finally:
            for name in [n for n in vars(multi_turn_utils) if n.startswith(f"{model}_")]:
                delattr(multi_turn_utils, name)
    return {
        "valid": verdict["valid"],
        "error_type": verdict.get("error_type", ""),
        "error_message": verdict.get("error_message", ""),
    }


@contextlib.contextmanager
def _sharing_undone() -> Iterator[None]:
    """Restores, after its body, the values that BFCL's worlds share within a process.

    These are default arguments and long-context extensions. The official executor lets calls change them, and
    the next verdict and the next world would see the changes.
    """
    shared = [value for tool in documented(TOOLSETS).values() for value in tool.defaults.values()]
    shared += [v for n, v in vars(long_context).items() if n.isupper() and isinstance(v, (list, dict))]
    before = copy.deepcopy(shared)
    try:
        yield
    finally:
        for value, old in zip(shared, before):
            value.clear()
            add = value.extend if isinstance(value, list) else value.update
            add(old)


def _render_or_refuse(call: Call, allowed: Container[str]) -> str:
    """Renders a call. A call that is not allowed or not plain becomes one that the executor rejects."""
    try:
        return render(call) if isinstance(call.name, str) and call.name in allowed else "refused_call()"
    except ValueError:
        return "refused_call()"
