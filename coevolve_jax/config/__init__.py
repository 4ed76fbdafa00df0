"""The config of a run: every key (keys.py), config files, checks, and what a run writes down of it.

A config file defines `get_config(arg) -> ConfigDict`. It starts from `defaults` or `inherit` and holds what
it changes.
"""

from coevolve_jax.config.command_line import check_new_file, check_output, parse_flags
from coevolve_jax.config.loading import (
    defaults,
    find,
    harness,
    harness_model,
    inherit,
    load_file,
    override,
    own_source,
    parse_arg,
    server,
)
from coevolve_jax.config.methods import (
    PARTS,
    REMEDY,
    asks_policy,
    explorer,
    needs,
    reads,
    scenario_keys,
    scheduled,
    strategy,
    trackers,
    words_by_model,
)
from coevolve_jax.config.recorded import (
    difference,
    digest,
    filled,
    numbers,
    numbers_of,
    of_run,
    plain,
    read,
    renamed,
    to_json,
)
from coevolve_jax.config.rules import check, check_evolution, check_several_runs, check_values

__all__ = [
    "PARTS", "REMEDY", "asks_policy", "check", "check_evolution", "check_new_file", "check_output",
    "check_several_runs", "check_values", "defaults", "difference", "digest", "explorer", "filled", "find",
    "harness", "harness_model", "inherit", "load_file", "needs", "numbers", "numbers_of", "of_run",
    "override", "own_source", "parse_arg", "parse_flags", "plain", "read", "reads", "renamed",
    "scenario_keys", "scheduled", "server", "strategy", "to_json", "trackers", "words_by_model",
]  # fmt: skip
