"""The paper's explorer: a language model plays the four roles, over any server with the OpenAI protocol.

The prompts are prompts/*.md, a file for each kind of question. Those about a task begin with system.md of
coevolve_jax/llm/prompts/.
An answer is data: it is bounded and checked against a schema. Only a call to a tool that the environment
offers is executed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.llm.abstractor import Abstractor
from coevolve_jax.explorers.llm.explorer import Explorer
from coevolve_jax.explorers.llm.reflector import Reflector
from coevolve_jax.explorers.llm.saying import ask
from coevolve_jax.explorers.llm.validator import Validator
from coevolve_jax.llm import answers, settings
from coevolve_jax.llm.client import Client

DEFAULTS = {
    **settings.DEFAULTS,  # of the client; beyond a budget synthesis ends and training goes on
    "solve": 0,  # attempts to solve a task from its words, or drop it (synthesis/solve.py); 0: no attempt
    "calibration": 4,  # failed proposals per batch that the judge sees too, at most, to measure agreement
    # The player of each role, "llm" or "scripted". "initial" makes D_0 and the held-out tasks.
    "reflector": "llm",
    "explorer": "llm",
    "abstractor": "llm",
    "validator": "llm",
    "initial": "llm",
}


# `make` gets the run's record of the model that answers.
RECORDS_MODEL = True


def make(config: ConfigDict, family: Family, recorded: Mapping[str, Any] | None = None) -> Roles:
    """Makes the roles. recorded: the model that answered the run so far (Roles.served); None: a new run.

    Raises ValueError if the server does not say which model it serves, or serves another one than the record
    says. Raises it also if the cache cannot be used. A server that is away is no error: questions to it fail.
    """
    client = Client(config.explorer, recorded)
    served = client.found()
    roles = played_by(f"llm:{served.name}" if served else "llm", client, family)
    return roles._replace(unanswered=client.unanswered, served=lambda: client.served._asdict())


def played_by(name: str, client: answers.Client, family: Family) -> Roles:
    """Makes the four roles over one client. name: the explorer's name in lineages."""
    return Roles(
        name,
        Reflector(client, family.tools, family.action_pattern),
        Explorer(client),
        Abstractor(client, family.action_pattern),
        Validator(client),
        client.costs,
        client.llm_calls,
        ask=functools.partial(ask, client),
    )
