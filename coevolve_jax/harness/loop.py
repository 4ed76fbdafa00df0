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
from coevolve_jax.comparison.cell_files import finished
from coevolve_jax.harness import campaign as folders
from coevolve_jax.harness import evidence, modules, progress, smoke
from coevolve_jax.harness.campaign import START, UNREADABLE, Campaign, reason
from coevolve_jax.harness.parts import Parts
from coevolve_jax.harness.store import Store, altered, is_run, log
from coevolve_jax.harness.versions import Versions
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import line
from coevolve_jax.records.files import read_lines

# --gate -> the parts before which a person decides.
GATES = {"design": ("smoke",), "verdict": ("verdict",)}
TOLD = 300  # characters of a difference


class Waiting(Exception):
    """A person must decide first (--gate). The message says what about."""


class Evolution:
    """A campaign that goes on.

    Args:
      campaign: its folder, claimed.
      config: of v000, with the section `harness`.
      store: where its runs are.
      say: receives a sentence for each thing that is done, in one line that a terminal can show.
      after: called after each version.

    Raises ValueError where the campaign's starts are in another store.

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
        own = campaign.store()
        if own and own != store.folder.resolve():
            raise ValueError(
                f"The campaign in {campaign.folder} has its runs in {own}, and not in {store.folder}: give "
                f"--store={own}."
            )
        self.campaign, self.store, self._after = campaign, store, after
        self._say = lambda text: say(line(text))  # a proposer's words are anybody's
        self._config = config
        self.settings, self.versions = config.harness, Versions(campaign, config, store)
        self.parts = Parts(campaign, config, store, self.versions, self._say)

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
            made = self._made(version, part)
            self._keep_questions()
            if made is None:
                self._say("Nothing is left to propose.")
                self.campaign.end()
                return
            if "failed" in made:  # another campaign may finish the run later
                runs = self.versions.runs(version)
                left = [(s, runs[s]) for s in self.parts.seeds(version, part) if not finished(runs[s])]
                made["logs"] = {str(seed): folders.beginning(log(run)) for seed, run in left}
            self.campaign.write(version, part, made)
            self._tell(version, part)
            if part == folders.PARTS[-1]:
                self._after()

    def replay(self) -> list[str]:
        """Makes every part again from the runs and earlier parts. Returns a sentence for each difference.

        Nothing is asked, trained or written.
        """
        found = []
        try:
            self.campaign.check()
        except folders.Tampered as error:
            found.append(f"{error} The rest is compared with what today's code makes of what is there.")
        for version in self.campaign.versions():
            for part in folders.PARTS:
                found += self._differences(version, part)
        if (self.campaign.folder / folders.ENDED).exists():
            found += self._differences("", "ended")
        return found

    def _mend(self) -> None:
        self.campaign.mend(self._differences)

    def _differences(self, version: str, part: str) -> list[str]:
        """Says how a part, or "ended", differs from what the runs and the parts before it give."""
        if part == "ended":
            return self._goes_on()
        path = self.campaign.path(version, part).relative_to(self.campaign.folder)
        try:
            there = self.campaign.read(version, part)
            if there is None:
                return []
            config, all_runs, found = self.versions.config(version), self.versions.runs(version), list[str]()
            reads = part in ("smoke", "evidence")
            runs = {s: all_runs[s] for s in (self.parts.seeds(version, part) if reads else ())}
            for seed, run in runs.items():
                if not is_run(run, config, seed):
                    return [f"{path} is of {run}, which is no run of {version} with seed {seed}."]
                failed = "failed" in there and not (run / "config.json").exists()  # before it was written
                if not failed and (why := altered(run)):
                    return [f"{path} rests on a changed config: {why}"]
            if reads and "failed" in there:
                return self._failures(version, part, there, runs)
            if part == "evidence":
                found = [sentence for run in runs.values() for sentence in evidence.contradictions(run)]
            with self.parts.on_record():
                made = json.loads(json.dumps(getattr(self.parts, part)(version)))
            told = textwrap.shorten(configs.difference(there, made, part), TOLD)
        except UNREADABLE as error:
            return [f"{path} cannot be made again from what is there ({reason(error)})."]
        return [*found, f"{path} differs from what the runs give ({told})."] if made != there else found

    def _failures(
        self, version: str, part: str, there: Mapping[str, Any], runs: Mapping[int, Path]
    ) -> list[str]:
        """Says what speaks against a part's word that some of these runs failed; the others were finished.

        A run that failed has the log of it. Where another campaign has finished it since, its log goes on.
        """
        logs, found = there.get("logs", {}), []
        unlike = (
            f"{version} is said to have failed ({part}), and its runs are finished, or their logs differ."
        )
        if not any(str(seed) in logs for seed in runs):
            found.append(unlike)
        for seed, run in runs.items():
            began, now = logs.get(str(seed)), folders.beginning(log(run))
            still = began is None or began == now
            if began is None:
                holds = finished(run)
            else:
                same = folders.beginning(log(run), began["bytes"]) == began
                holds = same and not (finished(run) and (still or not began["bytes"]))
            if not holds and unlike not in found:
                found.append(unlike)
            counts = evidence.spent_by_step(self.versions.config(version), run)
            if there.get("rollouts", {}).get(str(seed)) not in (counts[-1:] if still else counts):
                found.append(f"{version} ({part}) has other rollouts than its run of seed {seed}.")
        if not found and all(map(finished, runs.values())):
            self._say(f"{version} is judged as failed ({part}); its runs were finished since.")
        return found

    def _goes_on(self) -> list[str]:
        """Says where something is left to propose."""
        version = f"v{len(self.campaign.versions()):03d}"
        try:
            with self.parts.on_record():
                if self.campaign.next() in (None, (version, "proposal")) and not self.parts.proposal(version):
                    return []
        except UNREADABLE as error:
            return [f"{folders.ENDED} cannot be compared with what is there ({reason(error)})."]
        return [f"{folders.ENDED} says that nothing is left to propose, and something is."]

    def _begin(self) -> None:
        """Makes the starts, links them and freezes what may not change.

        Raises ValueError where a start fails, and where the audit could judge none of the held-out tasks.
        """
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
            turns = [turn for task in read_lines(kept[0]) for turn in task["turns"]]
            if self.settings.audit == "replay" and not any(turn.get("calls") for turn in turns):
                raise ValueError(
                    "config.harness.audit is 'replay', which compares with reference calls, and no held-out "
                    "task of the start has any: use --audit=none."
                )
        folders.freeze(self.campaign, files, modules.named(self._config))

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

    def _made(self, version: str, part: str) -> dict[str, Any] | None:
        """Makes a part. What an earlier process has asked a model for it is not asked again."""
        make = getattr(self.parts, part)
        if not self.campaign.has_untold_llm_calls():
            return make(version)
        self.campaign.add_llm_calls(())  # cuts off half a line
        with self.parts.answered():
            return make(version)

    def _train(self, version: str, part: str) -> None:
        """Makes the runs that a part reads, if any: for "smoke" the first steps of one."""
        if not (seeds := self.parts.seeds(version, part)):
            return
        first = part == "smoke"
        for seed in seeds:
            run = self.store.workdir(self.versions.config(version), seed)
            self.campaign.link(Path("versions") / version / "runs", seed, run)
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
