"""A testbed that measures what signals are worth: a base policy with ten weak tools, which are known.

The demo's policy errs with half of its tools, so any exploration meets a weakness. Here one task of 64 in D_0
calls each weak tool. The question for all arms of experiments/compare.py: does the policy learn weak tools
sooner if exploration knows them? The argument `weak` chooses one of two base policies:

    weak=seldom   unguided exploration rarely meets the weak tools (models/tiny_qwen3_seldom)
    weak=spread   it meets some of them often, so they improve without any signal (models/tiny_qwen3_weak)

    python experiments/compare.py --config=configs/bfcl_headroom.py --arms=static,random,oracle --seeds=0:3 \\
        --workdir=runs/headroom
    python experiments/compare.py --config=configs/bfcl_headroom.py:weak=spread --arms=...
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax.config import inherit, parse_arg

MODELS = {"seldom": "models/tiny_qwen3_seldom", "spread": "models/tiny_qwen3_weak"}


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, weak="seldom", strategy="coevolve", seed=0, engine="native")
    if arg.weak not in MODELS:
        raise ValueError(f"Config argument weak={arg.weak!r} must be one of {', '.join(MODELS)}.")
    c = inherit(__file__, "bfcl_tiny.py", f"strategy={arg.strategy},seed={arg.seed},engine={arg.engine}")

    c.model = MODELS[arg.weak]
    c.steps = 40
    c.data.initial_tasks = 64  # N
    c.evolution.every = 5  # F
    c.evolution.tasks = 16
    c.evolution.contexts = 20
    c.evaluation.tasks = 96
    c.evaluation.balanced_tasks = 300
    c.evaluation.balanced_candidates = 1600

    c.testbed = ConfigDict()
    planted = Path(__file__).parents[1] / c.model / "weak_tools.json"
    c.testbed.weak_tools = tuple(json.loads(planted.read_text()))  # with their habits
    c.testbed.least = 1
    c.testbed.most = 1
    c.testbed.candidates = 800
    c.checkpoint.every = 20
    return c
