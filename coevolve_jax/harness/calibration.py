"""Measures what a campaign's rules rest on: the noise between runs, and what each planted fault costs.

    noise      the standard deviation of success between seeds, between salts, and about the mean of a seed
    cost       the healthy start's mean success minus that of the start with a fault
    optimism   what a campaign gains when no version is better: harness/optimism.py, on the measured runs

experiments/calibrate_harness.py makes the runs, each an ordinary one of a start.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from ml_collections import ConfigDict

from coevolve_jax.comparison import cells, many_to_one
from coevolve_jax.diagnosis import trends
from coevolve_jax.harness import evidence
from coevolve_jax.harness.optimism import RULES, normal, optimism, resampled
from coevolve_jax.records.files import write_text

LEAST = 0.06  # of success: a fault that costs less is not used
CAMPAIGNS = 20_000
RESAMPLES = 100  # of the runs, for an interval
ADD_HEALTHY = "Give the same command with --faults=none to add it."
SIZES = ((1, 1), (6, 1), (6, 2), (8, 2))  # (versions, seeds) of the campaigns whose optimism is told


class Run(NamedTuple):
    """A finished run of a start.

    Attributes:
      settings: the config file, and the values that were set.
      solved, trials: of its last evaluation on the selection set. lost: trials asked for that are invalid.
      fresh_solved, fresh_trials: on fresh development tasks; None where these were not read.
      sampling: the variance of its success that comes from the samples of each task, not from its policy.
      machine, commit: where and by which code it was read.
      trend: of its training (diagnosis/trends.py).
    """

    fault: str
    seed: int
    salt: int
    settings: str
    solved: int
    trials: int
    lost: int
    sampling: float
    fresh_solved: int | None
    fresh_trials: int | None
    machine: str
    commit: str
    trend: Mapping[str, float | None]

    @property
    def success(self) -> float:
        return self.solved / self.trials

    @property
    def fresh(self) -> float | None:
        return (self.fresh_solved or 0) / self.fresh_trials if self.fresh_trials else None


class Cost(NamedTuple):
    """The cost of a fault.

    success: the mean, adjusted to the average of all seeds. margin: half of the 95% interval of the cost. p:
    one-sided, that it costs nothing. kept: whether it is large and sure.
    """

    fault: str
    runs: int
    success: float
    cost: float
    margin: float
    p: float
    kept: bool


class Luck(NamedTuple):
    """The gain of campaigns of a rule and size out of nothing, in success.

    Attributes:
      gain: over the measured runs. low, high: its 95% interval, over the runs drawn again.
      simulated: over normal numbers as far apart.
      kept: of the same selected runs on fresh tasks; nan unless all runs were read there.
      kept_low, kept_high: its interval.
    """

    rule: str
    versions: int
    seeds: int
    gain: float
    low: float
    high: float
    simulated: float
    kept: float
    kept_low: float
    kept_high: float


def read(
    fault: str,
    seed: int,
    salt: int,
    settings: str,
    config: ConfigDict,
    run: Path,
    fresh: tuple[int | None, int | None] = (None, None),
) -> Run:
    """Reads a finished run. Raises ValueError where none of its trials is valid.

    fresh: its successes and trials on fresh tasks.
    """
    counts = list(evidence.selection(run).by_task.values())
    solved, trials = (sum(c[i] for c in counts) for i in (0, 1))
    if not trials:
        raise ValueError(f"{run} has no valid trial in its last evaluation.")
    asked = len(counts) * (config.evaluation.last_rollouts or config.evaluation.num_rollouts)
    told = solved, trials, asked - trials, sampling(counts), *fresh, cells.machine(), cells.commit()
    return Run(fault, seed, salt, settings, *told, evidence.row(config, [run]))


def write_rows(path: Path, runs: Iterable[Run]) -> None:
    """Writes the runs as CSV: a line for each, a column for each value of the trend; empty where unknown."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*Run._fields[:-1], *trends.MEANINGS], lineterminator="\n")
    writer.writeheader()
    for run in sorted(runs, key=lambda r: r[:3]):
        own = run._asdict()
        writer.writerow({**own.pop("trend"), **own})
    write_text(path, text.getvalue())


