"""The reading of the test, once, at the end: what a campaign may claim.

The campaign chose its harness on a few seeds and on the selection set, so its own score is too high. Here
start and selected harness are trained anew on fresh seeds, and read on test tasks that no part of the
campaign has seen:

    gain(S, D)   the campaign's seeds, the selection set: what the campaign believed
    gain(F, D)   fresh seeds, the selection set
    gain(F, T)   fresh seeds, test tasks: the only one that is claimed
    luck of the seeds = gain(S, D) - gain(F, D);  luck of the tasks = gain(F, D) - gain(F, T)
    optimism = gain(S, D) - gain(F, T)

A gain is the success of the selected harness minus that of the start. Where trials are lost, a seed's is the
smaller of two: over the valid trials, and with the lost ones as failures. So no harness gains by losing what
it fails. gain(F, T) is also read in other ways:

    P1   as the campaign evaluates: this is gain(F, T)
    P2   greedy
    P3   at temperature 0.7
    P4   P1's rollouts of the long tasks alone: the third with the most calls, or less
    P5   with observations cut at 80 characters

Each of P2 to P5 has the p value of a paired t test over the seeds, and one adjusted for the four (Holm).
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.analysis import stats
from coevolve_jax.harness import evidence
from coevolve_jax.harness.campaign import READ, START, UNREADABLE, reason
from coevolve_jax.harness.loop import Evolution
from coevolve_jax.harness.store import Question, answer, config_id, is_run
from coevolve_jax.records.files import read_lines, write_text

TEST_SEED = 4321  # of the test tasks


class Protocol(NamedTuple):
    """How a policy is read.

    temperature: 0 is greedy; None is that of the campaign's own evaluations. flags: further ones of
    experiments/evaluate.py. long: it has no rollouts of its own; P1's of the long tasks are counted.
    said: how it differs from P1.
    """

    temperature: float | None
    num_rollouts: int = 2
    flags: tuple[str, ...] = ()
    long: bool = False
    said: str = ""

    def given(self, config: ConfigDict) -> tuple[str, ...]:
        """All flags of experiments/evaluate.py, in a campaign whose start has this config."""
        temperature = config.evaluation.temperature if self.temperature is None else self.temperature
        own = (f"--dtype={config.engine.dtype}", f"--temperature={temperature}")
        return (*own, f"--num_rollouts={self.num_rollouts}", *self.flags)


PROTOCOLS: dict[str, Protocol] = {
    "P1": Protocol(None),
    "P2": Protocol(0.0, 1, said="greedy"),
    "P3": Protocol(0.7, said="temperature 0.7"),
    "P4": Protocol(None, long=True, said="long tasks"),
    "P5": Protocol(None, flags=("--max_observation=80",), said="short observations"),
}
HARNESSES = ("start", "selected")
ENGINE = {"name": "native", "matmul_dtype": ""}  # by which the test is read, whatever config.engine says


class Reading(NamedTuple):
    """Success of one run. seeds: "S", the campaign's, or "F", fresh. tasks: "D", selection, or "T".

    lost: trials that are not valid, by the most that a task has in any run. worst: success with them as
    failures.
    """

    harness: str
    version: str
    seeds: str
    seed: int
    tasks: str
    protocol: str
    success: float = nan
    lost: int = 0
    worst: float = nan


def open_test(evolution: Evolution, fresh: Sequence[int], opened: Mapping[str, Any], reopen: bool) -> None:
    """Writes final/opened.json. Each opening stands in the campaign, and in its store, for ever.

    Raises ValueError for a second opening without `reopen`, while the campaign goes on, and where the test
    cannot be made. Then nothing is opened.
    """
    campaign, store, test = evolution.campaign, evolution.store, evolution.settings.test_split
    if campaign.next() is not None:
        raise ValueError("The campaign is not over, so its test stays sealed: run it to its end first.")
    before = sorted((campaign.folder / "final").glob("opened*.json"))
    noted = [note for note in openings(evolution) if note["campaign"] == _name(evolution)]
    own = {
        "versions": {"start": START, "selected": campaign.selected()},
        "fresh_seeds": list(fresh),
    }
    last = json.loads(before[-1].read_text()) if before else {}
    if before and own.items() <= last.items():
        return _note(evolution, last)  # the same command goes on
    if shared := sorted(set(fresh) & set(evolution.settings.seeds)):
        raise ValueError(f"--final_seeds names {shared[0]}, a seed of the campaign: name fresh ones.")
    if (before or noted) and not reopen:
        raise ValueError(
            f"{before[-1] if before else store.openings(TEST_SEED, test)} says that the test was read "
            f"already (openings in the store: {len(openings(evolution))}): a second reading needs "
            "--reopen, and the page will say so."
        )
    store.held_out(TEST_SEED, test)  # while nothing is written that says that the test was read
    number = max(len(before), len(noted)) + 1
    name = "opened.json" if number == 1 else f"opened_{number}.json"
    row = {**own, **opened, "number": number}
    campaign.write_final(name, row)
    _note(evolution, row)


def openings(evolution: Evolution) -> list[dict[str, Any]]:
    """The notes of all openings of this test by campaigns of the store."""
    notes = sorted(evolution.store.openings(TEST_SEED, evolution.settings.test_split).glob("*.json"))
    return [json.loads(path.read_text()) for path in notes]


def _note(evolution: Evolution, opened: Mapping[str, Any]) -> None:
    """Notes an opening in the store, once: another campaign, or the same one begun anew, finds it there."""
    who = hashlib.sha256(_name(evolution).encode()).hexdigest()[:12]
    path = (
        evolution.store.openings(TEST_SEED, evolution.settings.test_split)
        / f"{who}_{opened.get('number', 1)}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"campaign": _name(evolution), **opened}, indent=1))


def _name(evolution: Evolution) -> str:
    return str(evolution.campaign.folder.absolute())


def read(evolution: Evolution, fresh: Sequence[int]) -> list[Reading]:
    """Trains both harnesses on the fresh seeds and reads all runs. Goes on where it was killed."""
    campaign, store = evolution.campaign, evolution.store
    folder, own = campaign.folder / "final", evolution.versions.config(START)
    if failed := store.begin(fresh):
        seed, why = next(iter(failed.items()))
        raise ValueError(f"The start of the fresh seed {seed} failed: {why}")
    tasks = store.held_out(TEST_SEED, evolution.settings.test_split)
    campaign.link(Path("final/tasks"), TEST_SEED, tasks)
    raw = [f"tasks/seed_{TEST_SEED}/held_out.jsonl"]
    for harness, version in {"start": START, "selected": campaign.selected()}.items():
        config = evolution.versions.config(version)
        if failed := store.train(config, fresh):
            seed, why = next(iter(failed.items()))
            raise ValueError(f"The {harness} harness failed on the fresh seed {seed}: {why}")
        for seed in fresh:
            campaign.link(Path("final/runs") / harness, seed, store.workdir(config, seed))
            raw.append(f"runs/{harness}/seed_{seed}/evaluations.jsonl")
    asked = [
        Question(tasks, run / "policy", PROTOCOLS[reading.protocol].given(own), file)
        for reading, run, file in _rows(evolution, fresh)
        if reading.tasks == "T" and not PROTOCOLS[reading.protocol].long
    ]
    store.answers(asked)
    found = _read(evolution, fresh)
    with open(folder / "readings.csv.tmp", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Reading._fields)
        writer.writerows(found)
    (folder / "readings.csv.tmp").replace(folder / "readings.csv")
    told = {**result(found), "openings": len(openings(evolution)), "engines": _engines(own)}
    write_text(folder / "final.json", json.dumps(told, indent=1))
    raw += sorted(f"readings/{path.name}" for path in (folder / "readings").glob("*.json"))
    campaign.tell_final(*raw, "readings.csv", "final.json")  # the last one says that it is read
    return found


def _rows(evolution: Evolution, fresh: Iterable[int]) -> Iterator[tuple[Reading, Path, Path]]:
    """Each row of readings.csv, without its success; its run; and the file that holds its success."""
    folder = evolution.campaign.folder / "final"
    for harness, version in {"start": START, "selected": evolution.campaign.selected()}.items():
        runs = {("S", seed): run for seed, run in evolution.versions.runs(version).items()}
        runs |= {("F", seed): folder / "runs" / harness / f"seed_{seed}" for seed in fresh}
        for (kind, seed), run in runs.items():
            yield Reading(harness, version, kind, seed, "D", "P1"), run, run / "evaluations.jsonl"
            for name, protocol in PROTOCOLS.items():
                file = folder / "readings" / f"{harness}_{seed}_{'P1' if protocol.long else name}.json"
                yield Reading(harness, version, kind, seed, "T", name), run, file


def _read(evolution: Evolution, fresh: Iterable[int]) -> list[Reading]:
    """The rows of readings.csv. Both D and T are of one set: the balanced one where the tasks have one."""
    path = evolution.campaign.folder / "final" / "tasks" / f"seed_{TEST_SEED}" / "held_out.jsonl"
    tasks = {task["id"]: task for task in read_lines(path)}
    kinds = {id: task["lineage"]["kind"] for id, task in tasks.items()}
    kind = stats.SETS["balanced" if stats.SETS["balanced"] in kinds.values() else "iid"]
    calls = {id: _calls(task) for id, task in tasks.items() if kinds[id] == kind}
    counts = np.array(list(calls.values()))
    least = next((n for n in sorted({*calls.values()}) if (counts >= n).mean() <= 1 / 3), counts.max())
    long = {id for id, count in calls.items() if count >= least}
    found = []
    for reading, run, file in _rows(evolution, fresh):
        if reading.tasks == "D":
            selection = evidence.selection(run)
        else:
            chosen = long if PROTOCOLS[reading.protocol].long else calls
            counts = {id: count for id, count in answer(file).items() if id in chosen}
            selection = evidence.Selection(counts, {})
        found.append((reading, selection))
    return _told(found)


def _told(found: Sequence[tuple[Reading, evidence.Selection]]) -> list[Reading]:
    """The rows with their successes and lost trials. Runs that are read alike have been asked as often."""
    most: dict[tuple[str, str], int] = {}
    for reading, selection in found:
        alike = reading.tasks, reading.protocol
        most[alike] = max(most.get(alike, 0), selection.most)
    told = []
    for reading, own in found:
        asked = most[reading.tasks, reading.protocol]
        told.append(reading._replace(success=own.success, lost=own.lost(asked), worst=own.worst(asked)))
    return told


def _calls(task: Mapping[str, Any]) -> int:
    """The calls of a task's reference."""
    return sum(len(turn["calls"]) for turn in task.get("turns", ()))


