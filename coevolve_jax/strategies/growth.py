"""How D_t grows: new tasks for tools, drafts, pools of a method's own, and what admits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Lab, evolves
from coevolve_jax.synthesis import knobs
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Admit, Verdict
from coevolve_jax.synthesis.variants import elsewhere, possible, variant
from coevolve_jax.types import Context, Group, Task

Setting = TypeVar("Setting")

APART = 0.25  # share of the scenarios that are set apart for measuring


def solvable(lab: Lab, step: int, k: int) -> Admit:
    """Admits tasks that k probing rollouts solve sometimes, but not always; k = 0 admits all.

    Refuses a task whose probing rollouts are all invalid, as "environment": nothing is known about it.
    """

    def admit(tasks: Sequence[Task]) -> list[Verdict]:
        words: list[Verdict] = []
        for group in lab.probe(tasks, k, step):
            solved, tried = sum(t.outcome.success for t in group.valid), len(group.valid)
            if not tried:
                words.append(Verdict("environment"))
                continue
            refusal = None if group.mixed else "always_solved" if solved else "never_solved"
            words.append(Verdict(refusal, solved / tried))
        return words

    return admit if k else lambda tasks: [Verdict(None)] * len(tasks)


def synthesize_freely(config: ConfigDict, step: int, lab: Lab, **how: Any) -> SynthesisStats | None:
    """Evolves D_t as the control `random` does: by config.evolution.tasks tasks of free exploration.

    Methods that differ from `random` in other things than growth share its tasks by this function.

    how: further arguments of `lab.synthesize_unguided`.
    """
    if not evolves(config, step):
        return None
    rng, wanted = rng_for(config.seed, "evolve", step), config.evolution.tasks
    return lab.synthesize_unguided(wanted=wanted, kind="random", step=step, rng=rng, **how)


def synthesize_in_turn(lab: Lab, contexts: Sequence[Context], *, wanted: int, **how: Any) -> SynthesisStats:
    """Explores contexts in their order, each once and for at most one task, until D_t has grown by `wanted`.

    Later contexts thus only make up for earlier ones that give no task. Tasks beyond D_t's capacity are not
    made; they count as refused, "pool_full".

    how: further arguments of `lab.synthesize`; `kind`, `step` and `rng` are needed.
    """
    left, fitting = list(contexts), int(min(wanted, lab.tasks.remaining_capacity))
    total = SynthesisStats(refused=+Counter(pool_full=wanted - fitting))
    while left and total.added < fitting:
        now, left = left[: fitting - total.added], left[fitting - total.added :]
        total.add(lab.synthesize(now, wanted=len(now), once=True, **how))
    return total


def variants(
    config: ConfigDict,
    lab: Lab,
    tasks: Sequence[Task],
    operators: Sequence[str],
    *,
    step: int,
    rng: np.random.Generator,
) -> list[Context]:
    """Returns the contexts for the variants of tasks that config.data allows, task by task.

    Their ids are STRATEGY/STEP/TASK/OPERATOR. A variant in another scenario is asked for only where one
    offers the task's tools.
    """
    data, contexts, own = config.data, [], f"{config.strategy.name}/{step}"
    limits = data.min_calls, data.max_calls, data.max_turns
    offered = [lab.offered(scenario) for scenario in lab.scenarios]
    for task in tasks:
        places = elsewhere(task, lab.scenarios, offered)
        contexts += [
            variant(task, operator, rng, f"{own}/{task.id}/{operator}", places)
            for operator in operators
            if possible(task, operator, *limits, places)
        ]
    return contexts


def synthesize_for_tools(
    lab: Lab, tools: Sequence[str], signal: str, *, scenarios: Sequence[Task] | None = None, **wanted: Any
) -> SynthesisStats:
    """Makes one task for each of `tools` that has to call the tool.

    Explores random scenarios that offer the tool until one gives a task. If some tools give none, further
    tasks of the other tools make up for them, up to `wanted` in all. No call is required where actions are
    patterns of the family's own and no task of D_t has shown one.

    Args:
      tools: action patterns; in most families the names of tools.
      signal: names the contexts, and goes into the lineage.
      scenarios: None stands for all of `lab.scenarios`.
      wanted: further arguments of `lab.synthesize`; `wanted`, `kind`, `step` and `rng` are needed.
    """
    step, rng = wanted["step"], wanted["rng"]
    places = offering(lab, tools, scenarios)
    required = not _own_patterns(lab) or any(task.patterns for task in lab.tasks)

    def context(tool: str, id: str) -> Context:
        scenario = places[tool][rng.integers(len(places[tool]))]
        words = f"{tool} is called wrongly or not at all."
        must = (tool,) if required else ()
        return Context(id, signal, scenario, words, focus_pattern=(tool,), must=must)

    def relocate(unproductive: Context) -> Context:
        id, _, place = unproductive.id.rpartition("/")
        return context(unproductive.focus_pattern[0], f"{id}/{int(place) + 1}")

    return lab.synthesize(
        [context(tool, f"{signal}/{step}/{i}/{tool}/0") for i, tool in enumerate(tools) if places[tool]],
        relocate=relocate,
        **wanted,
    )


def offering(
    lab: Lab, actions: Sequence[str], scenarios: Sequence[Task] | None = None
) -> dict[str, list[Task]]:
    """Maps each action to the scenarios that offer it.

    A tool is offered where it is on the list. Where actions are patterns of the family's own, every scenario
    may offer them.

    scenarios: None stands for all of `lab.scenarios`.
    """
    among = lab.scenarios if scenarios is None else scenarios
    offered = [lab.offered(scenario) for scenario in among]
    anywhere = _own_patterns(lab)
    return {
        action: [s for s, tools in zip(among, offered) if anywhere or action in tools]
        for action in dict.fromkeys(actions)
    }


def _own_patterns(lab: Lab) -> bool:
    """Whether actions are patterns of the family's own: D_t says so where it has calls, else the family."""
    called = [task for task in lab.tasks if task.calls]
    return any(task.patterns for task in called) if called else lab.own_patterns


