"""Makes tasks without training, to judge an explorer before you pay for a run.

    python experiments/synthesize.py --config=configs/bfcl_tiny.py --tasks=5
    python experiments/synthesize.py --config=configs/bfcl_tiny.py:explorer=llm --tasks=20 \\
        --output=tasks.jsonl --config.explorer.base_url=https://HOST/v1 --config.explorer.model=MODEL \\
        --config.explorer.budget_tokens=500000

It explores freely, or for tasks that call one of --tools. It prints each task with the steps that it was made
of. At the end it prints the refusals by reason, and the costs. --llm_calls=FILE keeps every prompt and answer
of a model.

It needs the explorer and the environment; with explorer=policy also the weights in config.model. Run again,
it asks a served model nothing twice (config.explorer.cache).
"""

import itertools
import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags
from ml_collections import config_flags

from coevolve_jax.config import command_line
from coevolve_jax.llm.prompting import line
from coevolve_jax.rollout.engine import EngineError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its argument if any.", lock_config=True
)
_TASKS = flags.DEFINE_integer("tasks", 20, "Tasks wanted.", lower_bound=1)
_TOOLS = flags.DEFINE_list("tools", [], "Tools that the tasks must call: each task calls one, in turn.")
_OUTPUT = flags.DEFINE_string("output", None, "New file for the tasks, as JSON lines with their lineage.")
_LLM_CALLS = flags.DEFINE_string(
    "llm_calls",
    None,
    "New file for the prompts and answers of an explorer that is a model, as JSON lines.",
)
flags.mark_flag_as_required("config")
AT_ONCE = 4  # tasks asked for at once


def synthesize() -> None:
    import time
    from collections import Counter
    from contextlib import ExitStack, closing

    from coevolve_jax import build
    from coevolve_jax import config as configs
    from coevolve_jax.loop.initial import leak_guard
    from coevolve_jax.loop.lab import Laboratory
    from coevolve_jax.synthesis.pipeline import SynthesisStats
    from coevolve_jax.synthesis.task_pool import TaskPool

    c, ledger, total = _CONFIG.value, Counter(), SynthesisStats()
    configs.check(c)
    family, scenarios = build.family(c), build.scenarios(c)
    offered = {tool["function"]["name"] for scenario in scenarios for tool in family.tools(scenario)}
    if unknown := sorted(set(_TOOLS.value) - offered):
        raise ValueError(
            f"--tools names {unknown[0]!r}, which no scenario offers: "
            f"use some of {', '.join(sorted(offered))}."
        )
    for flag in (_OUTPUT, _LLM_CALLS):
        if flag.value:
            configs.check_new_file(flag.name, flag.value)
    tasks, end = TaskPool(key=family.task_key), ""
    record = recorder(_LLM_CALLS.value) if _LLM_CALLS.value else None
    with ExitStack() as stack:
        start, policy, engine, agent = time.perf_counter(), None, None, None
        env_pool = stack.enter_context(build.env_pool(c))
        if configs.asks_policy(c):
            policy = build.policy(c.model)
            engine = stack.enter_context(closing(build.engine(c, policy)))
            agent = stack.enter_context(closing(build.agent(c, policy, engine, env_pool)))
        roles = build.explorer(c, policy, engine, agent=agent)
        synthesizer = build.synthesizer(c, roles, env_pool, leak_guard(c, []))
        lab = Laboratory(tasks, scenarios, synthesizer, None, ledger, record)  # no roller: no rollouts here
        batch = 0
        # The first batch is all or none: if no model answers the explorer, the error comes at once.
        while len(tasks) < _TASKS.value and not end:
            wanted = min(AT_ONCE, _TASKS.value - len(tasks))
            before = len(tasks)
            stats, end = one_batch(c, lab, batch, wanted, all_or_none=not before)
            total.add(stats)
            for task in list(tasks)[before:]:
                show(task, {row["context"]["id"]: row for row in stats.explored})
            if _OUTPUT.value:  # after each batch, so that the tasks are kept however this ends
                tasks.write(_OUTPUT.value)
            batch += 1
        seconds = time.perf_counter() - start
    report(len(tasks), total, ledger, seconds, family.action_pattern)
    if end:
        sys.exit(f"Error: {end}")