def differences(evolution: Evolution) -> list[str]:
    """Makes readings.csv and final.json again from what was read. Returns a sentence on each difference."""
    folder, found = evolution.campaign.folder / "final", []
    if not any((evolution.campaign.folder / name).exists() for name in READ):
        return []
    try:
        with open(folder / "readings.csv", newline="") as file:
            there = {tuple(row.values()) for row in csv.DictReader(file)}
        fresh = sorted({int(seed) for _, _, kind, seed, *_ in there if kind == "F"})
        opened = [json.loads(path.read_text())["fresh_seeds"] for path in folder.glob("opened*.json")]
        if fresh not in map(sorted, opened):
            found.append(f"final/readings.csv has the fresh seeds {fresh}, for which no test was opened.")
        found += _misplaced(evolution, fresh)
        made = _read(evolution, fresh)
        if wrong := sorted(there ^ {tuple(map(str, row)) for row in made}):
            told = ",".join(wrong[0])
            found.append(f"final/readings.csv differs from what the runs and final/readings give ({told}).")
        kept, gains = result_of(evolution.campaign.folder), json.loads(json.dumps(result(made)))
        if wrong := [key for key in gains if kept.get(key) != gains[key]]:
            found.append(f"final/final.json differs from what the readings give ({wrong[0]}).")
    except UNREADABLE as error:
        found.append(f"final/ cannot be made again from what is there ({reason(error)}).")
    return found


