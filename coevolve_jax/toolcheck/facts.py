"""Plays the tools of an environment, and makes the same calls again: what happens then."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax.envs.base import EnvPool, Execution
from coevolve_jax.envs.tools.environment import UNREADABLE
from coevolve_jax.envs.tools.values import open_arguments
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers.scripted.arguments import succeeded
from coevolve_jax.rollout.chat import Chat, load_tokenizer
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.explore import explore, unguided
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.toolcheck import rewards, servers
from coevolve_jax.types import Call, Observation, Task

WORLDS, ROUNDS, STEPS = 32, 3, 10  # of exploration
READ = 300  # of a split's own `scenarios`: they may be many thousands
STARTED = 4  # worlds to explore where a server is started for each
TASKS = 120  # asked of synthesis after WORLDS, to see how many different ones come out
PAUSE = 1.1  # seconds between two executions, so that a clock of whole seconds shows itself
ALONE = 4  # runs of a call in processes of their own: chance may give the same twice
PAIRS = 3  # calls on which two tools must agree before nothing can tell them apart
SWAPPED = 40  # tasks that are played again with another argument
SHOWN = 10  # tasks that are shown


@dataclasses.dataclass
class ToolFacts:
    """The effects of the calls of one tool. values: parameter -> value as JSON text -> number of calls.

    changed, looked: successful calls that changed the state, and that did not. answers: of successful calls.
    fatal: the call that cost its world, and why. The tool was called no more.
    """

    schema: dict
    calls: int = 0
    succeeded: int = 0
    changed: int = 0
    looked: int = 0
    longest: int = 0  # characters of an answer
    answers: set[str] = dataclasses.field(default_factory=set)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    values: dict[str, Counter[str]] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    fatal: tuple[Call, str] | None = None


@dataclasses.dataclass(frozen=True)
class Unlike:
    """A call that went otherwise when its world was played again.

    alone: True where even worlds in processes of their own differ. Else other worlds in the process matter.
    paths: the files of a server's world that differ after it.
    """

    call: Call
    first: str
    second: str
    alone: bool
    paths: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one check.

    worlds: split -> number of worlds that begin differently. unlike: one call of each tool that does not
    repeat. twins: tools that answered and acted alike. reward: what is wrong with get_reward, or "". logs:
    files that every call changes. forgets: whether a server that is started for each world could serve all.
    tasks: all that came out, of those `asked` for. refused: proposals, by reason. prompt: what an agent reads
    of the first task. tokens: of that prompt, by the tokenizer in the folder `tokenizer`. speed: worlds made
    and played with one call, per second. unreadable: the first call after which the state cannot be read, and
    why. named: whether the worlds are a class's own `scenarios`. unnamed: tool -> its text arguments that
    take anything and for which no values are named. swapped: tasks that were played again with one argument
    of a call exchanged. loose: how many of these passed, by the tool of that call.
    """

    worlds: Mapping[str, int | str]
    tools: Mapping[str, ToolFacts]
    steps: int
    unlike: Sequence[Unlike]
    twins: Sequence[tuple[str, str]]
    reward: str
    logs: Sequence[str]
    forgets: bool
    tasks: Sequence[Task]
    asked: int
    proposed: int
    refused: Counter[str]
    prompt: str
    tokens: int
    tokenizer: str
    speed: float
    seconds: float
    unreadable: tuple[Call, str] | None = None
    named: bool = False
    unnamed: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    swapped: int = 0
    loose: Counter[str] = dataclasses.field(default_factory=Counter)


