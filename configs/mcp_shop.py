"""CoEvolve on mcp-server-sqlite, in the shops of examples/mcp_shop.py, with SmolLM2-135M-Instruct.

`make smollm2` makes the model's folder. `make mcp` sets the server up and makes the shops in runs/mcp_shop.

    python experiments/main.py --config=configs/mcp_shop.py --workdir=runs/mcp

Arguments are those of configs/bfcl_tiny.py. Hardware: two CPU cores, 16 GB of memory.
Expected time and score: see docs/notes/mcp.md.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "mcp_smollm2.py", arg)
    c.environment.command = ".mcp/sqlite/bin/mcp-server-sqlite --db-path {world}/shop.db"
    c.environment.template = "runs/mcp_shop"
    # append_insight keeps its notes in memory: no grading sees them, and the next world would.
    c.environment.tools = ("read_query", "write_query", "create_table", "list_tables", "describe_table")
    c.environment.reuse_server = True
    c.warm_start.tasks = 256
    c.warm_start.steps = 20  # after 40 nothing is left to learn by RL
    return c