def one_batch(config, lab, batch, wanted, all_or_none):
    """Adds `wanted` tasks. Returns (SynthesisStats, why no more tasks will come, or "").

    batch: its number, from 0. all_or_none: as in Laboratory.synthesize_unguided.
    """
    from collections import Counter

    from coevolve_jax.seeding import rng_for
    from coevolve_jax.strategies.growth import synthesize_for_tools
    from coevolve_jax.synthesis.pipeline import TooFew

    how = {"wanted": wanted, "step": batch, "rng": rng_for(config.seed, "synthesize", batch)}
    if _TOOLS.value:
        tools = [_TOOLS.value[(batch * AT_ONCE + n) % len(_TOOLS.value)] for n in range(wanted)]
        roles = lab.synthesizer.roles
        before = Counter(roles.costs)
        stats = synthesize_for_tools(lab, tools, "tool", kind="signal", **how)
        if stats.added:
            return stats, ""
        away = not stats.proposed and roles.unanswered and roles.unanswered(Counter(roles.costs) - before)
        return stats, away or f"No scenario gave a task that calls {', '.join(set(tools))}."
    try:
        stats = lab.synthesize_unguided(kind="initial", all_or_none=all_or_none, **how)
    except TooFew as error:
        return error.stats, str(error)
    end = (
        f"Free exploration gives no more new tasks (refused: {dict(stats.refused)}): "
        "let config.environment offer more, widen data.min_calls..max_calls, mend the explorer, "
        "or ask for fewer tasks."
    )
    return stats, "" if stats.added else end


def recorder(path):
    """Returns a function that appends LLM calls, with whole prompts, to a file."""
    import dataclasses

    from coevolve_jax.records.logs import encode

    open(path, "wb").close()

    def record(llm_calls) -> None:
        with open(path, "ab") as file:
            file.writelines(encode(dataclasses.asdict(d)) for d in llm_calls)

    return record


def show(task, explored) -> None:
    """Prints one task: its request, its solution and its origin, each in its line (`prompting.line`)."""
    lineage = task.lineage
    of = f" of {len(explored[lineage.context]['triplets'])}" if lineage.context in explored else ""
    print(f"\n{task.id}  {lineage.verdict}: {lineage.reason}")
    print(f"  {line(task.description)}")
    for turn, rules in itertools.zip_longest(task.turns, lineage.rule_queries):
        print(f"  user: {line(turn.query)}")
        if rules not in (None, turn.query):
            print(f"    by rules: {line(rules)}")
        for call in turn.calls:
            print(f"    {call.name}({', '.join(f'{line(k)}={v!r}' for k, v in call.arguments.items())})")
    by = line(lineage.explorer)  # a server names its model
    print(
        f"  from: {lineage.parent}, steps {', '.join(map(str, lineage.triplets))}{of} by {by};"
        f" cosine of {lineage.measure} to the nearest evaluation task {lineage.similarity:.2f}",
        flush=True,
    )


def report(made, total, ledger, seconds, action_pattern) -> None:
    """Prints the statistics. made: number of tasks. action_pattern: the environment family's."""
    from collections import Counter

    from coevolve_jax.types import Call

    steps = [step for row in total.explored for step in row["triplets"]]
    done = Counter(action_pattern(Call.from_json(step["call"])) for step in steps if not step["error"])
    print(f"\n{made} tasks of {total.proposed} proposals, {total.environment_steps} steps in the environment")
    print(f"{seconds / max(made, 1):.2f} s per task, reading the evaluation tasks for leak control included")
    print(f"{done.total() / max(len(steps), 1):.0%} of the steps without an error, of {len(done)} actions:")
    print("  " + ", ".join(f"{line(action)} {count}" for action, count in done.most_common()))
    for reason, count in total.refused.most_common():
        print(f"  {count:5d}  refused: {reason}")
    for words, count in sorted(total.judge_agreement.items()):
        print(f"  {count:5d}  judged: {words} (the judge, execution)")
    for key, value in sorted(ledger.items()):
        if key.startswith("explorer/"):
            print(f"  {value:>12,.6g}  {key.removeprefix('explorer/')}")
    if made and ledger["explorer/money"]:
        print(f"  {ledger['explorer/money'] / made:>12,.6g}  money per task")


if __name__ == "__main__":
    command_line.start(synthesize, EngineError, interrupted="--output holds the tasks of every whole batch.")