def _misplaced(evolution: Evolution, fresh: Iterable[int]) -> list[str]:
    """A sentence on each link of final/ that leads to something else than its name says."""
    folder, found = evolution.campaign.folder / "final", []
    for reading, run, _ in _rows(evolution, fresh):
        config, told = evolution.versions.config(reading.version), run.resolve()
        if reading[4:6] == ("D", "P1") and not is_run(told, config, reading.seed):
            found.append(f"{run} leads to {told}, which is no run of {reading.version} with this seed.")
    config = evolution.store.held_out_config(TEST_SEED, evolution.settings.test_split)
    tasks = (folder / "tasks" / f"seed_{TEST_SEED}").resolve()
    if not tasks.name.startswith(f"{config_id(config)}-"):
        found.append(f"final/tasks leads to {tasks}, which are other tasks than the test's.")
    return found


def _engines(config: ConfigDict) -> str:
    """A sentence where the campaign's own evaluations are by another engine than the test's; else ""."""
    own = [f"{key} {config.engine[key]!r}" for key, read in ENGINE.items() if config.engine[key] != read]
    if not own:
        return ""
    return (
        f"The selection set was read with config.engine.{' and '.join(own)}, the test by the native engine "
        f"in {config.engine.dtype}: the luck of the tasks holds what these differ by, the claim does not."
    )


