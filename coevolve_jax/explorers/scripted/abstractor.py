"""The scripted explorer's goals and words: random successful steps, worded from the tools' documentation."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coevolve_jax.explorers.base import Exploration, Goal, Limits, Proposal, Shorten
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.plans import fulfilled
from coevolve_jax.explorers.scripted.arguments import MAX_STRING, succeeded
from coevolve_jax.explorers.scripted.tools import allows
from coevolve_jax.types import Call, Triplet, Turn

SIZE_SHARES = {2: 0.19, 3: 0.24, 4: 0.3, 5: 0.4, 6: 0.14}  # shares of goals by steps, before shortening
TURN_SHARES = (0.6, 0.3, 0.1)  # shares of tasks with 1, 2, 3 user turns, if the calls suffice
TURN_DECAY = 0.5  # each further turn is so much rarer than the one before
OBJECTS = "a an the its it their them his her your whether".split()  # words that follow a verb, and no noun
NO_VERB = ("ss", "us", "is", "as", "os", "'s", "series", "species")  # how other words end: "this", "status"
BARE = ("sses", "shes", "ches", "xes", "oes", "ocuses")  # the verb has no "e" of its own: "searches"
SILENT = "caches axes shoes tiptoes canoes".split()  # it has one all the same
MAX_WORDS = 14  # words of a tool's documentation in a query

Phrase = Callable[
    [Sequence[Triplet], Sequence[Triplet], Sequence[dict], np.random.Generator, Callable[[Call], str]], str
]


class Abstractor:
    def __init__(
        self,
        action_pattern: Callable[[Call], str],
        wording: Callable[[Call], str],
        phrase: Phrase | None = None,
    ):
        """phrase: words a turn in place of `word`."""
        self._action_pattern, self._wording, self._phrase = action_pattern, wording, phrase

    def abstract(
        self, explorations: Sequence[Exploration], limits: Limits, shorten: Shorten
    ) -> list[list[Proposal]]:
        goals = [
            propose_goals(exploration, limits.of(exploration.context), self._action_pattern, self._wording)
            for exploration in explorations
        ]
        solutions = iter(shorten([goal for own in goals for goal in own]))
        return [
            self._word_all(
                exploration,
                list(itertools.islice(solutions, len(own))),
                limits.of(exploration.context),
            )
            for exploration, own in zip(explorations, goals)
        ]

    def _word_all(
        self, exploration: Exploration, solutions: Sequence[Goal | None], limits: Limits
    ) -> list[Proposal]:
        """Makes a proposal from each different solution within the limits.

        None has a step with a value that its tool's schema excludes, though the tool took it.
        """
        sound = soundness(exploration.tools)
        proposals: dict[str, Proposal] = {}
        for solution in solutions:
            if solution is None or not all(sound(t.call) for t in solution.steps):
                continue
            if limits.min_calls <= len(solution.steps) <= limits.max_calls:
                key = " ".join(signature(t.call) for t in solution.steps)
                if key not in proposals:
                    proposals[key] = self._propose(exploration, solution, limits)
        return list(proposals.values())

    def _propose(self, exploration: Exploration, solution: Goal, limits: Limits) -> Proposal:
        """Splits a solution into user turns and words them."""
        rng, calls = exploration.rng, tuple(t.call for t in solution.steps)
        least = min(limits.min_turns, len(calls))
        shares = turn_shares(min(limits.max_turns, len(calls)))[least - 1 :]
        count = least + int(rng.choice(len(shares), p=shares / shares.sum()))
        cuts = sorted(1 + int(i) for i in rng.choice(len(calls) - 1, size=count - 1, replace=False))
        turns = tuple(
            Turn(self._word(exploration, solution.steps, a, b), calls[a:b])
            for a, b in itertools.pairwise([0, *cuts, len(calls)])
        )
        return Proposal(
            exploration.context,
            describe([self._action_pattern(call) for call in calls], solution.asked),
            turns,
            tuple(t.index for t in solution.steps),
            tuple(t.observation for t in solution.steps),
            solution.asked,
        )

    def _word(self, exploration: Exploration, steps: Sequence[Triplet], start: int, end: int) -> str:
        tools, rng = exploration.tools, exploration.rng
        if self._phrase is not None:
            return self._phrase(steps[:start], steps[start:end], tools, rng, self._wording)
        return word([step.call for step in steps[start:end]], tools, rng, self._wording)


def turn_shares(most: int) -> np.ndarray:
    """Returns the shares of tasks with 1 to `most` user turns [most], up to a factor."""
    longer = TURN_SHARES[-1] * TURN_DECAY ** np.arange(1, most - len(TURN_SHARES) + 1)
    return np.array([*TURN_SHARES, *longer])[:most]


def propose_goals(
    exploration: Exploration,
    limits: Limits,
    action_pattern: Callable[[Call], str],
    wording: Callable[[Call], str] = lambda call: "",
) -> list[Goal]:
    """Draws up to limits.proposals different goals, each from the steps of one round.

    The first is the context's plan, where a round followed all of it. If a task needs more calls than the
    plan has, the next good steps of that round follow. The others are drawn. A step in the focus is four
    times as likely as another. If the draw misses an action in the context's `must`, a step with that action
    replaces a random one that `must` does not need. There is no goal where `must` has more actions than a
    task may have calls.

    wording: the family's words for a call.
    """
    triplets, rng = exploration.triplets, exploration.rng
    tools = exploration.tools
    rounds = {
        r: candidates([t for t in triplets if t.round == r], wording, tools)
        for r in {t.round for t in triplets}
    }
    usable = [rounds[r] for r in sorted(rounds) if len(rounds[r]) >= limits.min_calls]
    must = set(exploration.context.must)
    least = max(limits.min_calls, len(must))
    usable = [steps for steps in usable if must <= {action_pattern(t.call) for t in steps}]
    usable = usable if least <= limits.max_calls else []
    plan = exploration.context.plan
    goals: list[tuple[int, ...]] = []
    for steps in usable if plan else ():
        if not goals and (wanted := fulfilled(plan, steps, action_pattern)):
            later, short = [t.index for t in steps if t.index > wanted[-1]], limits.min_calls - len(wanted)
            goals = [(*wanted, *later[: max(0, short)])]
    for _ in range(limits.proposals - len(goals) if usable else 0):
        steps = usable[rng.integers(len(usable))]
        allowed = list(range(least, min(limits.max_calls, len(steps)) + 1))
        shares = np.array([SIZE_SHARES.get(n, 0.01) for n in allowed])
        size = allowed[rng.choice(len(allowed), p=shares / shares.sum())]
        focus = exploration.context.focus_pattern
        weights = np.array([4.0 if action_pattern(t.call) in focus else 1.0 for t in steps])
        picked = rng.choice(len(steps), size=size, replace=False, p=weights / weights.sum()).tolist()
        for action in sorted(must - {action_pattern(steps[i].call) for i in picked}):
            able = [i for i, t in enumerate(steps) if action_pattern(t.call) == action]
            held = [action_pattern(steps[i].call) for i in picked]
            free = [n for n, own in enumerate(held) if own not in must or held.count(own) > 1]
            picked[free[rng.integers(len(free))]] = able[rng.integers(len(able))]
        goals.append(tuple(sorted(steps[i].index for i in set(picked))))
    return [Goal(exploration, wanted) for wanted in dict.fromkeys(goals)]


def candidates(
    steps: Sequence[Triplet], wording: Callable[[Call], str], tools: Sequence[dict] = ()
) -> list[Triplet]:
    """Steps of one round that can be part of a goal: successful, and none a repetition.

    None has a value that its tool's schema excludes, though the tool took it.

    Each argument is at most MAX_STRING characters long, or the family's words for the call are shorter than
    it. A user would not type more.
    """
    seen, good, sound = set(), [], soundness(tools)
    for step in steps:
        values = [v if isinstance(v, str) else json.dumps(v) for v in step.call.arguments.values()]
        line = signature(step.call)
        said = len(wording(step.call))
        short = all(len(v) <= MAX_STRING or 0 < said < len(v) for v in values)
        if short and sound(step.call) and succeeded(step.observation) and line not in seen:
            seen.add(line)
            good.append(step)
    return good


def soundness(tools: Sequence[dict]) -> Callable[[Call], bool]:
    """Returns whether a call keeps the lists and ranges of values in its tool's schema."""
    schemas = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
    return lambda call: allows(schemas.get(call.name), dict(call.arguments))


