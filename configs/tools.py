"""Your own tools with SmolLM2-135M-Instruct, a real language model, on two CPU cores.

A class in TRL's style, or a file of functions, is all that it needs: exploration makes the tasks, execution
validates them, and equality of state and answers is the reward. The policy first learns the solutions of
explored tasks (warm start). GRPO and evolution go on from there. `make smollm2` makes the model's folder.

    python experiments/main.py --config=configs/tools.py:source=examples/shop.py:Shop --workdir=runs/shop

Arguments are those of configs/bfcl_tiny.py, and source: a class ("my_env:Shop", "my_env.py:Shop") or a file.
Hardware: two CPU cores, 16 GB of memory. Expected time and score: see docs/notes/own_tools.md.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import defaults, inherit


def get_config(arg: str = "") -> ConfigDict:
    items = arg.split(",")
    source = next((item.removeprefix("source=") for item in items if item.startswith("source=")), "")
    others = ",".join(item for item in items if not item.startswith("source="))
    c = inherit(__file__, "bfcl_smollm2.py", others)
    c.environment = defaults().environment
    c.environment.name = "tools"
    c.environment.source = source
    c.environment.workers = 2
    c.environment.call_timeout = 2.0
    c.data.leak_splits = ()
    return c
