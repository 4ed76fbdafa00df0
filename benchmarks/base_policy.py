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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from by_tool import by_tool, names, table
from ml_collections import ConfigDict, config_flags

from coevolve_jax import build
from coevolve_jax.evaluate import evaluate
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.explore import offered_names, unguided
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_TASKS = flags.DEFINE_integer("tasks", 192, "Tasks from unguided exploration.")
_TASKS_PER_TOOL = flags.DEFINE_integer(
    "tasks_per_tool", 8, "Tasks that hold a tool, for each tool; 0: no table."
)
_EXPLORED = flags.DEFINE_integer(
    "explored", 800, "Tasks in training scenarios from which a tool's share is taken."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write the table to.")
flags.mark_flag_as_required("config")

PASSES = 8  # of exploration around a tool, until there are enough tasks with it
CONTEXTS = 16  # scenarios in a pass


def development_scenarios(config: ConfigDict) -> list[Task]:
    """The scenarios on which a base policy is judged: every second of the evaluation split; a run is tested on all."""
    return sorted(build.held_out_scenarios(config), key=lambda s: s.id)[::2]


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


def main(_) -> None:
    c = _CONFIG.value
    policy, family = build.policy(c.model), build.family(c)
    planted = Path(c.model, "weak_tools.json")
    weak = json.loads(planted.read_text()) if planted.exists() else {}
    with build.env_pool(c) as env_pool:
        agent = build.agent(c, policy, build.engine(c, policy), env_pool)
        synthesizer = Synthesizer(build.explorer(c), family.tools, env_pool, c, guard=None)
        scenarios = development_scenarios(c)

        def explored(among: Sequence[Task], wanted: int, purpose: str) -> list[Task]:
            tasks, rng = TaskPool(), rng_for(c.evaluation.seed, purpose)
            synthesizer.explore_unguided(tasks, among, wanted=wanted, kind=purpose, step=0, rng=rng)
            return list(tasks)

        tasks = explored(scenarios, _TASKS.value, "held_out")
        kinds = {"all": tasks}
        if weak:
            kinds["with a weak tool"] = [t for t in tasks if names(t) & weak.keys()]
            kinds["without"] = [t for t in tasks if not names(t) & weak.keys()]
        for temperature, samples in ((1.0, c.rollout.group_size), (0.0, 1)):
            for kind, among in kinds.items():
                result, _ = evaluate(agent, among, samples=samples, temperature=temperature, seed=1)
                by_calls = {n: f"{s / trials:.0%}" for n, (s, trials) in result.by_calls.items()}
                print(
                    f"temperature {temperature:g}, {samples} samples of {len(among)} tasks ({kind}): success "
                    f"{result.success:.1%}, by calls {by_calls}, groups with both outcomes {result.mixed_groups:.0%}, "
                    f"ends {result.stops}",
                    flush=True,
                )
        if not _TASKS_PER_TOOL.value:
            return

        met = explored(build.scenarios(c), _EXPLORED.value, "explored")
        share = Counter()
        share.update({tool: n / len(met) for tool, n in Counter(n for t in met for n in names(t)).items()})
        offered = sorted({name for s in scenarios for name in offered_names(family.tools(s))})
        rng = rng_for(c.evaluation.seed, "by_tool")
        held = {t: tasks_with(t, _TASKS_PER_TOOL.value, scenarios, synthesizer, rng) for t in offered}
        tasks = [task for found in held.values() for task in found]
        samples = c.rollout.group_size
        _, trajectories = evaluate(agent, tasks, samples=samples, temperature=1.0, seed=1)
        rolled = {t.id: trajectories[i * samples : (i + 1) * samples] for i, t in enumerate(tasks)}
        rows = by_tool(held, rolled)
        print(table(rows, weak, share))
        for kind, group in (("weak", rows.keys() & weak.keys()), ("other", rows.keys() - weak.keys())):
            if group:
                mean = lambda key: np.mean([rows[tool][key] for tool in group])
                print(
                    f"mean over {len(group)} {kind} tools: success {mean('success'):.1%}, calls {mean('call_success'):.1%}"
                )
        if _OUTPUT.value:
            Path(_OUTPUT.value).write_text(json.dumps({"tools": rows, "met": dict(share)}, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