def read_rows(path: Path, settings: str) -> dict[tuple[str, int, int], Run]:
    """(fault, seed, salt) -> the run that `write_rows` wrote; {} where there is no file.

    Raises ValueError where a run is of other settings.
    """
    if not path.exists():
        return {}
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(row[name]) if row[name] else None for name in trends.MEANINGS}
            key = row["fault"], int(row["seed"]), int(row["salt"])
            found[key] = Run(
                *key,
                settings=row["settings"],
                solved=int(row["solved"]),
                trials=int(row["trials"]),
                lost=int(row["lost"]),
                sampling=float(row["sampling"]),
                fresh_solved=_whole(row.get("fresh_solved")),
                fresh_trials=_whole(row.get("fresh_trials")),
                machine=row["machine"],
                commit=row["commit"],
                trend=numbers,
            )
    if other := [run.settings for run in found.values() if run.settings != settings]:
        raise ValueError(
            f"{path} has runs of {other[0]}, and these are of {settings}: name another --workdir."
        )
    return found


def sampling(counts: Sequence[Sequence[int]]) -> float:
    """The variance of a success rate that the samples of each task bring.

    counts: [successes, trials] of each task. A task with one trial tells nothing: it counts as the others do
    on average. nan where no task has two.
    """
    repeated = [(s, n) for s, n in counts if n > 1]
    if not repeated:
        return math.nan
    each = np.mean([s * (n - s) / (n * (n - 1)) for s, n in repeated])  # of one sample, without bias
    return float(each / sum(n for _, n in counts))


def noise(runs: Sequence[Run]) -> float:
    """The standard deviation of success between runs; nan for fewer than two."""
    return float(np.std([r.success for r in runs], ddof=1)) if len(runs) > 1 else math.nan


def costs(runs: Sequence[Run]) -> tuple[float, list[Cost]]:
    """Returns the standard deviation of a run about its seed's mean, and what each fault costs, most first.

    Least squares fits success = fault + seed, with one error for all runs (comparison/many_to_one.py). So the
    difficulty of a seed's tasks is in no cost, and what a fault does to one seed alone is in the deviation.
    Deviation, margin and p are nan where too few seeds are shared. p is not corrected for the number of
    faults. A seed without a healthy run is left out.
    """
    shared = {r.seed for r in runs if r.fault == "none"}
    runs = [r for r in runs if r.seed in shared]
    values: dict[str, dict[int, float]] = {}
    for r in runs:
        values.setdefault(r.fault, {})[r.seed] = r.success
    fit = many_to_one.fit(values)
    healthy, found = fit.arms.index("none"), []
    for i, fault in enumerate(fit.arms):
        if i != healthy:
            lost = float(fit.means[healthy] - fit.means[i])
            shape = fit.shape[healthy, healthy] + fit.shape[i, i] - 2 * fit.shape[healthy, i]
            se, test = fit.sd * shape**0.5, scipy.stats.t(fit.df)
            p, times = (float(test.sf(lost / se)), test.ppf(0.975)) if fit.sd > 0 else (math.nan, math.nan)
            kept = lost >= LEAST and p < 0.05
            margin = float(times * se)
            found.append(Cost(fault, len(values[fault]), float(fit.means[i]), lost, margin, p, kept))
    return fit.sd, sorted(found, key=lambda c: -c.cost)


