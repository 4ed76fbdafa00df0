"""The explorer that needs no LLM: it reflects, acts, abstracts and judges by rules."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coevolve_jax.explorers.scripted.arguments import (
    MAX_STRING,
    Bank,
    Param,
    draw,
    harvest_state,
    parse,
    succeeded,
    tokens,
)
from coevolve_jax.synthesis import reflect as reflection
from coevolve_jax.synthesis.abstract import Proposal
from coevolve_jax.synthesis.reflect import signature
from coevolve_jax.types import Call, Context, Observation, Signal, Task, Trajectory, Triplet

SIZE_SHARES = {2: 0.19, 3: 0.24, 4: 0.3, 5: 0.4, 6: 0.14}  # of goals by wanted steps; some turn out shorter
OPTIONAL = 0.25  # probability of giving an optional parameter
REPAIR = 0.75  # probability of acting on an error message that points to another tool
LOOK = 0.2  # probability of looking around, with a tool that needs no argument, after another error
MAX_WORDS = 14  # of the tool's documentation in a query


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool as the scripted explorer sees it. words: of its name."""

    name: str
    params: tuple[Param, ...]
    words: frozenset[str]

    @property
    def required(self) -> frozenset[str]:
        return frozenset(p.name for p in self.params if p.required)


class ScriptedExplorer:
    """Implements Reflector, Actor, Abstractor and Judge.

    tools: gives the function schemas that the environment offers in a task, e.g.
    `coevolve_jax.envs.bfcl.tools`. All randomness comes from the generators
    passed in; what is kept here only saves time.
    """

    name = "scripted"

    def __init__(self, tools: Callable[[Task], list[dict]]):
        self._offer = tools
        # By identity of the scenario, which is kept, so that it remains its own.
        self._offers: dict[int, tuple[Any, list[dict], dict[str, Tool]]] = {}
        self._banks: dict[str, tuple[Any, Bank]] = {}

    # Reflector

    def reflect(
        self, signal: Signal, task: Task, trajectory: Trajectory, siblings: Sequence[Trajectory]
    ) -> Context:
        successes, failures = reflection.split(trajectory, siblings)
        at, good, bad = reflection.divergence(successes, failures)
        failed = [s for s in trajectory.steps if s.error]
        cause = trajectory.outcome.reason
        if failed:
            cause = f"{failed[0].text[:80]} -> {failed[0].observation[:120]}"
        pattern = ""
        if signal.kind == "boundary":
            pattern = (
                f"{len(successes)} of {len(successes) + len(failures)} succeed; "
                f"they part at call {at + 1}: "
                f"{good.name if good else 'end'} against {bad.name if bad else 'end'}"
            )
        elif signal.kind == "forgetting":
            pattern = "solved before, not any more"
        elif signal.kind == "rare":
            pattern = f"{signal.pattern} is hardly ever called"
        parts = [signal.kind, str(signal.step), task.id, str(signal.rollout_index)]
        parts += [signal.pattern] if signal.pattern else []
        return Context(
            id="/".join(parts),
            signal=signal.kind,
            task=task,
            summary=(
                f"Called {', '.join(trajectory.actions) or 'nothing'}; reward {trajectory.outcome.reward:g}."
            ),
            failure_cause=cause,
            instability_pattern=pattern,
            focus_pattern=reflection.focus(signal, task, trajectory, siblings),
            avoid=reflection.mistakes(trajectory),
        )

    # Actor

    def tools(self, task: Task) -> list[dict]:
        key = id(task.scenario)
        if key not in self._offers:
            tools = self._offer(task)
            self._offers[key] = (task.scenario, tools, toolbox(tools))
        return self._offers[key][1]

    def act(
        self,
        context: Context,
        tools: Sequence[dict],
        history: Sequence[Triplet],
        round: int,
        rng: np.random.Generator,
    ) -> Call | None:
        box = self._toolbox(context.task, tools)
        bank = self._bank(context.task).extended(history)
        again = retry(history, box, bank, rng)
        if again is not None and rng.random() < REPAIR:
            return again
        tried = {signature(t.call) for t in history}
        for _ in range(8):
            call = self._next(context, box, bank, history, round, rng)
            line = signature(call)
            if line not in tried and not any(a.startswith(line) for a in context.avoid):
                return call
        return None

    def _next(
        self,
        context: Context,
        box: dict[str, Tool],
        bank: Bank,
        history: Sequence[Triplet],
        round: int,
        rng: np.random.Generator,
    ) -> Call:
        if history and not succeeded(history[-1].observation):
            helpers = remedies(history[-1], box)
            if rng.random() < (REPAIR if helpers else LOOK):
                helpers = helpers or [t for t in box.values() if not t.required] or list(box.values())
                return fill(helpers[rng.integers(len(helpers))], bank, rng)
        if context.signal == "boundary":
            step = upcoming(context.task.calls, history)
            if step is not None and step.name in box and rng.random() > 0.15:
                # The first round stays closest to the task: later ones are harder variants.
                changed = rng.random() < 0.25 + 0.2 * round
                return vary(step, box[step.name], bank, rng) if changed else step
        names = list(box)
        weights = self._preferences(context, box, history, round)
        return fill(box[names[rng.choice(len(names), p=weights / weights.sum())]], bank, rng)

    def _preferences(
        self, context: Context, box: dict[str, Tool], history: Sequence[Triplet], round: int
    ) -> np.ndarray:
        """Weight of each tool. Unguided: the untried ones. Guided: the focus and its neighbours."""
        tried = {t.call.name for t in history}
        fresh = np.array([0.3 if n in tried else 1.0 for n in box])
        focus = [box[n] for n in context.focus_pattern if n in box]
        if not focus:
            return fresh
        on = np.array([float(n in context.focus_pattern) for n in box])
        next_to = np.array([float(any(related(t, f) for f in focus)) for t in box.values()]) * (1 - on)
        rarest = np.array([float(n == context.focus_pattern[0]) for n in box])
        share = {"forgetting": 0.2 + 0.2 * round, "rare": 0.5, "boundary": 0.3}[context.signal]
        spread = 0.05 * fresh / fresh.sum()
        if context.signal == "rare":
            on = on + 2 * rarest
        return (1 - share) * on / on.sum() + share * next_to * fresh / max(next_to.sum(), 1) + spread

    def _toolbox(self, task: Task, tools: Sequence[dict]) -> dict[str, Tool]:
        _, offered, box = self._offers.get(id(task.scenario), (None, None, None))
        return box if offered is tools else toolbox(tools)

    def _bank(self, task: Task) -> Bank:
        scenario, bank = self._banks.get(task.id, (None, None))
        if scenario is not task.scenario:
            bank = Bank(harvest_state(task.scenario.get("initial_state", task.scenario)))
            self._banks[task.id] = (task.scenario, bank)
        return bank

    # Abstractor

    def propose_goals(
        self,
        context: Context,
        triplets: Sequence[Triplet],
        count: int,
        sizes: tuple[int, int],
        rng: np.random.Generator,
    ) -> list[tuple[int, ...]]:
        rounds = {r: candidates([t for t in triplets if t.round == r]) for r in {t.round for t in triplets}}
        usable = [rounds[r] for r in sorted(rounds) if len(rounds[r]) >= sizes[0]]
        goals = []
        for _ in range(count if usable else 0):
            steps = usable[rng.integers(len(usable))]
            allowed = [n for n in range(sizes[0], min(sizes[1], len(steps)) + 1)]
            shares = np.array([SIZE_SHARES.get(n, 0.01) for n in allowed])
            size = allowed[rng.choice(len(allowed), p=shares / shares.sum())]
            weights = np.array([4.0 if t.call.name in context.focus_pattern else 1.0 for t in steps])
            picked = rng.choice(len(steps), size=size, replace=False, p=weights / weights.sum())
            goals.append(tuple(sorted(steps[i].index for i in picked)))
        return list(dict.fromkeys(goals))

    def word(self, calls: Sequence[Call], tools: Sequence[dict], rng: np.random.Generator) -> str:
        return word(calls, tools, rng)

    def describe(self, calls: Sequence[Call], asked: Sequence[int]) -> str:
        doing = [c.name for i, c in enumerate(calls) if i not in asked]
        telling = [calls[i].name for i in asked]
        parts = [f"Reach the state after {', '.join(doing)}"] * bool(doing)
        parts += [f"{'report' if doing else 'Report'} what {', '.join(telling)} returns"] * bool(telling)
        return " and ".join(parts)

    # Judge

    def judge(self, proposal: Proposal, turn: int, observations: Sequence[Observation]) -> str | None:
        start = sum(len(t.calls) for t in proposal.turns[:turn])
        recorded = proposal.observations[start : start + len(observations)]
        same = all(a.text == b.text for a, b in zip(observations, recorded, strict=True))
        return None if same else "result_differs"


