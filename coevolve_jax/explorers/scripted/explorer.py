"""The scripted explorer's actions: tools near the focus, with arguments that the environment has shown.

Where the environment lists calls that it would take now, the explorer chooses among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.explorers.base import Episode
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.plans import action_of, upcoming
from coevolve_jax.explorers.scripted.arguments import Bank, fill, harvest_state, succeeded, vary
from coevolve_jax.explorers.scripted.tools import Tool, related, tokens, toolbox
from coevolve_jax.types import Call, Triplet

REPAIR = 0.75  # probability of acting on an error message that points to another tool
LOOK = 0.2  # probability of looking around, with a tool that needs no argument, after another error
STRAY = 0.15  # probability of leaving the reference calls of a task with a boundary signal
KEPT = 128  # tasks whose banks are cached; D_t may grow to many more
# Weights among options. An action in focus gets FOCUS, another that this round has seen SEEN. MADE multiplies
# the weight of a call that this round has made.
FOCUS, SEEN, MADE = 4.0, 0.3, 0.1
WIDEST = 0.8  # greatest share of the focus's neighbours with a forgetting signal, which grows by the round


class Explorer:
    """Explores by rules. Its caches of tools and banks only save time and change no call."""

    SOLVES = False  # it reads no user's words

    def __init__(self, action_pattern: Callable[[Call], str]):
        self._action_pattern = action_pattern
        self._boxes: dict[tuple[str, ...], tuple[Sequence[dict], dict[str, Tool]]] = {}
        self._banks: dict[str, tuple[Mapping[str, Any], Bank]] = {}

    def act(self, episodes: Sequence[Episode]) -> list[Call | None]:
        return [self._act(episode) for episode in episodes]

    def _act(self, e: Episode) -> Call | None:
        if e.options:
            return choose(e, self._action_pattern)
        box, bank = self._box(e.tools), self._bank(e).extended(e.history)
        again = retry(e.history, box, bank, e.rng)
        if again is not None and e.rng.random() < REPAIR:
            return again
        tried = {signature(t.call) for t in e.history}
        for n in range(8):
            call = propose(e, box, bank, self._action_pattern, off_plan=n > 3)
            line = signature(call)
            if line not in tried and not any(a.startswith(line) for a in e.context.avoid):
                return call
        return None

    def _box(self, tools: Sequence[dict]) -> dict[str, Tool]:
        names = tuple(t["function"]["name"] for t in tools)
        known, box = self._boxes.get(names, (None, {}))
        if known != tools:
            box = toolbox(tools)
            self._boxes[names] = (tools, box)
        return box

    def _bank(self, e: Episode) -> Bank:
        task = e.context.task
        scenario, bank = self._banks.pop(task.id, (None, None))
        if bank is None or scenario is not task.scenario:
            state = task.scenario.get("initial_state", {"scenario": task.scenario})
            bank = Bank(harvest_state(state), known=task.scenario.get("values"))
        self._banks[task.id] = (task.scenario, bank)  # the last used comes last
        if len(self._banks) > KEPT:
            del self._banks[next(iter(self._banks))]
        return bank


def choose(e: Episode, action_pattern: Callable[[Call], str]) -> Call | None:
    """Draws one of the episode's options; None where all are to be avoided.

    The next step of the context's plan comes first, as soon as it is on offer: the call itself, or one with
    its action. With a boundary signal it mostly is the task's next reference call, or an option with the same
    action. Otherwise the weights favour actions in focus and actions that are new in this round.
    """
    options = [o for o in e.options if not any(a.startswith(signature(o)) for a in e.context.avoid)]
    if not options:
        return None
    planned = upcoming(e.context.plan, e.history, action_pattern)
    if planned is not None:
        alike = [o for o in options if action_of(o, action_pattern) == action_of(planned, action_pattern)]
        alike = [o for o in alike if o == planned] or alike
        if alike:
            return alike[e.rng.integers(len(alike))]
    if e.context.signal == "boundary":
        step = upcoming(e.context.task.calls, e.history, action_pattern)
        if step in options and e.rng.random() > STRAY:
            alike = [o for o in options if action_pattern(o) == action_pattern(step)]
            return alike[e.rng.integers(len(alike))] if changes(e) else step
    patterns, made = [action_pattern(o) for o in options], {signature(t.call) for t in e.history}
    seen, times = {action_pattern(t.call) for t in e.history}, Counter(patterns)
    weights = np.array(
        [
            (FOCUS if p in e.context.focus_pattern else SEEN if p in seen else 1.0)
            * (MADE if signature(o) in made else 1.0)
            / times[p]
            for o, p in zip(options, patterns)
        ]
    )
    return options[e.rng.choice(len(options), p=weights / weights.sum())]


def changes(e: Episode) -> bool:
    """Whether to vary a reference call. The first round stays closest to the task, later ones vary more."""
    return e.rng.random() < 0.25 + 0.2 * e.round


def propose(
    e: Episode,
    box: Mapping[str, Tool],
    bank: Bank,
    action_pattern: Callable[[Call], str],
    off_plan: bool = False,
) -> Call:
    """Makes one candidate for the next call. off_plan: the plan's next call cannot be made again."""
    if e.history and not succeeded(e.history[-1].observation):
        helpers = remedies(e.history[-1], box)
        if e.rng.random() < (REPAIR if helpers else LOOK):
            helpers = helpers or [t for t in box.values() if not t.required] or list(box.values())
            return fill(helpers[e.rng.integers(len(helpers))], bank, e.rng)
    planned = upcoming(e.context.plan, e.history, action_pattern)
    if planned is not None and not off_plan:
        if isinstance(planned, Call) and planned.name in box:
            return planned
        if isinstance(planned, str) and planned in box:
            return fill(box[planned], bank, e.rng)
    if e.context.signal == "boundary":
        step = upcoming(e.context.task.calls, e.history, action_pattern)
        if step is not None and step.name in box and e.rng.random() > STRAY:
            return vary(step, box[step.name], bank, e.rng) if changes(e) else step
    names = list(box)
    weights = preferences(e, box)
    return fill(box[names[e.rng.choice(len(names), p=weights / weights.sum())]], bank, e.rng)


