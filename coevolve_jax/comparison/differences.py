"""Statistics of a comparison from its raw numbers: means of arms, differences by seed, tests and curves.

Rows are those of outcomes.csv. A lost trial was asked for, but its rollout is invalid: it is neither a
success nor a failure. "if_lost_failed" holds the same numbers with each lost trial counted as a failure. It
exists where an arm lost more than stats.LOST of its trials, or where counting them moves its mean that far.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax.analysis import stats

EFFECT = 0.03  # the difference that seeds_for_effect is computed for
RESAMPLES = 2000
# Keys of an arm or a difference, with the same numbers for the worst case.
AT_WORST = ("if_lost_failed", "if_diverged_failed")

Row = Mapping[str, Any]
Runs = Mapping[tuple[str, int], "Counts"]  # by (arm, seed)


class Metric(NamedTuple):
    """A success rate to compare, on a held-out set after the last step.

    set: name of the held-out set.
    group: "weak" is the mean over weak tools of the success on tasks that call the tool. "others" is the
      success on tasks that call no weak tool, "all" that on all tasks.
    """

    name: str
    set: str
    group: str


METRICS = {
    "weak": Metric(
        "macro success on tasks with weak tools, tool-balanced set, last step", "balanced", "weak"
    ),
    "others": Metric(
        "success on tasks without weak tools, tool-balanced set, last step", "balanced", "others"
    ),
    "iid": Metric("success on the i.i.d. held-out set, last step", "iid", "all"),
    "queries": Metric("success on the held-out queries, last step", "queries", "all"),
}
# The same with a method's hints. A method without hints is told as it is: nothing would change.
METRICS |= {
    name + stats.HELP: Metric(
        f"{m.name}, with help (arms without it as they are)", m.set + stats.HELP, m.group
    )
    for name, m in METRICS.items()
}


class Counts(NamedTuple):
    """Counts of one run by scenario. A row is a weak tool; other groups have one row.

    successes, trials, lost: [rows, scenarios]. lost: trials that were asked for and are invalid.
    there: [scenarios], whether the run's held-out set has the scenario.
    tally: [3], lost trials, trials asked for, and tasks that lost all trials. Each task counts once, also if
      several rows have it.
    """

    successes: np.ndarray
    trials: np.ndarray
    lost: np.ndarray
    there: np.ndarray
    tally: np.ndarray

    def value(self, weights: np.ndarray | None = None) -> np.ndarray | float:
        """Mean over the rows of their success rates; NaN where no row has a trial.

        weights: [B, scenarios], how often each scenario counts; the result is [B] then.
        """
        w = np.ones((1, self.trials.shape[1])) if weights is None else weights
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = (w @ self.successes.T) / (w @ self.trials.T)
            known = np.isfinite(rates)
            means = np.where(known, rates, 0).sum(axis=1) / known.sum(axis=1)
        return float(means[0]) if weights is None else means

    def lost_as_failures(self) -> Counts:
        return self._replace(trials=self.trials + self.lost)

    def all_failed(self) -> Counts:
        """Returns the worst case of a run: every trial failed."""
        return self._replace(
            successes=np.zeros_like(self.trials),
            trials=np.ones_like(self.trials),
            lost=np.zeros_like(self.lost),
            there=np.ones_like(self.there),
            tally=np.zeros_like(self.tally),
        )

    def of_scenarios(self, chosen: np.ndarray) -> Counts:
        return Counts(
            self.successes[:, chosen],
            self.trials[:, chosen],
            self.lost[:, chosen],
            self.there[chosen],
            self.tally,
        )

    @classmethod
    def empty(cls, rows: int, scenarios: int) -> Counts:
        made = lambda: np.zeros((rows, scenarios))
        return cls(made(), made(), made(), np.zeros(scenarios, bool), np.zeros(3, int))


def counts(rows: Iterable[Row], metric: Metric) -> dict[tuple[str, int], Counts]:
    """Counts the rows of each run's last evaluation by (arm, seed)."""
    return _last(counts_by_step(rows, metric))


def _last(by_step: Mapping[int, Runs]) -> dict[tuple[str, int], Counts]:
    """The counts of each run's last evaluation."""
    return {key: c for step in sorted(by_step) for key, c in by_step[step].items()}