def result(readings: Sequence[Reading]) -> dict[str, Any]:
    """The gains and the optimism, from the rows of readings.csv.

    A gain has a 95% t interval over seeds, paired by seed. The optimism's parts are differences of means.
    `lost` has the lost trials of either harness; those of the long tasks are P1's, and count once.
    """
    by_run = {(r.harness, r.seeds, r.seed, r.tasks, r.protocol): r for r in readings}

    def gains(seeds: str, tasks: str, protocol: str = "P1") -> list[float]:
        at = sorted({r.seed for r in readings if r.seeds == seeds})
        both = [[by_run[h, seeds, s, tasks, protocol] for h in HARNESSES] for s in at]
        return [min(ours.success - theirs.success, ours.worst - theirs.worst) for theirs, ours in both]

    def told(values: Sequence[float]) -> dict[str, Any]:
        if len(values) < 2:
            return {"value": values[0], "low": None, "high": None, "seeds": 1}
        return {**dataclasses.asdict(stats.over_seeds(values)), "seeds": len(values)}

    gain = {f"{s}{t}": told(gains(s, t)) for s in "SF" for t in "DT"}
    value = {name: found["value"] for name, found in gain.items()}
    once = [r for r in readings if not PROTOCOLS[r.protocol].long]
    names = sorted({r.protocol for r in readings if r.tasks == "T"})
    others = [name for name in names if name != "P1"]
    p = [stats.paired_p(gains("F", "T", name)) for name in others]
    tests = {
        name: {"p": own, "p_holm": held} for name, own, held in zip(others, p, stats.holm(p), strict=True)
    }
    return {
        "gain": gain,
        "luck_of_seeds": value["SD"] - value["FD"],
        "luck_of_tasks": value["FD"] - value["FT"],
        "optimism": value["SD"] - value["FT"],
        "transfer": {name: {**told(gains("F", "T", name)), **tests.get(name, {})} for name in names},
        "lost": {h: sum(r.lost for r in once if r.harness == h) for h in HARNESSES},
    }


def result_of(folder: Path) -> dict[str, Any]:
    """The result that `read` has written into a campaign's folder."""
    return json.loads((folder / "final" / "final.json").read_text())


def table(result: Mapping[str, Any]) -> str:
    """Formats a result as text."""

    def told(name: str, found: Mapping[str, Any]) -> str:
        span = "" if found["low"] is None else f" ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
        return f"{name:<44} {100 * found['value']:+.1f} points{span}"

    gain, point = result["gain"], lambda name, value: f"{name:<44} {100 * value:+.1f} points"
    lost = [result.get("lost", {}).get(harness, 0) for harness in HARNESSES]
    return "\n".join(
        [
            told("gain, campaign's seeds, selection set", gain["SD"]),
            told("gain, fresh seeds, selection set", gain["FD"]),
            told("gain, fresh seeds, test tasks: the claim", gain["FT"]),
            point("luck of the seeds", result["luck_of_seeds"]),
            point("luck of the tasks", result["luck_of_tasks"]),
            point("optimism", result["optimism"]),
            *(
                told(f"the claim, {PROTOCOLS[name].said}", found)
                + f", p {_p(found['p_holm'])} (Holm, of four)"
                for name, found in result.get("transfer", {}).items()
                if PROTOCOLS[name].said
            ),
            *([f"{'trials lost, of start and selected':<44} {lost[0]} and {lost[1]}"] if any(lost) else ()),
            f"{'openings of this test in the store':<44} {result.get('openings', 1)}",
            *filter(None, [result.get("engines")]),
        ]
    )


def _p(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"
