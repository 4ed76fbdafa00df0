"""CoEvolve on mcp-server-sqlite with the tiny Qwen3 in this repository, which has never seen SQL.

It shows that a run on an MCP server works; configs/mcp_shop.py has a model that can learn something there.
`make mcp` sets the server up and makes the shops of examples/mcp_shop.py in runs/mcp_shop.

    make mcp
    python experiments/synthesize.py --config=configs/mcp_tiny.py --tasks=10
    python experiments/main.py --config=configs/mcp_tiny.py --workdir=runs/mcp_tiny

Arguments are those of configs/bfcl_tiny.py.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)
    shop = inherit(__file__, "mcp_shop.py", arg)
    c.steps = 16
    c.environment = shop.environment
    c.data.leak_splits = shop.data.leak_splits
    c.data.initial_tasks = 32
    c.data.max_calls = 4
    c.rollout.tasks_per_step = 8
    c.rollout.max_length = 1024
    c.rollout.max_steps = shop.rollout.max_steps
    c.learner.pack_length = 1024
    c.evolution.every = 8
    c.evolution.tasks = 8
    c.evolution.contexts = 8
    c.evolution.freeze_last_steps = 8
    c.evaluation.tasks = 32
    c.evaluation.every = 8
    return c
