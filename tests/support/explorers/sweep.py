"""sweep.py: tries the tools in focus with values that it has seen, and asks for what worked."""

from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Goal, Proposal, Roles
from coevolve_jax.explorers.evidence import focus, mistakes, signature
from coevolve_jax.explorers.plans import fulfilled, upcoming
from coevolve_jax.explorers.scripted.arguments import Bank, fill
from coevolve_jax.explorers.scripted.tools import toolbox
from coevolve_jax.types import Call, Context, Turn


class Reflector:
    def __init__(self, family):
        self.family = family

    def reflect(self, evidence):
        return [self.read(e.signal, e.trajectory, e) for e in evidence]

    def read(self, signal, trajectory, e):
        id = f"{signal.kind}/{signal.step}/{signal.task_id}/{signal.rollout_index}"
        summary, cause = f"{len(trajectory.steps)} calls", trajectory.outcome.reason
        actions = focus(e, self.family.action_pattern)
        return Context(id, signal.kind, e.task, summary, cause, "", actions, mistakes(trajectory))


class Explorer:
    def __init__(self, family):
        self.family = family

    def act(self, episodes):
        return [self.choose(e, toolbox(e.tools)) for e in episodes]

    def choose(self, e, box):
        planned = upcoming(e.context.plan, e.history, self.family.action_pattern)
        if isinstance(planned, Call):
            return planned
        if planned in box:
            return fill(box[planned], Bank(()).extended(e.history), e.rng)
        names = [name for name in e.context.focus_pattern if name in box] if e.round == 0 else []
        tool = box[e.rng.choice(names or list(box))]
        return fill(tool, Bank(()).extended(e.history), e.rng)


class Abstractor:
    def __init__(self, family):
        self.family = family

    def abstract(self, explorations, limits, shorten):
        goals = [self.goals(e, limits) for e in explorations]
        solutions = iter(shorten([goal for own in goals for goal in own]))  # one request for all
        return [self.tasks(e, limits, [next(solutions) for _ in own]) for e, own in zip(explorations, goals)]

    def goals(self, e, limits):
        rounds = {t.round: [] for t in e.triplets}
        for t in e.triplets:
            rounds[t.round] += [] if t.observation.error else [t]
        usable = [r for r in rounds.values() if len(r) >= limits.min_calls]
        planned = [fulfilled(e.context.plan, r, self.family.action_pattern) for r in usable]
        drawn = [e.rng.choice([t.index for t in r], limits.min_calls, replace=False) for r in usable]
        wanted = [*filter(None, planned), *map(tuple, drawn)]  # what follows the plan comes first
        return [Goal(e, steps) for steps in wanted[: limits.proposals]]

    def tasks(self, e, limits, solutions):
        fit = [s for s in solutions if s and limits.min_calls <= len(s.steps) <= limits.max_calls]
        made = [self.task(e.context, [t.call for t in s.steps], s) for s in fit]
        return list({tuple(map(signature, p.calls)): p for p in made}.values())  # each once

    def task(self, context, calls, s):
        query = "Please do this: " + "; then ".join(map(signature, calls)) + "."
        indices, answers = tuple(t.index for t in s.steps), tuple(t.observation for t in s.steps)
        return Proposal(context, "As asked.", (Turn(query, tuple(calls)),), indices, answers, s.asked)


def make(config, family):
    judge = scripted.make(config, family).validator
    return Roles("sweep", Reflector(family), Explorer(family), Abstractor(family), judge)
