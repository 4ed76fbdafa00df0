"""Backtests: a proposal's config is tried on its parent's rollouts before anything is trained.

The strategy's own code computes advantages under both configs, step by step with its state carried along, so
what is checked is what will run. A check refuses beyond its bound, and never for what the parent does too.

    order         pairs in a group whose failure is now worth as much as the success           any
    order_tiers   pairs of failures in a group in which less progress is worth more            shown
    sign_success  successes of mixed groups with an advantage below 0                          > 1%
    sign_failure  failures of mixed groups with an advantage above 0                           > 5%
    nothing       largest change of an advantage, with the same samples                        < 0.001
    live_groups   groups whose outcomes differ and are learned from, over the parent's         < 0.8
    live_tokens   policy tokens of these, over the parent's                                    < 0.8
    paid_share    share of the advantages' sizes that groups without a success have            > 50%
    paid_length*  size of the correlation of tokens and advantage in these groups              > 0.3
    cut           successes that the new limits would have ended                               > 2%
    group_size*   expected rollouts in mixed groups, over the parent's                         < 0.8
    draws         groups with spread in replayed draws, over the parent's                      < 0.8

* only warns: of four such moves that were trained all the same none was worse (E5, docs/results/harness.md).
A hypothesis that aims at fewer live groups moves their 0.8 to 0.3. Where the change is one of credit or loss
and none of these refuses, gradient.py compares the gradients at the parent's end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import names
from coevolve_jax.diagnosis.features import correlation
from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.harness import draws
from coevolve_jax.harness.draws import Run
from coevolve_jax.harness.store import config_changes
from coevolve_jax.records.rollouts import mean_advantages
from coevolve_jax.strategies.groups import spans
from coevolve_jax.types import TrainingSample, Trajectory

FIRST = 3  # steps that forecasts are about
MISSED = 0.3  # relative error from which on a forecast has missed
LEAST_PAID = 8  # rollouts of groups without a success, for `paid_length`
WARNS = ("paid_length", "group_size")  # their moves were not worse when trained; the others refuse
# Keys by the checks that see all that they do, and those that these checks see in part.
CREDIT = ("reward.", "learner.group_filter", "learner.filter_", "learner.skip_zero_variance_groups",
          "learner.advantage", "learner.overlong_filtering")  # fmt: skip
LIMITS = ("rollout.max_length", "rollout.max_new_tokens", "rollout.max_steps", "rollout.max_messages")
SIZES = ("rollout.group_size", "rollout.tasks_per_step")
DRAWS = ("data.sampling", "data.retire_after", "data.min_evolved_share", "learner.dynamic_sampling")
GRADIENT = ("learner.aggregate", "learner.constant_length", "learner.ratio", "learner.clip_", "learner.kl",
            "learner.tis_cap", "learner.surrogate")  # fmt: skip


class Check(NamedTuple):
    """A value and the bound that refuses; None where it is only shown."""

    value: float
    bound: float | None
    ok: bool


SAYS = {
    "order": "{value:.0f} pairs in a group pay the failure as much as the success.",
    "sign_success": "{value:.1%} of the successes of mixed groups lose probability, above {bound:.1%}.",
    "sign_failure": "{value:.1%} of the failures of mixed groups gain probability, above {bound:.1%}.",
    "nothing": "It changes nothing: no advantage changes by {bound:g} or more.",
    "live_groups": "{value:.2f} times as many groups are learned from, below {bound:g}.",
    "live_tokens": "{value:.2f} times as many tokens are learned from, below {bound:g}.",
    "paid_share": "{value:.0%} of the advantages are those of groups without a success, above {bound:.0%}.",
    "paid_length": "Without success, length and advantage correlate by {value:.2f}, above {bound:.2f}.",
    "cut": "{value:.1%} of the successes would have been ended by the new limits, above {bound:.0%}.",
    "group_size": "{value:.2f} times as many rollouts would be in mixed groups, below {bound:g}.",
    "draws": "{value:.2f} times as many groups would have a spread, below {bound:g}.",
    "finite": "The gradient under it is not finite.",
    "kl_share": "The KL term has {value:.0%} of the gradient, above {bound:.0%}.",
    "margin": "The update does not raise successes over failures: its cosine with that is {value:.3f}.",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Backtest:
    """The result for one proposal.

    Attributes:
      parent: the version's name. digest: of the child's config.
      checks: name -> check. forecast: name -> value in the first steps (`forecast`).
      refused: a sentence, of the first check that refuses; None if none does. by: its name, or "".
      notes: sentences on what is only shown, and of the checks that only warn.
      not_covered: changed keys whose effect no check sees, at least in part.
    """

    parent: str
    digest: str
    checks: Mapping[str, Check]
    forecast: Mapping[str, float]
    refused: str | None
    by: str = ""
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "checks": {name: list(c) for name, c in self.checks.items()}}


def backtest(
    parent: ConfigDict,
    child: ConfigDict,
    runs: Sequence[Run],
    *,
    version: str = "",
    aims_at_live: bool = False,
    gradient: Callable[[], Mapping[str, Check]] | None = None,
    unreliable: Collection[str] = (),
) -> Backtest:
    """Tries the child's config on the parent's rollouts.

    Args:
      runs: the parent's groups, of each run step by step.
      version: the parent's name.
      aims_at_live: the hypothesis is about the groups that are learned from.
      gradient: gives the checks of harness/gradient.py. It takes a process with a compiler, so it is called
        only where they can refuse.
      unreliable: names of checks that only warn from now on, since their forecasts missed (`missed`).

    Raises ValueError if the runs hold no valid rollout.
    """
    changed = config_changes(parent, child)
    touches = lambda keys: any(key.startswith(keys) for key in changed)
    facts, told = Facts(runs), forecast(parent, child, runs)
    if not facts.groups:
        raise ValueError("No rollouts are recorded: let the parent run with config.logging.rollouts_every=1.")
    before, after = credit(parent, runs), credit(child, runs)
    checks = {
        **_order(facts, before, after),
        **_live(facts, before, after, 0.3 if aims_at_live else 0.8),
        **_paid(facts, before, after),
    }
    notes = _paid_most(facts, after) + _revived(facts, before, after)
    if changed and all(key.startswith(CREDIT) for key in changed):
        largest = float(np.abs(after.advantage - before.advantage).max(initial=0))
        same = bool((after.taught == before.taught).all())
        checks["nothing"] = Check(largest, 1e-3, not same or largest >= 1e-3)
    if touches(LIMITS):
        won = [t for t, success in zip(facts.trajectories, facts.success) if success]
        checks["cut"] = _most(_mean([_cut(child, t) and not _cut(parent, t) for t in won]), 0.02)
    if touches(SIZES):
        sizes = [(c.rollout.group_size, c.rollout.tasks_per_step) for c in (child, parent)]
        mixed = [draws.share_mixed(facts.groups, k) for k, _ in sizes]
        rollouts = _ratio(*(share * k * tasks for share, (k, tasks) in zip(mixed, sizes)))
        checks["group_size"] = _least(rollouts, 0.8)
        told |= {"live": told["live"] * _ratio(*mixed), "tokens": told["tokens"] * rollouts}
    if touches(DRAWS):
        (live, drawn), (parents_live, parents_drawn) = (draws.live_drawn(c, runs) for c in (child, parent))
        more, all_drawn = _ratio(live, parents_live), _ratio(drawn, parents_drawn)
        checks["draws"] = _least(more, 0.8)
        told |= {"live": told["live"] * more / all_drawn, "tokens": told["tokens"] * more}
        notes.append(f"A step draws {all_drawn:.2f} times as many groups.")
    warns = {*WARNS, *unreliable}
    beyond = lambda: [n for n, c in checks.items() if not c.ok and n in SAYS]
    refusing = lambda: [n for n in beyond() if n not in warns]
    says = lambda name: SAYS[name].format_map(checks[name]._asdict())
    compared = gradient() if gradient and touches((*CREDIT, *GRADIENT)) and not refusing() else {}
    checks |= compared
    failed = refusing()
    covered = (*CREDIT, *SIZES, *DRAWS, *(GRADIENT if compared else ()))
    return Backtest(
        version,
        configs.digest(child),
        checks,
        told,
        says(failed[0]) if failed else None,
        failed[0] if failed else "",
        (*(f"A warning only: {says(name)}" for name in beyond() if name in warns), *notes),
        tuple(key for key in changed if not key.startswith(covered)),
    )


def forecast(parent: ConfigDict, child: ConfigDict, runs: Sequence[Run]) -> dict[str, float]:
    """Values of the child's first steps, from the first steps of recorded runs.

    On the parent's rollouts it is the forecast; on the child's own it is what came.

        live     share of groups learned from
        tokens   policy tokens learned from, per step
        revived  groups learned from that the parent's config would not learn from, per step
    """
    first = [run[:FIRST] for run in runs]
    facts, before, after = Facts(first), credit(parent, first), credit(child, first)
    live, steps = facts.with_any(after.advantage != 0), max(sum(map(len, first)), 1)
    return {
        "live": _mean(live),
        "tokens": float(facts.policy_tokens[after.advantage != 0].sum()) / steps,
        "revived": float((live & ~facts.with_any(before.advantage != 0)).sum()) / steps,
    }


def missed(forecast: Mapping[str, float], came: Mapping[str, float]) -> set[str]:
    """The names of forecasts that were off by more than 30% of what came."""
    return {n for n, value in forecast.items() if n in came and abs(value - came[n]) > MISSED * abs(came[n])}


class Facts:
    """Recorded runs: groups [m] with a valid rollout, and their valid rollouts [n] in one order."""

    def __init__(self, runs: Sequence[Run]):
        self.groups = [g for run in runs for step in run for g in step if g.valid]
        self.trajectories = [t for g in self.groups for t in g.valid]
        self.group = np.repeat(np.arange(len(self.groups)), [len(g.valid) for g in self.groups])
        self.success = np.array([t.outcome.success for t in self.trajectories], bool)
        self.progress = np.array([t.outcome.progress for t in self.trajectories], float)
        self.tokens = np.array([len(t.ids) for t in self.trajectories], float)
        self.policy_tokens = np.array([t.mask.sum() for t in self.trajectories], float)

    def with_any(self, mask: np.ndarray) -> np.ndarray:
        """bool [m]: the groups in which any rollout is in the mask [n]."""
        return np.bincount(self.group, mask, minlength=len(self.groups)) > 0

    @property
    def mixed(self) -> np.ndarray:
        """bool [n]: of a group with successes and failures."""
        return (self.with_any(self.success) & self.with_any(~self.success))[self.group]

    def parts(self) -> Iterator[slice]:
        """The rollouts of each group."""
        ends = np.cumsum([0, *(len(g.valid) for g in self.groups)]).tolist()
        return itertools.starmap(slice, itertools.pairwise(ends))


class Credit(NamedTuple):
    """A config's mean advantages (0 if left out) and rewards of the valid rollouts [n].

    taught: whether the learner gets them.
    """

    advantage: np.ndarray
    reward: np.ndarray
    taught: np.ndarray


def credit(config: ConfigDict, runs: Sequence[Run]) -> Credit:
    """The advantages that the config's strategy computes, each run by a strategy of its own."""
    found = [step for run in runs for step in credit_by_step(config, run)]
    return Credit(*(np.concatenate(part) for part in zip(*found))) if found else _credit([])


