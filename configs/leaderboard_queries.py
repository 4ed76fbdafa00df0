"""The leaderboard's table of methods that learn at test time: held-out queries without their answers.

The testbed and the budget are those of configs/leaderboard_bfcl.py. Besides, 96 queries are held out. A
method that needs them has them in D_t without their reference calls, and their rollouts bring no reward. The
primary metric is success on these queries. The other held-out sets stay far from them by leak control, and
show what of the gain is general.

    python experiments/compare.py --config=configs/leaderboard_queries.py:split=test --seeds=200:208 \\
        --arms=static,random,ttrl,ttcs --planned=ttcs-ttrl,ttcs-random,ttrl-static --workdir=runs/queries

    split      development (to build a method), or test (read once, when the method is frozen)

docs/notes/arena.md has the plan.
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit


def get_config(arg: str = "") -> ConfigDict:
    c = inherit(__file__, "leaderboard_bfcl.py", arg)
    c.evaluation.queries = 96
    return c
