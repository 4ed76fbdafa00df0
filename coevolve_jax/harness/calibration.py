"""What a campaign's rules rest on: the noise between runs of one start, and what each planted fault costs.

    noise      the standard deviation of a run's success between runs that differ by luck alone
    cost       the healthy start's mean success minus that of the start with a fault
    optimism   what a campaign gains when no version is better: harness/optimism.py, on the measured runs
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
from ml_collections import ConfigDict

from coevolve_jax.diagnosis import trends
from coevolve_jax.harness import evidence
from coevolve_jax.harness.optimism import RULES, normal, optimism, resampled
from coevolve_jax.records.files import write_text

LEAST = 0.06  # of success: a fault that costs less is not used
CAMPAIGNS = 20_000
SIZES = ((1, 1), (6, 1), (6, 2), (8, 2))  # (versions, seeds) of the campaigns whose optimism is told


class Run(NamedTuple):
    """A finished run of a start.

    solved, trials: of its last evaluation on the selection set. sampling: the variance of its success that
    comes from the samples of each task, not from its policy. trend: of its training (diagnosis/trends.py).
    """

    fault: str
    seed: int
    salt: int
    solved: int
    trials: int
    sampling: float
    trend: Mapping[str, float | None]

    @property
    def success(self) -> float:
        return self.solved / self.trials


class Cost(NamedTuple):
    """What a fault costs. p: one-sided, of Welch's t-test that it costs nothing. kept: whether it is used."""

    fault: str
    runs: int
    success: float
    deviation: float
    cost: float
    p: float
    kept: bool


def read(fault: str, seed: int, salt: int, config: ConfigDict, run: Path) -> Run:
    """Reads a finished run. Raises ValueError where none of its trials is valid."""
    counts = list(evidence.selection(run).by_task.values())
    solved, trials = (sum(c[i] for c in counts) for i in (0, 1))
    if not trials:
        raise ValueError(f"{run} has no valid trial in its last evaluation.")
    return Run(fault, seed, salt, solved, trials, sampling(counts), evidence.row(config, [run]))


def write_rows(path: Path, runs: Iterable[Run]) -> None:
    """Writes the runs as CSV: a line for each, a column for each value of the trend; empty where unknown."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*Run._fields[:-1], *trends.MEANINGS], lineterminator="\n")
    writer.writeheader()
    for run in sorted(runs, key=lambda r: r[:3]):
        own = run._asdict()
        writer.writerow({**own.pop("trend"), **own})
    write_text(path, text.getvalue())


def read_rows(path: Path) -> dict[tuple[str, int, int], Run]:
    """(fault, seed, salt) -> the run that `write_rows` wrote; {} where there is no file."""
    if not path.exists():
        return {}
    found = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(row[name]) if row[name] else None for name in trends.MEANINGS}
            key = row["fault"], int(row["seed"]), int(row["salt"])
            found[key] = Run(*key, int(row["solved"]), int(row["trials"]), float(row["sampling"]), numbers)
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


def cost(healthy: Sequence[Run], faulty: Sequence[Run]) -> Cost:
    """What the fault of these runs costs."""
    well, ill = ([r.success for r in runs] for runs in (healthy, faulty))
    lost = float(np.mean(well) - np.mean(ill))
    p = math.nan
    if min(len(well), len(ill)) > 1 and (np.ptp(well) or np.ptp(ill)):
        p = float(scipy.stats.ttest_ind(well, ill, equal_var=False, alternative="greater").pvalue)
    kept = lost >= LEAST and p < 0.05
    return Cost(faulty[0].fault, len(ill), float(np.mean(ill)), noise(faulty), lost, p, kept)


def selected_luck(runs: Sequence[Run]) -> list[tuple[str, int, int, float, float]]:
    """What campaigns over these runs would gain out of nothing, in success.

    Returns (rule, versions, seeds, of the measured runs, of normal numbers with their deviation).
    """
    scores, spread = np.array([r.success for r in runs]), noise(runs)
    found = []
    for rule in RULES:
        for versions, seeds in SIZES:
            how = dict(rule=rule, versions=versions, seeds=seeds, noise=spread, campaigns=CAMPAIGNS)
            measured = optimism(resampled(scores), truth=float(scores.mean()), **how)
            simulated = optimism(normal(spread), truth=0.0, **how)
            found.append((rule, versions, seeds, float(measured.mean()), float(simulated.mean())))
    return found


def table(runs: Sequence[Run]) -> str:
    """The noise and the costs over seeds, and the optimism over salts, as Markdown, in points."""
    points = lambda x: "" if math.isnan(x) else f"{100 * x:.1f}"
    found = []
    if healthy := [r for r in runs if r.fault == "none" and r.salt == 0]:
        lucky = math.sqrt(np.mean([r.sampling for r in healthy]))
        found.append(
            f"Healthy: {len(healthy)} seeds, success {points(np.mean([r.success for r in healthy]))}%, deviation "
            f"{points(noise(healthy))} points; the samples alone give {points(lucky)}."
        )
        faults = {r.fault for r in runs if r.salt == 0} - {"none"}
        own = lambda fault: [r for r in runs if r.fault == fault and r.salt == 0]
        if costs := sorted((cost(healthy, own(fault)) for fault in faults), key=lambda c: -c.cost):
            rows = [
                f"| `{c.fault}` | {c.runs} | {points(c.success)} | {points(c.deviation)} | {points(c.cost)} | "
                f"{c.p:.2g} | {'yes' if c.kept else 'no'} |"
                for c in costs
            ]
            head = ["| fault | runs | success | deviation | cost | p | kept |", "|---|---|---|---|---|---|---|"]
            found.append("\n".join([*head, *rows]))
    for seed in sorted({r.seed for r in runs if r.salt}):
        salted = [r for r in runs if r.fault == "none" and r.seed == seed]
        found.append(
            f"Seed {seed} under {len(salted)} salts: success {points(np.mean([r.success for r in salted]))}%, "
            f"deviation {points(noise(salted))} points. What campaigns gain out of nothing:"
        )
        rows = [f"| {r} | {v} | {s} | {points(a)} | {points(b)} |" for r, v, s, a, b in selected_luck(salted)]
        head = ["| rule | versions | seeds | of these runs | of normal numbers |", "|---|---|---|---|---|"]
        found.append("\n".join([*head, *rows]))
    return "\n\n".join(found)
