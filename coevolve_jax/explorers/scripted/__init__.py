"""The explorer that needs no LLM: it reflects, acts, abstracts and judges by rules."""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Roles
from coevolve_jax.explorers.scripted.abstractor import Abstractor
from coevolve_jax.explorers.scripted.explorer import Explorer
from coevolve_jax.explorers.scripted.reflector import Reflector
from coevolve_jax.explorers.scripted.validator import Validator
from coevolve_jax.types import Task


def make(config: ConfigDict | None, tools: Callable[[Task], list[dict]]) -> Roles:
    """The rules have no settings, and all that they need of the tools is in what they are given to do."""
    return Roles("scripted", Reflector(), Explorer(), Abstractor(), Validator())
