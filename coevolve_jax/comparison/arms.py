"""The arms of a comparison by name: their changes of the config, and the reason to run them.

All arms of a seed continue from the same start. They share the files of D_0, of the held-out sets and of the
first evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from coevolve_jax.types import SIGNAL_KINDS


class Arm(NamedTuple):
    """A method to compare. changes: config values by dotted key. why: the question that it answers."""

    changes: Mapping[str, Any]
    why: str


def _own(name: str, why: str, **own: Any) -> Arm:
    """A strategy with settings of its own."""
    return Arm({"strategy.name": name, **{f"strategy.{k}": v for k, v in own.items()}}, why)


def _centred(name: str, why: str, **own: Any) -> Arm:
    """The same, with advantages that no standard deviation divides: the source's are only centred."""
    return Arm({**_own(name, why, **own).changes, "learner.advantage": "group_mean"}, why)


ARMS: dict[str, Arm] = {
    "static": _own("static", "no new tasks"),
    "prioritised": Arm(
        {"strategy.name": "static", "data.sampling": "variance"}, "no new tasks, batches drawn by p (1 - p)"
    ),
    "random": _own("random", "as many new tasks, from exploration without signals"),
    "random_known": _own("random", "the same, in the scenarios of D_t alone", scenarios="known"),
    "random_probe": _own("random", "free exploration, of tasks that are solved sometimes", probe=4),
    "even": _own("even", "tasks for all actions in turn: evenness without aim"),
    "weakest": _own("weakest", "random, batches drawn by what categories lack (SpatialEvo)"),
    "random_dev": _own("random_dev", "random, and one task for each action joins D_t"),
    "sec": _own("sec", "random, and a bandit draws the batches by |advantage| (SEC)"),
    "eva": _own("eva", "variants of tasks with a gap between their rollouts (eva)"),
    "webrl": _own("webrl", "variants of failures that a critic lets pass (WebRL)"),
    "agent_world": _own("agent_world", "chains from what an arena shows weak (Agent-World)"),
    "agent_world_shuffled": _own("agent_world", "the same, its diagnosis dealt at random", shuffled=True),
    "et_agent": _own("et_agent", "random, and fewer calls are worth more (ET-Agent)"),
    "middo": _own("middo", "tasks too hard twice lose a call (Middo)"),
    "seal": _own("seal", "no new tasks, advantages weighed by type of failure (SEAL)"),
    "placebo": _own("coevolve", "the whole method with its signals on tasks drawn at random", shuffled=True),
    "coevolve": _own("coevolve", "the paper's method"),
    **{f"only_{kind}": _own("coevolve", f"{kind} signals alone", signals=kind) for kind in SIGNAL_KINDS},
    **{
        f"without_{kind}": _own(
            "coevolve", f"all signals but {kind}", signals=",".join(k for k in SIGNAL_KINDS if k != kind)
        )
        for kind in SIGNAL_KINDS
    },
    "without_validation": Arm(
        {"strategy.name": "coevolve", "evolution.validate": False}, "new tasks are taken as they are proposed"
    ),
    "oracle": _own("oracle", "exploration of the tools that are known to be weak"),
    "oracle_probe": _own("oracle", "the same, of tasks that are solved sometimes", probe=4),
    "coevolve_probe": _own("coevolve", "only tasks that 4 rollouts solve sometimes", probe=4),
    "coevolve_unsolved": _own("coevolve", "no signals of tasks that were solved since", unsolved=True),
    "coevolve_prioritised": Arm(
        {"strategy.name": "coevolve", "data.sampling": "variance"}, "batches drawn by p (1 - p)"
    ),
    "coevolve_retire": Arm(
        {"strategy.name": "coevolve", "data.retire_after": 3}, "tasks alike in 3 visits are drawn no more"
    ),
    "blame": _own("blame", "tools that failed rollouts miss at first sight, by p (1 - p) squared"),
    "blame_all_visits": _own("blame", "the same, from all visits to a task", first_sight=0),
    "blame_flat": _own("blame", "the same, by p (1 - p) itself", sharpness=1.0),
    "blame_narrow": _own("blame", "the same, each tool drawn anew", breadth=1),
    "blame_chasing": _own("blame", "the same, by 1 - p squared", chasing=True),
    "blame_probe": _own("blame", "blame and admission by probe", probe=4),
    "blame_prioritised": Arm(
        {"strategy.name": "blame", "data.sampling": "variance"}, "blame and batches drawn by p (1 - p)"
    ),
    "frontier": _own("frontier", "skills of which one more task is worth most, the best of probed drafts"),
    **{
        f"frontier_without_{part}": _own("frontier", f"the same without its part {part!r}", **{key: value})
        for part, key, value in (
            ("thompson", "thompson", False),
            ("diminishing", "diminishing", 0.0),
            ("probe", "probe", 0),
            ("odds", "odds", False),
            ("floor", "floor", 0.0),
        )
    },
    "frontier_levels": _own("frontier", "the same, a skill at each level of scenarios", level="level"),
    "panel_levels": _own("panel", "panel, a skill at each level of scenarios", level="level"),
    "panel": _own("panel", "skills that learn on unseen tasks set apart, measured at each evolution"),
    "agent0": _own(
        "agent0", "a proposer paid for disagreement; the solver's labels are exact", labels="checker"
    ),
    "agent0_majority": _own("agent0", "the same, and the solver learns from its majorities"),
    "dr_zero": _own("dr_zero", "a proposer paid for hard tasks, compared at equal numbers of calls"),
    "dr_zero_batch": _own("dr_zero", "the same with one baseline for all", baseline="batch"),
    "seif": _own("seif", "an instructor paid for what the policy misses, the policy for the turns it passes"),
    "infuser": _own(
        "infuser",
        "a proposer paid by influence on a goal set, at two thirds of its cost",
        documents=6,
        goal=12,
    ),
    "socratic": _own("socratic", "skills of what failed rollouts miss, drafts chosen by influence"),
    "socratic_noinfluence": _own("socratic", "the same skills, drafts as they come", influence=False),
    "soar": _own("soar", "a teacher paid by what a copy of the policy gains on hard tasks"),
    "step_credit": _centred("step_credit", "random, an advantage for each message among its alternatives"),
    "step_credit_state": _centred(
        "step_credit", "the same, with alternatives after equal calls", anchor="state"
    ),
    "slea_rl": _centred(
        "slea_rl", "random, step credit, and lessons of the library read before each message"
    ),
    "slea_rl_library": _centred("slea_rl", "the same lessons without the credit", step_credit=False),
    "evolver": _own("evolver", "random, and principles from failures read before each task, by their score"),
    "evolver_unscored": _own("evolver", "the same, and no principle is pruned", prune_below=0.0),
    "evolving_rl": _own(
        "evolving_rl", "random, and an extractor of hints paid by what they do on other tasks"
    ),
    "evolving_rl_own": _own("evolving_rl", "the same, paid by what they do on their own task", crossed=False),
    "sage": _centred(
        "sage", "random, and skills cut from a task are paid if they help to solve the next (SAGE)"
    ),
    "sage_unpaid": _centred("sage", "the same skills, for which nothing is paid", bonus=0.0),
    "ttcs": _own("ttcs", "held-out queries without answers, and variants of them, by majority (TTCS)"),
    "ttrl": _own("ttcs", "the same queries alone (TTRL)", variants=False),
    "random_prioritised": Arm(
        {"strategy.name": "random", "data.sampling": "variance"}, "random, and batches drawn by p (1 - p)"
    ),
}

# The differences that a comparison tests by default, if both arms are in it. Holm's correction is over these.
PLANNED = (("coevolve", "placebo"), ("coevolve", "random"), ("blame", "random"), ("random", "static"))


def arm(name: str) -> Arm:
    """Returns the arm of that name. The dotted path of a strategy's module is an arm too.

    Raises ValueError for any other name.
    """
    if name in ARMS:
        return ARMS[name]
    if "." in name:
        return Arm({"strategy.name": name}, "a strategy of yours")
    raise ValueError(
        f"There is no arm {name!r}: use {', '.join(ARMS)}, or the dotted path of a strategy's module."
    )
