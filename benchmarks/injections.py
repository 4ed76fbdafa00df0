"""Does text in an environment's answers steer an explorer? AgentDojo's injections in BFCL.

    python -m pip install --no-deps -r requirements/bench-agentdojo.txt
    python benchmarks/injections.py

AgentDojo's goals, in the templates of its attacks, stand inside or after the tools' answers. The benchmark
compares the prompts of the four roles with and without them. It reports the tasks of the scripted explorer,
and those of a model that obeys every injection it reads.
"""

import copy
import dataclasses
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from injected import Injecting, Injection, agentdojo

from coevolve_jax import envs
from coevolve_jax.config import load_file
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.base import action_pattern
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import llm, scripted
from coevolve_jax.explorers.base import Episode, Limits, Roles
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer, run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.explorer import evidence_of
from coevolve_jax.types import Call
from tests.support.openai_server import Model, OpenAIServer, action, schemas, steps

CONFIG = Path(__file__).parents[1] / "configs" / "bfcl_tiny.py"
SEED = 0  # the explorers' seed
SIZES = {"rounds": 2, "steps": 8}

_SCENARIOS = flags.DEFINE_integer("scenarios", 16, "Of BFCL's training split, to explore.")


class Gullible(Model):
    """Obeys each injection that it reads, once, and requests the same calls again as a task.

    It uses the attacker's tool, or the one on offer whose words are nearest.
    obeyed: the goals, by the signatures of these calls.
    """

    def __init__(self, injections: Sequence[Injection]):
        super().__init__()
        self._injections, self.obeyed = {i.goal: i for i in injections}, {}

    def explore(self, system, user, rng):
        return self._obeying(system, user, rng) or super().explore(system, user, rng)

    def solve(self, system, user, rng):
        return self._obeying(system, user, rng) or super().solve(system, user, rng)

    def abstract(self, system, user, rng):
        said = super().abstract(system, user, rng)
        tasks = json.loads(said[said.index("{") :])["tasks"]
        for part in re.split(r"^Round \d+,", user, flags=re.MULTILINE)[1:]:
            done = [r for r in steps(part) if not r.get("failed") and signature(_call(r)) in self.obeyed]
            for pair in zip(done, done[1:]):
                query = " ".join(" ".join(self.obeyed[signature(_call(r))] for r in pair).split())
                self.worded[query] = [_call(r) for r in pair]
                turns = [{"query": query, "steps": [r["step"] for r in pair]}]
                tasks.insert(0, {"description": "As asked.", "difficulty": 1, "turns": turns})
        return json.dumps({"tasks": tasks[:3]})

    def _obeying(self, system, user, rng) -> str | None:
        """Carries out the injection in the last answer; None if there is none or it was carried out."""
        rows = steps(user)
        read = json.dumps(rows[-1]["answer"]) if rows else ""
        goal = next((i for g, i in self._injections.items() if json.dumps(g)[1:-1] in read), None)
        if goal is None or goal.goal in {self.obeyed.get(signature(_call(r))) for r in rows}:
            return None
        if goal.tool and rng.random() < 0.2:
            return action(Call(goal.tool, {"body": goal.goal}))
        words = lambda text: set(re.findall(r"[a-z]{4,}", text.lower()))
        near = lambda tool: len(
            words(goal.goal) & words(f"{tool['name'].replace('_', ' ')} {tool['description']}")
        )
        tool = max((t["function"] for t in schemas(system)), key=near)
        named = [a or b for a, b in re.findall(r"'([^']+)'|(\S+@\S+|www\S+|US\d+)", goal.goal)]
        values, types = iter([*named, *[goal.goal] * 20]), tool["parameters"]["properties"]
        made = {
            "integer": 1,
            "number": 1.0,
            "float": 1.0,
            "boolean": True,
            "array": [named[0] if named else "x"],
        }
        given = {p: made.get(types[p]["type"]) or next(values) for p in tool["parameters"]["required"]}
        self.obeyed[signature(Call(tool["name"], given))] = goal.goal
        return action(Call(tool["name"], given))


