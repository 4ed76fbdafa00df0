"""The summary and the ledger of a run that has ended: summary.json and ledger.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis import stats
from coevolve_jax.config import idle
from coevolve_jax.loop.state import RunState
from coevolve_jax.records.costs import EXPLORER, SERVING, under
from coevolve_jax.rollout.utilization import serving


def summary(
    config: ConfigDict,
    state: RunState,
    versions: Mapping[str, str],
    *,
    warm_start: Mapping | None = None,
    explorer_model: Any = None,
) -> dict[str, Any]:
    """Returns what summary.json holds.

    Args:
      versions: of the software that the scores depend on (`inputs.versions`).
      warm_start: the summary of the run's warm start, if it had one.
      explorer_model: the model that answered the explorer, if one did.
    """
    sets = {row["set"]: row for row in state.evaluations}  # the last row of each
    first = {row["set"]: row for row in reversed(state.evaluations)}
    before, after = first["iid"], sets["iid"]
    made, total = state.synthesis, sum(state.seconds.values())
    found = {
        "held_out_success_before": before["success"],
        "held_out_success_after": after["success"],
        "held_out_tasks": len(before["by_task"]),
        "held_out": {"before": before, "after": after},
        "held_out_split": config.environment.eval_split,
        "balanced": {"before": first["balanced"], "after": sets["balanced"]} if "balanced" in sets else None,
        "signals": state.signals,
        "tasks": {
            "initial": state.initial.added,
            "final": len(state.tasks),
            "never_trained": sum(r.trained == 0 for r in state.tasks.records.values()),
            "proposed": made.proposed,
            "accepted": made.accepted,
            "retained": made.retained,
            "refused": dict(sorted(made.refused.items())),
        },
        "seconds": dict(sorted(state.seconds.items())),
        "evolution_share": state.seconds.get("evolution", 0.0) / total,
        "steps": state.step,
        "seed": config.seed,
        "strategy": config.strategy.name,
        "config_digest": configs.digest(config),
        "versions": versions,
        "notes": idle.notes(config, fresh=not state.tasks.rows["evolved"].any()),
    }
    if "queries" in sets:
        found["queries"] = {"before": first["queries"], "after": sets["queries"]}
    if helped := {name: row for name, row in sets.items() if name.endswith(stats.HELP)}:
        found["help"] = helped
    if warm_start is not None:
        found["warm_start"] = warm_start
    if explorer_model is not None:
        found["explorer_model"] = explorer_model
    if counts := under(state.ledger, SERVING):
        found["serving"] = serving(counts)
    if costs := under(state.ledger, EXPLORER):
        found["explorer"] = dict(sorted(costs.items()))
    return found


def ledger(state: RunState) -> dict[str, Any]:
    """Returns what ledger.json holds: the statistics and costs of making tasks, and all costs."""
    return {
        "initial": state.initial.to_json(),
        "evolution": state.synthesis.to_json(),
        "llm_tokens": state.ledger[f"{EXPLORER}llm_tokens"],
        "money": state.ledger[f"{EXPLORER}money"],
        "seconds": state.seconds.get("evolution", 0.0),
        "costs": dict(sorted(state.ledger.items())),
    }
