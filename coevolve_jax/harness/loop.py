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
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.harness import campaign as folders
from coevolve_jax.harness import progress, smoke
from coevolve_jax.harness.campaign import START, Campaign
from coevolve_jax.harness.parts import Parts
from coevolve_jax.harness.store import Store, finished, log, named
from coevolve_jax.harness.versions import Versions
from coevolve_jax.llm.calls import LLMCall

GATES = {
    "design": ("smoke",),
    "verdict": ("verdict",),
}  # --gate -> the parts before which a person decides


TOLD = 300  # characters of a difference
UNREADABLE = (LookupError, TypeError, AttributeError, ValueError, OSError)  # what is forged may have any form


def reason(error: Exception) -> str:
    """Says what an error is of. An OSError names its file."""
    return str(error) if isinstance(error, OSError) else repr(error)


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
      versions: what is known of them. parts: makes what each writes.
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
        self.parts = Parts(campaign, config, store, self.versions, say)

    def run(self, gate: str = "none") -> None:
        """Goes on to the end. Raises Waiting where --gate asks a person, and Tampered for a changed file."""
        self._mend()
        self._remember()
        if not self.campaign.events():
            self._begin()
        self.campaign.check()  # also where the campaign is over
        while (todo := self.campaign.next()) is not None:
            version, part = todo
            if part in ("proposal", "verdict"):
                self.campaign.check()
            if version != START and part in GATES.get(gate, ()):
                self._ask(version, part)
            if part in ("smoke", "evidence"):
                self._train(version, part)
            made = getattr(self.parts, part)(version)
            self._keep_questions()
            if made is None:
                self._say("Nothing is left to propose.")
                self.campaign.end()
                return
            if "failed" in made:  # another campaign may finish the run later
                left = [(s, run) for s, run in self.versions.runs(version).items() if not finished(run)]
                made["logs"] = {str(seed): folders.beginning(log(run)) for seed, run in left}
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
            found.append(f"{error} The rest is compared with what today's code makes of what is there.")
        for version in self.campaign.versions():
            for part in folders.PARTS:
                found += self._differences(version, part)
        return found

    def _mend(self) -> None:
        self.campaign.mend(self._differences)

    def _differences(self, version: str, part: str) -> list[str]:
        """Says how a part differs from what the runs and the parts before it give."""
        path = self.campaign.path(version, part).relative_to(self.campaign.folder)
        try:
            there = self.campaign.read(version, part)
            if there is None:
                return []
            if "failed" in there:
                told = f"{version} is said to have failed ({part}), and its runs are finished."
                return [told] if self._never_failed(version, there) else []
            for seed, run in there.get("runs", {}).items():
                config = named(self.versions.config(version))
                if not (run.startswith(f"{config}-") and run.endswith(f"/seed_{seed}")):
                    return [f"{path} names {run}, which is no run of {version} with seed {seed}."]
            if part == "proposal" and version != START and not self.parts.repeatable:
                self.parts.check(version, self.versions.proposal(version))
                self._say(f"{path} holds a model's answer, which nothing makes again: its form is checked.")
                return []
            made = json.loads(json.dumps(getattr(self.parts, part)(version)))
            told = textwrap.shorten(configs.difference(there, made, part), TOLD)
        except UNREADABLE as error:
            return [f"{path} cannot be made again from what is there ({reason(error)})."]
        return [f"{path} differs from what the runs give ({told})."] if made != there else []

    def _never_failed(self, version: str, there: Mapping[str, Any]) -> bool:
        """Whether all runs are finished, and no log begins as it was when a part says that they failed."""
        runs = self.versions.runs(version)
        told = {log(runs[int(seed)]): began for seed, began in there.get("logs", {}).items()}
        then = told and all(folders.beginning(path, began["bytes"]) == began for path, began in told.items())
        return all(finished(run) for run in runs.values()) and not then

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

    def _remember(self) -> None:
        """Tells a proposer that asks a model what an earlier process has asked."""
        if (known := getattr(self.parts.proposer, "llm_calls", None)) is not None:
            asked = self.campaign.llm_calls()[len(known) :]
            self.parts.proposer.resume([LLMCall(**row) for row in asked])

    def _keep_questions(self) -> None:
        """Writes what a proposer has asked a model since."""
        known = getattr(self.parts.proposer, "llm_calls", ())
        if new := known[len(self.campaign.llm_calls()) :]:
            self.campaign.add_llm_calls(map(dataclasses.asdict, new))

    def _train(self, version: str, part: str) -> None:
        """Makes the runs that a part reads, if any: for "smoke" the first steps of one."""
        if not (seeds := self.parts.seeds(version, part)):
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
            self.parts.failed[version, part] = why

    def _ask(self, version: str, part: str) -> None:
        """Raises Waiting where a person has not decided yet."""
        if part == "smoke" and self.versions.refused_unrun(version):
            return
        if self.versions.decision(version, part) is None:
            what = "before it is trained"
            if part == "verdict":
                what = f"before its verdict counts (the rules say {self.parts.judge(version).kind})"
            raise Waiting(
                f"{version} waits for a person {what}: --approve={version}, or --refuse={version} --why=..."
            )

    def decide(self, version: str, approved: bool, why: str) -> None:
        """Writes a person's decision about the part that is due, once. Raises ValueError if none is due."""
        self._mend()
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
