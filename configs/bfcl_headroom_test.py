"""The testbed as it was frozen on 2026-11-22, before any test scenario was read: for the one reading of the test set.

What was tried on development seeds, and the numbers that chose these settings, stand in docs/notes/headroom.md. The seeds of
the test (100 and up) were used for nothing before.

    python experiments/compare.py --config=configs/bfcl_headroom_test.py --arms=static,random,placebo,coevolve,blame,oracle \
      --seeds=100:108 --workdir=runs/test --jobs=2
"""

from ml_collections import ConfigDict

from coevolve_jax.config import inherit, parse_arg


def get_config(arg: str = "") -> ConfigDict:
    arg = parse_arg(arg, weak="seldom", strategy="blame", seed=0, engine="native")
    given = f"weak={arg.weak},strategy={arg.strategy},seed={arg.seed},engine={arg.engine}"
    c = inherit(__file__, "bfcl_headroom.py", given)
    c.environment.eval_split = "test"
    if arg.strategy != "blame":
        return c

    # The best that was found; the paper's own method is strategy=coevolve, and has no settings that were tuned here.
    c.strategy.first_sight = 1  # later visits hide what fails elsewhere: the policy knows its tasks
    c.strategy.memory = 0.95  # half of what is known of a tool is from the last 14 steps
    c.strategy.sharpness = 2.0  # by p (1 - p) itself half of the weight lay on the many sound tools
    c.strategy.breadth = 6  # different tools in a round: 10 took sound ones in, 1 forgot weak ones
    c.strategy.chasing = False  # a tool that is never called right teaches nothing
    c.strategy.probe = 0  # no rollouts besides those of the other arms
    return c
