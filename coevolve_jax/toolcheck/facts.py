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

from coevolve_jax import build
from coevolve_jax.envs.base import EnvPool, Execution
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers.scripted.arguments import succeeded
from coevolve_jax.rollout.chat import Chat, load_tokenizer
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.explore import explore, unguided
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Observation, Task

CONTEXTS, ROUNDS, STEPS = 32, 3, 10  # of exploration
TASKS = 120  # asked of synthesis, to see how many different ones come out
PAUSE = 1.1  # seconds between two executions, so that a clock of whole seconds shows itself
PAIRS = 3  # calls on which two tools must agree before nothing can tell them apart
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
    """

    call: Call
    first: str
    second: str
    alone: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of one check.

    worlds: split -> number of worlds that begin differently. unlike: one call of each tool that does not
    repeat. twins: tools that answered and acted alike. tasks: all that came out. refused: proposals, by
    reason. prompt: what an agent reads of the first task. tokens: of that prompt, by the tokenizer in the
    folder `tokenizer`. speed: worlds made and played with one call, per second.
    """

    worlds: Mapping[str, int | str]
    tools: Mapping[str, ToolFacts]
    steps: int
    unlike: Sequence[Unlike]
    twins: Sequence[tuple[str, str]]
    tasks: Sequence[Task]
    proposed: int
    refused: Counter[str]
    prompt: str
    tokens: int
    tokenizer: str
    speed: float
    seconds: float


