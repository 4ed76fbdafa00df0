"""Your own tools: a class in TRL's style or a file of functions (config.environment.source).

docs/guides/train_on_your_own_tools.md says what it may define. Its code runs in worker processes only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from coevolve_jax.envs.base import UNDER_WAY, digest
from coevolve_jax.envs.tools.deadline import deadline
from coevolve_jax.envs.tools.environment import Instance, World
from coevolve_jax.envs.tools.source import Refused, Tools, load, required
from coevolve_jax.envs.tools.values import of_state
from coevolve_jax.types import Task, Turn

# The functions below execute the user's code: in another process, even under this interpreter.
APART = True
# The worlds of reset(seed=0), reset(seed=1), ... that begin differently go to these splits, in turn.
SPLITS = ("train", "development", "test", "train", "train")
SEEDS = 120
SHOWN = 20_000  # characters of an initial state that explorers see; a longer one they see by its answers
SECONDS = 60.0  # that loading the source, or one reset, may take
BEGINNING = 480.0  # seconds of processor time that all resets may take: less than remote.ASK_SECONDS

_BEGUN: dict[tuple, list[Task]] = {}  # what `_begun` found, by what determines it

make = World


def scenarios(split: str, settings: Mapping[str, Any], apart_from: str = "") -> list[Task]:
    """Returns the worlds in which a split's tasks take place.

    They are the split's entry in the source's `scenarios`: keyword arguments of reset. Without these they are
    reset(seed=i), and each world that begins like none before it goes to one split.

    A source whose worlds all begin alike has this one in all splits. Its held-out tasks are other tasks in
    the same world, and leak control keeps them apart.

    settings: "most" is the number of `scenarios` of a split that are read; all without it.
    """
    tools = _load(settings)
    named = _named(tools)
    _check_values(tools)
    if named is None:
        return _by_seed(tools, split)
    most = settings.get("most")
    found = _begun(tools, split, _entry(tools, named, split)[:most])
    if apart_from:
        others = {s.scenario["begins"] for s in _begun(tools, split, _entry(tools, named, apart_from)[:most])}
        found = [s for s in found if s.scenario["begins"] not in others]
    if not found:
        raise Refused(
            f"{tools.place()}: every world of {tools.name}.scenarios[{split!r}] begins as one of "
            f"{apart_from!r} does: give others."
        )
    return found


def tasks(split: str, settings: Mapping[str, Any]) -> list[Task]:
    """Returns the source's own tasks: the text of reset is the request, and get_reward scores it.

    There are none without get_reward, and none of a world whose reset returns no text.
    """
    tools = _load(settings)
    if tools.own("get_reward") is None:
        return []
    worlds = scenarios(split, settings)
    asked = [(world, world.scenario.get("request")) for world in worlds]
    return [
        dataclasses.replace(world, id=f"own_{world.id}", turns=(Turn(request),))
        for world, request in asked
        if request
    ]


def tools(task: Task) -> list[dict]:
    """Returns the schemas of the source's tools."""
    return load(task.scenario["source"]).schemas()


def _load(settings: Mapping[str, Any]) -> Tools:
    source = str(settings.get("source") or "")
    with deadline(SECONDS, f"config.environment.source={source}"):
        found = load(source)
    found.schemas()
    return found


def _by_seed(tools: Tools, split: str) -> list[Task]:
    """Returns the worlds of a split that are made by seeds; the only world there is, for any split."""
    if split not in SPLITS:
        known = ", ".join(dict.fromkeys(SPLITS))
        raise Refused(f"Unknown split {split!r}: use {known}, or give {tools.name}.scenarios.")
    reset = tools.own("reset")
    parameters = inspect.signature(reset).parameters.values() if reset else ()
    seeded = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
    needed = [name for name in required(tools, "reset") if name != "seed"] if reset else []
    if needed:
        given = ", ".join(f'"{name}": ...' for name in needed)
        raise Refused(
            f"{tools.place(reset)}: {tools.name}.reset needs {' and '.join(needed)}: name worlds, such as "
            f'scenarios = {{"train": [{{{given}}}, ...], "development": [...], "test": [...]}}, or give '
            "them defaults."
        )
    worlds = _begun(tools, "world", [{"seed": i} for i in range(SEEDS)] if seeded else [{}])
    if len(worlds) == 1:
        return worlds
    found = [world for n, world in enumerate(worlds) if SPLITS[n % len(SPLITS)] == split]
    if not found:
        raise Refused(
            f"{tools.place(reset)}: reset makes {len(worlds)} different worlds, too few for a split "
            f"{split!r}: let it make more from its seed."
        )
    return found


def _named(tools: Tools) -> Mapping | None:
    """Returns the source's own `scenarios`, checked; None where it has none."""
    named = tools.own("scenarios")
    if named is not None:
        _check_scenarios(tools, named)
    return named


def _entry(tools: Tools, named: Mapping, split: str) -> list[dict]:
    if split not in named:
        raise Refused(
            f"{tools.place()}: {tools.name}.scenarios has no split {split!r}, but {', '.join(named)}: "
            "add it, or set config.environment.train_split and eval_split."
        )
    return [_lists(dict(each)) for each in named[split]]