def counts_by_step(rows: Iterable[Row], metric: Metric) -> dict[int, dict[tuple[str, int], Counts]]:
    """Counts the rows of each evaluated step by (arm, seed).

    The plain set stands for a set with help that an evaluation does not have. {} if none has it.
    """
    told = [r for r in rows if r["set"] in (metric.set, metric.set.removesuffix(stats.HELP))]
    where = lambda r: (r["arm"], int(r["seed"]), int(r["step"]))
    there = {where(r) for r in told if r["set"] == metric.set}
    rows = [r for r in told if (r["set"] == metric.set) == (where(r) in there)] if there else []
    scenarios = {s: i for i, s in enumerate(sorted({r["scenario"] for r in rows}))}
    tools = sorted({tool for r in rows for tool in r["weak"].split(";") if tool})
    names = tools if metric.group == "weak" else [metric.group]
    found: dict[int, dict[tuple[str, int], Counts]] = {}
    for r, asked in zip(rows, samples(rows), strict=True):
        runs, key = found.setdefault(int(r["step"]), {}), (r["arm"], int(r["seed"]))
        if key not in runs:
            runs[key] = Counts.empty(len(names), len(scenarios))
        c, where, trials = runs[key], scenarios[r["scenario"]], int(r["trials"])
        c.there[where] = True
        weak = [tool for tool in r["weak"].split(";") if tool]
        own = weak if metric.group == "weak" else [metric.group] if metric.group == "all" or not weak else []
        for name in own:
            c.successes[names.index(name), where] += int(r["successes"])
            c.trials[names.index(name), where] += trials
            c.lost[names.index(name), where] += asked - trials
        if own:
            c.tally[:] += (asked - trials, asked, asked > trials == 0)
    return found


def samples(rows: Sequence[Row]) -> list[int]:
    """Returns the trials per task that each row's evaluation asked for: its "samples".

    Older tables lack this column. For them it is the most trials of any row of the same set and setting.
    """
    most: dict[tuple[str, str], int] = {}
    kinds = [(r.get("set", ""), r["arm"].partition("+")[2]) for r in rows]
    for r, kind in zip(rows, kinds, strict=True):
        most[kind] = max(most.get(kind, 0), int(r["trials"]))
    return [
        max(int(r.get("samples") or most[kind]), int(r["trials"]))
        for r, kind in zip(rows, kinds, strict=True)
    ]


def lost_by_evaluation(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, tuple[int, int]]]]:
    """Returns {set: {arm: {step: (lost trials, trials asked for)}}}, summed over tasks and seeds."""
    found: dict[str, dict[str, dict[int, tuple[int, int]]]] = {}
    for r, asked in zip(rows, samples(rows), strict=True):
        steps = found.setdefault(r["set"], {}).setdefault(r["arm"], {})
        lost, of = steps.get(int(r["step"]), (0, 0))
        steps[int(r["step"])] = (lost + asked - int(r["trials"]), of + asked)
    return found


def at_worst(found: Runs, arm: str) -> dict[str, Any] | None:
    """Numbers of an arm with lost trials as failures. None where these say the same, up to stats.LOST."""
    own = _of(found, arm)
    worst = _values({key: c.lost_as_failures() for key, c in own.items()})
    values, told = _values(own), lost_counts(own.values())
    moved = bool(values and worst) and abs(_mean(values.values()) - _mean(worst.values())) > stats.LOST
    return _over_seeds(worst) if told["lost_share"] > stats.LOST or moved else None


def difference(found: Runs, a: str, b: str, seed: int = 0) -> dict[str, Any]:
    """Computes a - b, paired by seed: t interval and p value over seeds, and a bootstrap interval.

    The bootstrap crosses seeds and scenarios; `seed` is its random seed. Seeds where one arm has no value are
    left out. "lost", "lost_share": of the trials of both arms.
    """
    own = _of(found, a, b)
    row = {**_difference(own, a, b, seed), **lost_counts(own.values(), tasks=False)}
    if at_worst(own, a) or at_worst(own, b):
        failed = {key: c.lost_as_failures() for key, c in own.items()}
        row["if_lost_failed"] = _difference(failed, a, b, seed)
    return row


