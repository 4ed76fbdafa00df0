"""The versions of a campaign by their files: configs, runs, verdicts, and what a proposer is told of them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.harness import diagnostics, evidence, levers, registry, skills, smoke
from coevolve_jax.harness.campaign import START, Campaign, read_object
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.records import Proposal, Rule, Skill, Verdict
from coevolve_jax.harness.registry import Diagnostic
from coevolve_jax.harness.start import without_harness
from coevolve_jax.harness.store import Store
from coevolve_jax.harness.templates import named
from coevolve_jax.types import Group

TOLD = {  # rule -> what proposers are told, where its sentence has paths or numbers of the selection set
    "score": "It did not score higher.",
    "ran": "It could not run, or its trials were lost.",
    "audit": "The independent verifier refused too many of its successes.",
}


class Versions:
    """The versions of a campaign.

    Args:
      config: of v000, with the section `harness`.
    """

    def __init__(self, campaign: Campaign, config: ConfigDict, store: Store):
        self._campaign, self._store, self._settings = campaign, store, config.harness
        self._first = without_harness(config)
        self._config = config
        self._read: dict[str, registry.Evidence] = {}
        self._halves: dict[str, list[evidence.Half]] = {}
        self._configs: dict[str, ConfigDict] = {}  # by all changes since the start

    def config(self, version: str) -> ConfigDict:
        """The config of a version: that of its parent with its changes."""
        changes: list[Mapping[str, Any]] = []
        while version != START:
            found = self.proposal(version)
            if found.parent >= version:
                raise ValueError(f"{version} has {found.parent} as its parent, which is no earlier version.")
            version, changes = found.parent, [found.changes, *changes]
        if not changes:
            return self._first
        name = json.dumps(changes)
        if name not in self._configs:
            self._configs[name] = functools.reduce(levers.changed, changes, self._first)
        return self._configs[name]

    def proposal(self, version: str) -> Proposal:
        return Proposal.from_json(self._campaign.read(version, "proposal"))

    def verdict(self, version: str) -> Verdict | None:
        found = self._campaign.read(version, "verdict")
        return found and Verdict.from_json(found)

    def row(self, version: str) -> dict[str, float | None]:
        """The version's values in training; {} if it was not trained."""
        return (self._campaign.read(version, "evidence") or {}).get("row", {})

    def open_levers(self, before: str) -> dict[str, levers.Lever]:
        """The levers by name. Diagnostics that were registered before a version may become reward terms."""
        known = diagnostics.live(self.diagnostics(before))
        return levers.table(self._config, {d.id: (d.formula, d.direction == "up_is_bad") for d in known})

    def trained(self, last: str) -> list[str]:
        """The trained versions up to `last`."""
        return [v for v in self._campaign.versions() if v <= last and self.row(v)]

    def runs(self, version: str) -> dict[int, Path]:
        """seed -> workdir: the one that the campaign links to, else the one that the store would make."""
        config, linked = self.config(version), self._campaign.runs(version)
        return {s: linked.get(s) or self._store.workdir(config, s) for s in self._settings.seeds}

    def selection(self, version: str) -> dict[int, evidence.Selection]:
        """seed -> success on the selection set."""
        return {seed: evidence.selection(run) for seed, run in self.runs(version).items()}

    def rollouts(self, version: str) -> registry.Evidence:
        """The training rollouts of a version, kept in memory: they do not change."""
        if version not in self._read:
            runs = self.runs(version).items()
            self._read[version] = registry.evidence(
                [registry.Recorded(version, f"{version} seed {s}", evidence.groups(run)) for s, run in runs]
            )
        return self._read[version]

    def halves(self, version: str) -> list[evidence.Half]:
        """Each run's first half beside its later gain, kept in memory too."""
        if version not in self._halves:
            config = self.config(version)
            self._halves[version] = [evidence.half(config, run) for run in self.runs(version).values()]
        return self._halves[version]

    def skills(self, before: str) -> list[Skill]:
        """The skills as the last version before this one left them."""
        found = self._learned(before)
        return list(skills.BUILT_IN) if found is None else [Skill.from_json(s) for s in found["skills"]]

    def diagnostics(self, before: str) -> list[Diagnostic]:
        """The diagnostics as the last version before this one left them."""
        found = self._learned(before)
        return [] if found is None else [Diagnostic.from_json(d) for d in found["diagnostics"]]

    def _learned(self, before: str) -> dict[str, Any] | None:
        earlier = [v for v in self._campaign.versions() if v < before]
        return next((found for v in reversed(earlier) if (found := self._campaign.read(v, "learned"))), None)

    def decision(self, version: str, part: str) -> dict[str, Any] | None:
        """A person's decision (--gate), if there is one."""
        path = self._campaign.folder / "approved" / f"{version}_{part}.json"
        return read_object(path, "approved", "why") if path.exists() else None

    def refused_unrun(self, version: str) -> Rule | None:
        """Why no step of a version is run."""
        tried = self._campaign.read(version, "backtest") or {}
        if why := tried.get("refused"):
            value, bound, _ = tried["checks"][tried["by"]]
            return Rule("backtest", False, why, value, bound)
        person = self.decision(version, "smoke")
        if person and not person["approved"]:
            return Rule("person", False, f"A person refused it: {person['why']}")
        return None

    def refusal(self, version: str) -> Rule | None:
        """Why a version is not trained in full."""
        if rule := self.refused_unrun(version):
            return rule
        ran = self._campaign.read(version, "smoke") or {}
        why = ran.get("refused")
        return Rule("smoke", False, why, ran["live"], smoke.LEAST * ran["parent"]) if why else None

    # ---- what a proposer is told -----------------------------------------------------------------------

    def history(self, version: str, and_itself: bool = False) -> History:
        """Returns what the proposer of a version knows. and_itself: with the version's own verdict."""
        done = [v for v in self._campaign.versions() if v < version or (and_itself and v == version)]
        return History(
            [self.seen(v) for v in done],
            {v: configs.override(self.config(v), {}) for v in done},  # copies: a proposer is anybody's code
            self.open_levers(before=version),
            self.skills(before=version),
            self.shown,
            self.diagnostics(before=version),
            self.names,
        )

    def seen(self, version: str) -> Seen:
        """Returns what a proposer is told of a version."""
        if version == START:
            return Seen(version, None, "start", "", self._score(version), self.row(version))
        judged = self.verdict(version)
        assert judged is not None
        decided = judged.decided
        told = TOLD.get(decided.name, decided.sentence) if decided else ""
        scored = judged.success is not None and not (decided and decided.name == "canary")
        score = self._score(version) if scored else None
        return Seen(version, self.proposal(version), judged.kind, told, score, self.row(version))

    def shown(self, version: str) -> list[Group]:
        """Groups of the first seed's last recorded step, on tasks that no test of a diagnostic reads."""
        last = evidence.groups(self.runs(version)[self._settings.seeds[0]])[-1:]
        return [g for step in last for g in step if not registry.testing_half(g.task.id)]

    def names(self, version: str) -> list[str]:
        """The tools and stop reasons of that half of the tasks, which a formula may name."""
        return list(itertools.chain(*named(registry.halves(self.rollouts(version))[0])))

    def _score(self, version: str) -> float:
        """The success in whole standard errors: of the calibration, or of the trials if that is larger."""
        found = self.selection(version)
        trials = sum(count for s in found.values() for _, count in s.by_task.values())
        step = max(self._settings.noise * (2 / len(found)) ** 0.5, 0.5 / trials**0.5)
        return round(mean_success(found) / step) * step


def mean_success(selections: Mapping[int, evidence.Selection]) -> float:
    """The mean over seeds."""
    return sum(s.success for s in selections.values()) / len(selections)
