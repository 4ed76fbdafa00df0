"""The claim of a campaign, from the readings of its test.

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

References are other harnesses that are trained on the same fresh seeds: one tuned by hand, or what another
campaign selected. The selected harness minus a reference is reckoned as a gain over the start is. P1's p
values are adjusted for the number of references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax.analysis import stats


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


def result(readings: Sequence[Reading]) -> dict[str, Any]:
    """The gains and the optimism, from the rows of readings.csv.

    A gain has a 95% t interval over seeds, paired by seed. The optimism's parts are differences of means.
    `lost` has each harness's lost trials; those of the long tasks are P1's, and count once. `over` has the
    selected harness minus each reference: on the selection set (`FD`), and on the test in every way.
    """
    by_run = {(r.harness, r.seeds, r.seed, r.tasks, r.protocol): r for r in readings}
    names = sorted({r.protocol for r in readings if r.tasks == "T"})
    references = sorted({r.harness for r in readings} - {*HARNESSES})

    def gains(seeds: str, tasks: str, protocol: str = "P1", than: str = "start") -> list[float]:
        at = sorted({r.seed for r in readings if r.seeds == seeds})
        both = [[by_run[h, seeds, s, tasks, protocol] for h in (than, "selected")] for s in at]
        return [min(ours.success - theirs.success, ours.worst - theirs.worst) for theirs, ours in both]

    def transfer(than: str) -> dict[str, dict[str, Any]]:
        values = {name: gains("F", "T", name, than) for name in names}
        tests = _tests({name: own for name, own in values.items() if name != "P1"})
        return {name: {**_told(own), **tests.get(name, {})} for name, own in values.items()}

    gain = {f"{s}{t}": _told(gains(s, t)) for s in "SF" for t in "DT"}
    value = {name: found["value"] for name, found in gain.items()}
    once = [r for r in readings if not PROTOCOLS[r.protocol].long]
    over = {h: {"FD": _told(gains("F", "D", than=h)), "transfer": transfer(h)} for h in references}
    for h, tested in _tests({h: gains("F", "T", than=h) for h in references}).items():
        over[h]["transfer"]["P1"] |= tested
    return {
        "gain": gain,
        "luck_of_seeds": value["SD"] - value["FD"],
        "luck_of_tasks": value["FD"] - value["FT"],
        "optimism": value["SD"] - value["FT"],
        "transfer": transfer("start"),
        "lost": {h: sum(r.lost for r in once if r.harness == h) for h in (*HARNESSES, *references)},
        **({"over": over} if over else {}),
    }


def _told(values: Sequence[float]) -> dict[str, Any]:
    """The mean of a value per seed, its interval and the number of seeds."""
    if len(values) < 2:
        return {"value": values[0], "low": None, "high": None, "seeds": 1}
    return {**dataclasses.asdict(stats.over_seeds(values)), "seeds": len(values)}


def _tests(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | None]]:
    """name -> p of a paired t test, and p adjusted for all the names (Holm)."""
    p = [stats.paired_p(own) for own in values.values()]
    return {n: {"p": own, "p_holm": held} for n, own, held in zip(values, p, stats.holm(p), strict=True)}


def table(result: Mapping[str, Any]) -> str:
    """Formats a result as text."""

    def told(name: str, found: Mapping[str, Any]) -> str:
        span = "" if found["low"] is None else f" ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"
        return f"{name:<44} {100 * found['value']:+.1f} points{span}"

    def ways(name: str, transfer: Mapping[str, Any]) -> list[str]:
        return [
            told(f"{name}, {PROTOCOLS[way].said}", found) + f", p {_p(found['p_holm'])} (Holm, of four)"
            for way, found in transfer.items()
            if PROTOCOLS[way].said
        ]

    gain, point = result["gain"], lambda name, value: f"{name:<44} {100 * value:+.1f} points"
    over, given = result.get("over", {}), result.get("given", {})
    lines = [
        told("gain, campaign's seeds, selection set", gain["SD"]),
        told("gain, fresh seeds, selection set", gain["FD"]),
        told("gain, fresh seeds, test tasks: the claim", gain["FT"]),
        point("luck of the seeds", result["luck_of_seeds"]),
        point("luck of the tasks", result["luck_of_tasks"]),
        point("optimism", result["optimism"]),
        *ways("the claim", result.get("transfer", {})),
    ]
    for name, found in over.items():
        first = found["transfer"]["P1"]
        lines += [
            f"{name}: {given.get(name, '')}",
            told(f"selected over {name}", first) + f", p {_p(first['p_holm'])} (Holm, of {len(over)})",
            *ways(f"over {name}", found["transfer"]),
        ]
    lost = result.get("lost", {})
    if any(lost.values()):
        lines.append(f"{'trials lost':<44} {', '.join(f'{n} of {h}' for h, n in lost.items())}")
    lines.append(f"{'openings of this test in the store':<44} {result.get('openings', 1)}")
    return "\n".join([*lines, *filter(None, [result.get("engines")])])


def _p(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"
