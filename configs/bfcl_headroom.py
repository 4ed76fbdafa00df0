"""A testbed on which signals can show what they are worth: a base policy with few weak tools, which are known.

The demo's policy errs with half of its tools, so whatever is explored meets a weakness. This one (models/tiny_qwen3_weak)
errs with ten, some met often and some seldom by unguided exploration; D_0 has each of them in one or two tasks. The
question (shared by all arms of experiments/compare.py): are weak tools mended sooner if exploration knows of them?

    python experiments/compare.py --config=configs/bfcl_headroom.py --arms=static,random,oracle --seeds=0:3 --workdir=runs/headroom
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax.config import inherit

MODEL = Path(__file__).parents[1] / "models" / "tiny_qwen3_weak"


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "bfcl_tiny.py", arg)

    c.model = "models/tiny_qwen3_weak"
    c.steps = 40
    c.data.initial_tasks = 32  # N
    c.evolution.every = 5  # F
    c.evolution.tasks = 8
    c.evolution.contexts = 10
    c.evolution.settle_steps = 10

    c.evaluation.tasks = 96
    c.evaluation.balanced_tasks = 300
    c.evaluation.balanced_candidates = 1600
    c.evaluation.every = 20

    c.testbed = ConfigDict()
    c.testbed.weak_tools = tuple(json.loads((MODEL / "weak_tools.json").read_text()))  # with their habits
    c.testbed.least = 1  # tasks of D_0 with each of them
    c.testbed.most = 2
    c.testbed.candidates = 400  # that D_0 is chosen from
    c.checkpoint.every = 20
    return c
