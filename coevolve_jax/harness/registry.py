"""The registry of diagnostics: a value counts only after it told failures from successes of the same task.

A proposer sees the groups of tasks whose id hashes odd. The test takes the even ones, from runs that no
earlier test used where there are enough. The j-th test of a campaign has the level 0.05 / (j (j + 1)). The
levels sum to 0.05, which bounds the chance of any false registration.

A value of steps cannot tell rollouts apart. It is tracked, and registered if its mean over the first half of
a run foretells the later gain. These tests have a sequence of levels of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from coevolve_jax.diagnosis.features import Row, trajectory_row
from coevolve_jax.harness.separation import PERMUTATIONS, Separation, separate
from coevolve_jax.types import Group

ALPHA = 0.05
GROUPS = 100  # mixed groups of the testing half, at least
EFFECT = 0.10  # least distance of the AUC from 0.5
SIGN_GROUPS = 30  # mixed groups from which on a version must have the sign of all
MISSING = 0.05  # most missing values
ALIKE = 0.9  # rank correlation from which on a value is one that is registered already
WEAK = 0.05  # distance of the AUC from 0.5 that counts as none
RUNS, VERSIONS = 12, 6  # for a value of steps, at least
SHUFFLES = 20_000  # of the versions; all orders of seven are 5,040

Values = Callable[[Sequence[Row]], np.ndarray]  # rows [n] -> values [n], as Expression.values


class Recorded(NamedTuple):
    """The groups of one run, in the order of its steps. run: its name, one for each version and seed."""

    version: str
    run: str
    steps: Sequence[Sequence[Group]]


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """Valid rollouts of runs, [n] each.

    solved: success. task: ids. group: a number for each task and policy. version, run: names. step: the GRPO
    step.
    """

    rows: tuple[Row, ...]
    solved: np.ndarray
    task: np.ndarray
    group: np.ndarray
    version: np.ndarray
    run: np.ndarray
    step: np.ndarray

    def where(self, mask: np.ndarray) -> Evidence:
        """The rollouts of a bool mask [n]."""
        arrays = (self.solved, self.task, self.group, self.version, self.run, self.step)
        return Evidence(tuple(itertools.compress(self.rows, mask)), *(a[mask] for a in arrays))

    @property
    def mixed(self) -> Evidence:
        """The rollouts of groups with successes and failures."""
        size, solved = np.bincount(self.group), np.bincount(self.group, self.solved)
        return self.where(((solved > 0) & (solved < size))[self.group])

    @property
    def groups(self) -> int:
        return len(np.unique(self.group))


def evidence(runs: Sequence[Recorded]) -> Evidence:
    """The rollouts of runs as evidence."""
    groups = [(r, step, g) for r in runs for step, each in enumerate(r.steps) for g in each]
    found = [
        (trajectory_row(t, g.task, step), t.outcome.success, g.task.id, number, r.version, r.run, step)
        for number, (r, step, g) in enumerate(groups)
        for t in g.valid
    ]
    columns: list[Any] = list(zip(*found)) if found else [()] * 7
    kinds = (bool, str, int, str, str, int)
    return Evidence(columns[0], *(np.array(c, kind) for c, kind in zip(columns[1:], kinds, strict=True)))


def testing_half(task: str) -> bool:
    """Whether a task is of the half that tests read. Proposers see the other one."""
    return hashlib.sha256(task.encode()).digest()[0] % 2 == 0


def halves(found: Evidence) -> tuple[Evidence, Evidence]:
    """(the half that proposers see, the half that tests read)."""
    tests = np.array([testing_half(task) for task in found.task], bool)
    return found.where(~tests), found.where(tests)


@dataclasses.dataclass(frozen=True)
class Registration:
    """One test of a candidate, passed or not; a campaign keeps them all.

    Attributes:
      number: of the test, j. level: 0.05 / (j (j + 1)).
      auc: of failures against successes, over all groups: above 0.5 the value is higher in failures.
      by_version: version -> (AUC, mixed groups).
      nominal: an earlier test used some of these runs, so p is not of fresh data.
      runs: that it used.
      refused: why it is not registered, in a sentence; None if it is.
    """

    number: int
    level: float
    auc: float | None
    p: float | None
    groups: int
    missing: float
    by_version: Mapping[str, tuple[float, int]]
    nominal: bool
    runs: tuple[str, ...]
    refused: str | None

    @property
    def direction(self) -> str:
        return "up_is_bad" if (self.auc or 0) > 0.5 else "down_is_bad"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Registration:
        by_version = {name: (auc, groups) for name, (auc, groups) in data["by_version"].items()}
        return cls(**{**data, "by_version": by_version, "runs": tuple(data["runs"])})


@dataclasses.dataclass(frozen=True)
class Foretold:
    """One test of whether a value of steps, over the first halves of runs, foretells their later gains.

    Attributes:
      number, level: as in `Registration`, of a sequence of their own.
      tau: Kendall's, over versions. p: two-sided, by permuting versions: the runs of one are alike.
      versions: how many. runs: their runs, by name.
      nominal: an earlier test used some of these runs.
      refused: why it is not registered, in a sentence; None if it is.
    """

    number: int
    level: float
    tau: float
    p: float
    versions: int
    runs: tuple[str, ...]
    nominal: bool
    refused: str | None

    @property
    def direction(self) -> str:
        return "down_is_bad" if self.tau > 0 else "up_is_bad"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Foretold:
        return cls(**{**data, "runs": tuple(data["runs"])})


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """A diagnostic as a campaign keeps it.

    Attributes:
      unit, formula: see diagnosis/expressions.py.
      direction: "up_is_bad", "down_is_bad" or "either".
      status: "tracked", "registered", "gating", "retired" or "refused".
      born: the version after which it was proposed. proposer: who did.
      warn, alert: `thresholds`; None until a version is promoted.
      test: None for those that are only tracked.
    """

    id: str
    unit: str
    formula: str
    direction: str
    status: str
    born: str = ""
    proposer: str = "built-in"
    warn: float | None = None
    alert: float | None = None
    test: Registration | Foretold | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnostic:
        kind = Registration if data["unit"] == "trajectory" else Foretold
        return cls(**{**data, "test": data["test"] and kind.from_json(data["test"])})


def level(number: int) -> float:
    """Level of the number-th test of a campaign, from 1 on."""
    return ALPHA / (number * (number + 1))


def register(
    values: Values,
    found: Evidence,
    *,
    number: int,
    rng: np.random.Generator,
    registered: Mapping[str, Values] | None = None,
    used: Collection[str] = (),
    permutations: int = PERMUTATIONS,
) -> Registration:
    """Tests a candidate of the unit trajectory.

    Args:
      values: of rows, such as `Expression.values`.
      found: all evidence; the odd half is left out here.
      number: of this test in the campaign, from 1 on.
      registered: id -> values of the diagnostics that are registered.
      used: runs of earlier tests.
    """
    half = halves(found)[1].mixed
    fresh = half.where(~np.isin(half.run, list(used)))
    half = fresh if _enough(fresh) else half
    x = values(half.rows)
    told = separate(x, ~half.solved, half.group, rng, permutations)
    parts = {v: half.version == v for v in dict.fromkeys(half.version.tolist())}
    each = {v: separate(x[mask], ~half.solved[mask], half.group[mask]) for v, mask in parts.items()}
    by_version = {v: (s.auc, s.groups) for v, s in each.items() if s.auc is not None}
    alike = {id: rank_correlation(x, other(half.rows)) for id, other in (registered or {}).items()}
    why = _refusal(half, told, by_version, level(number), alike)
    runs = tuple(sorted(set(half.run.tolist())))
    nominal = bool({*runs} & {*used})
    return Registration(
        number, level(number), told.auc, told.p, told.groups, told.missing, by_version,
        nominal, runs, why,
    )  # fmt: skip


def testable(found: Evidence) -> bool:
    """Whether there is evidence enough for a test. A candidate that is tested earlier is lost."""
    return _enough(halves(found)[1].mixed)


def _enough(half: Evidence) -> bool:
    return half.groups >= GROUPS and len(set(half.run.tolist())) >= 2


def _refusal(
    half: Evidence,
    told: Separation,
    by_version: Mapping[str, tuple[float, int]],
    level: float,
    alike: Mapping[str, float],
) -> str | None:
    """The first condition that does not hold, as a sentence; None if all hold."""
    runs = len(set(half.run.tolist()))
    if told.missing > MISSING:
        return f"It is missing for {told.missing:.0%} of the rollouts: {MISSING:.0%} is the most."
    if told.groups < GROUPS or runs < 2:
        return f"It has {told.groups} mixed groups of {runs} runs: {GROUPS} of 2 are the least."
    assert told.auc is not None and told.p is not None
    if abs(told.auc - 0.5) < EFFECT:
        return f"Its AUC of {told.auc:.3f} is nearer than {EFFECT} to 0.5."
    for version, (auc, groups) in by_version.items():
        if groups >= SIGN_GROUPS and (auc > 0.5) != told.up:
            return f"Its AUC is {told.auc:.3f}, and {auc:.3f} in {version}, on the other side of 0.5."
    if told.p > level:
        return f"Its p of {told.p:.2g} is above the level {level:.2g} of this test."
    for id, correlation in alike.items():
        if correlation >= ALIKE:
            return f"Its rank correlation with {id} is {correlation:.2f} in size: that one says the same."
    return None


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Size of Spearman's correlation where both are there; 0 for a constant."""
    both = np.isfinite(x) & np.isfinite(y)
    if both.sum() < 2 or np.ptp(x[both]) == 0 or np.ptp(y[both]) == 0:
        return 0.0
    return abs(float(np.corrcoef(scipy.stats.rankdata(x[both]), scipy.stats.rankdata(y[both]))[0, 1]))


