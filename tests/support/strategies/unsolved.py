"""My signal: the tools of tasks that no rollout solved at their last visit."""

from collections import Counter

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import evolves
from coevolve_jax.strategies.growth import synthesize_for_tools
from coevolve_jax.strategies.static import Static


def evolve(config, step, lab):
    if not evolves(config, step):  # every config.evolution.every steps
        return None
    records = lab.tasks.records
    unsolved = [task for task in lab.tasks if records[task.id].last_score == 0]
    missed = Counter(call.name for task in unsolved for call in task.calls)
    tools = [tool for tool, _ in missed.most_common(6)]
    rng, wanted = rng_for(config.seed, "evolve", step), config.evolution.tasks
    return synthesize_for_tools(lab, tools, "unsolved", wanted=wanted, kind="signal", step=step, rng=rng)


def make(config, state=None):
    return Static(config, state, evolve)
