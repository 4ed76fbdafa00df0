"""A campaign: the demo's policy on BFCL, whose training harness evolves too (EvoTrainer, arXiv 2606.03108).

A run takes about seven minutes of one core (docs/results/harness.md).

    python experiments/evolve_harness.py --config=configs/bfcl_harness.py --workdir=runs/harness --jobs=2
    python experiments/evolve_harness.py --config=configs/bfcl_harness.py:fault=slow --workdir=runs/slow

    start     tuned (the demo's own settings), or textbook (GRPO as it is in textbooks)
    fault     one of coevolve_jax/harness/bench.py, planted into the start; none
    proposer  scripted, placebo, score, search, or llm (a model over the OpenAI protocol)
    strategy  how the training set grows; static: not at all
"""

from ml_collections import ConfigDict

from coevolve_jax.config import harness, harness_model, inherit, override, parse_arg
from coevolve_jax.harness.bench import FAULTS

STARTS = {
    "tuned": {},
    "textbook": {
        "learner.aggregate": "sequence",
        "learner.kl_coef": 0.04,
        "learner.skip_zero_variance_groups": False,
    },
}


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(
        arg, start="tuned", fault="none", proposer="scripted", strategy="static", seed=0, engine="native"
    )
    if arg.start not in STARTS:
        raise ValueError(f"Config argument start={arg.start!r} must be one of {', '.join(STARTS)}.")
    if arg.fault not in FAULTS:
        raise ValueError(f"Config argument fault={arg.fault!r} must be one of {', '.join(FAULTS)}.")
    c = inherit(__file__, "bfcl_tiny.py", f"strategy={arg.strategy},seed={arg.seed},engine={arg.engine}")
    c.steps = 24
    c.evaluation.every = 0
    c.checkpoint.every = 24
    c.harness = harness()
    c.harness.proposer = arg.proposer
    if arg.proposer == "llm":
        c.harness_model = harness_model()
    return override(c, {**STARTS[arg.start], **FAULTS[arg.fault].changes})