def credit_by_step(config: ConfigDict, run: Run) -> list[Credit]:
    """The advantages of each step of one run."""
    rewards, found = rewards_of(config), []
    for groups, samples in zip(run, samples_by_step(config, run)):
        learned = mean_advantages(samples)
        paid = [pair for group in groups for pair in zip(group.valid, rewards(group), strict=True)]
        found.append(_credit([(learned.get(id(t), 0.0), reward, id(t) in learned) for t, reward in paid]))
    return found


def samples_by_step(config: ConfigDict, run: Run) -> Iterator[Sequence[TrainingSample]]:
    """Yields the samples that the config's strategy gives the learner at each step of one run."""
    strategy = names.module("strategies", config.strategy.name, "strategy.name", ["make"]).make(config)
    return (strategy.compute_advantages(groups) for groups in run)


def _credit(rows: Sequence[tuple[float, float, bool]]) -> Credit:
    advantage, reward, taught = np.array(rows, float).reshape(-1, 3).T
    return Credit(advantage, reward, taught > 0)


def _order(facts: Facts, before: Credit, after: Credit) -> dict[str, Check]:
    """Pairs that rewards rank wrongly and advantages of the wrong sign, where the parent has them right."""
    wrong = reversed_tiers = tiers = 0
    for part in facts.parts():
        won, r, progress = facts.success[part], after.reward[part], facts.progress[part]
        right = before.reward[part][won][:, None] > before.reward[part][~won]
        wrong += int((right & (r[won][:, None] <= r[~won])).sum())
        further = progress[~won][:, None] > progress[~won]
        tiers += int(further.sum())
        reversed_tiers += int((further & (r[~won][:, None] < r[~won])).sum())
    sign = lambda a: np.where(facts.success, a < 0, a > 0)
    new = sign(after.advantage) & ~sign(before.advantage)
    share = lambda which: _mean(new[facts.mixed & which])
    return {
        "order": _most(wrong, 0),
        "order_tiers": Check(_ratio(reversed_tiers, tiers, 0.0), None, True),
        "sign_success": _most(share(facts.success), 0.01),
        "sign_failure": _most(share(~facts.success), 0.05),
    }


