"""What a policy can do before RL, on development scenarios: success by number of calls and by tool.

python benchmarks/base_policy.py --config=configs/bfcl_tiny.py --config.model=models/tiny_qwen3_weak

The tasks of the first lines come from unguided exploration, as the held-out tasks of a run do. Those of the table come
from exploration around one tool at a time, so that each tool is seen in as many tasks, however rare it is.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from by_tool import by_tool, names, table
from ml_collections import config_flags

from coevolve_jax import build
from coevolve_jax.evaluate import evaluate, tally
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.explore import offered_names, unguided
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task, Trajectory

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_TASKS = flags.DEFINE_integer("tasks", 192, "Tasks from unguided exploration.")
_TASKS_PER_TOOL = flags.DEFINE_integer(
    "tasks_per_tool", 8, "Tasks that hold a tool, for each tool; 0: no table."
)
_EXPLORED = flags.DEFINE_integer(
    "explored", 800, "Tasks in training scenarios from which a tool's share is taken."
)
flags.mark_flag_as_required("config")

PASSES = 8  # of exploration around a tool, until there are enough tasks with it
CONTEXTS = 16  # scenarios in a pass


def tasks_with(
    tool: str, wanted: int, scenarios: Sequence[Task], synthesizer: Synthesizer, rng: np.random.Generator
) -> list[Task]:
    """Up to `wanted` tasks that hold the tool, from exploration around it."""
    offering = [s for s in scenarios if tool in offered_names(synthesizer.tools(s))]
    found, holding = TaskPool(), []
    for n in range(PASSES if offering else 0):
        chosen = [offering[i] for i in rng.integers(len(offering), size=CONTEXTS)]
        contexts = [
            dataclasses.replace(unguided(s, f"{tool}-{n}-{i}"), signal="rare", focus_pattern=(tool,))
            for i, s in enumerate(chosen)
        ]
        synthesizer.grow(found, contexts, wanted=3 * wanted, kind=f"{tool}-{n}", step=0, rng=rng)
        holding = [t for t in found if tool in names(t)][:wanted]
        if len(holding) == wanted:
            break
    return holding


def by_task(trajectories: Sequence[Trajectory], samples: int) -> dict[str, list[Trajectory]]:
    """Trajectories by task id; the samples of a task stand one after the other."""
    return {
        trajectories[i].task_id: list(trajectories[i : i + samples])
        for i in range(0, len(trajectories), samples)
    }


def print_success(agent: Agent, tasks: Sequence[Task], weak: Container[str], samples: int) -> None:
    """Success at temperature 1 and greedy, of all tasks and of those with and without a weak tool."""
    kinds = {"all": tasks}
    if weak:
        kinds["with a weak tool"] = [t for t in tasks if any(name in weak for name in names(t))]
        kinds["without"] = [t for t in tasks if not any(name in weak for name in names(t))]
    for temperature, n in ((1.0, samples), (0.0, 1)):
        _, trajectories = evaluate(agent, tasks, samples=n, temperature=temperature, seed=1)
        groups = by_task(trajectories, n)
        for kind, among in kinds.items():
            result = tally(among, [t for task in among for t in groups[task.id]], n, temperature)
            by_calls = {size: f"{s / trials:.0%}" for size, (s, trials) in result.by_calls.items()}
            print(
                f"temperature {temperature:g}, {n} samples of {len(among)} tasks ({kind}): success {result.success:.1%}, "
                f"by calls {by_calls}, groups with both outcomes {result.mixed_groups:.0%}, ends {result.stops}",
                flush=True,
            )


def print_tools(
    agent: Agent,
    held: Mapping[str, Sequence[Task]],
    weak: Mapping[str, Mapping],
    share: Mapping[str, float],
    samples: int,
) -> None:
    """The table by tool, at temperature 1. held: tasks by tool. share: of exploration's tasks that hold a tool."""
    tasks = [task for found in held.values() for task in found]
    _, trajectories = evaluate(agent, tasks, samples=samples, temperature=1.0, seed=1)
    rows = by_tool(held, by_task(trajectories, samples))
    print(table(rows, weak, share))
    for kind, group in (("weak", rows.keys() & weak.keys()), ("other", rows.keys() - weak.keys())):
        if group:
            success, made = (np.mean([rows[t][key] for t in group]) for key in ("success", "call_success"))
            print(f"mean over {len(group)} {kind} tools: success {success:.1%}, calls {made:.1%}")


def main(_) -> None:
    c = _CONFIG.value
    policy, family = build.policy(c.model), build.family(c)
    planted = Path(c.model, "weak_tools.json")
    weak = json.loads(planted.read_text()) if planted.exists() else {}
    with build.env_pool(c) as env_pool:
        agent = build.agent(c, policy, build.engine(c, policy), env_pool)
        synthesizer = Synthesizer(build.explorer(c), family.tools, env_pool, c, None, agent.fits)
        scenarios = build.held_out_scenarios(c)  # config.environment.eval_split: development

        def explored(among: Sequence[Task], wanted: int, purpose: str) -> list[Task]:
            tasks, rng = TaskPool(), rng_for(c.evaluation.seed, purpose)
            synthesizer.explore_unguided(tasks, among, wanted=wanted, kind=purpose, step=0, rng=rng)
            return list(tasks)

        tasks = explored(scenarios, _TASKS.value, "held_out")
        print_success(agent, tasks, weak, c.rollout.group_size)
        if _TASKS_PER_TOOL.value:
            met = explored(build.scenarios(c), _EXPLORED.value, "explored")
            count = Counter(name for task in met for name in names(task))
            tools = sorted({name for s in scenarios for name in offered_names(family.tools(s))})
            rng, wanted = rng_for(c.evaluation.seed, "by_tool"), _TASKS_PER_TOOL.value
            held = {tool: tasks_with(tool, wanted, scenarios, synthesizer, rng) for tool in tools}
            share = {tool: count[tool] / len(met) for tool in tools}
            print_tools(agent, held, weak, share, c.rollout.group_size)


if __name__ == "__main__":
    app.run(main)