def _check_scenarios(tools: Tools, named: Any) -> None:
    sound = isinstance(named, Mapping) and named and all(
        isinstance(split, str) and isinstance(listed, (list, tuple)) and listed
        and all(isinstance(each, Mapping) for each in listed)
        for split, listed in named.items()
    )  # fmt: skip
    if not sound:
        raise Refused(
            f'{tools.place()}: {tools.name}.scenarios must be {{"train": [{{...}}, ...], "development": '
            '[...], "test": [...]}, with keyword arguments of reset in each place.'
        )
    for split, listed in named.items():
        for number, each in enumerate(listed):
            if not _is_json(dict(each)):
                raise Refused(
                    f"{tools.place()}: {tools.name}.scenarios[{split!r}][{number}] is {_short(each)}, which "
                    "is no JSON: use text, numbers, lists and mappings with text keys."
                )


def _check_values(tools: Tools) -> None:
    named = tools.own("values")
    if named is None:
        return
    if not isinstance(named, Mapping):
        raise Refused(
            f"{tools.place()}: {tools.name}.values is {_short(named)}: give a mapping of arguments to lists, "
            'such as values = {"customer": ["Ada", "Ben"]}.'
        )
    for argument, listed in named.items():
        if not (isinstance(argument, str) and isinstance(listed, (list, tuple)) and _is_json(listed)):
            raise Refused(
                f"{tools.place()}: {tools.name}.values[{argument!r}] is {_short(listed)}: give a list of "
                'values that JSON can write, such as values = {"customer": ["Ada", "Ben"]}.'
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _lists(value: Any) -> Any:
    """Returns a value with lists for its tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


def _is_json(value: Any) -> bool:
    """Tells whether JSON gives back what it is given, but for tuples."""
    try:
        value = _lists(value)
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def _begun(tools: Tools, name: str, resets: list[dict]) -> list[Task]:
    """Returns a scenario for each reset that begins like none before it. name: begins its id.

    A run asks for each split several times: worlds are begun once, and anew when the source's file changes.
    """
    file = str(tools.module.__file__)
    key = (tools.source, file, os.stat(file).st_mtime, name, repr(resets))
    if key in _BEGUN:
        return _BEGUN[key]
    found: dict[str, Task] = {}
    before = time.process_time()
    for number, reset in enumerate(resets):
        if (spent := time.process_time() - before) > BEGINNING:
            raise Refused(
                f"{tools.place(tools.own('reset'))}: {tools.name}.reset takes {spent / (2 * number):.2g} s, "
                f"too long to begin {len(resets)} worlds twice each: name fewer in `scenarios`, or let it "
                "be quicker."
            )
        given = ", ".join(f"{key}={value!r}"[:60] for key, value in reset.items())
        what = f"{tools.place()}: {tools.name}.reset({given})"
        _say(what)
        with deadline(SECONDS, what):
            states = []
            for _ in range(2):
                world = Instance(tools.source, reset)
                states.append([world.state(), world.text])
        if states[0] != states[1]:
            raise Refused(
                f"{tools.place()}: {tools.name}.reset({given}) begins otherwise each time, at "
                f"{difference(*states) or 'its text'}: let it depend on its arguments alone, and on no clock."
            )
        begins = digest(states[0])
        if begins not in found:
            found[begins] = _scenario(tools, f"{name}_{number}", reset, begins, *states[0])
    _say("")
    return _BEGUN.setdefault(key, list(found.values()))


def _say(what: str) -> None:
    """Says to whoever started this process what is under way, "" for nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f"{UNDER_WAY}{what}\n".encode(errors="replace"))


def _scenario(tools: Tools, id: str, reset: dict, begins: str, state: Any, text: str) -> Task:
    """text: what reset returned, a system message; with get_reward it is the request of the own task."""
    graded = tools.own("get_reward") is not None
    shown = {tools.name: state} if len(repr(state)) <= SHOWN else {}
    scenario = {
        "source": tools.source,
        "reset": reset,
        "begins": begins,
        "initial_state": shown,
        **({"request": text} if graded and text else {}),
        "values": _values(tools, state),
    }
    return Task(id, "tools", scenario, system="" if graded else text)


def _values(tools: Tools, state: Any) -> dict[str, list]:
    """Returns the values for explorers: the source's own `values`, and for other arguments the state's."""
    own = {k: _lists(v) for k, v in (tools.own("values") or {}).items()}
    read = of_state(state, tools.schemas()) if len(repr(state)) <= SHOWN else {}
    return {k: v for k, v in read.items() if k.partition(".")[2] not in own} | own


def difference(a: Any, b: Any, where: str = "") -> str:
    """Names the first place where two JSON values differ; "" where they are equal."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for key in a if (d := difference(a[key], b[key], f"{where}.{key}".lstrip(".")))), "")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next((d for n, pair in enumerate(zip(a, b)) if (d := difference(*pair, f"{where}[{n}]"))), "")
    return "" if a == b else where or "its state"
