"""The reading of the test, once, at the end: what a campaign may claim.

The campaign chose its harness on a few seeds and on the selection set, so its own score is too high. Here
start, selected harness and references are trained anew on fresh seeds, and read on test tasks that no part of
the campaign has seen. claim.py says what follows from the readings.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis import stats
from coevolve_jax.harness import evidence, levers, references
from coevolve_jax.harness.campaign import READ, START, UNREADABLE, Tampered, reason, sha256, was_read
from coevolve_jax.harness.claim import HARNESSES, PROTOCOLS, Reading, result
from coevolve_jax.harness.loop import Evolution
from coevolve_jax.harness.records import changes_from_json
from coevolve_jax.harness.store import Question, altered, answer, config_changes, config_id, is_run
from coevolve_jax.records.files import read_lines, write_text

TEST_SEED = 4321  # of the test tasks
ENGINE = {"name": "native", "matmul_dtype": ""}  # by which the test is read, whatever config.engine says


class Harness(NamedTuple):
    """One of those that are trained anew. name: "start", "selected", or "reference_" and hex digits."""

    name: str
    version: str  # "" of a reference
    config: ConfigDict


def harnesses(evolution: Evolution) -> list[Harness]:
    """The harnesses of the last opening of the test."""
    versions = {"start": START, "selected": evolution.campaign.selected()}
    found = [Harness(name, v, evolution.versions.config(v)) for name, v in versions.items()]
    first = evolution.versions.config(START)
    for name, reference in _last_opened(evolution).get("references", {}).items():
        changed = configs.override(first, changes_from_json(reference["changes"]))
        found.append(Harness(name, "", changed))
    return found


def _reference(config: ConfigDict) -> str:
    """Names a reference by its config, so that no other one's runs or readings pass for its own."""
    return f"reference_{config_id(config)[:8]}"


def _last_opened(evolution: Evolution) -> dict[str, Any]:
    """The content of the last opened.json of the campaign; {} if there was no opening."""
    folder = evolution.campaign.folder / "final"
    notes = [json.loads(path.read_text()) for path in folder.glob("opened*.json")]
    return max(notes, key=lambda note: note.get("number", 1), default={})


def open_test(
    evolution: Evolution,
    fresh: Sequence[int],
    opened: Mapping[str, Any],
    reopen: bool,
    others: Mapping[str, levers.Changes] | None = None,
) -> None:
    """Writes final/opened.json. Each opening stands in the campaign, and in its store, for ever.

    others: references, as the user names them -> what they change of the start (references.py).

    Raises ValueError for a second opening without `reopen`, while the campaign goes on, and where the test
    cannot be made. Then nothing is opened.
    """
    campaign, store, test = evolution.campaign, evolution.store, evolution.settings.test_split
    if campaign.next() is not None:
        raise ValueError("The campaign is not over, so its test stays sealed: run it to its end first.")
    before = sorted((campaign.folder / "final").glob("opened*.json"))
    noted = [note for note in openings(evolution) if note["campaign"] == _name(evolution)]
    own: dict[str, Any] = {
        "versions": {"start": START, "selected": campaign.selected()},
        "fresh_seeds": list(fresh),
    }
    if others:
        first = evolution.versions.config(START)
        named = {given: _reference(configs.override(first, changes)) for given, changes in others.items()}
        told = {named[given]: {"given": given, "changes": changes} for given, changes in others.items()}
        own["references"] = json.loads(json.dumps(told))
    last = _last_opened(evolution)
    if before and own.items() <= last.items():
        return _note(evolution, last)  # the same command goes on
    check_fresh("final_seeds", fresh, evolution.settings.seeds)
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


def check_fresh(flag: str, fresh: Iterable[int], seeds: Iterable[int]) -> None:
    """Raises ValueError where a flag's fresh seeds have one of a campaign's own."""
    if shared := sorted({*fresh} & {*seeds}):
        raise ValueError(f"--{flag} names {shared[0]}, a seed of the campaign: name fresh ones.")


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
    """The campaign's folder, however it was given: through links too."""
    return str(evolution.campaign.folder.resolve())