def _difference(found: Runs, a: str, b: str, seed: int) -> dict[str, Any]:
    known = {key for key, c in found.items() if np.isfinite(c.value())}
    seeds = sorted({s for arm, s in known if arm == a} & {s for arm, s in known if arm == b})
    mine, theirs = ([found[arm, s] for s in seeds] for arm in (a, b))
    ours, other = (np.array([c.value() for c in side]) for side in (mine, theirs))
    d = ours - other
    row: dict[str, Any] = {
        "a": a,
        "b": b,
        "n": len(seeds),
        "difference": float(np.mean(d)) if seeds else None,
    }
    if len(seeds) < 2:
        return row | {"note": "an interval needs 2 seeds"}
    t, constant = stats.over_seeds(d), stats.alike(d)
    low, high, empty = _bootstrap(mine, theirs, seed)
    sd = statistics.stdev(d.tolist())
    return row | {
        "low": t.low,
        "high": t.high,
        "boot_low": low,
        "boot_high": high,
        "boot_empty": empty,
        "p": stats.paired_p(d),
        "p_improvement": stats.probability_of_improvement(ours, other),
        "sd": sd,
        "seeds_for_effect": None if constant else stats.seeds_needed(sd, EFFECT),
        "by_seed": dict(zip(map(str, seeds), d.tolist())),
    }


def _bootstrap(
    mine: Sequence[Counts], theirs: Sequence[Counts], seed: int
) -> tuple[float | None, float | None, float]:
    """Bootstraps the mean difference over seeds and over the scenarios of these runs, crossed.

    Returns (low, high, empty). low and high are None where all samples are alike. empty: the share of samples
    that hold no task of the metric and are left out.
    """
    there = np.any([c.there for c in (*mine, *theirs)], axis=0)
    rng = np.random.default_rng(seed)
    # Published intervals depend on the order of draws: scenarios, then seeds.
    where = stats.resample(int(there.sum()), rng, RESAMPLES)
    pairs = [(x.of_scenarios(there), y.of_scenarios(there)) for x, y in zip(mine, theirs, strict=True)]
    by_seed = np.stack([x.value(where) - y.value(where) for x, y in pairs])  # [S, B]
    drawn = stats.resample(len(pairs), rng, RESAMPLES) / len(pairs)
    sampled = np.einsum("sb,bs->b", by_seed, drawn)
    known = sampled[np.isfinite(sampled)]
    empty = 1 - len(known) / RESAMPLES
    if not len(known) or stats.alike(known):
        return None, None, empty
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high), empty


def compare(
    rows: Sequence[Row],
    metric: Metric,
    arms: Sequence[str],
    planned: Sequence[tuple[str, str]],
    diverged: Iterable[tuple[str, int]] = (),
) -> dict[str, Any]:
    """Computes each arm's mean, and the planned differences with Holm's correction over them.

    diverged: (arm, seed) of runs that diverged. The means leave them out; "if_diverged_failed" counts each as
    success 0. This is the worst case, so there an arm's lost trials are failures too, where they are many.
    """
    ended = [(arm, int(seed)) for arm, seed in diverged]
    found = {key: c for key, c in counts(rows, metric).items() if key not in ended}
    shape = next(iter(found.values()), Counts.empty(1, 1))
    worst = {arm: at_worst(found, arm) for arm in {arm for arm, _ in found}}
    whole = {key: c.lost_as_failures() if worst[key[0]] else c for key, c in found.items()}
    whole |= {key: shape.all_failed() for key in ended}
    table = []
    for arm in arms:
        own = _of(found, arm)
        entry = {"arm": arm, **_over_seeds(_values(own)), **lost_counts(own.values())}
        if worst.get(arm):
            entry["if_lost_failed"] = worst[arm]
        if seeds := sorted(s for name, s in ended if name == arm):
            entry["diverged"] = seeds
            entry["if_diverged_failed"] = _over_seeds(_values(_of(whole, arm)))
        table.append(entry)
    differences = [difference(found, a, b) for a, b in planned]
    for d in differences:
        if any(arm in (d["a"], d["b"]) for arm, _ in ended):
            d["if_diverged_failed"] = _difference(whole, d["a"], d["b"], 0)
    correct(differences)
    return {"metric": metric._asdict(), "arms": table, "planned": differences}