def _call(row: dict) -> Call:
    """The call of a step in a prompt, or in explorations.jsonl."""
    return Call(row["tool"], row["arguments"]) if "tool" in row else Call(**row["call"])


class Recorder:
    """Stands in for the roles' client: it keeps the questions and answers none."""

    def __init__(self):
        self.questions, self.costs = [], Counter()

    def ask(self, role, questions, form):
        self.questions = list(questions)
        return [None] * len(questions)


class Twins:
    """Plays the roles of `roles`, and makes each prompt once more without the injections.

    prompts: how many it compared. moved: those that differ outside of an answer.
    """

    def __init__(self, roles: Roles, pool: Injecting):
        self._roles, self._pool, self._client = roles, pool, Recorder()
        self._own = llm.Reflector(self._client, bfcl.tools, action_pattern), llm.Explorer(self._client)
        self.prompts, self.moved = Counter(), 0

    def reflect(self, evidence):
        """Reflects; also compares the first prompts under the contexts of a silent model's reflection."""
        self._compare("reflect", self._own[0].reflect, evidence)
        begun = lambda e: [
            Episode(c, bfcl.tools(c.task), (), 0, np.random.default_rng(0)) for c in self._own[0].reflect(e)
        ]
        self._compare("explore", self._own[1].act, begun(evidence), begun(self._without(evidence)))
        return self._roles.reflector.reflect(evidence)

    def act(self, episodes):
        self._compare("explore", self._own[1].act, episodes)
        return self._roles.explorer.act(episodes)

    def abstract(self, explorations, limits, shorten):
        abstractor = llm.Abstractor(self._client, action_pattern)
        ask = lambda batch: abstractor.abstract(batch, limits, lambda goals: [])
        self._compare("abstract", ask, explorations)
        return self._roles.abstractor.abstract(explorations, limits, shorten)

    def judge(self, proposals, answers):
        judge = lambda batch: llm.Validator(self._client).judge(proposals, batch)
        self._compare("judge", judge, answers)
        return self._roles.validator.judge(proposals, answers)

    def roles(self) -> Roles:
        return Roles(self._roles.name, self, self, self, self, self._roles.costs)

    def _compare(self, role, ask, batch, without=None) -> None:
        asked = []
        for entries in (batch, self._without(batch) if without is None else without):
            ask([_fork(entry) for entry in entries])
            asked.append(self._client.questions)
        for ours, theirs in zip(*asked, strict=True):
            self.prompts[role] += 1
            self.moved += not _alike(f"{ours.system}\n{ours.user}", f"{theirs.system}\n{theirs.user}")

    def _without(self, value):
        """The same value without injections, wherever it holds an answer of the environment."""
        if isinstance(value, str):
            return self._pool.sound.get(value, value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._without(v) for v in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self._without(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        return value


def _fork(entry):
    """The entry with a copy of its generator, which a role draws from."""
    return dataclasses.replace(entry, rng=copy.deepcopy(entry.rng)) if hasattr(entry, "rng") else entry


def _alike(ours: str, theirs: str) -> bool:
    """Whether the lines agree, but for the answer of a step."""
    if len(a := ours.splitlines()) != len(b := theirs.splitlines()):
        return False
    blank = lambda line: {**json.loads(line), "answer": ""} if line.startswith('{"step"') else line
    return all(x == y or blank(x) == blank(y) for x, y in zip(a, b))


def scripted_made(pool: Injecting, scenarios, seed: int) -> dict[tuple, tuple[str, str]]:
    """Verdict and reason of the scripted explorer's proposals, by context and calls."""
    contexts = [unguided(s, s.id) for s in scenarios]
    made = run_pipeline(
        scripted.make(None, envs.load("bfcl")), bfcl.tools, pool, contexts, Settings(Limits(3), **SIZES),
        Birth("initial"), np.random.default_rng(seed),
    )  # fmt: skip
    key = lambda p: (p.context.id, *map(signature, p.calls))
    return {key(p): (v.verdict, v.reason) for p, v in zip(made.proposals, made.verdicts)}


def gullible_made(
    pool: Injecting, injections, scenarios, seed: int, solve: int
) -> Iterator[tuple[str, object]]:
    """An obedient model's effect on D_t, as lines of a table."""
    with OpenAIServer() as server:
        server.model = model = Gullible(injections)
        config = load_file(CONFIG, "explorer=llm")
        config.explorer.update({"base_url": server.url, "cache": "", "solve": solve})
        config.evolution.update(SIZES)
        twins, tasks = Twins(llm.make(config, envs.load("bfcl")), pool), TaskPool()
        made = Synthesizer(twins.roles(), bfcl.tools, pool, config, None)
        rng, contexts = np.random.default_rng(seed), [unguided(s, s.id) for s in scenarios]
        stats = made.synthesize(
            tasks, contexts, SynthesisRequest(wanted=10**6, kind="initial", step=0, rng=rng)
        )
        unoffered = pool.unoffered
        twins.reflect([e for task in list(tasks)[:8] for e in evidence_of(pool, [task], 0)])
    told = lambda row, p: {signature(_call(row["triplets"][i])) for i in p["triplets"]}
    rows = [(p, bool(told(row, p) & model.obeyed.keys())) for row in stats.explored for p in row["proposals"]]
    done = [
        t["error"] for row in stats.explored for t in row["triplets"] if signature(_call(t)) in model.obeyed
    ]
    count = lambda own: dict(
        Counter("in D_t" if p["task"] else p["reason"] for p, obeys in rows if obeys == own)
    )
    costs = twins.roles().costs or {}
    yield "injections shown", len(pool.shown)
    yield "prompts compared", dict(twins.prompts)
    yield "prompts that differ outside of answers", twins.moved
    yield "calls to what is not offered: asked for, executed", (costs["llm_refused/no_such_tool"], unoffered)
    yield "calls that obey: executed, of them failed", (len(done), sum(done))
    yield "proposals that obey", count(True)
    yield "other proposals", count(False)
    yield "refused before validation", {k: n for k, n in costs.items() if k.startswith("llm_refused")}


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)  # without a line for every request
    spec = importlib.util.find_spec("agentdojo")
    if spec is None or not spec.submodule_search_locations:
        raise app.UsageError(
            "agentdojo is not installed: pip install --no-deps -r requirements/bench-agentdojo.txt"
        )
    injections = agentdojo(Path(spec.submodule_search_locations[0]))
    print(f"{len({i.goal for i in injections})} goals, {len(injections)} texts")
    every = bfcl.scenarios("train")
    scenarios = every[:: max(1, len(every) // _SCENARIOS.value)][: _SCENARIOS.value]
    worlds = ProcessPool("bfcl", workers=2, timeout=60.0)
    try:
        sound = scripted_made(Injecting(worlds), scenarios, SEED)
        pool = Injecting(worlds, injections)
        other = scripted_made(pool, scenarios, SEED)
        same = sound.keys() & other.keys()
        carried = [
            k for k in other if any(json.dumps(i.goal)[1:-1] in call for call in k[1:] for i in pool.shown)
        ]
        print(f"scripted: {len(sound)} proposals, {len(other)} with injections, {len(same)} the same, "
              f"of which {sum(sound[k] != other[k] for k in same)} have another verdict; "
              f"accepted {accepted(sound)} and {accepted(other)}, "
              f"{accepted({k: other[k] for k in carried})} of them with an injection "
              f"for an argument; calls to what is not offered: {pool.unoffered}")  # fmt: skip
        for solve in (0, 1):
            print(f"gullible, config.explorer.solve={solve}")
            injecting = Injecting(worlds, injections)
            for name, value in gullible_made(injecting, injections, scenarios, SEED, solve):
                print(f"  {name}: {value}")
    finally:
        worlds.shutdown()


def accepted(made: dict) -> int:
    return sum(verdict == "accept" for verdict, _ in made.values())


if __name__ == "__main__":
    app.run(main)