def separation_in(values: Values, found: Evidence, rng: np.random.Generator | None = None) -> Separation:
    """Failures against successes in the testing half of a later version."""
    half = halves(found)[1].mixed
    return separate(values(half.rows), ~half.solved, half.group, rng)


def status(test: Registration, later: Sequence[Separation]) -> str:
    """Status of a registered diagnostic after later versions: registered, gating or retired.

    A gating one may refuse a promotion: it kept its sign at p <= 0.05 on two later versions. It is retired
    after three versions in a row with an AUC near 0.5.

    later: of each later version, in order.
    """
    told = [s for s in later if s.auc is not None]
    if len(told) >= 3 and all(abs(s.auc - 0.5) < WEAK for s in told[-3:] if s.auc is not None):
        return "retired"
    up = test.direction == "up_is_bad"
    held = [s for s in told if s.p is not None and s.p <= ALPHA and s.up == up]
    return "gating" if len(held) >= 2 else "registered"


def thresholds(step_means: Sequence[float], direction: str) -> tuple[float, float]:
    """(warn, alert): the 95th and 99th percentile of step means over promoted versions, on the bad side."""
    ends = (95, 99) if direction == "up_is_bad" else (5, 1)
    warn, alert = np.percentile(np.asarray(step_means, float), ends).tolist()
    return warn, alert