class _Watched:
    """A pool that writes down the calls that cost their worlds, which exploration leaves out.

    A tool that has cost a world is called no more: each such call can take minutes. So a tool that is not
    known yet is tried by one call before others.

    bar: counts the calls until it is closed.
    """

    def __init__(self, pool: EnvPool, bar: tqdm):
        self._pool, self._bar = pool, bar
        self._known: set[str] = set()
        self.fatal: dict[str, tuple[Call, str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def step(self, env_ids: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]:
        """Answers the calls of each world, in the pool's way where some world makes several."""
        self._bar.update(sum(map(len, calls)))
        if any(len(own) != 1 for own in calls):
            return self._pool.step(env_ids, calls)
        found: dict[int, Observation] = {}
        left = list(range(len(env_ids)))
        while left:
            trials, first = [], set[str]()
            for i in left:
                name = calls[i][0].name
                if name in self.fatal:
                    found[i] = Observation(json.dumps({"error": "It has ended a world before."}), error=True)
                elif name in self._known or name not in first:
                    trials.append(i)
                    first.add(name)
            answers = self._pool.step([env_ids[i] for i in trials], [calls[i] for i in trials])
            for i, (observation,) in zip(trials, answers):
                found[i] = observation
                self._known.add(calls[i][0].name)
                if observation.fatal or not observation.valid:
                    self.fatal.setdefault(calls[i][0].name, (calls[i][0], observation.text))
            left = [i for i in left if i not in found]
        return [[found[i]] for i in range(len(env_ids))]


def gather(config: ConfigDict, splits: Sequence[str], worlds: int | None = None) -> Facts:
    """Explores the tools of a config's environment. Raises ValueError where the environment refuses.

    splits: whose worlds are counted. worlds: how many are explored; None: WORLDS or STARTED.
    """
    began = time.perf_counter()
    family, scenarios = build.family(config), _scenarios(config, config.environment.train_split)
    rng = rng_for(config.seed, "check tools")
    roles = build.explorer(config, None, None)
    worlds = worlds or (STARTED if servers.started(config) else WORLDS)
    asked = max(1, TASKS * worlds // WORLDS)
    contexts = [unguided(scenarios[i % len(scenarios)], f"check/{i}") for i in range(worlds)]
    bar = tqdm(total=4 * worlds * ROUNDS * STEPS, desc="calls", unit="call", leave=False)
    with build.env_pool(config) as pool, bar:
        watched: Any = _Watched(pool, bar)  # a pool but for `step`
        explorations = explore(
            roles.explorer, family.tools, watched, contexts, rounds=ROUNDS, steps=STEPS, rng=rng
        )  # fmt: skip
        jobs = [
            (task, tuple(call for call in calls if call.name not in watched.fatal))
            for task, calls in _rounds(explorations)
        ]
        steps = sum(len(calls) for _, calls in jobs)
        bar.total = bar.n + 3 * steps  # they are made three times more
        before = time.perf_counter()
        first = pool.execute(jobs)
        bar.update(steps)
        speed = len(jobs) / (time.perf_counter() - before)
        time.sleep(PAUSE)
        with build.env_pool(config) as other:
            second = other.execute(jobs)
            bar.update(steps)
            unlike = _unlike(config, jobs, first, second)
            if not unlike and not servers.started(config):
                unlike = _unlike(config, jobs, first, _side_by_side(other, jobs))
            bar.update(steps)
        tools = {t["function"]["name"]: ToolFacts(t) for e in explorations for t in e.tools}
        for (_, calls), execution in zip(jobs, first):
            _count(tools, calls, execution)
        for name, fatal in watched.fatal.items():
            tools[name].fatal = fatal
        twins = _twins(pool, tools, jobs, first)
        looks = any(tool.looked for tool in tools.values())
        forgets = servers.started(config) and not unlike and _forgets(config, jobs, first)
        tasks = TaskPool(key=family.task_key)
        synthesizer = Synthesizer(
            roles, family.tools, watched, config, None, action_pattern=family.action_pattern
        )
        request = SynthesisRequest(asked, "initial", 0, rng_for(config.seed, "initial"))
        bar.close()
        if unlike or servers.started(config):  # few passes, where calls do not repeat and so no task passes
            made = synthesizer.synthesize(tasks, contexts, request)
        else:
            with tqdm(total=asked, desc="tasks", unit="task", leave=False) as added:
                made = synthesizer.synthesize_unguided(tasks, scenarios, request, on_added=added.update)
        found = list(tasks)
        swapped, loose = _loose(pool, found[: STARTED if servers.started(config) else SWAPPED])
    prompt, tokens, tokenizer = _prompt(config, family.tools, found[0] if found else scenarios[0])
    return Facts(
        worlds={split: _worlds(config, split) for split in splits},
        tools=tools,
        steps=steps,
        unlike=unlike,
        twins=twins,
        reward=rewards.fault(config, jobs),
        logs=() if looks else servers.logs(config, jobs),
        forgets=forgets,
        tasks=found,
        asked=asked,
        proposed=made.proposed,
        refused=made.refused,
        prompt=prompt,
        tokens=tokens,
        tokenizer=tokenizer,
        speed=speed,
        seconds=time.perf_counter() - began,
        unreadable=_unreadable(jobs, first),
        named=config.environment.name == "tools" and not scenarios[0].id.startswith("world_"),
        unnamed=_unnamed(tools, scenarios),
        swapped=swapped,
        loose=loose,
    )


def _unreadable(
    jobs: Sequence[tuple[Task, Sequence[Call]]], executed: Sequence[Execution]
) -> tuple[Call, str] | None:
    """Returns the first call after which a class's state cannot be read, and why."""
    for (_, calls), execution in zip(jobs, executed):
        for call, state in zip(calls, execution.fingerprints[1:]):
            if state.startswith(UNREADABLE):
                return call, state.removeprefix(UNREADABLE)
    return None


def _unnamed(tools: Mapping[str, ToolFacts], scenarios: Sequence[Task]) -> dict[str, list[str]]:
    """Returns the text arguments of each tool that take anything, and for which no world has values."""
    known = set().union(*(scenario.scenario.get("values", ()) for scenario in scenarios))
    return {
        name: [each for each in open_arguments(facts.schema) if not known & {each, f"{name}.{each}"}]
        for name, facts in tools.items()
    }


def _rounds(explorations: Sequence) -> Iterator[tuple[Task, tuple[Call, ...]]]:
    """Yields each round of exploration as a world and its calls."""
    for exploration in explorations:
        for number in sorted({t.round for t in exploration.triplets}):
            calls = tuple(t.call for t in exploration.triplets if t.round == number)
            yield exploration.context.task, calls


def _count(tools: Mapping[str, ToolFacts], calls: Sequence[Call], execution: Execution) -> None:
    states = execution.fingerprints
    for n, (call, said) in enumerate(zip(calls, execution.observations)):
        facts = tools[call.name]
        facts.calls += 1
        facts.longest = max(facts.longest, len(said.text))
        for name, value in call.arguments.items():
            facts.values[name][json.dumps(value, sort_keys=True, ensure_ascii=False)[:80]] += 1
        if not succeeded(said):
            facts.errors[said.text[:160]] += 1
            continue
        facts.succeeded += 1
        facts.answers.add(said.text)
        facts.changed += states[n] != states[n + 1]
        facts.looked += states[n] == states[n + 1]


def _unlike(
    config: ConfigDict, jobs: Sequence, first: Sequence[Execution], second: Sequence[Execution]
) -> list[Unlike]:
    """Returns the first call of each tool that differs between two executions of the same calls."""
    found: dict[str, Unlike] = {}
    for (task, calls), *executions in zip(jobs, first, second):
        for at in _partings(*executions):
            if (call := calls[at]).name in found:
                continue
            cut = (task, calls[: at + 1])
            alone, ends, differs = [], [], False
            while len(alone) < ALONE and not differs:
                alone += _alone(config, [cut])
                ends.append(servers.contents(config, *cut)[-1])
                differs = any(calls[n].name not in found for n in _partings(alone[0], alone[-1]))
            shown = (alone[0], alone[-1]) if differs else executions
            one, other = (e.observations[at].text for e in shown)
            found[call.name] = Unlike(call, one, other, differs, servers.differing(ends[0], ends[-1]))
    return list(found.values())


def _side_by_side(pool: EnvPool, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
    """Executes the jobs in worlds that are open at once, one call of each job in turn."""
    ids = pool.reset([task for task, _ in jobs])
    said: list[list[Observation]] = [[] for _ in jobs]
    states = [[state] for state in pool.fingerprint(ids)]
    for n in range(max((len(calls) for _, calls in jobs), default=0)):
        left = [i for i, (_, calls) in enumerate(jobs) if n < len(calls)]
        now = [ids[i] for i in left]
        answers = pool.step(now, [[jobs[i][1][n]] for i in left])
        for i, own, state in zip(left, answers, pool.fingerprint(now)):
            said[i] += own
            states[i].append(state)
    pool.close(ids)
    return [Execution(tuple(own), tuple(prints)) for own, prints in zip(said, states)]


def _partings(a: Execution, b: Execution) -> Iterator[int]:
    """Yields the position of each call whose answer differs, up to the first after which the state does."""
    states = zip(a.fingerprints[1:], b.fingerprints[1:])
    for n, (one, other, (before, after)) in enumerate(zip(a.observations, b.observations, states)):
        if one.text != other.text or before != after:
            yield n
        if before != after:
            return


def _alone(config: ConfigDict, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
    """Executes calls in a process that has done nothing else, a pause after the last such process."""
    time.sleep(PAUSE)
    with build.env_pool(build.configs.override(config, {"environment.workers": 1})) as pool:
        return pool.execute(jobs)


def _forgets(config: ConfigDict, jobs: Sequence, first: Sequence[Execution]) -> bool:
    """Says whether one server for all worlds does what a server for each did."""
    again = _alone(config, [(servers.reusing(task), calls) for task, calls in jobs])
    return not any(list(_partings(*pair)) for pair in zip(first, again))


def _twins(
    pool: ProcessPool, tools: Mapping[str, ToolFacts], jobs: Sequence, executed: Sequence[Execution]
) -> list[tuple[str, str]]:
    """Returns pairs of tools with equal parameters that answered and acted alike on PAIRS different calls."""
    shapes = defaultdict(list)
    for name, facts in tools.items():
        properties = facts.schema["function"]["parameters"].get("properties", {})
        shapes[json.dumps({k: v.get("type") for k, v in properties.items()}, sort_keys=True)].append(name)
    pairs = [(a, b) for group in shapes.values() for i, a in enumerate(group) for b in group[i + 1 :]]
    trials = {p: [t for a, b in (p, p[::-1]) for t in _exchanged(a, b, jobs, executed)] for p in pairs}
    alike = [pair for pair, own in trials.items() if len(own) >= PAIRS]
    for n in range(2 * PAIRS):  # most pairs part at the first trial
        asked = [pair for pair in alike if n < len(trials[pair])]
        results = pool.execute([trials[pair][n][0] for pair in asked]) if asked else []
        for pair, result in zip(asked, results):
            if (result.observations[-1].text, result.fingerprints[-1]) != trials[pair][n][1]:
                alike.remove(pair)
    return alike


def _exchanged(
    name: str, other: str, jobs: Sequence, executed: Sequence[Execution]
) -> list[tuple[tuple[Task, Sequence[Call]], tuple[str, str]]]:
    """Returns up to PAIRS jobs in which another tool makes the last call, which succeeded, of this one.

    Beside each stand the answer and the fingerprint that this tool gave.
    """
    found = {}
    for (task, calls), execution in zip(jobs, executed):
        for n, (call, said) in enumerate(zip(calls, execution.observations)):
            key = json.dumps(dict(call.arguments), sort_keys=True)
            if call.name == name and succeeded(said) and key not in found and len(found) < PAIRS:
                exchanged = task, (*calls[:n], Call(other, call.arguments))
                found[key] = exchanged, (said.text, execution.fingerprints[n + 1])
    return list(found.values())


def _loose(pool: EnvPool, tasks: Sequence[Task]) -> tuple[int, Counter[str]]:
    """Returns the number of tasks in which one argument can be exchanged, and the tools of those that pass.

    Each of a task's text arguments is exchanged once, for the next of the values that its world names for it.
    A task that passes in several ways counts once, for the first.
    """
    jobs = [(task, turn, n, call) for task in tasks for turn, n, call in _swaps(task)]
    ids = pool.reset([task for task, *_ in jobs])
    for at in range(max((len(task.turns) for task in tasks), default=0)):
        own = [(i, *job) for i, job in zip(ids, jobs) if at < len(job[0].turns)]
        calls = [list(task.turns[at].calls) for _, task, *_ in own]
        for made, (_, _, turn, n, call) in zip(calls, own):
            if turn == at:
                made[n] = call
        pool.step([i for i, *_ in own], calls)
        pool.end_turn([i for i, *_ in own])
    passed = {}
    for (task, _, _, call), outcome in zip(jobs, pool.score(ids)):
        if outcome.success:
            passed.setdefault(task.id, call.name)
    pool.close(ids)
    return len({task.id for task, *_ in jobs}), Counter(passed.values())


def _swaps(task: Task) -> Iterator[tuple[int, int, Call]]:
    """Yields turn, position, and the call there with one text argument exchanged."""
    known = task.scenario.get("values", {})
    for turn, each in enumerate(task.turns):
        for n, call in enumerate(each.calls):
            for name, value in call.arguments.items():
                values = known.get(f"{call.name}.{name}", known.get(name, ()))
                if isinstance(value, str) and len(values) > 1:
                    at = values.index(value) if value in values else -1
                    other = values[(at + 1) % len(values)]
                    yield turn, n, Call(call.name, {**call.arguments, name: other})


def _scenarios(config: ConfigDict, split: str, apart_from: str = "") -> list[Task]:
    """Returns the worlds of a split; of a class's own `scenarios` those of the first READ."""
    settings = config.environment.to_dict()
    if config.environment.name == "tools":
        settings["most"] = READ
    return build.family(config).scenarios(split, settings, apart_from=apart_from)


def _worlds(config: ConfigDict, split: str) -> int | str:
    """Returns the number of worlds of a split, or why it has none. Held-out worlds are apart, as in a run."""
    c = config.environment
    apart_from = c.train_split if split == c.eval_split else ""
    try:
        return len(_scenarios(config, split, apart_from))
    except ValueError as error:
        return str(error)


def _prompt(config: ConfigDict, tools: Any, task: Task) -> tuple[str, int, str]:
    """Returns a task's prompt, its number of tokens, and the folder whose tokenizer counted them."""
    folder = config.model if Path(config.model, "tokenizer.json").exists() else "models/tiny_qwen3"
    tokenizer = load_tokenizer(folder)
    query = task.turns[0].query if task.turns else "..."
    ids = np.asarray(Chat(tokenizer).prompt(tools(task), query, task.system, task.examples))
    return tokenizer.decode(ids.tolist()), len(ids), folder
