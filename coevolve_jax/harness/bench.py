"""Planted faults: what is wrong with a start, which levers mend it, and whether campaigns find them.

    right first     the first trained version moves a right lever the right way
    right within 3  one of the first three does
    mended          the first promoted version that regains 80% of what the fault cost, counted from 1
    regained        what the version that the campaign ends with gains over the start

The gains are read on fresh seeds and on fresh development tasks, which no campaign sees.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.campaign import Campaign
from coevolve_jax.harness.records import Verdict
from coevolve_jax.harness.store import Question, Store, cores_of_a_run
from coevolve_jax.records.files import write_text

REGAINED = 0.8
FRESH_TASKS = 4321  # evaluation.seed of the tasks that read the gains
FRESH_ROLLOUTS = 2  # of each of them
ARMS: dict[str, dict[str, Any]] = {  # arm -> values of config.harness
    "evolving": {"proposer": "scripted", "diagnostics": "evolving"},
    "fixed": {"proposer": "scripted", "diagnostics": "fixed"},
    "placebo": {"proposer": "placebo", "diagnostics": "fixed"},
}


class Fault(NamedTuple):
    """A fault of the demo's settings.

    changes: dotted config key -> value. right: lever -> the moves that count as the right diagnosis.
    """

    changes: Mapping[str, Any]
    right: Mapping[str, tuple[str, ...]]


class Fresh(NamedTuple):
    """Counts of a run on the fresh tasks. trials: those that were not lost. asked: with the lost ones."""

    solved: int
    trials: int
    asked: int


class Row(NamedTuple):
    """The measures of one campaign, as a row of campaigns.csv.

    settings: what rows that stand in one file must share. mended: "" if no version did it.
    """

    fault: str
    arm: str
    seed: int
    settings: str
    right_first: int
    right_within_3: int
    mended: int | str
    promoted: int
    harmful: int
    lost: float
    regained: float
    runs: int


def check_names(flag: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raises ValueError where a flag names nothing, or something unknown."""
    if wrong := next((repr(name) for name in given if name not in known), "" if given else "nothing"):
        raise ValueError(f"--{flag} names {wrong}: use some of {', '.join(known)}.")


def cores_of_campaigns(folder: Path, jobs: int) -> int:
    """The cores that the campaigns in a folder were begun with; without any, those that a run gets here."""
    told = (Campaign(path.parent).plan().get("told", {}) for path in folder.glob("*/campaign.json"))
    return next((own["cores"] for own in told if "cores" in own), cores_of_a_run(jobs))


def success(store: Store, folder: Path, name: str, config: ConfigDict, seeds: Sequence[int]) -> float:
    """The mean success of a config's policies on the fresh tasks. Trains what is missing.

    A lost trial counts as a failure: no policy must gain by losing its failures.

    folder: for the answers of the evaluations. name: of the config, for a message.
    """
    if failed := store.begin(seeds) or store.train(config, seeds):
        raise ValueError(f"A run of {name} failed: {failed}")
    found = fresh(store, folder, [(config, seed) for seed in seeds])
    return float(np.mean([own.solved / own.asked for own in found]))


def fresh(store: Store, folder: Path, runs: Sequence[tuple[ConfigDict, int]]) -> list[Fresh]:
    """Reads finished runs on fresh development tasks, two rollouts each at temperature 1.

    folder: for the answers, each in a file named after its run in the store. So what another code or another
      setting has trained is asked anew.
    runs: config and seed of each; all configs have the same evaluation split.
    """
    (split,) = {config.environment.eval_split for config, _ in runs}
    tasks, workdirs = store.held_out(FRESH_TASKS, split), [store.workdir(*run) for run in runs]
    flags = ("--temperature=1.0", f"--num_rollouts={FRESH_ROLLOUTS}")
    file = lambda run: folder / run.parent.name / f"{run.name}.json"
    counts = store.answers([Question(tasks, run / "policy", flags, file(run)) for run in workdirs])
    total = lambda own, i: sum(count[i] for count in own.values())
    return [Fresh(total(own, 0), total(own, 1), FRESH_ROLLOUTS * len(own)) for own in counts]


