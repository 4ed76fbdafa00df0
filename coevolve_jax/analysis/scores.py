"""Scores of a benchmark as rows and as text: avg@k and best@k with their intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.analysis import stats


def scores(
    by_task: Mapping[str, Sequence[int]],
    num_rollouts: int,
    categories: Mapping[str, str],
    alike: Mapping[str, Any],
    together: bool = True,
) -> list[dict]:
    """avg@k and best@k for k = num_rollouts, with 95% intervals: by category of a benchmark, and overall.

    Args:
      by_task: task id -> [successes, trials].
      categories: task id -> its category.
      together: whether a row "all" follows several categories.
      alike: task id -> label shared by nearly equal tasks, which the bootstrap resamples together.

    Returns:
      Rows with category, tasks, trials, invalid (number of invalid rollouts), avg and best. avg: successes
      over trials. best: share of tasks solved by at least one rollout, among tasks whose k rollouts are all
      valid. Both are {"value", "low", "high"}, or None if no rollout is valid. If more than 1% of the
      rollouts are invalid (stats.LOST), or more than 1% of the tasks are not in best, avg_if_invalid_failed
      and best_if_invalid_failed count invalid rollouts as failures.
    """

    def estimate(counts: Mapping[str, Sequence[int]]) -> dict | None:
        labels = [alike.get(task, task) for task in counts]
        solved, of = zip(*counts.values()) if counts else ((), ())
        return dataclasses.asdict(stats.share(solved, of, labels)) if counts else None

    names = list(dict.fromkeys(categories.values()))
    rows = []
    for name in [*names, "all"] if len(names) != 1 and together else names:
        asked = {t: c for t, c in by_task.items() if name in ("all", categories.get(t))}
        tried = {t: c for t, c in asked.items() if c[1]}
        whole = {t: [s > 0, 1] for t, (s, n) in tried.items() if n == num_rollouts}
        trials = sum(n for _, n in tried.values())
        invalid = num_rollouts * len(asked) - trials
        row = {"category": name, "tasks": len(tried), "trials": trials, "invalid": invalid}
        row |= {"avg": estimate(tried), "best": estimate(whole)}
        lost = len(asked) - len(whole) > stats.LOST * len(asked)  # for best
        if lost or invalid > stats.LOST * num_rollouts * len(asked):
            row["avg_if_invalid_failed"] = estimate({t: [s, num_rollouts] for t, (s, _) in asked.items()})
            row["best_if_invalid_failed"] = estimate({t: [s > 0, 1] for t, (s, _) in asked.items()})
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping], num_rollouts: int) -> str:
    """Formats `scores` as text. If many rollouts are invalid, a second line counts them as failures."""
    told = lambda e: f"{e['value']:.1%} ({e['low']:.1%} to {e['high']:.1%})" if e else "no valid rollout"
    lines = [("", "tasks", f"avg@{num_rollouts} (95% interval)", f"best@{num_rollouts} (95% interval)")]
    for r in rows:
        lines.append((r["category"], str(r["tasks"]), told(r["avg"]), told(r["best"])))
        if "avg_if_invalid_failed" in r:
            worst = told(r["avg_if_invalid_failed"]), told(r["best_if_invalid_failed"])
            lines.append((f"with {r['invalid']} invalid", "", *worst))
    return "\n".join(f"{a:>16}  {b:>5}  {c:<24}  {d}".rstrip() for a, b, c, d in lines)