def read(evolution: Evolution, fresh: Sequence[int]) -> list[Reading]:
    """Trains the harnesses on the fresh seeds and reads all runs. Goes on where it was killed.

    What was read since the last opening is not read again. Raises ValueError where every trial of a run or of
    a reading was lost, before anything is told of it; Tampered where a run or the tasks are other ones.
    """
    campaign, store = evolution.campaign, evolution.store
    if was_read(campaign.events()):
        _check_placed(evolution, fresh)
        return _read(evolution, fresh)
    folder, own = campaign.folder / "final", evolution.versions.config(START)
    if failed := store.begin(fresh):
        seed, why = next(iter(failed.items()))
        raise ValueError(f"The start of the fresh seed {seed} failed: {why}")
    tasks = store.held_out(TEST_SEED, evolution.settings.test_split)
    campaign.link(Path("final/tasks"), TEST_SEED, tasks)
    raw = [f"tasks/seed_{TEST_SEED}/{name}" for name in ("held_out.jsonl", "config.json")]
    for harness, _, config in harnesses(evolution):
        if failed := store.train(config, fresh):
            seed, why = next(iter(failed.items()))
            raise ValueError(f"The {harness} harness failed on the fresh seed {seed}: {why}")
        for seed in fresh:
            run = campaign.link(Path("final/runs") / harness, seed, store.workdir(config, seed))
            evidence.check_valid(run, f"the {harness} harness on the fresh seed {seed}")
            raw.append(f"runs/{harness}/seed_{seed}/evaluations.jsonl")
    _check_placed(evolution, fresh)
    asked = [
        Question(tasks, run / "policy", PROTOCOLS[reading.protocol].given(own), file)
        for reading, run, file in _rows(evolution, fresh)
        if reading.tasks == "T" and not PROTOCOLS[reading.protocol].long
    ]
    store.answers(asked)
    found = _read(evolution, fresh)
    _check_valid(evolution, fresh, found)
    with open(folder / "readings.csv.tmp", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Reading._fields)
        writer.writerows(found)
    (folder / "readings.csv.tmp").replace(folder / "readings.csv")
    told = {**result(found), **_said(evolution), "openings": len(openings(evolution))}
    write_text(folder / "final.json", json.dumps(told, indent=1))
    raw += sorted(f"readings/{path.name}" for path in (folder / "readings").glob("*.json"))
    files = [run / name for run in _fresh_runs(evolution, fresh) for name in evidence.files(run)]
    hashes = {str(path.relative_to(folder)): sha256(path) for path in files}
    write_text(folder / "files.json", json.dumps(hashes, indent=1))
    names = [name.removeprefix("final/") for name in READ]
    campaign.tell_final(*raw, *names)  # the last one says that it is read
    return found


def _rows(evolution: Evolution, fresh: Iterable[int]) -> Iterator[tuple[Reading, Path, Path]]:
    """Each row of readings.csv, without its success; its run; and the file that holds its success."""
    folder = evolution.campaign.folder / "final"
    for harness, version, _ in harnesses(evolution):
        own = evolution.versions.runs(version) if version else {}
        runs = {("S", seed): run for seed, run in own.items()}
        runs |= {("F", seed): folder / "runs" / harness / f"seed_{seed}" for seed in fresh}
        for (kind, seed), run in runs.items():
            yield Reading(harness, version, kind, seed, "D", "P1"), run, run / "evaluations.jsonl"
            for name, protocol in PROTOCOLS.items():
                file = folder / "readings" / f"{harness}_{seed}_{'P1' if protocol.long else name}.json"
                yield Reading(harness, version, kind, seed, "T", name), run, file


def _check_valid(evolution: Evolution, fresh: Iterable[int], found: Sequence[Reading]) -> None:
    """Raises ValueError where a reading has no valid trial. found: all readings, in the order of `_rows`."""
    for reading, (_, _, file) in zip(found, _rows(evolution, fresh), strict=True):
        if math.isnan(reading.success):
            raise ValueError(
                f"Every trial of the {reading.harness} harness, seed {reading.seed}, was lost in the reading "
                f"{reading.protocol} of the test: mend what lost them, take {file} away and give the same "
                "command again."
            )


