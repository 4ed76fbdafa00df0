"""The policy that a run trains as its own explorer: the roles of explorers/llm, asked through the run's engine.

It explores with the weights of the step at which the training set evolves. Nothing leaves the process but what the
engine sends, and nothing is kept: a run that goes on has the same weights again, and gets the same answers.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.llm import played_by
from coevolve_jax.explorers.policy.client import Client
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Engine

# `make` gets the policy's chat format and the engine as well. The engine has room for max_length and max_tokens, and
# constrains what it samples where json_schema wants it.
ASKS_POLICY = True

DEFAULTS = {
    "temperature": 0.7,
    "max_tokens": 512,  # of an answer
    "max_length": 8000,  # tokens of a question with its answer; a longer one is not asked, and counted
    "json_schema": True,  # answers are constrained to a schema as they are sampled; False: they are only checked
    "solve": 0,  # attempts at each task from its words alone, to keep it (synthesis/solve.py); 0: it need not be solved
    "calibration": 4,  # failed proposals of a batch that the judge is asked about too, at most: does it agree?
    # Who plays each role, "policy" or "scripted"; and who makes D_0 and the held-out tasks.
    "reflector": "policy",
    "explorer": "policy",
    "abstractor": "policy",
    "validator": "policy",
    "initial": "policy",
}


def make(config: ConfigDict, family: Family, chat: Chat, engine: Engine) -> Roles:
    """Raises ValueError where answers are to be constrained and the engine cannot."""
    return played_by("policy", Client(config.explorer, chat, engine), family)
