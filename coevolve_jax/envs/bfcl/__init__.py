"""The multi-turn classes of the Berkeley Function-Calling Leaderboard as an environment family."""

from coevolve_jax.envs.bfcl.environment import *  # noqa: F403
