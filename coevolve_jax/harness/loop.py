"""The loop of a campaign: what is missing is done, one thing after the other, until nothing is.

    for each version:
        1. propose    a lever is moved, with a hypothesis (proposers/)
        2. backtest   the parent's own rollouts under the changed credit (backtest.py)
        3. smoke      its first steps, where a backtest does not see all of the change (smoke.py)
        4. train      ordinary runs, one for each seed (store.py)
        5. evidence   the values of its training (evidence.py)
        6. judge      conditions that code alone decides (verdict.py)
        7. learn      skills and diagnostics (skills.py, diagnostics.py)

Each leaves a file that is written once, so a kill loses at most the one under way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import names
from coevolve_jax.harness import backtest, diagnostics, evidence, levers, progress, skills, smoke, verdict
from coevolve_jax.harness import campaign as folders
from coevolve_jax.harness.audit import JUDGED, Audit
from coevolve_jax.harness.backtest import Check
from coevolve_jax.harness.campaign import START, Campaign
from coevolve_jax.harness.records import Proposal, Rule, Verdict
from coevolve_jax.harness.registry import Diagnostic, testable
from coevolve_jax.harness.store import Question, Store, finished
from coevolve_jax.harness.templates import Candidate, checked
from coevolve_jax.harness.versions import Versions, mean_success
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.seeding import rng_for

GATES = {
    "design": ("smoke",),
    "verdict": ("verdict",),
}  # --gate -> the parts before which a person decides
CANARY = "The start's policy is scored differently under this version's config: a lever moved the judge."
MANY = 10  # versions with a forecast, until it can be found unreliable
FORECAST_OF = {"live": ("live_groups",), "tokens": ("live_tokens",)}  # forecast -> the checks that rest on it


class Waiting(Exception):
    """A person must decide first (--gate). The message says what about."""


class Evolution:
    """A campaign that goes on.

    Args:
      campaign: its folder, claimed.
      config: of v000, with the section `harness`.
      store: where its runs are.
      say: receives a sentence for each thing that is done.
      after: called after each version.

    Attributes:
      versions: what is known of them.
    """

    def __init__(
        self,
        campaign: Campaign,
        config: ConfigDict,
        store: Store,
        say: Callable[[str], object] = lambda s: None,
        after: Callable[[], object] = lambda: None,
    ):
        self.campaign, self.store, self._say, self._after = campaign, store, say, after
        self.settings, self.versions = config.harness, Versions(campaign, config, store)
        self._proposer = names.module(
            "harness.proposers", self.settings.proposer, "harness.proposer", ["make"]
        )
        self._proposes = self._proposer.make(config)
        self._failed: dict[tuple[str, str], str] = {}  # (version, part) -> why its run failed

    # ---- what is missing ---------------------------------------------------------------------------

    def run(self, gate: str = "none") -> None:
        """Goes on to the end. Raises Waiting where --gate asks a person, and Tampered for a changed file."""
        self.campaign.mend()
        asking = getattr(self._proposes, "llm_calls", None) is not None
        if asking and (asked := self.campaign.llm_calls()):
            self._proposes.resume([LLMCall(**row) for row in asked])
        if not self.campaign.events():
            self._begin()
        while (todo := self.campaign.next()) is not None:
            version, part = todo
            if part in ("proposal", "verdict"):
                self.campaign.check()
            if version != START and part in GATES.get(gate, ()):
                self._ask(version, part)
            if part in ("smoke", "evidence"):
                self._train(version, part)
            made = getattr(self, f"_{part}")(version)
            if made is None:
                self._say("Nothing is left to propose.")
                self.campaign.end()
                return
            if asking and (new := self._proposes.llm_calls[len(self.campaign.llm_calls()) :]):
                self.campaign.add_llm_calls(map(dataclasses.asdict, new))
            self.campaign.write(version, part, made)
            self._tell(version, part)
            if part == folders.PARTS[-1]:
                self._after()

    def replay(self) -> list[str]:
        """Makes every part again from the runs and earlier parts. Returns a sentence for each difference."""
        found = []
        try:
            self.campaign.check()
        except folders.Tampered as error:
            found.append(str(error))
        for version in self.campaign.versions():
            for part in folders.PARTS:
                try:
                    found += self._differences(version, part)
                except (
                    LookupError,
                    TypeError,
                    AttributeError,
                    ValueError,
                ) as error:  # what is forged may have any form
                    path = self.campaign.path(version, part).relative_to(self.campaign.folder)
                    found.append(f"{path} cannot be made again from what is there ({error!r}).")
        return found

    def _differences(self, version: str, part: str) -> list[str]:
        """Says how a part differs from what the runs and the parts before it give."""
        there = self.campaign.read(version, part)
        if there is None:
            return []
        if "failed" in there:
            runs = self.versions.runs(version).values()
            ended = [f"{version} is said to have failed ({part}), and its runs are finished."]
            return ended if all(finished(run) for run in runs) else []
        if part == "proposal" and version != START and not self._repeatable:
            self._check(version, self.versions.proposal(version))
            return []
        made = json.loads(json.dumps(getattr(self, f"_{part}")(version)))
        path = self.campaign.path(version, part).relative_to(self.campaign.folder)
        told = configs.difference(there, made, part)
        return [f"{path} differs from what the runs give ({told})."] if made != there else []

    @property
    def _repeatable(self) -> bool:
        return getattr(self._proposer, "REPEATABLE", True)

    # ---- the parts: each a function of the runs and of the parts before it -----------------------------

    def _proposal(self, version: str) -> dict[str, Any] | None:
        if version == START:
            return {"because": "The harness to begin with."}
        rng = rng_for(self.settings.seed, "propose", int(version[1:]))
        drawn = self._proposes.propose(self.versions.history(version), rng)
        if drawn is None:
            return None
        self._check(version, drawn)
        return drawn.to_json()

    def _check(self, version: str, proposal: Proposal) -> None:
        """Raises Refused unless the proposal moves open levers of a version that may have children."""
        kinds = {v: self.versions.verdict(v) for v in self.campaign.versions() if v < version}
        good = [v for v, judged in kinds.items() if judged and judged.kind in ("start", "promoted")]
        if proposal.parent not in good:
            raise levers.Refused(
                f"{levers.short(proposal.parent)} is no parent: use one of {', '.join(good)}."
            )
        levers.check_proposal(self.versions.levers, self.versions.config(proposal.parent), proposal)

    def _backtest(self, version: str) -> dict[str, Any]:
        if version == START or not getattr(self._proposer, "BACKTEST", True):
            return {"refused": None}
        proposal = self.versions.proposal(version)
        runs = self.versions.runs(proposal.parent)
        aim = proposal.expects.diagnostic if proposal.expects else ""
        child = self.versions.config(version)

        def gradient() -> dict[str, Check]:
            folder = self.campaign.folder / "gradients" / version
            told = self.store.gradients(runs[self.settings.seeds[0]], child, folder)
            return {name: Check(*check) for name, check in told.items()}

        return backtest.backtest(
            self.versions.config(proposal.parent),
            child,
            [evidence.groups(run) for run in runs.values()],
            version=proposal.parent,
            aims_at_live=aim.startswith(("dead", "active", "kept", "mixed")),
            kl_end=self.versions.row(proposal.parent).get("kl_last"),
            gradient=gradient,
            unreliable=self._unreliable(version),
        ).to_json()

    def _unreliable(self, before: str) -> set[str]:
        """The checks whose forecasts missed in most of at least MANY versions: they refuse no more."""
        told: dict[str, list[bool]] = {}
        for version in (v for v in self.versions.trained(before) if START < v < before):
            forecast = (self.campaign.read(version, "backtest") or {}).get("forecast", {})
            came = self.campaign.read(version, "evidence").get("came", {})
            off = backtest.missed(forecast, came)
            for name in forecast.keys() & came.keys():
                told.setdefault(name, []).append(name in off)
        bad = {
            name for name, missed in told.items() if len(missed) >= MANY and 2 * sum(missed) >= len(missed)
        }
        return {check for name, checks in FORECAST_OF.items() if name in bad for check in checks}

    def _seeds(self, version: str, part: str) -> Sequence[int]:
        """The seeds whose runs a part reads: for "smoke" the first, for "evidence" all. () if none runs."""
        if part == "smoke":
            uncovered = self.campaign.read(version, "backtest").get("not_covered")
            return self.settings.seeds[: bool(uncovered and not self.versions.refused_unrun(version))]
        stopped = self.versions.refusal(version) or "failed" in self.campaign.read(version, "smoke")
        return () if stopped else self.settings.seeds

    def _smoke(self, version: str) -> dict[str, Any]:
        if not (seeds := self._seeds(version, "smoke")):
            return {}
        config, run = self.versions.config(version), self.versions.runs(version)[seeds[0]]
        if why := self._failed.get((version, "smoke")):
            return {"failed": why, "rollouts": {str(seeds[0]): evidence.spent(config, run)}}
        parent = self.versions.runs(self.versions.proposal(version).parent)[seeds[0]]
        told = smoke.compared(parent, run)
        return {**told, "rollouts": {str(seeds[0]): evidence.spent(config, run, smoke.FIRST)}}

    def _evidence(self, version: str) -> dict[str, Any]:
        if not self._seeds(version, "evidence"):
            return {}
        runs, config = self.versions.runs(version), self.versions.config(version)
        if why := self._failed.get((version, "evidence")):
            return {"failed": why, "rollouts": {str(s): evidence.spent(config, r) for s, r in runs.items()}}
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
                f"seed_{seed}/{name}": folders.sha256(run / name)
                for seed, run in runs.items()
                for name in evidence.FILES
            },
        }

    def _audit(self, version: str, runs: Mapping[int, Path]) -> dict[str, Any] | None:
        """The verifier's word on some successes of the last evaluations, drawn at random; or None."""
        if self.settings.audit == "none":
            return None
        won = [(seed, *pair) for seed, run in runs.items() for pair in evidence.successes(run)]
        order = rng_for(self.settings.seed, "audit", int(version[1:])).permutation(len(won))
        drawn = [won[i] for i in sorted(order[:JUDGED])]
        told = self.store.audit([(task, t) for _, task, t in drawn])
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
        seed = self.settings.seeds[0]
        policy = self.versions.runs(START)[seed] / "policy"
        output = self.campaign.folder / "canary" / f"{version}.json"
        (counts,) = self.store.answers(
            [Question(self.versions.runs(version)[seed], policy, ("--temperature=0",), output)]
        )
        return counts

    def _came(self, version: str, runs: Sequence[Path]) -> dict[str, float]:
        """Returns what came in the place of the backtest's forecasts; {} where there were none."""
        if version == START or "forecast" not in self.campaign.read(version, "backtest"):
            return {}
        parent, child = (self.versions.config(v) for v in (self.versions.proposal(version).parent, version))
        return backtest.forecast(parent, child, [evidence.groups(run)[: backtest.FIRST] for run in runs])

    def _watched(self, version: str) -> dict[str, Any]:
        """The registered diagnostics beside their thresholds, in the parent and in this version."""
        known = self.versions.diagnostics(before=version)
        if version == START or not diagnostics.live(known):
            return {}
        parent = self.versions.proposal(version).parent
        return diagnostics.watched(known, *(self.versions.rollouts(v) for v in (parent, version)))

    def _verdict(self, version: str) -> dict[str, Any]:
        return self.judge(version).to_json()

    def judge(self, version: str) -> Verdict:
        """The verdict on a version, from its runs and its parent's."""
        if version == START:
            return Verdict("start", (), mean_success(self.versions.selection(version)))
        if refusal := self.versions.refusal(version):
            return Verdict("refused", (refusal,))
        found = self.campaign.read(version, "evidence")
        if failed := self.campaign.read(version, "smoke").get("failed") or found.get("failed"):
            return Verdict("failed", (Rule("ran", False, failed),))
        if found["canary"] != self.campaign.read(START, "evidence")["canary"]:
            return Verdict("invalid", (Rule("canary", False, CANARY),))
        proposal = self.versions.proposal(version)
        judged = verdict.judge(
            self.versions.selection(proposal.parent),
            self.versions.selection(version),
            noise=self.settings.noise,
            rules=getattr(self._proposer, "RULES", verdict.RULES),
            expects=proposal.expects,
            before=self.versions.row(proposal.parent),
            after=found["row"],
            alerts=diagnostics.newly_at_alert(found["diagnostics"]),
            audit=self._audited(proposal.parent, version),
        )
        person = self.versions.decision(version, "verdict")
        return judged if person is None else verdict.with_person(judged, person["approved"], person["why"])

    def _audited(self, parent: str, child: str) -> Audit | None:
        found = [self.campaign.read(v, "evidence")["audit"] for v in (child, parent)]
        return Audit(*((len(f["rejected"]), f["judged"]) for f in found)) if all(found) else None

    def _learned(self, version: str) -> dict[str, Any]:
        told = self.versions.skills(before=version)
        if version != START:
            proposal, judged = self.versions.proposal(version), self.versions.verdict(version)
            assert judged is not None
            told = skills.learned(told, version, proposal, judged, self.versions.row(proposal.parent))
        return {
            "skills": [s.to_json() for s in told],
            "diagnostics": [d.to_json() for d in self._registered(version)],
        }

    def _registered(self, version: str) -> list[Diagnostic]:
        """The diagnostics after a version, which are tested on it; new ones only where they may evolve."""
        known = self.versions.diagnostics(before=version)
        if self.settings.diagnostics == "fixed" or not self.versions.row(version):
            return known
        trained = self.versions.trained(version)
        good = [v for v in trained if (x := self.versions.verdict(v)) and x.kind in ("start", "promoted")]
        rows = {v: self.versions.rollouts(v) for v in trained}
        return diagnostics.evolved(
            known,
            version,
            rows,
            good,
            rng_for(self.settings.seed, "register", int(version[1:])),
            invented=self._invented(version) if testable(diagnostics.merged(list(rows.values()))) else (),
            halves=lambda: {v: self.versions.halves(v) for v in trained},
        )

    def _invented(self, version: str) -> list[Candidate]:
        """The proposer's own formulas, checked. A model is not asked again for those on record."""
        invent = getattr(self._proposes, "invent", None)
        if invent is None:
            return []
        history = self.versions.history(version, and_itself=True)
        if there := self.campaign.read(version, "learned"):
            own = [Diagnostic.from_json(d) for d in there["diagnostics"]]
            given = [
                Candidate(d.id, d.formula, None, d.unit, d.proposer)
                for d in own
                if d.born == version and d.proposer == self.settings.proposer
            ]
        else:
            rng = rng_for(self.settings.seed, "invent", int(version[1:]))
            given = invent(history, version, rng)
        known = [*history.diagnostics, *diagnostics.STEPS]
        return checked(given, known, history.names(version), self._say)

    # ---- what is done besides writing ------------------------------------------------------------------

    def _begin(self) -> None:
        """Makes the starts, links them and freezes what may not change."""
        if failed := self.store.begin(self.settings.seeds):
            seed, why = next(iter(failed.items()))
            raise ValueError(f"The start of seed {seed} failed: {why}")
        files = []
        for seed in self.settings.seeds:
            link = self.campaign.link(Path("starts"), seed, self.store.start(seed))
            kept = [
                link / "held_out.jsonl",
                *sorted(p for p in (link / "checkpoints").rglob("*") if p.is_file()),
            ]
            files += [str(p.relative_to(self.campaign.folder)) for p in kept]
        folders.freeze(self.campaign, files)

    def _train(self, version: str, part: str) -> None:
        """Makes the runs that a part reads, if any: for "smoke" the first steps of one."""
        if not (seeds := self._seeds(version, part)):
            return
        runs, first = self.versions.runs(version), part == "smoke"
        for seed in seeds:
            self.campaign.link(Path("versions") / version / "runs", seed, runs[seed])
        what = f"its first {smoke.FIRST} steps are run" if first else "it is trained"
        self._say(f"{version}: {what}, seed {', '.join(map(str, seeds))}.")
        with progress.said(self._say, lambda: progress.sentence(progress.training(self.campaign))):
            config, until = self.versions.config(version), smoke.FIRST if first else None
            failed = self.store.train(config, seeds, until)
        why = "; ".join(f"seed {seed}: {text}" for seed, text in failed.items())
        if why and version == START:
            raise ValueError(f"{START} failed: {why}")
        if why:
            self._failed[version, part] = why

    def _ask(self, version: str, part: str) -> None:
        """Raises Waiting where a person has not decided yet."""
        if part == "smoke" and self.versions.refused_unrun(version):
            return
        if self.versions.decision(version, part) is None:
            what = "before it is trained"
            if part == "verdict":
                what = f"before its verdict counts (the rules say {self.judge(version).kind})"
            raise Waiting(
                f"{version} waits for a person {what}: --approve={version}, or --refuse={version} --why=..."
            )

    def decide(self, version: str, approved: bool, why: str) -> None:
        """Writes a person's decision about the part that is due, once. Raises ValueError if none is due."""
        todo = self.campaign.next()
        if todo is None or todo[0] != version or todo[1] not in ("smoke", "verdict"):
            raise ValueError(f"{version} waits for nobody: the next thing to do is {todo}.")
        self.campaign.decide(version, todo[1], {"approved": approved, "why": why})

    def _tell(self, version: str, part: str) -> None:
        if version == START:
            return
        if part == "proposal":
            drawn = self.versions.proposal(version)
            aim = f" It should show: {drawn.expects.text}." if drawn.expects else ""
            self._say(f"{version}, from {drawn.parent}: {drawn.lever} {drawn.move}. {drawn.because}{aim}")
        elif part == "verdict" and (judged := self.versions.verdict(version)):
            why = f": {judged.decided.sentence}" if judged.decided else "."
            self._say(f"{version} is {judged.kind}{why}")
