"""The explorer that needs no LLM: it reflects, acts, abstracts and judges by rules."""

from __future__ import annotations

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Family, Roles
from coevolve_jax.explorers.scripted.abstractor import Abstractor
from coevolve_jax.explorers.scripted.explorer import Explorer
from coevolve_jax.explorers.scripted.phrasing import phrase
from coevolve_jax.explorers.scripted.reflector import Reflector
from coevolve_jax.explorers.scripted.validator import Validator

DEFAULTS = {
    # Who words the queries of new tasks: "rules"; "varied" rules, with values that earlier answers single out
    # (phrasing.py); or "policy", the model in training (explorers/wording.py).
    "wording": "rules",
    "wording_attempts": 2,  # rollouts from the policy's words, of which one must succeed; 0: no rollout
    "temperature": 0.4,  # of a paraphrase
    "max_tokens": 192,  # of a paraphrase
    "max_length": 512,  # tokens of the question with its answer; a longer one is counted and not asked
}


def make(config: ConfigDict | None, family: Family) -> Roles:
    """Makes the roles. The settings of the policy's wording are for build.explorer, which adds it."""
    pattern = family.action_pattern
    varied = config is not None and config.explorer.get("wording") == "varied"
    abstractor = Abstractor(pattern, family.wording, phrase if varied else None)
    return Roles("scripted", Reflector(pattern), Explorer(pattern), abstractor, Validator())
