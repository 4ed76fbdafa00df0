"""The explorer that needs no LLM: it reflects, acts, abstracts and judges by rules."""

from __future__ import annotations

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.scripted.abstractor import Abstractor
from coevolve_jax.explorers.scripted.explorer import Explorer
from coevolve_jax.explorers.scripted.reflector import Reflector
from coevolve_jax.explorers.scripted.validator import Validator


def make(config: ConfigDict | None, family: Family) -> Roles:
    """Makes the roles. config is unused: the rules have no settings."""
    pattern = family.action_pattern
    return Roles(
        "scripted", Reflector(pattern), Explorer(pattern), Abstractor(pattern, family.wording), Validator()
    )