def _live(facts: Facts, before: Credit, after: Credit, least: float) -> dict[str, Check]:
    """Groups learned from whose outcomes differ. The others are live by a term alone, which may go."""
    differ = np.array([g.spread > 0 for g in facts.groups], bool)[facts.group]
    learned = [differ & (c.advantage != 0) for c in (after, before)]
    return {
        "live_groups": _least(_ratio(*(facts.with_any(mask).sum() for mask in learned)), least),
        "live_tokens": _least(_ratio(*(facts.policy_tokens[mask].sum() for mask in learned)), least),
    }


def _paid(facts: Facts, before: Credit, after: Credit) -> dict[str, Check]:
    """Advantages in groups without a success, where nothing says that they lead to one."""
    unsolved = ~facts.with_any(facts.success)[facts.group]

    def share(c: Credit) -> float:
        sizes = np.abs(c.advantage)
        return _ratio(sizes[unsolved].sum(), sizes.sum(), 0.0)

    def length(c: Credit) -> float:
        there = unsolved & (c.advantage != 0)
        found = correlation(facts.tokens[there], c.advantage[there]) if there.sum() >= LEAST_PAID else 0.0
        return abs(found or 0.0)

    return {
        "paid_share": _most(share(after), max(0.5, share(before))),
        "paid_length": _most(length(after), max(0.3, length(before))),
    }


