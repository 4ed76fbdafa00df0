"""Tells what of an MCP server is fit to train on, in seconds and without a model.

    python experiments/check_server.py --config=configs/mcp_shop.py
    python experiments/check_server.py --config=configs/mcp_smollm2.py \\
        --config.environment.command="SERVER {world}" --config.environment.template=FOLDER

The scripted explorer calls the tools. All its calls are then made twice more, in worlds that begin alike. The
table says how often each tool was called, succeeded, and changed the world's folder. Below it stands what to
mend: answers or files that differ, tools that never succeed, a state that is nowhere in the folder.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from coevolve_jax.config import parse_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its argument if any.", lock_config=True
)
_CONTEXTS = flags.DEFINE_integer("contexts", 4, "Worlds to explore.", lower_bound=1)
flags.mark_flag_as_required("config")


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(check(_CONFIG.value, _CONTEXTS.value))
    except ValueError as error:
        sys.exit(f"Error: {error}")


def check(c, count: int) -> int:
    """Prints what was found. Returns 1 where there is something to mend, else 0."""
    from coevolve_jax import build, envs
    from coevolve_jax.envs.mcp import check
    from coevolve_jax.explorers import scripted
    from coevolve_jax.seeding import rng_for
    from coevolve_jax.synthesis.explore import explore, unguided

    family = build.family(c)
    make = envs.family.module(c.environment.name).make
    if not hasattr(make(), "state"):
        raise ValueError(
            f"config.environment.name is {c.environment.name!r}: servers are those of mcp and folder_tools."
        )
    scenarios = build.scenarios(c)
    contexts = [unguided(scenarios[n % len(scenarios)], f"check-{n}") for n in range(count)]
    with build.env_pool(c) as pool:
        explorations = explore(
            scripted.make(None, family).explorer,
            family.tools,
            pool,
            contexts,
            rounds=1,
            steps=c.evolution.steps,
            rng=rng_for(c.seed, "check_server"),
        )
    calls = [[t.call for t in found.triplets] for found in explorations]
    rounds = [check.execute(make, context.task, own) for context, own in zip(contexts, calls)]
    tools = dict.fromkeys(t["function"]["name"] for s in scenarios for t in family.tools(s))
    found = check.summary(rounds, list(tools))
    width = max(map(len, found))
    print(f"{'tool':{width}}  calls  succeeded  changed the folder")
    for name, own in found.items():
        print(f"{name:{width}}  {own.calls:5d}  {own.succeeded:9d}  {own.changed:18d}")
    told = check.sentences(found)
    for sentence in told or ["All tools are fit to train on."]:
        print(f"* {sentence}")
    if not told and not c.environment.reuse_server:
        tasks = [reusing(context.task) for context in contexts]
        if check.alike(rounds, [check.execute(make, *job) for job in zip(tasks, calls)]):
            print(
                "* The server remembered nothing of an earlier world: --config.environment.reuse_server=True"
            )
            print("  lets one process serve many worlds, which saves their start.")
    return int(bool(told))


def reusing(task):
    """Returns the task with a server that may serve one world after the other."""
    import dataclasses

    return dataclasses.replace(task, scenario={**task.scenario, "reuse_server": True})


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
