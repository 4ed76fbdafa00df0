"""Measures a policy before RL on a run's held-out tasks: success by number of calls, and by tool (or verb).

python benchmarks/base_policy.py --config=configs/bfcl_tiny.py
python benchmarks/base_policy.py --config=configs/bfcl_headroom.py   # has a balanced set
python benchmarks/base_policy.py --config=configs/textworld_tiny.py   # or tau2_tiny.py
python benchmarks/base_policy.py --config=configs/leaderboard_hints.py --hints   # also with hints
python benchmarks/base_policy.py --config=configs/textworld_tiny.py --by=level   # also by level

A table by tool follows where weak tools were planted, or where the config asks for a balanced set
(config.evaluation.balanced_tasks). Rare tools come about as often as others in that set. Without one, the
table uses the same tasks again. How often exploration meets a tool is counted in the set's candidates, or in
these tasks.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from by_tool import by_tool, table
from ml_collections import config_flags

from coevolve_jax import build
from coevolve_jax.loop.evaluate import evaluate, tally
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import trajectories_of
from coevolve_jax.strategies.hints import line
from coevolve_jax.synthesis.choice import balanced
from coevolve_jax.synthesis.pipeline import SynthesisRequest
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Group, Hint, Task

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.", lock_config=True)
_HINTS = flags.DEFINE_bool(
    "hints", False, "Also measure with a right hint before each task, and a wrong one."
)
_BY = flags.DEFINE_string(
    "by", "", "Key of the scenarios by whose values success is printed too, e.g. level."
)
ToolOf = Callable[[Call], str]  # what counts as the tool of a call


def print_success(
    agent: Agent, tasks: Sequence[Task], weak: Container[str], tool_of: ToolOf, num_rollouts: int, by: str
) -> list[Group]:
    """Prints success at temperature 1 and greedy: of all tasks, and of those with and without a weak tool.

    by: a key of the scenarios, by whose values it is printed too; "": none.

    Returns the samples at temperature 1.
    """
    holds = lambda task: any(tool_of(call) in weak for call in task.calls)
    kinds: dict[str, Callable[[Task], bool]] = {"all": lambda task: True}
    if weak:
        kinds |= {"with a weak tool": holds, "without": lambda task: not holds(task)}
    for value in sorted({task.scenario[by] for task in tasks}) if by else ():
        kinds[f"{by} {value}"] = lambda task, value=value: task.scenario[by] == value
    sampled = []
    for temperature, n in ((1.0, num_rollouts), (0.0, 1)):
        _, groups = evaluate(agent, tasks, num_rollouts=n, temperature=temperature, seed=1)
        sampled = sampled or groups
        for kind, belongs in kinds.items():
            among = [group for group in groups if belongs(group.task)]
            result = tally(among, n, temperature)
            by_calls = {size: f"{s / trials:.0%}" for size, (s, trials) in result.by_calls.items() if trials}
            told = lambda share, digits: "unknown" if share is None else f"{share:.{digits}%}"
            calls = [step.call is not None for t in trajectories_of(among) for step in t.steps]
            print(
                f"temperature {temperature:g}, {n} samples of {len(among)} tasks ({kind}): "
                f"success {told(result.success, 1)}, by calls {by_calls}, "
                f"groups with both outcomes {told(result.mixed_groups, 0)}, ends {result.stops}, "
                f"calls that parse {np.mean(calls):.1%}",
                flush=True,
            )
    return sampled


def print_hints(agent: Agent, tasks: Sequence[Task], tool_of: ToolOf, num_rollouts: int) -> None:
    """Prints success with a line before each task that names its own tools, and with one of another's."""
    lines = [line([tool_of(call) for call in task.calls]) for task in tasks]
    for whose, given in (("its own", lines), ("another task's", [*lines[1:], *lines[:1]])):
        told = {task.id: Hint(text) for task, text in zip(tasks, given, strict=True)}
        hints = lambda task, rollout_index, told=told: told[task.id]
        result, _ = evaluate(agent, tasks, num_rollouts=num_rollouts, temperature=1.0, seed=1, hints=hints)
        success = "unknown" if result.success is None else f"{result.success:.1%}"
        print(f"temperature 1, {num_rollouts} samples with a hint of {whose} tools: success {success}")


def print_tools(
    groups: Sequence[Group],
    weak: Mapping[str, Mapping],
    tool_of: ToolOf,
    share: Mapping[str, float],
) -> None:
    """Prints the table by tool. share: of exploration's tasks that hold a tool."""
    rows = by_tool([g.task for g in groups], {g.task.id: g.trajectories for g in groups}, tool_of)
    print(table(rows, weak, share))
    for kind, tools in (("weak", rows.keys() & weak.keys()), ("other", rows.keys() - weak.keys())):
        if tools:
            success, made = (np.mean([rows[t][key] for t in tools]) for key in ("success", "call_success"))
            print(f"mean over {len(tools)} {kind} tools: success {success:.1%}, calls {made:.1%}")


def main(_) -> None:
    c = _CONFIG.value
    policy, family, e = build.policy(c.model), build.family(c), c.evaluation
    planted = Path(c.model, "weak_tools.json")
    weak = json.loads(planted.read_text()) if planted.exists() else {}
    with build.env_pool(c) as env_pool:
        agent = build.agent(c, policy, build.engine(c, policy), env_pool)
        synthesizer = build.synthesizer(c, build.explorer(c), env_pool, None, agent.fits)
        scenarios = build.held_out_scenarios(c)
        there = set.intersection(*(set(s.scenario) for s in scenarios))
        if _BY.value and _BY.value not in there:
            raise app.UsageError(
                f"--by={_BY.value} is no key of every scenario: use {', '.join(sorted(there))}."
            )

        def explored(wanted: int, kind: str) -> list[Task]:
            tasks, rng = TaskPool(key=family.task_key), rng_for(e.seed, kind)
            synthesizer.synthesize_unguided(
                tasks, scenarios, SynthesisRequest(wanted=wanted, kind=kind, step=0, rng=rng)
            )
            return list(tasks)

        tool_of, num_rollouts = family.action_pattern, c.rollout.group_size
        met = tasks = explored(e.tasks, "held_out")
        sampled = print_success(agent, tasks, weak, tool_of, num_rollouts, _BY.value)
        if _HINTS.value:
            print_hints(agent, tasks, tool_of, num_rollouts)
        if e.balanced_tasks:
            met = explored(e.balanced_candidates, "balanced")
            tasks = balanced(met, e.balanced_tasks, rng_for(e.seed, "balanced choice"))
            _, sampled = evaluate(agent, tasks, num_rollouts=num_rollouts, temperature=1.0, seed=1)
        if weak or e.balanced_tasks:
            counts = Counter(tool for task in met for tool in set(map(tool_of, task.calls)))
            share = {tool: n / len(met) for tool, n in counts.items()}
            print_tools(sampled, weak, tool_of, share)


if __name__ == "__main__":
    app.run(main)
