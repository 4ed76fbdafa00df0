"""Diagnostics version 0: the values of records/health.py as formulas, which needed no registration."""

from __future__ import annotations

from typing import NamedTuple


class Builtin(NamedTuple):
    """A diagnostic: one formula, which is read in each of its units.

    direction: "up_is_bad", "down_is_bad", or "either" where both ends are alarming.
    """

    id: str
    units: tuple[str, ...]
    formula: str
    direction: str


_BOTH = ("trajectory", "step")

# The ids are the names of health.diagnose and health.behaviour. Over a step a ratio of counts is the pooled
# share; over a trajectory it is the rollout's own, which registration can separate (harness/registry.py).
BUILTIN = (
    Builtin("zero_variance_groups", ("step",), "zero_variance", "up_is_bad"),
    Builtin("group_std", ("step",), "spread", "down_is_bad"),
    Builtin("logprob", _BOTH, "logprob_mean", "up_is_bad"),
    Builtin("steps", _BOTH, "double(calls + malformed) / double(rollouts)", "either"),
    Builtin("truncated", _BOTH, "double(truncated) / double(rollouts)", "up_is_bad"),
    Builtin("active_groups", ("step",), "live", "down_is_bad"),
    Builtin("length_reward", ("step",), "length_reward", "up_is_bad"),
    Builtin("malformed", _BOTH, "double(malformed) / double(calls + malformed)", "up_is_bad"),
    Builtin("invalid", ("step",), "double(invalid) / double(rollouts + invalid)", "up_is_bad"),
    Builtin("tool_failures", _BOTH, "double(errors) / double(calls)", "up_is_bad"),
    Builtin("tool_entropy", ("step",), "tool_entropy", "down_is_bad"),
    Builtin("repeated", _BOTH, "double(repeated_pairs) / double(pairs)", "up_is_bad"),
    Builtin("longest_run", _BOTH, "double(longest_run)", "up_is_bad"),
)
