"""CoEvolve on an MCP server of yours with SmolLM2-135M-Instruct, a real language model, on two CPU cores.

The learner and the engine are those of configs/bfcl_smollm2.py. `make smollm2` makes the model's folder. Name
the server and the template folder (docs/guides/train_on_an_mcp_server.md):

    python experiments/main.py --config=configs/mcp_smollm2.py --workdir=runs/mcp \\
        --config.environment.command="SERVER {world}" --config.environment.template=FOLDER

Arguments are those of configs/bfcl_tiny.py. Hardware: two CPU cores, 16 GB of memory.
"""

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_smollm2.py", arg)
    del c.environment.toolsets
    c.environment.update(configs.server())
    c.environment.name = "mcp"
    c.data.leak_splits = ()
    c.rollout.max_steps = 8
    c.warm_start.tasks = 128  # a world takes a second of a core where the server is started for it
    return c