def toolbox(tools: Sequence[dict]) -> dict[str, Tool]:
    """Function schemas by name, with their parameters read."""
    box = {}
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters", {})
        required = schema.get("required", ())
        params = tuple(parse(k, v, k in required) for k, v in schema.get("properties", {}).items())
        box[function["name"]] = Tool(function["name"], params, tokens(function["name"]))
    return {
        name: dataclasses.replace(tool, params=tuple(share(p, box) for p in tool.params))
        for name, tool in box.items()
    }


def share(param: Param, box: dict[str, Tool]) -> Param:
    """The parameter with what the documentation of other tools says about one of the same name and type."""
    same = [p for t in box.values() for p in t.params if (p.name, p.type) == (param.name, param.type)]
    choices = param.choices or next((p.choices for p in same if p.choices), ())
    return dataclasses.replace(param, choices=choices, hints=frozenset().union(*(p.hints for p in same)))


def related(a: Tool, b: Tool) -> bool:
    """Neighbouring operations: they share a required parameter or words of their names, or the name of `a`
    speaks of what the parameters of `b` are (get_zipcode_based_on_city, estimate_distance)."""
    needs = frozenset().union(*(p.hints for p in b.params if p.required))
    return a.name != b.name and bool(a.required & b.required or a.words & (b.words | needs))