def preferences(e: Episode, box: Mapping[str, Tool]) -> np.ndarray:
    """Weights of the tools [tools]: high for untried ones or, with a focus, for it and its neighbours."""
    tried = {t.call.name for t in e.history}
    fresh = np.array([0.3 if n in tried else 1.0 for n in box])
    focus = [box[n] for n in e.context.focus_pattern if n in box]
    if not focus:
        return fresh
    on = np.array([float(n in e.context.focus_pattern) for n in box])
    next_to = np.array([float(any(related(t, f) for f in focus)) for t in box.values()]) * (1 - on)
    rarest = np.array([float(n == e.context.focus_pattern[0]) for n in box])
    assert e.context.signal is not None  # without one there is no focus
    share = {"forgetting": min(0.2 + 0.2 * e.round, WIDEST), "boundary": 0.3}.get(e.context.signal, 0.5)
    spread = 0.05 * fresh / fresh.sum()
    if e.context.signal not in ("forgetting", "boundary"):
        on = on + 2 * rarest
    return (1 - share) * on / on.sum() + share * next_to * fresh / max(next_to.sum(), 1) + spread


def remedies(failure: Triplet, box: Mapping[str, Tool]) -> list[Tool]:
    """Tools that the error message names ("doors must be locked" -> lockDoors): all that fit best."""
    said = tokens(failure.observation.text)
    others = [t for t in box.values() if t.name != failure.call.name]
    fits = [t for t in others if 2 * len(t.words & said) >= len(t.words)]
    # Among several login tools, prefer the one whose name is like the failed tool's.
    scores = [2 * len(t.words & said) + len(t.words & box[failure.call.name].words) for t in fits]
    return [t for t, score in zip(fits, scores) if score == max(scores)]


def retry(
    history: Sequence[Triplet], box: Mapping[str, Tool], bank: Bank, rng: np.random.Generator
) -> Call | None:
    """Repeats the latest failed call for which the last step, a success, was a remedy. None: there is none.

    The call keeps its arguments, unless its error mentions one of them: then all are drawn again.
    """
    if not history or not succeeded(history[-1].observation):
        return None
    for step in reversed(history[:-1]):
        if not succeeded(step.observation) and history[-1].call.name in {t.name for t in remedies(step, box)}:
            blamed = any(str(v) in step.observation.text for v in step.call.arguments.values())
            return fill(box[step.call.name], bank, rng) if blamed else step.call
    return None
