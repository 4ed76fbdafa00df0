"""The leaderboard's table of methods with hints: its first testbed, with a base policy that reads hints.

A policy that never saw a hint is confused by one. This base policy has the weak tools of the other testbed,
and 30% of its demonstrations held a hint, of which 30% were wrong. It is not in this repository: make it
first. All arms have it, those without hints too. docs/notes/arena.md has the plan.

    experiments/pretraining/tiny_qwen3_hints.sh    # about 20 minutes on two cores; writes runs/pretrain/hints
    python experiments/compare.py --config=configs/leaderboard_hints.py:split=test --seeds=200:208 \\
        --arms=random,step_credit,slea_rl,evolver,evolving_rl,sage --workdir=runs/hints

    split      development (to build a method), or test (read once, when the method is frozen)
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "leaderboard_bfcl.py", arg)
    c.model = "runs/pretrain/hints"
    return c
