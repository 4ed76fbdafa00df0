"""The loop of a campaign: what is missing is done, one thing after the other, until nothing is.

    for each version:
        1. propose    a lever is moved, with a hypothesis (proposers/)
        2. backtest   the parent's own rollouts under the changed credit (backtest.py)
        3. train      ordinary runs, one for each seed (store.py)
        4. evidence   the values of its training (evidence.py)
        5. judge      conditions that code alone decides (verdict.py)
        6. learn      skills and diagnostics (skills.py, registry.py)

Each leaves a file that is written once, so a kill loses at most the one under way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import names
from coevolve_jax.config import keys
from coevolve_jax.harness import backtest, diagnostics, evidence, levers, registry, skills, verdict
from coevolve_jax.harness import campaign as folders
from coevolve_jax.harness.audit import JUDGED, Audit
from coevolve_jax.harness.campaign import START, Campaign
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.records import Proposal, Rule, Skill, Verdict
from coevolve_jax.harness.registry import Diagnostic
from coevolve_jax.harness.store import Question, Store
from coevolve_jax.seeding import rng_for
from coevolve_jax.types import Group

GATES = {
    "design": ("evidence",),
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
        self.settings = config.harness
        self.levers = levers.table(config)
        self._first = without_harness(config)
        self._proposer = names.module(
            "harness.proposers", self.settings.proposer, "harness.proposer", ["make"]
        )
        self._proposes = self._proposer.make(config)
        self._failed: dict[str, str] = {}
        self._read: dict[str, registry.Evidence] = {}

    # ---- what there is -----------------------------------------------------------------------------

    def config(self, version: str) -> ConfigDict:
        """The config of a version: that of its parent with its changes."""
        if version == START:
            return self._first
        found = self.proposal(version)
        return levers.changed(self.config(found.parent), found.changes)

    def proposal(self, version: str) -> Proposal:
        return Proposal.from_json(self.campaign.read(version, "proposal"))

    def verdict(self, version: str) -> Verdict | None:
        found = self.campaign.read(version, "verdict")
        return found and Verdict.from_json(found)

    def row(self, version: str) -> dict[str, float | None]:
        """The version's values in training; {} if it was not trained."""
        return (self.campaign.read(version, "evidence") or {}).get("row", {})

    def runs(self, version: str) -> dict[int, Path]:
        """seed -> workdir."""
        config = self.config(version)
        return {seed: self.store.workdir(config, seed) for seed in self.settings.seeds}

    def skills(self, before: str) -> list[Skill]:
        """The skills as the last version before this one left them."""
        for version in reversed([v for v in self.campaign.versions() if v < before]):
            if found := self.campaign.read(version, "learned"):
                return [Skill.from_json(s) for s in found["skills"]]
        return list(skills.BUILT_IN)

    def diagnostics(self, before: str) -> list[Diagnostic]:
        """The diagnostics as the last version before this one left them."""
        for version in reversed([v for v in self.campaign.versions() if v < before]):
            if found := self.campaign.read(version, "learned"):
                return [Diagnostic.from_json(d) for d in found["diagnostics"]]
        return []

    def seen(self, version: str) -> Seen:
        """Returns what a proposer is told of a version."""
        if version == START:
            score = mean_success(self.selection(version))
            return Seen(version, None, "start", "", self._rounded(score), self.row(version))
        judged = self.verdict(version)
        assert judged is not None
        decided = judged.decided
        told = (
            ""
            if decided is None
            else "It did not score higher."
            if decided.name == "score"
            else decided.sentence
        )
        score = None if judged.success is None else self._rounded(judged.success)
        return Seen(version, self.proposal(version), judged.kind, told, score, self.row(version))

    def _rounded(self, rate: float) -> float:
        step = self.settings.noise * (2 / len(self.settings.seeds)) ** 0.5
        return round(rate / step) * step if step else rate

    def history(self, before: str) -> History:
        """Returns what the proposer of version `before` knows."""
        done = [v for v in self.campaign.versions() if v < before]
        configs_of = {v: self.config(v) for v in done}
        seen = [self.seen(v) for v in done]
        return History(seen, configs_of, self.levers, self.skills(before), self._shown)

    def _shown(self, version: str) -> list[Group]:
        """Groups of the first seed's last recorded step, on tasks that no test of a diagnostic reads."""
        last = evidence.groups(self.runs(version)[self.settings.seeds[0]])[-1:]
        return [g for step in last for g in step if not registry.testing_half(g.task.id)]

    def selected(self) -> str:
        """The version that the campaign ends with (`Campaign.selected`)."""
        return self.campaign.selected()

    def selection(self, version: str) -> dict[int, evidence.Selection]:
        return {seed: evidence.selection(run) for seed, run in self.runs(version).items()}

    # ---- what is missing ---------------------------------------------------------------------------

    def next(self) -> tuple[str, str] | None:
        """(version, part) of the next thing to do; None where the campaign is over."""
        return self.campaign.next()

    def run(self, gate: str = "none") -> None:
        """Goes on to the end. Raises Waiting where --gate asks a person, and Tampered for a changed file."""
        self.campaign.mend()
        if not self.campaign.events():
            self._begin()
        while (todo := self.next()) is not None:
            version, part = todo
            if part in ("proposal", "verdict"):
                self.campaign.check()
            if version != START and part in GATES.get(gate, ()):
                self._ask(version, part)
            if part == "evidence":
                self._train(version)
            made = getattr(self, f"_{part}")(version)
            if made is None:
                self._say("Nothing is left to propose.")
                self.campaign.end()
                return
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
                there = self.campaign.read(version, part)
                if there is None or (part == "evidence" and "failed" in there):
                    continue
                if (
                    part == "proposal"
                    and version != START
                    and not getattr(self._proposer, "REPEATABLE", True)
                ):
                    self._check(self.proposal(version))
                    continue
                made = json.loads(json.dumps(getattr(self, f"_{part}")(version)))
                if made != there:
                    path = self.campaign.path(version, part).relative_to(self.campaign.folder)
                    found.append(
                        f"{path} differs from what the runs give ({configs.difference(there, made, part)})."
                    )
        return found

    # ---- the parts: each a function of the runs and of the parts before it -----------------------------

    def _proposal(self, version: str) -> dict[str, Any] | None:
        if version == START:
            return {"because": "The harness to begin with."}
        rng = rng_for(self.settings.seed, "propose", int(version[1:]))
        drawn = self._proposes.propose(self.history(version), rng)
        if drawn is None:
            return None
        self._check(drawn)
        return drawn.to_json()

    def _check(self, proposal: Proposal) -> None:
        """Raises Refused unless the proposal writes keys of open levers alone, to what their moves give."""
        parent = self.config(proposal.parent)
        if proposal.lever in self.levers:
            if levers.move(self.levers, parent, proposal.lever, proposal.move) != dict(proposal.changes):
                raise levers.Refused(
                    f"{proposal.lever} {proposal.move} does not give {dict(proposal.changes)}."
                )
            return
        allowed = {key for lever in self.levers.values() for key in lever.keys}
        if not set(proposal.changes) <= allowed:
            raise levers.Refused(f"{sorted(set(proposal.changes) - allowed)} belong to no open lever.")
        levers.changed(parent, proposal.changes)

    def _backtest(self, version: str) -> dict[str, Any]:
        if version == START or not getattr(self._proposer, "BACKTEST", True):
            return {"refused": None}
        proposal = self.proposal(version)
        runs = [evidence.groups(run) for run in self.runs(proposal.parent).values()]
        aim = proposal.expects.diagnostic if proposal.expects else ""
        return backtest.backtest(
            self.config(proposal.parent),
            self.config(version),
            runs,
            version=proposal.parent,
            aims_at_live=aim.startswith(("dead", "active", "kept", "mixed")),
            kl_end=self.row(proposal.parent).get("kl_last"),
            unreliable=self._unreliable(version),
        ).to_json()

    def _unreliable(self, before: str) -> set[str]:
        """The checks whose forecasts missed in most of at least MANY versions: they refuse no more."""
        told: dict[str, list[bool]] = {}
        for version in (v for v in self.campaign.versions() if START < v < before and self.row(v)):
            forecast = (self.campaign.read(version, "backtest") or {}).get("forecast", {})
            came = self.campaign.read(version, "evidence").get("came", {})
            off = backtest.missed(forecast, came)
            for name in forecast.keys() & came.keys():
                told.setdefault(name, []).append(name in off)
        bad = {
            name for name, missed in told.items() if len(missed) >= MANY and 2 * sum(missed) >= len(missed)
        }
        return {check for name, checks in FORECAST_OF.items() if name in bad for check in checks}

    def _evidence(self, version: str) -> dict[str, Any]:
        if self._refusal(version):
            return {}
        if version in self._failed:
            return {"failed": self._failed[version]}
        runs = self.runs(version)
        return {
            "canary": self._canary(version),
            "audit": self._audit(version, runs),
            "row": evidence.row(self.config(version), list(runs.values())),
            "costs": {
                str(seed): json.loads((run / "ledger.json").read_text())["costs"]
                for seed, run in runs.items()
            },
            "runs": {str(seed): f"{run.parent.name}/{run.name}" for seed, run in runs.items()},
            "came": self._came(version, list(runs.values())),
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
        policy = self.runs(START)[seed] / "policy"
        output = self.campaign.folder / "canary" / f"{version}.json"
        (counts,) = self.store.answers(
            [Question(self.runs(version)[seed], policy, ("--temperature=0",), output)]
        )
        return counts

    def _came(self, version: str, runs: Sequence[Path]) -> dict[str, float]:
        """Returns what came in the place of the backtest's forecasts; {} where there were none."""
        if version == START or "forecast" not in self.campaign.read(version, "backtest"):
            return {}
        parent, child = self.config(self.proposal(version).parent), self.config(version)
        return backtest.forecast(parent, child, [evidence.groups(run)[: backtest.FIRST] for run in runs])

    def _verdict(self, version: str) -> dict[str, Any]:
        return self.judge(version).to_json()

    def judge(self, version: str) -> Verdict:
        """The verdict on a version, from its runs and its parent's."""
        if version == START:
            return Verdict("start", (), mean_success(self.selection(version)))
        if refusal := self._refusal(version):
            return Verdict("refused", (refusal,))
        found = self.campaign.read(version, "evidence")
        if "failed" in found:
            return Verdict("failed", (Rule("ran", False, found["failed"]),))
        if found["canary"] != self.campaign.read(START, "evidence")["canary"]:
            return Verdict("invalid", (Rule("canary", False, CANARY),))
        proposal = self.proposal(version)
        judged = verdict.judge(
            self.selection(proposal.parent),
            self.selection(version),
            noise=self.settings.noise,
            rules=getattr(self._proposer, "RULES", verdict.RULES),
            expects=proposal.expects,
            before=self.row(proposal.parent),
            after=found["row"],
            alerts=self._alerts(proposal.parent, version),
            audit=self._audited(proposal.parent, version),
        )
        person = self._decision(version, "verdict")
        return judged if person is None else verdict.with_person(judged, person["approved"], person["why"])

    def _audited(self, parent: str, child: str) -> Audit | None:
        found = [self.campaign.read(v, "evidence")["audit"] for v in (child, parent)]
        return Audit(*((len(f["rejected"]), f["judged"]) for f in found)) if all(found) else None

    def _alerts(self, parent: str, child: str) -> list[str]:
        known = self.diagnostics(before=child)
        if not any(d.status == "gating" for d in known):
            return []
        return diagnostics.newly_at_alert(known, self._rollouts(parent), self._rollouts(child))

    def _rollouts(self, version: str) -> registry.Evidence:
        """The training rollouts of a version, kept in memory: they do not change."""
        if version not in self._read:
            runs = self.runs(version).items()
            self._read[version] = registry.evidence(
                [registry.Recorded(version, f"{version} seed {s}", evidence.groups(run)) for s, run in runs]
            )
        return self._read[version]

    def _registered(self, version: str) -> list[Diagnostic]:
        """The diagnostics after a version, which are tested on it; new ones only where they may evolve."""
        known = self.diagnostics(before=version)
        if self.settings.diagnostics == "fixed" or not self.row(version):
            return known
        trained = [v for v in self.campaign.versions() if v <= version and self.row(v)]
        good = [v for v in trained if (x := self.verdict(v)) and x.kind in ("start", "promoted")]
        rng = rng_for(self.settings.seed, "register", int(version[1:]))
        return diagnostics.evolved(known, version, {v: self._rollouts(v) for v in trained}, good, rng)

    def _learned(self, version: str) -> dict[str, Any]:
        told = self.skills(before=version)
        if version != START:
            proposal, judged = self.proposal(version), self.verdict(version)
            assert judged is not None
            told = skills.learned(told, version, proposal, judged, self.row(proposal.parent))
        return {
            "skills": [s.to_json() for s in told],
            "diagnostics": [d.to_json() for d in self._registered(version)],
        }

    # ---- what is done besides writing ------------------------------------------------------------------

    def _begin(self) -> None:
        """Makes the starts, links them and freezes what may not change."""
        if failed := self.store.begin(self.settings.seeds):
            seed, why = next(iter(failed.items()))
            raise ValueError(f"The start of seed {seed} failed: {why}")
        files = []
        for seed in self.settings.seeds:
            link = self.campaign.folder / "starts" / f"seed_{seed}"
            link.parent.mkdir(exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.store.start(seed).absolute())
            kept = [
                link / "held_out.jsonl",
                *sorted(p for p in (link / "checkpoints").rglob("*") if p.is_file()),
            ]
            files += [str(p.relative_to(self.campaign.folder)) for p in kept]
        folders.freeze(self.campaign, files)

    def _train(self, version: str) -> None:
        if self._refusal(version):
            return
        self._say(f"{version} is trained on seeds {', '.join(map(str, self.settings.seeds))}.")
        failed = self.store.train(self.config(version), self.settings.seeds)
        why = "; ".join(f"seed {seed}: {text}" for seed, text in failed.items())
        if why and version == START:
            raise ValueError(f"{START} failed: {why}")
        if why:
            self._failed[version] = why

    def _refusal(self, version: str) -> Rule | None:
        """Why a version is not trained."""
        if why := (self.campaign.read(version, "backtest") or {}).get("refused"):
            return Rule("backtest", False, why)
        person = self._decision(version, "evidence")
        if person and not person["approved"]:
            return Rule("person", False, f"A person refused it: {person['why']}")
        return None

    def _ask(self, version: str, part: str) -> None:
        """Raises Waiting where a person has not decided yet."""
        if part == "evidence" and self._refusal(version):
            return
        if self._decision(version, part) is None:
            what = "before it is trained"
            if part == "verdict":
                what = f"before its verdict counts (the rules say {self.judge(version).kind})"
            raise Waiting(
                f"{version} waits for a person {what}: --approve={version}, or --refuse={version} --why=..."
            )

    def _decision(self, version: str, part: str) -> dict[str, Any] | None:
        path = self.campaign.folder / "approved" / f"{version}_{part}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def decide(self, version: str, approved: bool, why: str) -> None:
        """Writes a person's decision about the part that is due, once. Raises ValueError if none is due."""
        todo = self.next()
        if todo is None or todo[0] != version or todo[1] not in ("evidence", "verdict"):
            raise ValueError(f"{version} waits for nobody: the next thing to do is {todo}.")
        self.campaign.decide(version, todo[1], {"approved": approved, "why": why})

    def _tell(self, version: str, part: str) -> None:
        if version == START:
            return
        if part == "proposal":
            drawn = self.proposal(version)
            self._say(f"{version}, from {drawn.parent}: {drawn.lever} {drawn.move}. {drawn.because}")
        elif part == "verdict" and (judged := self.verdict(version)):
            why = f": {judged.decided.sentence}" if judged.decided else "."
            self._say(f"{version} is {judged.kind}{why}")


def without_harness(config: ConfigDict) -> ConfigDict:
    """The config of an ordinary run: without the sections of the campaign."""
    return ConfigDict(
        {key: value for key, value in config.to_dict().items() if key not in ("harness", "harness_model")}
    )


def settled(config: ConfigDict) -> ConfigDict:
    """The config of v000 with all that no lever may move by accident.

    Evaluations get the limits that they have now, and whole groups are kept on disk.

    Raises ValueError where the evaluation would read the test split.
    """
    c = config
    if c.environment.eval_split == "test":
        raise ValueError(
            "config.environment.eval_split is 'test': a campaign selects on another split, and --final reads "
            "the test once."
        )
    limits = [key for key in c.evaluation if key in c.rollout and key != "temperature"]
    default = {key: keys.REQUIRED[f"evaluation.{key}"].default for key in limits}
    pinned = {key: c.rollout[key] for key in limits if c.evaluation[key] == default[key]}
    return configs.override(
        c,
        {
            **{f"evaluation.{key}": value for key, value in pinned.items()},
            "logging.rollouts_every": 1,
            "logging.evaluations": True,
        },
    )


def mean_success(selections: Mapping[int, evidence.Selection]) -> float:
    return sum(s.success for s in selections.values()) / len(selections)


def summary(evolution: Evolution) -> str:
    """A table of the versions, for the terminal."""
    lines = [("version", "parent", "lever", "verdict", "success on selection")]
    for version in evolution.campaign.versions():
        found = evolution.verdict(version)
        if found is None:
            continue
        told = evolution.proposal(version) if version != START else None
        success = "" if found.success is None else f"{found.success:.1%}"
        move = f"{told.lever} {told.move}" if told else ""
        lines.append((version, told.parent if told else "", move[:44], found.kind, success))
    selected = evolution.selected()
    rows = [f"{a:<8} {b:<7} {c:<45} {d:<9} {e:>8}".rstrip() for a, b, c, d, e in lines]
    return "\n".join(
        [*rows, f"Selected: {selected}. Its score was selected, so it is too high: --final reads the test."]
    )
