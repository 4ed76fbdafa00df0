"""The diagnostics of a campaign: what is registered, tested again on later versions, and may refuse.

After each trained version the scripted inventor proposes formulas, and registry.py tests them. A diagnostic
that kept its sign on two later versions is gating: a version that brings it to alert is not promoted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from coevolve_jax.diagnosis import expressions
from coevolve_jax.harness.registry import (
    Diagnostic,
    Evidence,
    register,
    separation_in,
    status,
    thresholds,
)
from coevolve_jax.harness.templates import invent

LIVE = ("registered", "gating")


def values_of(found: Diagnostic) -> expressions.Expression:
    """The compiled formula. It was checked against known names when it was proposed."""
    return expressions.compile(found.formula, found.unit)


def evolved(
    known: Sequence[Diagnostic],
    version: str,
    rows: Mapping[str, Evidence],
    promoted: Collection[str],
    rng: np.random.Generator,
) -> list[Diagnostic]:
    """The diagnostics after a version was judged.

    Args:
      rows: version -> the rollouts of its runs, of all trained versions up to this one, in their order.
      promoted: the start and the promoted versions, whose values make the thresholds.
    """
    found = [_tested_again(d, rows, promoted) for d in known]
    live = {d.id: values_of(d).values for d in found if d.status in LIVE}
    tests = [d.test for d in found if d.test]
    used = {run for test in tests for run in test.runs}
    whole = merged(list(rows.values()))
    drawn = invent(whole, known=live, tried=[d.formula for d in found])
    for number, candidate in enumerate(drawn, len(tests) + 1):
        values = expressions.compile(candidate.formula, "trajectory").values
        test = register(values, whole, number=number, rng=rng, registered=live, used=used)
        kind = "refused" if test.refused else "registered"
        new = Diagnostic(
            candidate.id,
            "trajectory",
            candidate.formula,
            test.direction,
            kind,
            version,
            "templates",
            test=test,
        )
        found.append(_with_thresholds(new, rows, promoted) if kind == "registered" else new)
        used |= set(test.runs)
        live |= {candidate.id: values} if kind == "registered" else {}
    return found


def _tested_again(d: Diagnostic, rows: Mapping[str, Evidence], promoted: Collection[str]) -> Diagnostic:
    if d.test is None or d.status not in LIVE:
        return d
    values = values_of(d).values
    later = [separation_in(values, own, np.random.default_rng(0)) for v, own in rows.items() if v > d.born]
    return _with_thresholds(dataclasses.replace(d, status=status(d.test, later)), rows, promoted)


def _with_thresholds(d: Diagnostic, rows: Mapping[str, Evidence], promoted: Collection[str]) -> Diagnostic:
    values = values_of(d).values
    means = [m for v, own in rows.items() if v in promoted for m in step_means(values(own.rows), own)]
    if not means:
        return d
    warn, alert = thresholds(means, d.direction)
    return dataclasses.replace(d, warn=warn, alert=alert)


def step_means(x: np.ndarray, found: Evidence) -> list[float]:
    """The mean of values [n] in each step of each run; steps without a known value are left out."""
    keys = [f"{run} {step}" for run, step in zip(found.run.tolist(), found.step.tolist())]
    sums: dict[str, list[float]] = {}
    for key, value in zip(keys, x.tolist()):
        if np.isfinite(value):
            sums.setdefault(key, []).append(value)
    return [float(np.mean(values)) for values in sums.values()]


def newly_at_alert(known: Sequence[Diagnostic], parent: Evidence, child: Evidence) -> list[str]:
    """The gating diagnostics whose mean is beyond the alert threshold in the child and not in the parent."""
    found = []
    for d in known:
        if d.status != "gating" or d.alert is None:
            continue
        before, after = (float(np.nanmean(values_of(d).values(e.rows))) for e in (parent, child))
        beyond = (lambda v, d=d: v > d.alert) if d.direction == "up_is_bad" else (lambda v, d=d: v < d.alert)
        if beyond(after) and not beyond(before):
            found.append(d.id)
    return found


def merged(parts: Sequence[Evidence]) -> Evidence:
    """The rollouts of several versions as one, with groups numbered through."""
    rows, group, base = [], [], 0
    for part in parts:
        rows += part.rows
        group.append(part.group + base)
        base += int(part.group.max(initial=-1)) + 1
    join = lambda name: np.concatenate([getattr(p, name) for p in parts])
    return Evidence(
        tuple(rows), join("solved"), join("task"), np.concatenate(group), join("version"), join("run"),
        join("step"),
    )  # fmt: skip
