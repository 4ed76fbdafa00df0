"""The policy under training as its own explorer: the roles of explorers/llm, asked through the run's engine.

It explores with the weights of the step at which the training set evolves. Answers are not cached, since a
resumed run has the same weights and gets the same answers. Only the engine sends anything out of the process.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.llm import played_by
from coevolve_jax.explorers.policy.client import Client
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Engine

# `make` gets the policy's chat format and the engine as well. The engine has the capacity for max_length and
# max_tokens, and can constrain its samples if json_schema is True.
ASKS_POLICY = True

DEFAULTS = {
    "temperature": 0.7,
    "max_tokens": 512,  # of an answer
    "max_length": 8000,  # tokens of a question with its answer; a longer one is counted and not asked
    "json_schema": True,  # constrain answers to a schema while sampling; False: only check them
    "solve": 0,  # attempts to solve a task from its words, or drop it (synthesis/solve.py); 0: no attempt
    "calibration": 4,  # failed proposals per batch that the judge sees too, at most, to measure agreement
    # The player of each role, "policy" or "scripted". "initial" makes D_0 and the held-out tasks.
    "reflector": "policy",
    "explorer": "policy",
    "abstractor": "policy",
    "validator": "policy",
    "initial": "policy",
}


def make(config: ConfigDict, family: Family, chat: Chat, engine: Engine) -> Roles:
    """Raises ValueError if json_schema is True and the engine cannot constrain samples."""
    return played_by("policy", Client(config.explorer, chat, engine), family)