def _paid_most(facts: Facts, after: Credit) -> list[str]:
    """A sentence on the tool or stop that is paid most in groups without a success."""
    unsolved = np.flatnonzero(~facts.with_any(facts.success)[facts.group] & (after.advantage != 0))
    has: dict[str, np.ndarray] = {}
    for n, i in enumerate(unsolved):
        t = facts.trajectories[i]
        for name in {f"stop by {t.stop}", *(f"call {s.call.name}" for s in t.steps if s.call)}:
            has.setdefault(name, np.zeros(len(unsolved), bool))[n] = True
    a = after.advantage[unsolved]
    paid = {name: a[mask].mean() - a[~mask].mean() for name, mask in has.items() if not mask.all()}
    if not paid:
        return []
    name = max(paid, key=lambda name: abs(paid[name]))
    return [f"In groups without a success, rollouts that {name} have {paid[name]:+.2f} more advantage."]


def _revived(facts: Facts, before: Credit, after: Credit) -> list[str]:
    """A sentence on the groups that only the child learns from, and what alone makes them differ."""
    live = [facts.with_any(c.advantage != 0) for c in (before, after)]
    revived, only = 0, Counter[str]()
    for part, was, now in zip(facts.parts(), *live):
        if now and not was:
            revived += 1
            signs = np.sign(np.subtract.outer(after.advantage[part], after.advantage[part]))
            for name, x in _single(facts.trajectories[part]).items():
                own = np.sign(np.subtract.outer(x, x))
                only[name] += bool((signs == own).all() or (signs == -own).all())
    told = ", ".join(f"{count} by {name}" for name, count in only.most_common() if count)
    return [f"It revives {revived} groups; by one thing alone: {told or 'none'}."] if revived else []


def _single(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Counts [k] of a group's rollouts, by name."""
    count = lambda of: np.array([of(t) for t in trajectories], float)
    tools = {s.call.name for t in trajectories for s in t.steps if s.call}
    return {
        "length": count(lambda t: len(t.ids)),
        "malformed": count(lambda t: sum(s.call is None for s in t.steps)),
        **{n: count(lambda t, n=n: sum(s.call is not None and s.call.name == n for s in t.steps))
           for n in sorted(tools)},
    }  # fmt: skip


def _cut(config: ConfigDict, trajectory: Trajectory) -> bool:
    """Whether the limits of a config would have ended a conversation before its last message."""
    c, messages = config.rollout, spans(trajectory)
    acted = {(s.turn, s.message) for s in trajectory.steps if not s.ignored}
    per_turn = Counter(turn for turn, _ in acted)
    return (
        any(
            m.start + c.max_new_tokens > c.max_length or m.stop - m.start > c.max_new_tokens for m in messages
        )
        or 0 < c.max_messages < len(messages)
        or max(per_turn.values(), default=0) > c.max_steps
    )


def _most(value: float, bound: float) -> Check:
    return Check(float(value), float(bound), value <= bound + 1e-9)


def _least(value: float, bound: float) -> Check:
    return Check(float(value), float(bound), value >= bound)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _ratio(part: float, whole: float, otherwise: float = 1.0) -> float:
    return float(part / whole) if whole else otherwise
