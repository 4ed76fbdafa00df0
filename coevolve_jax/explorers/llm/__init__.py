"""The explorer of the paper: a language model plays the four roles, over any server that speaks the OpenAI protocol.

Its prompts are prompts/*.md, a file for each role. What it writes is data: checked against a schema, bounded, and
never executed but as a call to a tool that the environment offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.llm import answers
from coevolve_jax.explorers.llm.abstractor import Abstractor
from coevolve_jax.explorers.llm.client import Client
from coevolve_jax.explorers.llm.explorer import Explorer
from coevolve_jax.explorers.llm.reflector import Reflector
from coevolve_jax.explorers.llm.validator import Validator

DEFAULTS = {
    "base_url": "http://127.0.0.1:30000/v1",  # of the server; SGLang's own, or a hosted one's
    "model": "default",  # as the server calls it; "default": the one that it serves
    "key_variable": "OPENAI_API_KEY",  # environment variable that holds the key; unset: the server needs none
    "temperature": 0.7,
    "max_tokens": 1024,  # of an answer
    "json_schema": True,  # the server constrains answers to a schema; False: they are only checked
    "timeout": 60.0,  # seconds for one answer, all of it
    "attempts": 4,  # at one answer, where the server cannot be reached, is slow, busy or broken
    "patience": 30.0,  # seconds between two attempts at most, whatever the server asks for
    "concurrency": 16,  # questions under way at once
    "max_bytes": 1_000_000,  # of an answer
    "price_in": 0.0,  # money per million tokens of questions
    "price_out": 0.0,  # and of answers
    "budget_tokens": 0,  # of a run, both ways; synthesis ends there and training goes on; 0: no bound
    "budget_money": 0.0,  # likewise
    "cache": "runs/answers.sqlite",  # every answer, for all runs that ask the same; "": none
    "offline": False,  # only what is in the cache
    "solve": 0,  # attempts at each task from its words alone, to keep it (synthesis/solve.py); 0: it need not be solved
    "calibration": 4,  # failed proposals of a batch that the judge is asked about too, at most: does it agree?
    # Who plays each role, "llm" or "scripted"; and who makes D_0 and the held-out tasks.
    "reflector": "llm",
    "explorer": "llm",
    "abstractor": "llm",
    "validator": "llm",
    "initial": "llm",
}


# `make` gets what the run has recorded of the model that answers.
RECORDS_MODEL = True


def make(config: ConfigDict, family: Family, recorded: Mapping[str, Any] | None = None) -> Roles:
    """Raises ValueError where the server does not say which model it serves, or serves another one than is recorded.

    One that is away says so when it is asked.
    """
    client = Client(config.explorer, recorded)
    served = client.found()
    roles = played_by(f"llm:{served.name}" if served else "llm", client, family)
    return roles._replace(unanswered=client.unanswered, served=lambda: client.served._asdict())


def played_by(name: str, client: answers.Client, family: Family) -> Roles:
    """The four roles, asked of a client."""
    return Roles(
        name,
        Reflector(client, family.tools, family.action_pattern),
        Explorer(client),
        Abstractor(client),
        Validator(client),
        client.costs,
        client.llm_calls,
    )
