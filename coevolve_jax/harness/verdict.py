"""The verdict on a version: conditions that code alone judges. All must hold for a promotion.

    canary    no lever has moved the judge
    score     the mean difference to the parent on the selection set is at least one standard error
    target    the diagnostic that the hypothesis names has moved as it said
    reward    the success in training rises, or the reward that is trained on, by the version's terms, does
              not; a value that is unknown shows neither
    gating    no registered diagnostic that may refuse is newly at alert
    audit     an independent verifier refuses no more of the child's successes than of the parent's, and
              than of the start's

The reading on the selection set decides and is never reported as the result: harness/final.py reads fresh
seeds and the test for that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from coevolve_jax.analysis import stats
from coevolve_jax.harness.audit import Audit
from coevolve_jax.harness.evidence import Selection
from coevolve_jax.harness.records import RULES, Expectation, Rule, Verdict

RESAMPLES = 2_000


def judge(
    parent: Mapping[int, Selection],
    child: Mapping[int, Selection],
    *,
    noise: float,
    rules: Sequence[str] = RULES,
    expects: Expectation | None = None,
    before: Mapping[str, float | None] | None = None,
    after: Mapping[str, float | None] | None = None,
    alerts: Sequence[str] = (),
    audit: Audit | None = None,
) -> Verdict:
    """Judges a version.

    Args:
      parent, child: seed -> selection, of the same seeds.
      noise: standard deviation of one run's success between seeds, from a calibration.
      rules: the conditions that count, of RULES. "score" alone asks for any difference above 0.
      expects: of the hypothesis. before, after: the rows of parent and child, rewarded by the child's terms.
        None: the reward is not judged.
      alerts: gating diagnostics that are at alert for the child and were not for the parent.
      audit: None: not audited.
    """
    by_seed = {str(s): difference(parent[s], child[s]) for s in sorted(child)}
    mean = float(np.mean(list(by_seed.values())))
    se = standard_error(parent, child, noise)
    least = se if len(rules) > 1 else 0.0
    found = [
        Rule(
            "score",
            mean >= least and mean > 0,
            f"Success on the selection set differs from the parent's by {_points(mean)}; "
            f"{_points(least) if least else 'anything above 0'} is asked for.",
            mean,
            least,
        )
    ]
    if expects:
        was, now = (row.get(expects.diagnostic) if row else None for row in (before, after))
        found.append(
            Rule(
                "target",
                expects.holds(was, now),
                f"{expects.diagnostic} went from {_number(was)} to {_number(now)}; expected: "
                f"{expects.direction} by {_number(expects.least)} at least.",
                now,
                None if was is None else was + expects.least * (1 if expects.direction == "up" else -1),
            )
        )
    if before is not None and after is not None:
        found.append(_reward(before, after))
    found.append(
        Rule("gating", not alerts, f"Newly at alert: {', '.join(alerts)}." if alerts else "No new alert.")
    )
    if audit is not None:
        found.append(Rule("audit", audit.ok, audit.sentence, audit.share, audit.bound))
    decisive = [rule for rule in found if rule.name in rules]
    failed = next((rule for rule in decisive if not rule.ok), None)
    kind = "promoted" if failed is None else "invalid" if failed.name == "audit" else "rejected"
    success = float(np.mean([s.success for s in child.values()]))
    return Verdict(kind, tuple(decisive), success, mean, se, by_seed)


def with_canary(judged: Verdict, moved: str) -> Verdict:
    """The verdict beside the canary's word, which comes first: a version that moved the judge is invalid.

    moved: a sentence on how it was moved; "": it was not. Another judge may have no task with a trial on both
      sides: then nothing is told of the score.
    """
    rule = Rule("canary", not moved, moved or "The start's policy is scored as under the start's config.")
    if moved and math.isnan(judged.difference or 0.0):
        return Verdict("invalid", (rule,))
    kind = "invalid" if moved else judged.kind
    return dataclasses.replace(judged, kind=kind, rules=(rule, *judged.rules))


def with_person(judged: Verdict, approved: bool, why: str) -> Verdict:
    """The verdict after a person's word: it can stop a promotion, and never makes one."""
    rule = Rule(
        "person",
        approved,
        f"A person {'approved' if approved else 'refused'} it: {why or 'no reason given'}.",
    )
    kind = "rejected" if judged.kind == "promoted" and not approved else judged.kind
    return dataclasses.replace(judged, kind=kind, rules=(*judged.rules, rule))


def difference(parent: Selection, child: Selection) -> float:
    """Child - parent in success on the same tasks; nan where a side has no trial.

    Where trials are lost it is the smaller of two: the mean over the tasks that both have, and the difference
    with lost trials as failures. So no version gains by losing what it fails.
    """
    most = max(parent.most, child.most)
    if not (parent.lost(most) or child.lost(most)):
        return child.success - parent.success
    both = [(parent.by_task.get(task, (0, 0)), own) for task, own in child.by_task.items()]
    pairs = [own[0] / own[1] - theirs[0] / theirs[1] for theirs, own in both if own[1] and theirs[1]]
    if not pairs:
        return math.nan
    return min(float(np.mean(pairs)), child.worst(most) - parent.worst(most))


def standard_error(parent: Mapping[int, Selection], child: Mapping[int, Selection], noise: float) -> float:
    """The standard error of the mean difference over m seeds: the larger of two estimates.

    One is sqrt(2 noise^2 / m). The other is the bootstrap over the scenarios of the selection set, which sees
    the luck of the tasks and not that of the runs.
    """
    sums: dict[str, list[float]] = {}
    for seed in child:
        for task, (solved, trials) in child[seed].by_task.items():
            theirs, of = parent[seed].by_task.get(task, (0, 0))
            if trials and of:
                sums.setdefault(child[seed].scenarios[task], []).append(solved / trials - theirs / of)
    if not sums:
        return math.sqrt(2 * noise**2 / len(child))
    parts, wholes = np.array([sum(v) for v in sums.values()]), np.array([len(v) for v in sums.values()])
    counts = stats.resample(len(parts), np.random.default_rng(0), RESAMPLES)
    spread = float(np.std(counts @ parts / (counts @ wholes)))
    return max(math.sqrt(2 * noise**2 / len(child)), spread)


def _reward(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> Rule:
    values = [row.get(name) for name in ("shaped_last", "success_last") for row in (before, after)]
    was, now, solved, solves = (math.nan if v is None else v for v in values)
    return Rule(
        "reward",
        solves > solved or now <= was,
        f"The reward by the version's terms went from {_number(was)} to {_number(now)}, success in training "
        f"from {_number(solved)} to {_number(solves)}.",
    )


def _points(rate: float) -> str:
    return f"{100 * rate:+.1f} points"


def _number(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{value:.4g}"
