"""The reading of the test, once, at the end: what a campaign may claim.

The campaign chose its harness on a few seeds and on the selection set, so its own score is too high. Here
start and selected harness are trained anew on fresh seeds, and read on test tasks that no part of the
campaign has seen:

    gain(S, D)   the campaign's seeds, the selection set: what the campaign believed
    gain(F, D)   fresh seeds, the selection set
    gain(F, T)   fresh seeds, test tasks: the only one that is claimed
    luck of the seeds = gain(S, D) - gain(F, D);  luck of the tasks = gain(F, D) - gain(F, T)
    optimism = gain(S, D) - gain(F, T)

A gain is the success of the selected harness minus that of the start.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coevolve_jax.analysis import stats
from coevolve_jax.harness import evidence
from coevolve_jax.harness.campaign import START
from coevolve_jax.harness.loop import Evolution
from coevolve_jax.harness.store import Question
from coevolve_jax.records.files import write_text

TEST_SEED = 4321  # of the test tasks


class Protocol(NamedTuple):
    """How a policy is read. temperature 0 is greedy. flags: further ones of experiments/evaluate.py."""

    temperature: float
    num_rollouts: int = 2
    flags: tuple[str, ...] = ()

    @property
    def given(self) -> tuple[str, ...]:
        """All flags of experiments/evaluate.py."""
        return (f"--temperature={self.temperature}", f"--num_rollouts={self.num_rollouts}", *self.flags)


PROTOCOLS: dict[str, Protocol] = {
    "P1": Protocol(1.0),
    "P2": Protocol(0.0, 1),
    "P3": Protocol(0.7),
    "P5": Protocol(1.0, flags=("--max_observation=80",)),
}


class Reading(NamedTuple):
    """Success of one run. seeds: "S", the campaign's, or "F", fresh. tasks: "D", selection, or "T"."""

    harness: str
    version: str
    seeds: str
    seed: int
    tasks: str
    protocol: str
    success: float


def open_test(evolution: Evolution, fresh: Sequence[int], opened: Mapping[str, Any], reopen: bool) -> None:
    """Writes final/opened.json. Each opening stands in the campaign for ever.

    Raises ValueError for a second opening without `reopen`, and while the campaign goes on.
    """
    if evolution.campaign.next() is not None:
        raise ValueError("The campaign is not over, so its test stays sealed: run it to its end first.")
    before = sorted((evolution.campaign.folder / "final").glob("opened*.json"))
    own = {
        "versions": {"start": START, "selected": evolution.campaign.selected()},
        "fresh_seeds": list(fresh),
    }
    if before and own.items() <= json.loads(before[-1].read_text()).items():
        return  # the same command goes on
    if shared := sorted(set(fresh) & set(evolution.settings.seeds)):
        raise ValueError(f"--final_seeds names {shared[0]}, a seed of the campaign: name fresh ones.")
    if before and not reopen:
        raise ValueError(
            f"{before[-1]} says that the test was read already: a second reading needs --reopen, and the "
            "page will say so."
        )
    name = "opened.json" if not before else f"opened_{len(before) + 1}.json"
    evolution.campaign.write_final(name, {**own, **opened})


def read(evolution: Evolution, fresh: Sequence[int]) -> list[Reading]:
    """Trains both harnesses on the fresh seeds and reads all runs. Goes on where it was killed."""
    folder, store = evolution.campaign.folder / "final", evolution.store
    found: list[Reading] = []
    asked: list[tuple[Reading, Question]] = []
    if failed := store.begin(fresh):
        seed, why = next(iter(failed.items()))
        raise ValueError(f"The start of the fresh seed {seed} failed: {why}")
    tasks = store.held_out(TEST_SEED, "test")
    for harness, version in {"start": START, "selected": evolution.campaign.selected()}.items():
        config = evolution.versions.config(version)
        if failed := store.train(config, fresh):
            seed, why = next(iter(failed.items()))
            raise ValueError(f"The {harness} harness failed on the fresh seed {seed}: {why}")
        for kind, seed in [("S", s) for s in evolution.settings.seeds] + [("F", s) for s in fresh]:
            run = store.workdir(config, seed)
            own = evidence.selection(run).success
            found.append(Reading(harness, version, kind, seed, "D", "P1", own))
            for name, protocol in PROTOCOLS.items():
                output = folder / "readings" / f"{harness}_{seed}_{name}.json"
                question = Question(tasks, run / "policy", protocol.given, output)
                asked.append((Reading(harness, version, kind, seed, "T", name, 0.0), question))
    for (reading, _), counts in zip(asked, store.answers([q for _, q in asked]), strict=True):
        solved, trials = (sum(c[i] for c in counts.values()) for i in (0, 1))
        found.append(reading._replace(success=solved / trials))
    with open(folder / "readings.csv.tmp", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Reading._fields)
        writer.writerows(found)
    (folder / "readings.csv.tmp").replace(folder / "readings.csv")
    write_text(folder / "final.json", json.dumps(result(found), indent=1))
    raw = sorted({str(question.output.relative_to(folder)) for _, question in asked})
    evolution.campaign.tell_final("readings.csv", "final.json", *raw)
    return found


def result(readings: Sequence[Reading]) -> dict[str, Any]:
    """The gains and the optimism, from the rows of readings.csv.

    A gain has a 95% t interval over seeds, paired by seed. The optimism's parts are differences of means.
    """
    success = {(r.harness, r.seeds, r.seed, r.tasks, r.protocol): r.success for r in readings}

    def gains(seeds: str, tasks: str, protocol: str = "P1") -> list[float]:
        at = sorted({r.seed for r in readings if r.seeds == seeds})
        both = [[success[h, seeds, s, tasks, protocol] for h in ("selected", "start")] for s in at]
        return [a - b for a, b in both]

    def told(values: Sequence[float]) -> dict[str, Any]:
        if len(values) < 2:
            return {"value": values[0], "low": None, "high": None, "seeds": 1}
        return {**dataclasses.asdict(stats.over_seeds(values)), "seeds": len(values)}

    gain = {f"{s}{t}": told(gains(s, t)) for s in "SF" for t in "DT"}
    value = {name: found["value"] for name, found in gain.items()}
    names = sorted({r.protocol for r in readings if r.tasks == "T"})
    return {
        "gain": gain,
        "luck_of_seeds": value["SD"] - value["FD"],
        "luck_of_tasks": value["FD"] - value["FT"],
        "optimism": value["SD"] - value["FT"],
        "transfer": {name: told(gains("F", "T", name)) for name in names},
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
    return "\n".join(
        [
            told("gain, campaign's seeds, selection set", gain["SD"]),
            told("gain, fresh seeds, selection set", gain["FD"]),
            told("gain, fresh seeds, test tasks: the claim", gain["FT"]),
            point("luck of the seeds", result["luck_of_seeds"]),
            point("luck of the tasks", result["luck_of_tasks"]),
            point("optimism", result["optimism"]),
        ]
    )