def foretells(
    values: Mapping[str, Sequence[tuple[float | None, float | None]]],
    *,
    number: int,
    rng: np.random.Generator,
    used: Collection[str] = (),
    permutations: int = SHUFFLES,
) -> Foretold:
    """Tests a candidate of the unit step.

    Args:
      values: version -> of each run the value over its first half and its later gain; None where missing.
      number: of this test in the campaign, from 1 on.
      used: runs of earlier tests, named as in `Foretold.runs`.
    """
    runs = [(f"{version} run {i}", *pair) for version, own in values.items() for i, pair in enumerate(own)]
    names, missing = tuple(name for name, *_ in runs), sum(None in pair for _, *pair in runs)
    if missing or len(runs) < RUNS or len(values) < VERSIONS:
        why = (
            f"It is missing in {missing} of {len(runs)} runs."
            if missing
            else f"It has {len(runs)} runs of {len(values)} versions: {RUNS} of {VERSIONS} are the least."
        )
        return Foretold(number, level(number), 0.0, 1.0, len(values), names, bool({*names} & {*used}), why)
    x, y = np.array([np.array(own, float).mean(0) for own in values.values()]).T
    pairs = np.triu_indices(len(x), 1)
    signs = lambda z: np.sign(z[..., pairs[0]] - z[..., pairs[1]])
    observed, differing = signs(y) @ signs(x), np.abs(signs(x)).sum() * np.abs(signs(y)).sum()
    drawn = signs(rng.permuted(np.tile(y, (permutations, 1)), axis=1)) @ signs(x)
    p = float((1 + (np.abs(drawn) >= abs(observed)).sum()) / (1 + permutations))
    tau = float(observed / np.sqrt(max(differing, 1)))
    why = (
        f"Its p of {p:.2g} is above the level {level(number):.2g} of this test."
        if p > level(number)
        else None
    )
    return Foretold(number, level(number), tau, p, len(x), names, bool({*names} & {*used}), why)