def actions_on_offer(lab: Lab) -> list[str]:
    """The names of all tools that scenarios offer, sorted.

    Where tasks of D_t have action patterns of the family's own, these patterns.
    """
    if any(task.patterns for task in lab.tasks):
        return sorted({action for task in lab.tasks for action in task.actions})
    return sorted({tool for scenario in lab.scenarios for tool in lab.offered(scenario)})


def set_apart(config: ConfigDict, lab: Lab) -> tuple[list[Task], list[Task]]:
    """Splits the scenarios into those to grow in and those set apart for measuring.

    The split depends on config.seed alone. At least one is set apart. A single scenario is on both sides.
    """
    order = rng_for(config.seed, "set apart").permutation(len(lab.scenarios)).tolist()
    count = max(1, int(APART * len(order)))
    apart, others = ([lab.scenarios[i] for i in sorted(part)] for part in (order[:count], order[count:]))
    return others or apart, apart


def goal_actions(config: ConfigDict, lab: Lab, size: int, step: int) -> tuple[list[str], np.random.Generator]:
    """Returns the actions of a goal set, and the random numbers that go on from their draw.

    They are drawn at random, each once before any comes again. size: their number; 0: all once.
    """
    rng, actions = rng_for(config.seed, "goals", step), actions_on_offer(lab)
    order = rng.permutation(len(actions)).tolist()
    return [actions[order[i % len(order)]] for i in range(size or len(order)) if order], rng


def goal_set(config: ConfigDict, lab: Lab, size: int, step: int) -> tuple[list[Task], SynthesisStats]:
    """Makes tasks to measure on, in the scenarios set apart. D_t takes none of them.

    Each has to call one of `goal_actions`.
    """
    (chosen, rng), made = goal_actions(config, lab, size, step), lab.tasks.fresh()
    stats = synthesize_for_tools(
        lab, chosen, "goal", scenarios=set_apart(config, lab)[1], wanted=len(chosen), kind="goal", step=step,
        rng=rng, into=made,
    )  # fmt: skip
    return unseen(lab.tasks, list(made)), stats


def unseen(tasks: TaskPool, made: Sequence[Task]) -> list[Task]:
    """Returns the new tasks that are no duplicates of a pool's."""
    refusals = tasks.fork().add(made)
    return [task for task, refusal in zip(made, refusals, strict=True) if refusal != "duplicate"]


def full(config: ConfigDict, lab: Lab) -> SynthesisStats | None:
    """Returns what becomes of an evolution where D_t takes no more tasks: all are refused, as "pool_full".

    None where D_t has room. A method that makes drafts asks before it spends anything on them.
    """
    if lab.tasks.remaining_capacity:
        return None
    return SynthesisStats(refused=Counter(pool_full=config.evolution.tasks))


def draft(
    lab: Lab, contexts: Sequence[Context], *, step: int, rng: np.random.Generator
) -> tuple[TaskPool, SynthesisStats]:
    """Makes one task for each context that gives one, in a new pool. D_t stays as it is.

    Each draft's `lineage.context` is the id of its context. `lab.adopt` takes the best into D_t, and
    `SynthesisStats.adopting` joins the statistics of both.
    """
    drafts = lab.tasks.fresh()
    made = lab.synthesize(
        contexts, wanted=len(contexts), kind="draft", step=step, rng=rng, once=True, into=drafts
    )
    return drafts, made


def propose(
    lab: Lab,
    drawn: Sequence[Mapping[str, Any]],
    signal: str,
    *,
    step: int,
    rng: np.random.Generator,
    scenarios: Sequence[Task] | None = None,
) -> tuple[list[Task | None], SynthesisStats]:
    """Makes one draft for each setting of a proposer (synthesis/knobs.py); None where it gives none.

    Args:
      signal: names the contexts.
      scenarios: of each setting; None: a random one that has the setting's key.
    """
    contexts = [
        knobs.context(
            d, [scenarios[i]] if scenarios else lab.scenarios, rng, id=f"{signal}/{step}/{i}", signal=signal
        )
        for i, d in enumerate(drawn)
    ]
    drafts, made = draft(lab, contexts, step=step, rng=rng)
    by_context = {task.lineage.context: task for task in drafts}
    return [by_context.get(c.id) for c in contexts], made


def probed(
    lab: Lab, drawn: Sequence[Setting], drafts: Sequence[Task | None], k: int, step: int
) -> list[tuple[Setting, Group | None]]:
    """Pairs each setting of a proposer with k probing rollouts of its draft; None where it gave no draft.

    Leaves out a setting whose draft has no valid rollout. Nothing is known about such a draft, so it teaches
    a proposer nothing and is not adopted.
    """
    groups = {g.task.id: g for g in lab.probe([t for t in drafts if t], k, step)}
    pairs = [(own, groups[t.id] if t else None) for own, t in zip(drawn, drafts, strict=True)]
    return [(own, group) for own, group in pairs if group is None or group.valid]


def adopt_first(
    lab: Lab, ranked: Sequence[Task], count: int, *, kind: str, solved: Mapping[str, float] | None = None
) -> SynthesisStats:
    """Adds drafts to D_t, best first, until it has taken `count`. One that it refuses costs no place.

    ranked: the drafts, best first. kind and solved: as in `lab.adopt`.
    """
    total = SynthesisStats()
    for task in ranked:
        if total.added < count:
            total.add(lab.adopt([task], kind=kind, solved=solved))
    return total