def _fresh_runs(evolution: Evolution, fresh: Iterable[int]) -> list[Path]:
    """The links to the runs of all harnesses on the fresh seeds."""
    rows = _rows(evolution, fresh)
    return [run for reading, run, _ in rows if (reading.seeds, reading.tasks) == ("F", "D")]


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
    """Makes readings.csv and final.json again from what was read. Returns a sentence on each difference.

    The fresh runs are also compared with their own rollouts.
    """
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
        found += itertools.chain.from_iterable(map(evidence.contradictions, _fresh_runs(evolution, fresh)))
        made = _read(evolution, fresh)
        if wrong := sorted(there ^ {tuple(map(str, row)) for row in made}):
            told = ",".join(wrong[0])
            found.append(f"final/readings.csv differs from what the runs and final/readings give ({told}).")
        kept, told = result_of(evolution.campaign.folder), {**result(made), **_said(evolution)}
        told = json.loads(json.dumps(told))
        if wrong := [key for key in told if kept.get(key) != told[key]]:
            found.append(f"final/final.json differs from what the readings give ({wrong[0]}).")
        found += _unopened(evolution, kept.get("openings", 0))
    except UNREADABLE as error:
        found.append(f"final/ cannot be made again from what is there ({reason(error)}).")
    return found


def _check_placed(evolution: Evolution, fresh: Iterable[int]) -> None:
    if wrong := _misplaced(evolution, fresh):
        raise Tampered(wrong[0])


def _misplaced(evolution: Evolution, fresh: Iterable[int]) -> list[str]:
    """A sentence on each run or link of the reading that is something else than its name says."""
    folder, found = evolution.campaign.folder / "final", []
    config_of = {name: config for name, _, config in harnesses(evolution)}
    first = evolution.versions.config(START)
    for name, config in config_of.items():
        if name in HARNESSES:
            continue
        if name != _reference(config):
            found.append(f"final/ has a {name}, which is not the name of its config.")
        if key := references.frozen(config_changes(first, config)):
            found.append(f"final/ has a {name} that changes config.{key}, which no reference may.")
    for reading, run, _ in _rows(evolution, fresh):
        config, told = config_of[reading.harness], run.resolve()
        if reading[4:6] != ("D", "P1"):
            continue
        if not is_run(told, config, reading.seed):
            whose = reading.version or reading.harness
            found.append(f"{run} leads to {told}, which is no run of {whose} with this seed.")
        elif why := altered(told):
            found.append(why)
    config = evolution.store.held_out_config(TEST_SEED, evolution.settings.test_split)
    tasks = (folder / "tasks" / f"seed_{TEST_SEED}").resolve()
    if not tasks.name.startswith(f"{config_id(config)}-"):
        found.append(f"final/tasks leads to {tasks}, which are other tasks than the test's.")
    elif why := altered(tasks):
        found.append(why)
    return found


def _unopened(evolution: Evolution, told: int) -> list[str]:
    """Sentences on openings of the test that the store has noted and the campaign's folder does not tell of.

    told: how many openings final.json tells of. Other campaigns may have opened the test since.
    """
    own = [note for note in openings(evolution) if note["campaign"] == _name(evolution)]
    paths = sorted((evolution.campaign.folder / "final").glob("opened*.json"))
    there = [json.loads(path.read_text()) for path in paths]
    gone = [note for note in own if {k: v for k, v in note.items() if k != "campaign"} not in there]
    found = [f"final/ lacks the opening {note['number']} that the store has noted." for note in gone]
    if not max(len(own), len(there)) <= told <= len(openings(evolution)):
        found.append(f"final/final.json tells of {told} openings of the test, which the store does not.")
    return found


def _said(evolution: Evolution) -> dict[str, Any]:
    """The values of final.json that do not follow from the readings."""
    others = _last_opened(evolution).get("references", {})
    return {
        "given": {name: reference["given"] for name, reference in others.items()},
        "engines": _engines(evolution.versions.config(START)),
    }


def _engines(config: ConfigDict) -> str:
    """A sentence where the campaign's own evaluations are by another engine than the test's; else ""."""
    own = [f"{key} {config.engine[key]!r}" for key, read in ENGINE.items() if config.engine[key] != read]
    if not own:
        return ""
    return (
        f"The selection set was read with config.engine.{' and '.join(own)}, the test by the native engine "
        f"in {config.engine.dtype}: the luck of the tasks holds what these differ by, the claim does not."
    )


def result_of(folder: Path) -> dict[str, Any]:
    """The result that `read` has written into a campaign's folder."""
    return json.loads((folder / "final" / "final.json").read_text())