def describe(actions: Sequence[str], asked: Sequence[int]) -> str:
    """Describes the goal in one line. asked: positions of the actions whose answers the user wants."""
    doing = [a for i, a in enumerate(actions) if i not in asked]
    telling = [actions[i] for i in asked]
    parts = [f"Reach the state after {', '.join(doing)}"] * bool(doing)
    parts += [f"{'report' if doing else 'Report'} what {', '.join(telling)} returns"] * bool(telling)
    return " and ".join(parts)


def word(
    calls: Sequence[Call], tools: Sequence[dict], rng: np.random.Generator, wording: Callable[[Call], str]
) -> str:
    """Words calls as a user's message, in one of a few styles.

    The family's words for a call come first. Where it has none, the tool's documentation and the arguments
    give them.
    """
    docs = {t["function"]["name"]: t["function"].get("description") or "" for t in tools}
    style = int(rng.integers(2))
    clauses = [wording(c) or asked(c.name, docs[c.name]) + arguments_text(c, style) for c in calls]
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


def asked(name: str, doc: str) -> str:
    """Words a user's request for a tool: by its documentation or, without any, by the words of its name."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_\W]+", " ", name).strip().lower()
    return instruction(doc) or spaced or name


def instruction(doc: str) -> str:
    """The first sentence of a tool's documentation as a short imperative without a period; "" for none."""
    text = doc.rsplit("Tool description:", 1)[-1].strip()
    sentence = re.split(r"(?<!\.\w)\.(?:\s|$)", text, maxsplit=1)[0]  # "i.e." and "e.g." end none
    words = sentence.split()
    if not words:
        return ""
    if len(words) > MAX_WORDS:
        clause = re.match(r"^(.{20,}?)(?:,| that | which | with | using | given )", sentence)
        words = (clause[1] if clause else sentence).split()[:MAX_WORDS]
    first = words[0].lower()
    verb = imperative(first)
    if verb != first:  # it speaks of the tool in the third person, maybe also later ("and returns its id")
        for n in range(2, len(words) - 1):
            if words[n - 1] in ("and", "or", "then") and words[n + 1] in OBJECTS:
                words[n] = imperative(words[n])
    return " ".join([verb, *words[1:]])


def imperative(verb: str) -> str:
    """Returns a verb of the third person as a request has it: "goes" becomes "go". Other words stay."""
    if not verb.endswith("s") or verb.endswith(NO_VERB):
        return verb
    if verb.endswith("ies") and len(verb) > 4:  # not "ties"
        return f"{verb[:-3]}y"
    bare = verb.endswith(BARE) and verb not in SILENT
    return verb[:-2] if bare else verb[:-1]


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