class _Watched:
    """A pool that writes down the calls that cost their worlds, which exploration leaves out.

    A tool that has cost a world is called no more: each such call can take minutes. So a tool that is not
    known yet is tried by one call before others.
    """

    def __init__(self, pool: EnvPool):
        self._pool = pool
        self._known: set[str] = set()
        self.fatal: dict[str, tuple[Call, str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def step(self, env_ids: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]:
        """Answers the calls of each world, in the pool's way where some world makes several."""
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


def gather(config: ConfigDict, splits: Sequence[str]) -> Facts:
    """Explores the tools of a config's environment. Raises ValueError where the environment refuses.

    splits: whose worlds are counted.
    """
    began = time.perf_counter()
    family, scenarios = build.family(config), build.scenarios(config)
    rng = rng_for(config.seed, "check tools")
    roles = build.explorer(config, None, None)
    contexts = [unguided(scenarios[i % len(scenarios)], f"check/{i}") for i in range(CONTEXTS)]
    with build.env_pool(config) as pool:
        watched: Any = _Watched(pool)  # a pool but for `step`
        explorations = explore(
            roles.explorer, family.tools, watched, contexts, rounds=ROUNDS, steps=STEPS, rng=rng
        )  # fmt: skip
        jobs = [
            (task, tuple(call for call in calls if call.name not in watched.fatal))
            for task, calls in _rounds(explorations)
        ]
        before = time.perf_counter()
        first = pool.execute(jobs)
        speed = len(jobs) / (time.perf_counter() - before)
        time.sleep(PAUSE)
        with build.env_pool(config) as other:
            second = other.execute(jobs)
        unlike = _unlike(config, jobs, first, second)
        tools = {t["function"]["name"]: ToolFacts(t) for e in explorations for t in e.tools}
        for (_, calls), execution in zip(jobs, first):
            _count(tools, calls, execution)
        for name, fatal in watched.fatal.items():
            tools[name].fatal = fatal
        twins = _twins(pool, tools, jobs, first)
        tasks = TaskPool(key=family.task_key)
        stats = Synthesizer(roles, family.tools, watched, config, None, action_pattern=family.action_pattern)
        made = stats.synthesize_unguided(
            tasks, scenarios, SynthesisRequest(TASKS, "initial", 0, rng_for(config.seed, "initial"))
        )
    found = list(tasks)
    prompt, tokens, tokenizer = _prompt(config, family.tools, found[0] if found else scenarios[0])
    return Facts(
        worlds={split: _worlds(config, split) for split in splits},
        tools=tools,
        steps=sum(len(calls) for _, calls in jobs),
        unlike=unlike,
        twins=twins,
        tasks=found,
        proposed=made.proposed,
        refused=made.refused,
        prompt=prompt,
        tokens=tokens,
        tokenizer=tokenizer,
        speed=speed,
        seconds=time.perf_counter() - began,
    )


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
    for job, a, b in zip(jobs, first, second):
        at = _parting(a, b)
        if at is None or at >= len(job[1]) or job[1][at].name in found:
            continue
        cut = (job[0], job[1][: at + 1])
        alone = [_alone(config, cut) for _ in range(2)]
        differs = _parting(*alone) is not None
        texts = [e.observations[at].text if at < len(e.observations) else "" for e in (a, b)]
        if differs:
            texts = [e.observations[at].text for e in alone]
        found[job[1][at].name] = Unlike(job[1][at], texts[0], texts[1], alone=differs)
    return list(found.values())


def _parting(a: Execution, b: Execution) -> int | None:
    """Returns the position of the first call whose answer or state differs; None where none does."""
    pairs = zip(a.observations, b.observations, a.fingerprints[1:], b.fingerprints[1:])
    return next((n for n, (o, p, s, t) in enumerate(pairs) if o.text != p.text or s != t), None)


def _alone(config: ConfigDict, job: tuple[Task, Sequence[Call]]) -> Execution:
    """Executes calls in a process that has done nothing else, a pause after the last such process."""
    time.sleep(PAUSE)
    with build.env_pool(build.configs.override(config, {"environment.workers": 1})) as pool:
        (execution,) = pool.execute([job])
    return execution


def _twins(
    pool: ProcessPool, tools: Mapping[str, ToolFacts], jobs: Sequence, executed: Sequence[Execution]
) -> list[tuple[str, str]]:
    """Returns pairs of tools with equal parameters that answered and acted alike on PAIRS different calls."""
    shapes = defaultdict(list)
    for name, facts in tools.items():
        properties = facts.schema["function"]["parameters"].get("properties", {})
        shapes[json.dumps({k: v.get("type") for k, v in properties.items()}, sort_keys=True)].append(name)
    pairs = [(a, b) for group in shapes.values() for i, a in enumerate(group) for b in group[i + 1 :]]
    trials = []
    for pair in pairs:
        for name, other in (pair, pair[::-1]):
            trials += [(pair, job) for job in _exchanged(name, other, jobs, executed)]
    wanted = [
        job for _, (task, calls, call) in trials for job in ((task, calls), (task, (*calls[:-1], call)))
    ]
    results = pool.execute(wanted) if wanted else []
    alike: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for n, (pair, _) in enumerate(trials):
        a, b = results[2 * n], results[2 * n + 1]
        same = a.observations[-1].text == b.observations[-1].text and a.fingerprints[-1] == b.fingerprints[-1]
        alike[pair].append(same)
    return [pair for pair, same in alike.items() if len(same) >= PAIRS and all(same)]


def _exchanged(
    name: str, other: str, jobs: Sequence, executed: Sequence[Execution]
) -> list[tuple[Task, tuple[Call, ...], Call]]:
    """Returns up to PAIRS successful calls of a tool, with what went before and the other tool's call."""
    found = {}
    for (task, calls), execution in zip(jobs, executed):
        for n, (call, said) in enumerate(zip(calls, execution.observations)):
            key = json.dumps(dict(call.arguments), sort_keys=True)
            if call.name == name and succeeded(said) and key not in found and len(found) < PAIRS:
                found[key] = (task, calls[: n + 1], Call(other, call.arguments))
    return list(found.values())


def _worlds(config: ConfigDict, split: str) -> int | str:
    """Returns the number of worlds of a split, or why it has none."""
    try:
        return len(build.family(config).scenarios(split, config.environment.to_dict()))
    except ValueError as error:
        return str(error)


def _prompt(config: ConfigDict, tools: Any, task: Task) -> tuple[str, int, str]:
    """Returns a task's prompt, its number of tokens, and the folder whose tokenizer counted them."""
    folder = config.model if Path(config.model, "tokenizer.json").exists() else "models/tiny_qwen3"
    tokenizer = load_tokenizer(folder)
    query = task.turns[0].query if task.turns else "..."
    ids = np.asarray(Chat(tokenizer).prompt(tools(task), query, task.system, task.examples))
    return tokenizer.decode(ids.tolist()), len(ids), folder