def selected_luck(runs: Sequence[Run], assumed: float) -> list[Luck]:
    """Returns what campaigns over these runs would gain out of nothing.

    assumed: the noise between runs by which these campaigns judge, their config.harness.noise.
    """
    there = [math.nan if r.fresh is None else r.fresh for r in runs]
    scores, spread = np.array([[r.success for r in runs], there]).T, noise(runs)
    again = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    found = []
    for rule in RULES:
        for size in SIZES:
            how = {"rule": rule, "versions": size[0], "seeds": size[1], "noise": assumed}
            gain, kept = _gained(scores, CAMPAIGNS, how)
            others = [_gained(scores[own], CAMPAIGNS // 20, how) for own in again]
            (low, kept_low), (high, kept_high) = np.quantile(others, (0.025, 0.975), axis=0)
            simulated = optimism(normal(spread), truth=0.0, campaigns=CAMPAIGNS, **how).mean()
            told = (gain, low, high, simulated, kept, kept_low, kept_high)
            found.append(Luck(rule, *size, *map(float, told)))
    return found


def _gained(scores: np.ndarray, campaigns: int, how: Mapping[str, Any]) -> np.ndarray:
    """The mean gain of campaigns over measured runs, on each set of tasks. scores: [runs, sets]."""
    return optimism(resampled(scores), truth=scores.mean(0), campaigns=campaigns, **how).mean(0)


def table(runs: Sequence[Run], assumed: float) -> str:
    """The noise and the costs over seeds, and the optimism over salts, as Markdown, in points.

    A sentence names each seed that lacks the healthy runs for them. assumed: as for `selected_luck`.
    """
    plain = [r for r in runs if r.salt == 0]
    lost, commits = sum(r.lost for r in runs), sorted({r.commit[:7] for r in runs})
    healthy = [r for r in plain if r.fault == "none"]
    found = [f"Healthy, {len(healthy)} seeds: {_noise(healthy)}"] if healthy else []
    shared, faulty = {r.seed for r in healthy}, {r.seed for r in plain if r.fault != "none"}
    if alone := ", ".join(map(str, sorted(faulty - shared))):
        found.append(f"No cost is of seed {alone}: no healthy run has it. {ADD_HEALTHY}")
    if shared & faulty:
        spread, faults = costs(plain)
        if not math.isnan(spread):
            found.append(f"About the mean of its seed a run deviates by {_points(spread)} points.")
        if spread > 0:
            found.append(f"For a campaign: --config.harness.noise={spread:.4f}")
        found.append(
            markdown(
                ("fault", "runs", "success", "cost", "one-sided p", "kept"),
                [
                    (f"`{c.fault}`", c.runs, _points(c.success),
                     _interval(c.cost, c.cost - c.margin, c.cost + c.margin),
                     "" if math.isnan(c.p) else f"{c.p:.2g}", "yes" if c.kept else "no")
                    for c in faults
                ],
            )
        )  # fmt: skip
    for seed in sorted({r.seed for r in runs if r.salt}):
        salted = [r for r in runs if r.fault == "none" and r.seed == seed]
        if not any(r.salt for r in salted):
            found.append(f"Seed {seed} tells of no luck: no healthy run has another salt. {ADD_HEALTHY}")
            continue
        found += [
            f"Seed {seed}, {len(salted)} salts: {_noise(salted)}{_fresh(salted)} What campaigns that judge "
            f"by a noise of {_points(assumed)} points gain out of nothing:",
            markdown(
                ("rule", "versions", "seeds", "of these runs", "of normal numbers", "on fresh tasks"),
                [
                    (
                        *(row.rule, row.versions, row.seeds, _interval(row.gain, row.low, row.high)),
                        *(_points(row.simulated), _interval(row.kept, row.kept_low, row.kept_high)),
                    )
                    for row in selected_luck(salted, assumed)
                ],
            ),
        ]
    found.append(
        f"Lost trials: {lost} of {lost + sum(r.trials for r in runs)}. Commits: {', '.join(commits)}."
    )
    return "\n\n".join(found)


def _whole(text: str | None) -> int | None:
    return int(text) if text else None


def _noise(runs: Sequence[Run]) -> str:
    success = float(np.mean([r.success for r in runs]))
    lucky = math.sqrt(np.mean([r.sampling for r in runs]))
    if len(runs) < 2:
        return f"success {_points(success)}%, and one run has no deviation."
    told = f"success {_points(success)}%, deviation {_points(noise(runs))} points"
    return f"{told}, of which the samples alone give {_points(lucky)}."


def _fresh(runs: Sequence[Run]) -> str:
    there = [(r.success, r.fresh) for r in runs if r.fresh is not None]
    if len(there) < len(runs):
        return ""
    success, fresh = np.array(there).T
    deviation, shared = _points(float(fresh.std(ddof=1))), np.corrcoef(success, fresh)[0, 1]
    told = f" On fresh tasks: success {_points(float(fresh.mean()))}%, deviation {deviation} points"
    return f"{told}, correlation {shared:.2f} with the selection set."


def _interval(rate: float, low: float, high: float) -> str:
    return _points(rate) if math.isnan(low) else f"{_points(rate)} ({_points(low)} to {_points(high)})"


def _points(rate: float) -> str:
    return "" if math.isnan(rate) else f"{round(100 * rate, 1) + 0.0:.1f}"  # no -0.0


def markdown(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def share(part: int, whole: int) -> str:
    """A part of a number in words, with the 95% interval of Clopper and Pearson; "none" of 0."""
    if not whole:
        return "none"
    found = scipy.stats.binomtest(part, whole).proportion_ci()
    return f"{part} of {whole} ({100 * found.low:.0f} to {100 * found.high:.0f}%)"
