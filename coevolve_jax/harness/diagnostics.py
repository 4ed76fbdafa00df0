"""The diagnostics of a campaign: what is registered, tested again on later versions, and may refuse.

After each trained version, once there is evidence enough, the proposer's own formulas and the best templates
are tested (registry.py). One that kept its sign on two later versions is gating: a version that brings it to
alert is not promoted. Values of steps are tracked. Once there are runs enough, one of them after each version
is tested by what it foretold. It refuses no version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.builtin import BUILTIN
from coevolve_jax.harness.evidence import Half
from coevolve_jax.harness.registry import (
    MISSING,
    RUNS,
    VERSIONS,
    Diagnostic,
    Evidence,
    Foretold,
    Registration,
    foretells,
    register,
    separation_in,
    status,
    testable,
    thresholds,
)
from coevolve_jax.harness.templates import Candidate, invent

LIVE = ("registered", "gating")
COUNT = 2  # new formulas of a unit after a version: about trajectories to be tested, of steps to be tracked
LEARNED = ("kl", "entropy", "clip_fraction", "grad_norm")  # fields of a step that only the learner knows
# Tested in this order, which no result decides.
STEPS = tuple(
    Diagnostic(name, "step", formula, direction, "tracked")
    for name, formula, direction in (
        *((name, name, "either") for name in LEARNED),
        *((b.id, b.formula, b.direction) for b in BUILTIN if "step" in b.units),
    )
)


def values_of(found: Diagnostic) -> expressions.Expression:
    """The compiled formula. It was checked against known names when it was proposed."""
    return expressions.compile(found.formula, found.unit)


def live(known: Sequence[Diagnostic]) -> list[Diagnostic]:
    """The registered ones about trajectories."""
    return [d for d in known if d.status in LIVE and d.unit == "trajectory"]


def evolved(
    known: Sequence[Diagnostic],
    version: str,
    rows: Mapping[str, Evidence],
    promoted: Collection[str],
    rng: np.random.Generator,
    *,
    invented: Sequence[Candidate] = (),
    halves: Callable[[], Mapping[str, Sequence[Half]]] = dict,
) -> list[Diagnostic]:
    """The diagnostics after a version was judged.

    Args:
      rows: version -> the rollouts of its runs, of all trained versions up to this one, in their order.
      promoted: the start and the promoted versions, whose values make the thresholds.
      invented: formulas of the proposer, checked. They go before the templates; COUNT of a unit are taken.
      halves: gives version -> its runs' first halves and gains, of the same versions.
    """
    found = [_tested_again(d, rows, promoted) for d in known or STEPS]
    new = lambda unit: [c for c in invented if c.unit == unit][:COUNT]
    found += [
        Diagnostic(c.id, c.unit, c.formula, "either", "tracked", version, c.proposer) for c in new("step")
    ]
    registered = {d.id: values_of(d).values for d in live(found)}
    tests = [d.test for d in found if isinstance(d.test, Registration)]
    used = {run for test in tests for run in test.runs}
    whole = merged(list(rows.values()))
    own = new("trajectory")
    tried = [*(d.formula for d in found if d.unit == "trajectory"), *(c.formula for c in own)]
    if testable(whole):
        ids = {d.id for d in found} | {c.id for c in own}
        own += invent(whole, known=registered, tried=tried, ids=ids, count=COUNT - len(own))
    for number, candidate in enumerate(own, len(tests) + 1):
        values = expressions.compile(candidate.formula, "trajectory").values
        test = register(values, whole, number=number, rng=rng, registered=registered, used=used)
        kind = "refused" if test.refused else "registered"
        judged = Diagnostic(
            candidate.id,
            "trajectory",
            candidate.formula,
            test.direction,
            kind,
            version,
            candidate.proposer,
            test=test,
        )
        found.append(_with_thresholds(judged, rows, promoted) if kind == "registered" else judged)
        used |= set(test.runs)
        registered |= {candidate.id: values} if kind == "registered" else {}
    runs = sum(len(np.unique(own.run)) for own in rows.values())
    enough = runs >= RUNS and len(rows) >= VERSIONS
    return _foretold(found, halves(), promoted, rng) if enough else found


def _foretold(
    known: Sequence[Diagnostic],
    halves: Mapping[str, Sequence[Half]],
    promoted: Collection[str],
    rng: np.random.Generator,
) -> list[Diagnostic]:
    """Tests one tracked value of steps: a proposer's newest, else the next in the order of STEPS."""
    waiting = [d for d in known if d.status == "tracked"]
    if not waiting:
        return list(known)
    chosen = max(waiting, key=lambda d: (d.born, -waiting.index(d)))
    tests = [d.test for d in known if isinstance(d.test, Foretold)]
    formula, used = values_of(chosen), {run for test in tests for run in test.runs}
    steps = {v: [formula.values(half.steps) for half in own] for v, own in halves.items()}
    pairs = {v: [(_mean(x), half.gain) for x, half in zip(steps[v], own)] for v, own in halves.items()}
    test = foretells(pairs, number=len(tests) + 1, rng=rng, used=used)
    new = dataclasses.replace(
        chosen, test=test, direction=test.direction, status="refused" if test.refused else "registered"
    )
    there = [x for v in steps if v in promoted for own in steps[v] for x in own if np.isfinite(x)]
    if not test.refused and there:
        warn, alert = thresholds(there, new.direction)
        new = dataclasses.replace(new, warn=warn, alert=alert)
    return [new if d is chosen else d for d in known]


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _tested_again(d: Diagnostic, rows: Mapping[str, Evidence], promoted: Collection[str]) -> Diagnostic:
    if not isinstance(d.test, Registration) or d.status not in LIVE:
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


def watched(known: Sequence[Diagnostic], parent: Evidence, child: Evidence) -> dict[str, dict[str, Any]]:
    """id -> the registered diagnostic's mean in parent and child beside its thresholds, JSON values.

    unknown: the shares of the parent's and of the child's rollouts that have no value.
    """
    values = {d.id: [values_of(d).values(of.rows) for of in (parent, child)] for d in live(known)}
    return {
        d.id: {
            "before": _mean(values[d.id][0]),
            "after": _mean(values[d.id][1]),
            "unknown": [1 - float(np.isfinite(x).mean()) if len(x) else 1.0 for x in values[d.id]],
            "warn": d.warn,
            "alert": d.alert,
            "direction": d.direction,
            "gating": d.status == "gating",
        }
        for d in live(known)
    }


def newly_at_alert(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The gating ones of `watched` that are at alert in the child and not in the parent, each in words.

    One is at alert if its mean is beyond the bound, and also if more than MISSING of the rollouts have no
    value of it: a mean over the others would say nothing of them.
    """

    def alert(of: Mapping[str, Any], side: int) -> str:
        value, unknown = of["before" if side == 0 else "after"], of["unknown"][side]
        if unknown > MISSING:
            return f" has no value in {unknown:.0%} of the rollouts"
        if value is None or of["alert"] is None:
            return ""
        past = value > of["alert"] if of["direction"] == "up_is_bad" else value < of["alert"]
        return f" is {value:.3g}, beyond {of['alert']:.3g}" if past else ""

    gating = {id: of for id, of in found.items() if of["gating"]}
    return [f"{id}{now}" for id, of in gating.items() if (now := alert(of, 1)) and not alert(of, 0)]


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