def fill(tool: Tool, bank: Bank, rng: np.random.Generator) -> Call:
    """A call with all required and some optional arguments; one left at its default is not written out."""
    given = [p for p in tool.params if p.required or rng.random() < OPTIONAL]
    arguments = {p.name: draw(p, bank, rng) for p in given}
    return Call(
        tool.name,
        {
            p.name: arguments[p.name]
            for p in given
            if p.required or arguments[p.name] not in (p.default, None)
        },
    )


def vary(call: Call, tool: Tool, bank: Bank, rng: np.random.Generator) -> Call:
    """The call with one argument drawn anew."""
    params = [p for p in tool.params if p.name in call.arguments]
    if not params:
        return call
    param = params[rng.integers(len(params))]
    return Call(call.name, {**call.arguments, param.name: draw(param, bank, rng)})


def upcoming(reference: Sequence[Call], history: Sequence[Triplet]) -> Call | None:
    """The reference call that follows those already made (by tool name, in order) in this round."""
    position = 0
    for triplet in history:
        if position < len(reference) and triplet.call.name == reference[position].name:
            position += 1
    return reference[position] if position < len(reference) else None


def remedies(failure: Triplet, box: dict[str, Tool]) -> list[Tool]:
    """Tools whose name the error message speaks of ("doors must be locked" -> lockDoors), best first."""
    said = tokens(failure.observation.text)
    others = [t for t in box.values() if t.name != failure.call.name]
    fits = [t for t in others if 2 * len(t.words & said) >= len(t.words)]
    # Of several logins, the one that is named like the tool that failed.
    scores = [2 * len(t.words & said) + len(t.words & box[failure.call.name].words) for t in fits]
    return [t for t, score in zip(fits, scores) if score == max(scores)]


def retry(
    history: Sequence[Triplet], box: dict[str, Tool], bank: Bank, rng: np.random.Generator
) -> Call | None:
    """The latest failed call for which the last step, a success, was a remedy.

    It is made as it was, unless its error spoke of one of its arguments: then with others.
    """
    if not history or not succeeded(history[-1].observation):
        return None
    for step in reversed(history[:-1]):
        if not succeeded(step.observation) and history[-1].call.name in {t.name for t in remedies(step, box)}:
            blamed = any(str(v) in step.observation.text for v in step.call.arguments.values())
            return fill(box[step.call.name], bank, rng) if blamed else step.call
    return None


def candidates(steps: Sequence[Triplet]) -> list[Triplet]:
    """Steps of one round that can be part of a goal: successful, not repeated, with short arguments."""
    seen, good = set(), []
    for step in steps:
        values = [v if isinstance(v, str) else json.dumps(v) for v in step.call.arguments.values()]
        line = signature(step.call)
        if succeeded(step.observation) and line not in seen and all(len(v) <= MAX_STRING for v in values):
            seen.add(line)
            good.append(step)
    return good


# Wording


def word(calls: Sequence[Call], tools: Sequence[dict], rng: np.random.Generator) -> str:
    """A user's message from the tools' documentation and the arguments, in one of a few styles."""
    docs = {t["function"]["name"]: t["function"].get("description", "") for t in tools}
    style = rng.integers(2)
    clauses = [instruction(docs[c.name]) + arguments_text(c, style) for c in calls]
    join = rng.integers(3)
    if len(clauses) == 1:
        text = clauses[0]
    elif join == 0:
        text = ", then ".join([f"first {clauses[0]}", *clauses[1:]])
    elif join == 1:
        text = ". After that ".join(clauses)
    else:
        text = "; ".join(clauses)
    return text[0].upper() + text[1:] + "."


def instruction(doc: str) -> str:
    """The first sentence of a tool's documentation as a short imperative without a period."""
    sentence = re.split(r"\.(?:\s|$)", doc.rsplit("Tool description:", 1)[-1].strip(), maxsplit=1)[0]
    words = sentence.split()
    if len(words) > MAX_WORDS:
        clause = re.match(r"^(.{20,}?)(?:,| that | which | with | using | given )", sentence)
        words = (clause[1] if clause else sentence).split()[:MAX_WORDS]
    verb = words[0].lower()
    # Some documentation speaks of the tool in the third person ("Starts the engine").
    if verb.endswith("s") and not verb.endswith("ss"):
        verb = verb[:-2] if verb.endswith("sses") else verb[:-1]
    return " ".join([verb, *words[1:]])


def arguments_text(call: Call, style: int) -> str:
    items = [(k, value_text(v)) for k, v in call.arguments.items()]
    if not items:
        return ""
    if style == 0:
        return " (" + ", ".join(f"{k} {v}" for k, v in items) + ")"
    pairs = [f"{k} {v}" for k, v in items]
    return " with " + " and ".join([", ".join(pairs[:-1])] * (len(pairs) > 1) + pairs[-1:])


def value_text(value: Any) -> str:
    """A value as a user writes it: 'text', 12.5, true, ["a", "b"]."""
    if isinstance(value, str):
        return f"'{value}'" if "'" not in value else f'"{value}"'
    return json.dumps(value, ensure_ascii=False)