def correct(family: Sequence[dict[str, Any]], told: Sequence[dict[str, Any]] | None = None) -> None:
    """Sets p_holm of `told` (default: all) by Holm's correction over the family of differences.

    Every member counts in the size of the family, also one without a test. The same is done for the versions
    in AT_WORST.
    """
    for kind in (None, *AT_WORST):
        version = lambda d, kind=kind: d.get(kind, d) if kind else d
        adjusted = stats.holm([version(d).get("p") for d in family])
        for d, p in zip(family, adjusted, strict=True):
            if (told is None or any(d is t for t in told)) and "p" in (own := d.get(kind, {}) if kind else d):
                own["p_holm"] = p


def curves(rows: Sequence[Row], metrics: Iterable[str]) -> dict[str, Any]:
    """Returns {metric: {arm: {step, mean, low, high, lost, if_lost_failed}}}: lists over evaluated steps.

    low, high: the t interval over seeds.
    lost: the share of lost trials.
    if_lost_failed: the mean with these as failures, None where `at_worst` gives none.

    Runs that a budget of rollouts ends do so after steps of their own. The last point of an arm is of the
    last evaluations of all its runs, at the mean of their steps. A step at which some run of the arm was over
    is no point of its own: the others alone would be other seeds.
    """
    found: dict[str, Any] = {}
    keys = ("step", "mean", "low", "high", "lost", "if_lost_failed")
    ends: dict[tuple[str, int], int] = {}
    for r in rows:
        key = (r["arm"], int(r["seed"]))
        ends[key] = max(ends.get(key, 0), int(r["step"]))
    of_arm = lambda arm: [end for (name, _), end in ends.items() if name == arm]
    for name in metrics:
        by_step = counts_by_step(rows, METRICS[name])
        for step, at in [*sorted(by_step.items()), (None, _last(by_step))]:
            for arm in dict.fromkeys(arm for arm, _ in at):
                if step is not None and step >= min(of_arm(arm)):
                    continue
                own = _of(at, arm)
                e, worst = _over_seeds(_values(own)), at_worst(own, arm)
                lost = lost_counts(own.values())["lost_share"]
                if not (e["n"] or worst):
                    continue
                line = found.setdefault(name, {}).setdefault(arm, {key: [] for key in keys})
                values = (*(e.get(key) for key in ("mean", "low", "high")), lost, worst and worst.get("mean"))
                where = _mean(of_arm(arm)) if step is None else step
                where = int(where) if where == int(where) else where
                for key, value in zip(keys, (where, *values), strict=True):
                    line[key].append(value)
    return found


def no_values(rows: Sequence[Row], metrics: Iterable[str]) -> list[str]:
    """Returns a sentence for each metric that some run lacks, since no task of it has a valid rollout."""
    said = []
    for name in metrics:
        lost = [key for key, c in sorted(counts(rows, METRICS[name]).items()) if not np.isfinite(c.value())]
        if lost:
            runs = ", ".join(f"{column}, seed {seed}" for column, seed in lost)
            said.append(f"Without a valid rollout of {METRICS[name].name}, and left out of it: {runs}.")
    return said


def _of(found: Runs, *arms: str) -> dict[tuple[str, int], Counts]:
    """The runs of these arms, in their order."""
    return {key: c for key, c in found.items() if key[0] in arms}


def _values(runs: Runs) -> dict[int, float]:
    """Values of one arm by seed, without runs that have no trial."""
    values = {seed: float(c.value()) for (_, seed), c in sorted(runs.items(), key=lambda item: item[0][1])}
    return {seed: value for seed, value in values.items() if np.isfinite(value)}


def _over_seeds(values: Mapping[int, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"n": len(values), "values": {str(s): v for s, v in values.items()}}
    own = list(values.values())
    if own:
        row |= {"mean": _mean(own), "iqm": stats.interquartile_mean(own)}
    if len(own) > 1:
        e = stats.over_seeds(own)
        row |= {"low": e.low, "high": e.high}
    return row


def lost_counts(runs: Iterable[Counts], tasks: bool = True) -> dict[str, Any]:
    """Sums the lost trials of runs: their number, their share, and with `tasks` the tasks without a trial."""
    lost, asked, whole = map(int, np.sum([np.zeros(3, int), *(c.tally for c in runs)], axis=0))
    told = {"lost": lost, "lost_share": lost / asked if asked else 0.0}
    return {**told, "lost_tasks": whole} if tasks else told


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