def row(
    name: str,
    arm: str,
    seed: int,
    settings: str,
    told: Sequence[tuple[str, str, Verdict]],
    reached: Mapping[int, float],
    selected: int,
    faulty: float,
    healthy: float,
    runs: int,
) -> Row:
    """Measures one campaign.

    Args:
      told: (lever, move, verdict) of each version, in order.
      reached: number of a promoted version, from 1 on -> success on the fresh tasks.
      selected: number of the version that the campaign ends with; 0 is the start. The campaign chose it, and
        not the fresh tasks: the best of several readings is too high.
      faulty, healthy: success of the start with and without its fault.
    """
    trained = [(lever, move) for lever, move, judged in told if judged.kind != "refused"]
    right = [move in FAULTS[name].right.get(lever, ()) for lever, move in trained]
    lost = healthy - faulty
    mends = [n for n, value in reached.items() if lost > 0 and value - faulty >= REGAINED * lost]
    gained = reached[selected] - faulty if selected else 0.0
    return Row(
        name, arm, seed, settings, int(any(right[:1])), int(any(right[:3])), min(mends, default=""),
        len(reached), sum(value < faulty for value in reached.values()), lost, gained, runs,
    )  # fmt: skip


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes the rows as CSV, in the order of fault, arm and seed."""
    text, ordered = io.StringIO(), sorted(rows, key=lambda r: r[:3])
    csv.writer(text, lineterminator="\n").writerows([Row._fields, *ordered])
    write_text(path, text.getvalue())


def read_rows(path: Path, settings: str) -> dict[tuple[str, str, int], Row]:
    """(fault, arm, seed) -> the row that `write_rows` wrote; {} where there is no file.

    Raises ValueError where a row is of other settings.
    """
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != Row._fields:
            raise ValueError(f"{path} has other columns than {', '.join(Row._fields)}: move that file away.")
        found = [
            Row(
                *(told["fault"], told["arm"], int(told["seed"]), told["settings"]),
                right_first=int(told["right_first"]),
                right_within_3=int(told["right_within_3"]),
                mended=int(told["mended"]) if told["mended"] else "",
                promoted=int(told["promoted"]),
                harmful=int(told["harmful"]),
                lost=float(told["lost"]),
                regained=float(told["regained"]),
                runs=int(told["runs"]),
            )
            for told in reader
        ]
    if other := [row.settings for row in found if row.settings != settings]:
        raise ValueError(
            f"{path} has campaigns of {other[0]}, and these are of {settings}: name another --workdir."
        )
    return {row[:3]: row for row in found}


FAULTS: dict[str, Fault] = {
    "none": Fault({}, {}),
    "slow": Fault(
        {"learner.learning_rate": 1e-5}, {"learner.learning_rate": ("x3",), "learner.epochs": ("up",)}
    ),
    "hot": Fault(
        {"learner.learning_rate": 5e-4},
        {"learner.learning_rate": ("/3",), "learner.kl_coef": ("x3",), "learner.clip_high": ("/1.5",)},
    ),
    "leash": Fault({"learner.kl_coef": 3.0}, {"learner.kl_coef": ("/3", "0")}),
    "length_pay": Fault(
        {"reward.terms": ("length:0.3",)}, {"reward.terms": ("remove length", "halve length")}
    ),
    "brevity_pay": Fault(
        {"reward.terms": ("brevity:0.3",)}, {"reward.terms": ("remove brevity", "halve brevity")}
    ),
    "mixed_dropped": Fault(
        {
            "learner.group_filter": True,
            "learner.filter_side": "high",
            "learner.filter_keep": 0.1,
            "learner.filter_z": 0.0,
        },
        {"learner.group_filter": ("False",)},
    ),
    "short": Fault(
        {"rollout.max_length": 256, "evaluation.max_length": 512}, {"rollout.max_length": ("x2",)}
    ),
    "cold": Fault({"rollout.temperature": 0.4}, {"rollout.temperature": ("x1.25",)}),
    "few": Fault({"rollout.group_size": 2, "rollout.tasks_per_step": 64}, {"rollout.group_size": ("x2",)}),
    "stale": Fault({"rollout.max_staleness": 6}, {"rollout.max_staleness": ("down",)}),
    "narrow": Fault({"data.retire_after": 1}, {"data.retire_after": ("up",)}),
}
