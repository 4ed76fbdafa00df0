"""The parts of a version: each a function of the runs and of the parts before it, as JSON values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.harness import backtest, diagnostics, evidence, levers, skills, smoke, verdict
from coevolve_jax.harness.audit import JUDGED, Audit, comparable
from coevolve_jax.harness.backtest import Check
from coevolve_jax.harness.campaign import START, Campaign, sha256
from coevolve_jax.harness.records import RULES, Proposal, Rule, Verdict
from coevolve_jax.harness.registry import Diagnostic, testable
from coevolve_jax.harness.store import Question, Store, config_changes, twin
from coevolve_jax.harness.templates import Candidate, checked
from coevolve_jax.harness.versions import Versions, mean_success
from coevolve_jax.seeding import rng_for

JUDGE = ("environment.", "evaluation.", "model")  # what no version may change
CANARY = "The start's policy is scored differently under this version's config: a lever moved the judge."
STAND_IN = "scripted"  # the proposer that goes on where a model gives no answer
# Values by which a hypothesis aims at fewer live groups, by their direction.
FEWER_LIVE = {"up": ("dead",), "down": ("active", "kept", "mixed")}
MANY = 10  # versions with a forecast, until it can be found unreliable
FORECAST_OF = {"live": ("live_groups",), "tokens": ("live_tokens",)}  # forecast -> the checks that rest on it


class Parts:
    """Makes the parts of a campaign's versions.

    Args:
      config: of v000, with the section `harness`.
      say: receives a sentence on what is left out.

    Attributes:
      proposer: of the config.
      failed: (version, part) -> why the run that the part reads has failed.
    """

    def __init__(
        self,
        campaign: Campaign,
        config: ConfigDict,
        store: Store,
        versions: Versions,
        say: Callable[[str], object],
    ):
        self._campaign, self._store, self._versions, self._say = campaign, store, versions, say
        self._settings = config.harness
        self._module, self._rules, self.proposer = proposer_of(config)
        self.failed: dict[tuple[str, str], str] = {}

    @contextmanager
    def on_record(self) -> Iterator[None]:
        """Asks for nothing while the block runs: what a model or an evaluation has answered is on record."""
        self._store.asks = False
        try:
            with self.answered():
                yield
        finally:
            self._store.asks = True

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Asks no model while the block runs: its answers are those on record."""
        asking, recorded = self.proposer, getattr(self._module, "recorded", None)
        self.proposer = recorded(self._campaign.llm_calls()) if recorded else asking
        try:
            yield
        finally:
            self.proposer = asking

    def proposal(self, version: str) -> dict[str, Any] | None:
        if version == START:
            return {"because": "The harness to begin with."}
        rng = rng_for(self._settings.seed, "propose", int(version[1:]))
        drawn = self.proposer.propose(self._versions.history(version), rng)
        if drawn is None:
            return None
        drawn = levers.plain(drawn)
        self.check(version, drawn)
        row = self._versions.row(drawn.parent)
        return dataclasses.replace(
            drawn,
            evidence={name: row.get(name) for name in drawn.evidence},
            proposer=drawn.proposer if drawn.proposer == STAND_IN else self._settings.proposer,
        ).to_json()

    def check(self, version: str, proposal: Proposal) -> None:
        """Raises Refused unless the proposal moves open levers of a version that may have children.

        The config must be new in the campaign. A skill that it names must hold for that version and say this
        move. It names what will change, unless the proposer's rules leave `target` out.
        """
        kinds = {v: self._versions.verdict(v) for v in self._campaign.versions() if v < version}
        good = [v for v, judged in kinds.items() if judged and judged.kind in ("start", "promoted")]
        p = proposal
        if p.parent not in good:
            raise levers.Refused(f"{levers.short(p.parent)} is no parent: use one of {', '.join(good)}.")
        known, several = self._versions.open_levers(before=version), getattr(self._module, "SEVERAL", False)
        own = self._versions.config(p.parent)
        levers.check_proposal(known, own, p, several)
        if p.expects is None and "target" in self._rules:
            raise levers.Refused(
                f"The proposal {p.lever} {levers.short(p.move)} expects nothing, and the rule `target` asks "
                f"for it: give `expects`, or set RULES of {self._module.__name__} without `target`."
            )
        if earlier := twin(levers.changed(own, p.changes), {v: self._versions.config(v) for v in kinds}):
            raise levers.Refused(
                f"{p.lever} {levers.short(p.move)} of {p.parent} gives the config of {earlier}, whose runs "
                "would count as new evidence: propose another move."
            )
        if not p.skill:
            return
        holding = skills.holding(self._versions.skills(before=version), self._versions.row(p.parent))
        if not any(s.id == p.skill and s.says(p.lever, p.move) for s in holding):
            raise levers.Refused(
                f"{levers.short(p.skill)} is no skill that holds for {p.parent} and says {p.lever} "
                f"{levers.short(p.move)}: name such a skill, or none."
            )

    def backtest(self, version: str) -> dict[str, Any]:
        if version == START or not getattr(self._module, "BACKTEST", True):
            return {"refused": None}
        proposal = self._versions.proposal(version)
        runs = self._versions.runs(proposal.parent)
        aim, child = proposal.expects, self._versions.config(version)

        def gradient() -> dict[str, Check]:
            folder = self._campaign.folder / "gradients" / version
            told = self._store.gradients(runs[self._settings.seeds[0]], child, folder)
            return {name: Check(*check) for name, check in told.items()}

        return backtest.backtest(
            self._versions.config(proposal.parent),
            child,
            [evidence.groups(run) for run in runs.values()],
            version=proposal.parent,
            aims_at_live=aim is not None and aim.diagnostic.startswith(FEWER_LIVE[aim.direction]),
            gradient=gradient,
            unreliable=self._unreliable(version),
        ).to_json()

    def _unreliable(self, before: str) -> set[str]:
        """The checks whose forecasts missed in most of at least MANY versions: they refuse no more."""
        told: dict[str, list[bool]] = {}
        for version in (v for v in self._versions.trained(before) if START < v < before):
            forecast = (self._campaign.read(version, "backtest") or {}).get("forecast", {})
            came = self._campaign.read(version, "evidence").get("came", {})
            off = backtest.missed(forecast, came)
            for name in forecast.keys() & came.keys():
                told.setdefault(name, []).append(name in off)
        bad = {
            name for name, missed in told.items() if len(missed) >= MANY and 2 * sum(missed) >= len(missed)
        }
        return {check for name, checks in FORECAST_OF.items() if name in bad for check in checks}

    def seeds(self, version: str, part: str) -> Sequence[int]:
        """The seeds whose runs a part reads: for "smoke" the first, for "evidence" all. () if none runs."""
        if part == "smoke":
            uncovered = self._campaign.read(version, "backtest").get("not_covered")
            return self._settings.seeds[: bool(uncovered and not self._versions.refused_unrun(version))]
        stopped = self._versions.refusal(version) or "failed" in self._campaign.read(version, "smoke")
        return () if stopped else self._settings.seeds

    def smoke(self, version: str) -> dict[str, Any]:
        if not (seeds := self.seeds(version, "smoke")):
            return {}
        config, run = self._versions.config(version), self._versions.runs(version)[seeds[0]]
        if why := self.failed.get((version, "smoke")):
            return {"failed": why, "rollouts": {str(seeds[0]): evidence.spent(config, run)}}
        parent = self._versions.runs(self._versions.proposal(version).parent)[seeds[0]]
        told = smoke.compared(parent, run)
        return {**told, "rollouts": {str(seeds[0]): evidence.spent(config, run, smoke.FIRST)}}

    def evidence(self, version: str) -> dict[str, Any]:
        """Raises ValueError where the start has lost every trial of a seed: no version could be judged."""
        if not self.seeds(version, "evidence"):
            return {}
        runs, config = self._versions.runs(version), self._versions.config(version)
        if why := self.failed.get((version, "evidence")):
            return {"failed": why, "rollouts": {str(s): evidence.spent(config, r) for s, r in runs.items()}}
        for seed, run in runs.items() if version == START else ():
            evidence.check_valid(run, f"seed {seed} of {START}")
        return {
            "canary": self._canary(version),
            "audit": self._audit(version, runs),
            "row": evidence.row(config, list(runs.values())),
            "costs": {
                str(seed): json.loads((run / "ledger.json").read_text())["costs"]
                for seed, run in runs.items()
            },
            "runs": {str(seed): f"{run.parent.name}/{run.name}" for seed, run in runs.items()},
            "came": self._came(version, list(runs.values())),
            "diagnostics": self._watched(version),
            "files": {
                f"seed_{seed}/{name}": sha256(run / name)
                for seed, run in runs.items()
                for name in evidence.files(run)
            },
        }

    def _audit(self, version: str, runs: Mapping[int, Path]) -> dict[str, Any] | None:
        """The verifier's word on some successes of the last evaluations, drawn at random; or None."""
        if self._settings.audit == "none":
            return None
        every = ((seed, *pair) for seed, run in runs.items() for pair in evidence.successes(run))
        won = [(seed, task, t) for seed, task, t in every if comparable(task)]
        order = rng_for(self._settings.seed, "audit", int(version[1:])).permutation(len(won))
        drawn = [won[i] for i in sorted(order[:JUDGED])]
        told = self._store.audit([(task, t) for _, task, t in drawn])
        rejected = [
            {"seed": seed, "task": task.id, "rollout": t.rollout_index, "why": why}
            for (seed, task, t), why in zip(drawn, told, strict=True)
            if why
        ]
        return {"judged": len(drawn), "rejected": rejected}

    def _canary(self, version: str) -> dict[str, list[int]]:
        """Greedy successes and trials of v000's policy on the selection set, as this version's runs read it.

        They must be the same for every version: if not, a lever has moved the judge.
        """
        seed = self._settings.seeds[0]
        policy = self._versions.runs(START)[seed] / "policy"
        output = self._campaign.folder / "canary" / f"{version}.json"
        (counts,) = self._store.answers(
            [Question(self._versions.runs(version)[seed], policy, ("--temperature=0",), output)]
        )
        return counts

    def _came(self, version: str, runs: Sequence[Path]) -> dict[str, float]:
        """Returns what came in the place of the backtest's forecasts; {} where there were none."""
        if version == START or "forecast" not in self._campaign.read(version, "backtest"):
            return {}
        parent, child = (self._versions.config(v) for v in (self._versions.proposal(version).parent, version))
        return backtest.forecast(parent, child, [evidence.groups(run)[: backtest.FIRST] for run in runs])

    def _watched(self, version: str) -> dict[str, Any]:
        """The registered diagnostics beside their thresholds, in the parent and in this version."""
        known = self._versions.diagnostics(before=version)
        if version == START or not diagnostics.live(known):
            return {}
        parent = self._versions.proposal(version).parent
        return diagnostics.watched(known, *(self._versions.rollouts(v) for v in (parent, version)))

    def verdict(self, version: str) -> dict[str, Any]:
        return self.judge(version).to_json()

    def judge(self, version: str) -> Verdict:
        """The verdict on a version, from its runs and its parent's."""
        if version == START:
            return Verdict("start", (), mean_success(self._versions.selection(version)))
        if refusal := self._versions.refusal(version):
            return Verdict("refused", (refusal,))
        found = self._campaign.read(version, "evidence")
        if failed := self._campaign.read(version, "smoke").get("failed") or found.get("failed"):
            return Verdict("failed", (Rule("ran", False, failed),))
        for seed, selection in self._versions.selection(version).items():
            if math.isnan(selection.success):
                why = f"Every trial of seed {seed} on the selection set was lost."
                return Verdict("failed", (Rule("ran", False, why),))
        moved = self._moved_judge(version)
        if found["canary"] != self._campaign.read(START, "evidence")["canary"]:
            moved = moved or CANARY
        proposal, before = self._versions.proposal(version), self._before(version)
        judged = verdict.judge(
            self._versions.selection(proposal.parent),
            self._versions.selection(version),
            noise=self._settings.noise,
            rules=self._rules,
            expects=proposal.expects,
            before=before,
            after=found["row"],
            alerts=diagnostics.newly_at_alert(found["diagnostics"]),
            audit=self._audited(proposal.parent, version),
        )
        judged = verdict.with_canary(judged, moved)
        person = self._versions.decision(version, "verdict")
        return judged if person is None else verdict.with_person(judged, person["approved"], person["why"])

    def _moved_judge(self, version: str) -> str:
        """A sentence on what of the judge a version's config changes, seen by the canary or not; or ""."""
        changed = config_changes(self._versions.config(START), self._versions.config(version))
        key = next((key for key in changed if key.startswith(JUDGE)), "")
        return key and f"config.{key} is {changed[key]!r}, other than the start's: a lever moved the judge."

    def _before(self, version: str) -> Mapping[str, float | None]:
        """The parent's row, with its reward by this version's terms: the two rewards are then of one kind."""
        parent, child = self._versions.proposal(version).parent, self._versions.config(version)
        row = self._versions.row(parent)
        if not (child.reward.terms or self._versions.config(parent).reward.terms):
            return row
        by_terms = evidence.row(child, list(self._versions.runs(parent).values()))
        return {name: by_terms[name] if name.startswith("shaped") else row[name] for name in row}

    def _audited(self, parent: str, child: str) -> Audit | None:
        found = [self._campaign.read(v, "evidence")["audit"] for v in (child, parent, START)]
        return Audit(*((len(f["rejected"]), f["judged"]) for f in found)) if all(found) else None

    def learned(self, version: str) -> dict[str, Any]:
        told = self._versions.skills(before=version)
        if version != START:
            proposal, judged = self._versions.proposal(version), self._versions.verdict(version)
            assert judged is not None
            told = skills.learned(told, version, proposal, judged, self._versions.row(proposal.parent))
        return {
            "skills": [s.to_json() for s in told],
            "diagnostics": [d.to_json() for d in self._registered(version)],
        }

    def _registered(self, version: str) -> list[Diagnostic]:
        """The diagnostics after a version, which are tested on it; new ones only where they may evolve."""
        known = self._versions.diagnostics(before=version)
        if self._settings.diagnostics == "fixed" or not self._versions.row(version):
            return known
        trained = self._versions.trained(version)
        good = [v for v in trained if (x := self._versions.verdict(v)) and x.kind in ("start", "promoted")]
        rows = {v: self._versions.rollouts(v) for v in trained}
        return diagnostics.evolved(
            known,
            version,
            rows,
            good,
            rng_for(self._settings.seed, "register", int(version[1:])),
            invented=self._invented(version) if testable(diagnostics.merged(list(rows.values()))) else (),
            halves=lambda: {v: self._versions.halves(v) for v in trained},
        )

    def _invented(self, version: str) -> list[Candidate]:
        """The proposer's own formulas, checked."""
        invent = getattr(self.proposer, "invent", None)
        if invent is None:
            return []
        history = self._versions.history(version, and_itself=True)
        given = invent(history, version, rng_for(self._settings.seed, "invent", int(version[1:])))
        known = [*history.diagnostics, *diagnostics.STEPS]
        return checked(given, known, history.names(version), self._say)


def proposer_of(config: ConfigDict) -> tuple[ModuleType, tuple[str, ...], Any]:
    """Returns the module that config.harness.proposer names, the rules that it sets, and its proposer.

    Raises ValueError where there is no such module, its rules could not judge, or it cannot propose here.
    """
    module = names.module("harness.proposers", config.harness.proposer, "harness.proposer", ["make"])
    return module, _rules(module), module.make(config)


def _rules(module: ModuleType) -> tuple[str, ...]:
    """The conditions of a verdict that a proposer's module sets; all of them where it sets none.

    Raises ValueError for one that there is not, and where the score does not count.
    """
    found = tuple(getattr(module, "RULES", RULES))
    if unknown := [rule for rule in found if rule not in RULES]:
        raise ValueError(f"RULES of {module.__name__} names {unknown[0]!r}: use some of {', '.join(RULES)}.")
    if "score" not in found:
        raise ValueError(
            f"RULES of {module.__name__} lacks 'score', so a version could be promoted that is no better "
            "than its parent: add it."
        )
    return found
