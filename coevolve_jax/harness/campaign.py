"""The folder of a campaign. Its state is a function of its files, so the same command goes on after any kill.

    campaign.json      the config, the levers, seeds, command, machine, date
    frozen.json        sha256 of the source files, of the user's modules that the config names, of
                       campaign.json, of the held-out tasks and weights
    events.jsonl       what was done, in order; each line carries the sha256 of the line before
    starts/            links to the starts in the store, one for each seed
    versions/v003/     proposal.json, backtest.json, smoke.json, evidence.json, verdict.json, learned.json
    versions/v003/runs/  links to its runs in the store
    gradients/v003/    what the gradients under its config were compared by, where the backtest needs it
    canary/v003.json   the start's policy on the selection set, as this version's runs read it
    llm_calls.jsonl    the questions of a proposer that asks a model, and the answers
    approved/          a person's decisions (--gate)
    ended.json         where nothing was left to propose
    final/             the test, read once, and the sha256 of the files of the fresh runs
    lock               held by the one process that writes here

Every file of versions/ is written once, by a rename that cannot replace another, and is read-only then. Its
sha256 stands in events.jsonl. `check` finds a file that was changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coevolve_jax import config as configs
from coevolve_jax import shipped
from coevolve_jax.diagnosis import expressions
from coevolve_jax.harness import modules
from coevolve_jax.harness.records import Proposal, Verdict
from coevolve_jax.records.files import lock

PACKAGE = shipped.PACKAGE
PROGRAMS = ("main.py", "evaluate.py", "compare_gradients.py")  # of experiments/, which launch.py starts
SOURCE = (f"{PACKAGE.name}/", "experiments/")  # begin the names of source files
PARTS = ("proposal", "backtest", "smoke", "evidence", "verdict", "learned")
START = "v000"
# Written anew each time that the test is read. The first has the sha256 of the fresh runs' files.
READ = ("final/files.json", "final/readings.csv", "final/final.json")
QUESTIONS, ENDED = "llm_calls.jsonl", "ended.json"
MOST_REFUSED = 3  # proposals refused unseen, for each version that may be trained
# Part -> a key that its file has.
NEEDED = {"proposal": "because", "backtest": "refused", "verdict": "kind", "learned": "skills"}
# What is forged may have any form.
UNREADABLE = (
    LookupError, TypeError, AttributeError, ValueError, OSError, RecursionError, ArithmeticError,
    AssertionError,
)  # fmt: skip


class Tampered(ValueError):
    """A file of the campaign, or of the code, is not as it was. The message names it."""


def reason(error: Exception) -> str:
    """Says what an error is of. An OSError names its file."""
    return str(error) if isinstance(error, OSError) else repr(error)


@contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Raises Tampered, which names the file, where what the block reads has another form."""
    try:
        yield
    except Tampered:
        raise
    except UNREADABLE as error:
        raise Tampered(f"{name} cannot be read ({reason(error)}): restore it.") from None


def read_object(path: Path, *needed: str) -> dict[str, Any]:
    """The JSON object in a file, with these keys. Raises Tampered, which names it, for anything else."""
    with reading(path):
        found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise Tampered(f"{path} holds no JSON object: restore it.")
    for key in needed:
        if key not in found:
            raise Tampered(f"{path} lacks {key!r}: restore it.")
    return found


class Campaign:
    """A campaign's folder. One process at a time writes to it.

    Args:
      folder: made by `begin`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._events = folder / "events.jsonl"

    # ---- what is there ---------------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """campaign.json."""
        path = self.folder / "campaign.json"
        found = read_object(path, "config")
        with reading(path):
            int(found["config"]["harness"]["versions"])
        return found

    def versions(self) -> list[str]:
        """Ids of all versions, oldest first. v000 is the start."""
        return sorted(p.name for p in (self.folder / "versions").glob("v[0-9]*"))

    def path(self, version: str, part: str) -> Path:
        return self.folder / "versions" / version / f"{part}.json"

    def read(self, version: str, part: str) -> Any:
        """The content of one part of a version; None if it is not there yet."""
        path, needed = self.path(version, part), NEEDED.get(part)
        return read_object(path, *filter(None, [needed])) if path.exists() else None

    def next(self) -> tuple[str, str] | None:
        """(version, part) of the next thing to do; None where the campaign is over."""
        there, wanted = self.versions(), self.plan()["config"]["harness"]["versions"]
        for part in PARTS if there else ():
            if self.read(there[-1], part) is None:
                return there[-1], part
        if any(event["event"] in ("ended", "opened") for event in self.events()):
            return None  # nothing is trained after a reading of the test
        kinds = self._kinds()
        if self.left() <= 0 or kinds.count("refused") >= MOST_REFUSED * wanted:
            return None
        return f"v{len(there):03d}", "proposal"

    def left(self) -> int:
        """Versions that may still be trained, besides those that have a verdict."""
        kinds = self._kinds()
        tried = len(kinds) - kinds.count("start") - kinds.count("refused")
        return self.plan()["config"]["harness"]["versions"] - tried

    def _kinds(self) -> list[str]:
        judged = (self.read(version, "verdict") for version in self.versions())
        return [found["kind"] for found in judged if found]

    def runs(self, version: str) -> dict[int, Path]:
        """seed -> workdir, of the runs that were begun."""
        links = (self.folder / "versions" / version / "runs").glob("seed_*")
        return {int(link.name.removeprefix("seed_")): link.resolve() for link in sorted(links)}

    def store(self) -> Path | None:
        """The folder of the store that starts/ leads to (store.py); None before there is a start."""
        with reading(self.folder / "starts"):
            links = sorted((self.folder / "starts").glob("seed_*"))
            return links[0].resolve().parents[2] if links else None

    def selected(self) -> str:
        """The version that the campaign ends with: the promoted one that no promoted one follows, or v000.

        Where several are, as in a design without a loop, it is the one of the largest gain over v000: the sum
        of its and its ancestors' differences, which no lost trial raises.
        """
        gains, good, followed = {START: 0.0}, set[str](), set[str]()
        for version in self.versions():
            judged, proposal = (self.read(version, part) for part in ("verdict", "proposal"))
            if judged and version != START:
                parent = (proposal or {}).get("parent", "")
                gains[version] = gains.get(parent, 0.0) + (judged.get("difference") or 0.0)
                if judged["kind"] == "promoted":
                    good.add(version)
                    followed.add(parent)
        return max(good - followed, key=lambda v: (gains[v], v), default=START)

    def events(self) -> list[dict[str, Any]]:
        """The events. Raises Tampered where the chain of hashes breaks."""
        found, before = [], ""
        for number, line in enumerate(self._lines(), 1):
            try:
                row = json.loads(line)
                told, *others = (row[key] for key in ("previous", "event", "file", "sha256"))
                if not all(isinstance(text, str) for text in others):
                    raise ValueError
            except UNREADABLE:
                raise Tampered(f"{self._events}, line {number} is no event: restore it.") from None
            if told != before or row.get("n") != number - 1:
                raise Tampered(f"{self._events}, line {number}: a line up to here was changed or removed.")
            found.append(row)
            before = _sha(line.encode())
        return found

    def _lines(self) -> list[str]:
        """Whole lines: a kill may have left half of one."""
        with reading(self._events):
            text = self._events.read_text() if self._events.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    # ---- writing -----------------------------------------------------------------------------------

    def write(self, version: str, part: str, content: Any) -> None:
        """Writes one part of a version, once, and the event of it. Raises Tampered if it is there already."""
        name = str(self.path(version, part).relative_to(self.folder))
        self._record(part, name, content, version=version)

    def _record(self, event: str, name: str, content: Any = None, **more: str) -> None:
        """Writes a file of the campaign, once, unless content is None, and the event of it.

        more: what else the event says.
        """
        path = self.folder / name
        if content is not None:
            self._once(path, content)
        self._append({"event": event, **more, "file": name, "sha256": sha256(path)})

    def _once(self, path: Path, content: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        half.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        half.chmod(0o444)
        try:
            os.link(half, path)  # fails where the file exists, and leaves no half of one
        except FileExistsError:
            raise Tampered(f"{path} exists: it is written once.") from None
        finally:
            half.unlink()

    def _append(self, row: Mapping[str, Any]) -> None:
        lines = self._lines()
        if (asked := self.folder / QUESTIONS).exists():
            row = {**row, "asked": beginning(asked)}
        line = json.dumps({"n": len(lines), **row, "previous": _sha(lines[-1].encode()) if lines else ""})
        with open(self._events, "a") as file:
            file.truncate(sum(len(whole.encode()) + 1 for whole in lines))  # cuts off half a line
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def llm_calls(self) -> list[dict[str, Any]]:
        """The whole lines of llm_calls.jsonl."""
        path = self.folder / QUESTIONS
        with reading(path):
            text = path.read_text() if path.exists() else ""
            return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def has_untold_llm_calls(self) -> bool:
        """Whether llm_calls.jsonl has whole lines since the last event, of a part that was not written."""
        path, events = self.folder / QUESTIONS, self.events()
        told = events[-1].get("asked", {}).get("bytes", 0) if events else 0
        return path.exists() and path.read_bytes().rfind(b"\n") >= told

    def add_llm_calls(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends to llm_calls.jsonl, after its last whole line."""
        before = "".join(json.dumps(row) + "\n" for row in self.llm_calls())
        with open(self.folder / QUESTIONS, "a") as file:
            file.truncate(len(before.encode()))
            file.write("".join(json.dumps(dict(row)) + "\n" for row in rows))

    def link(self, folder: Path, seed: int, target: Path) -> Path:
        """Returns the link to a workdir in a folder of the campaign, made if it is missing.

        Raises Tampered where something else stands in its place.
        """
        link = self.folder / folder / f"seed_{seed}"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(target.absolute())
        if link.resolve() != target.resolve():
            raise Tampered(f"{link} leads to {link.resolve()}, and not to {target}: take it away.")
        return link

    def decide(self, version: str, part: str, decision: Mapping[str, Any]) -> None:
        """Writes a person's decision, once."""
        self._record("decided", f"approved/{version}_{part}.json", decision, version=version)

    def write_final(self, name: str, content: Any) -> None:
        """Writes a file of final/, once, and the event of it."""
        self._record("opened", f"final/{name}", content)

    def end(self) -> None:
        """Says that nothing is left to propose: the campaign is over."""
        self._record("ended", ENDED, {"why": "Nothing is left to propose."})

    def tell_final(self, *names: str) -> None:
        """Writes the events of files of final/ that were made anew."""
        for name in names:
            self._record("read", f"final/{name}")

    def mend(self, differences: Callable[[str, str], Sequence[str]]) -> None:
        """Completes what a kill has left: the event of the last file, and half-written files.

        differences: (version, part) -> sentences on how a part differs from what the runs give; of ("",
          "ended"), whether something is left to propose.

        Raises Tampered where more than one file has no event, where the one differs, and for a decision or a
        reading of the test that is not due.
        """
        lost, told = self._without_event(), {row.get("file") for row in self.events()}
        if len(lost) > 1 or lost.keys() & told or {"event": "read"} in lost.values():  # no kill leaves these
            raise Tampered(f"{self._events} lacks the event of {next(iter(lost))}: restore it.")
        for version in self.versions():
            for half in (self.folder / "versions" / version).glob(".*.json.*"):
                half.unlink()
        for name, event in lost.items():
            self._check_files()  # what it is compared with
            kind, due = event["event"], self.next()
            not_due = kind == "decided" and name != "approved/{}_{}.json".format(*due or ("", ""))
            if not_due or (kind == "opened" and due is not None):
                raise Tampered(f"{name} has no event in {self._events} and is not due: take it away.")
            if kind in (*PARTS, "ended") and (told := differences(event.get("version", ""), kind)):
                raise Tampered(f"{told[0]} Its event is missing too: restore both.")
            self._record(name=name, **event)

    def _without_event(self) -> dict[str, dict[str, str]]:
        """Name of each file that should have an event and has none -> what the event should say."""
        rows = self.events()
        found = {
            f"versions/{version}/{part}.json": {"event": part, "version": version}
            for version in self.versions()
            for part in PARTS
        }
        others = ("decided", "approved/v*.json"), ("opened", "final/opened*.json"), ("ended", ENDED)
        for event, pattern in others:
            for path in sorted(self.folder.glob(pattern)):
                who = {"version": path.name.partition("_")[0]} if event == "decided" else {}
                found[str(path.relative_to(self.folder))] = {"event": event, **who}
        if was_read(rows):
            names = (f"final/readings/{p.name}" for p in self.folder.glob("final/readings/*.json"))
            found |= {name: {"event": "read"} for name in (*names, *READ)}
        told = {row["file"]: row for row in rows if "file" in row}
        lost = lambda name: not found[name].items() <= told.get(name, {}).items()
        return {name: found[name] for name in found if (self.folder / name).exists() and lost(name)}

    # ---- what may not change -------------------------------------------------------------------------

    def check(self, code: bool = True) -> None:
        """Raises Tampered, which names the file, for anything that is not as it was written.

        code: whether the source files and the modules that the config names count too.
        """
        for name in self._without_event():
            raise Tampered(f"{name} has no event in {self._events}: restore that file.")
        self._check_files(code)

    def _check_files(self, code: bool = True) -> None:
        events = self.events()
        if not events:
            raise Tampered(f"{self._events} holds no event: restore it, or run the campaign first.")
        told = {row["file"]: row["sha256"] for row in events if "file" in row}  # the last event counts
        if not was_read(events):
            told = {name: told[name] for name in told if name not in READ}  # the test is being read again
        for name, digest in told.items():
            _same(self.folder / name, digest, name)
        if was_read(events) and (kept := self.folder / READ[0]).exists():
            for name, digest in read_object(kept).items():
                _same(kept.parent / name, digest, f"final/{name}")
        asked = next((row["asked"] for row in reversed(events) if "asked" in row), None)
        with reading(self._events):
            same = not asked or beginning(self.folder / QUESTIONS, asked["bytes"]) == asked
        if not same:
            raise Tampered(f"{QUESTIONS} lacks questions that were asked, or they were changed: restore it.")
        for version in self.versions():
            self._check_version(version)
        for name, digest in read_object(self.folder / "frozen.json").items():
            own, source = name.startswith(f"{modules.FOLDER}/"), name.startswith(SOURCE)
            if code and own:
                _same(modules.path(name), digest, name)
            elif code or not (own or source):
                _same((PACKAGE.parent if source else self.folder) / name, digest, name)

    def _check_version(self, version: str) -> None:
        """Raises Tampered where parts are of no form that the code reads, and for changed files of runs."""
        proposal, judged = (self.read(version, part) for part in ("proposal", "verdict"))
        name = lambda part: self.path(version, part).relative_to(self.folder)
        with reading(name("proposal")):
            earlier = [v for v in self.versions() if v < version]
            if proposal and version != START and Proposal.from_json(proposal).parent not in earlier:
                raise ValueError(f"its parent {proposal['parent']!r} is no earlier version")
        with reading(name("verdict")):
            if judged:
                Verdict.from_json(judged)
        with reading(name("evidence")):
            files = [*((self.read(version, "evidence") or {}).get("files") or {}).items()]
        for file, digest in files:
            _same(self.folder / (file := f"versions/{version}/runs/{file}"), digest, file)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keeps other processes out while the block runs. Raises ValueError where one is in."""
        with open(self.folder / "lock", "a") as file:
            lock(file, f"Another process goes on with the campaign in {self.folder}: wait for its end.")
            yield


def begin(folder: Path, plan: Mapping[str, Any]) -> Campaign:
    """Makes the folder, or recognises it as this plan's.

    plan: values that JSON can hold: "config", and "told" (command, jobs, machine, date). The latter may
      differ from the first time; they are kept as they were.

    Raises ValueError if the folder holds another campaign (with the first key that differs) or something
    else, or if the package is missing that reads the formulas of skills and diagnostics.
    """
    expressions.check_installed()
    campaign, path = Campaign(folder), folder / "campaign.json"
    if path.exists():
        theirs, ours = campaign.plan()["config"], json.loads(json.dumps(plan["config"]))
        if theirs != ours:
            raise ValueError(
                f"{folder} holds another campaign ({configs.difference(theirs, ours)}): choose another "
                "--workdir, or give its own settings."
            )
        return campaign
    left = lambda p: p.name == "lock" or p.name.startswith(".campaign.json.")  # by a kill
    if folder.exists() and not all(map(left, folder.iterdir())):
        raise ValueError(f"{folder} is not empty and holds no campaign: choose another --workdir.")
    folder.mkdir(parents=True, exist_ok=True)
    campaign._once(path, plan)
    return campaign


def freeze(campaign: Campaign, files: Iterable[str], named: Iterable[str] = ()) -> None:
    """Writes frozen.json, once: the sha256 of the source, of campaign.json, of these files and modules.

    files: relative to the campaign's folder. named: dotted paths, as `modules.named` gives them.
    """
    path = campaign.folder / "frozen.json"
    if not path.exists():
        found = {name: sha256(campaign.folder / name) for name in ("campaign.json", *files)}
        found |= {str(p.relative_to(PACKAGE.parent)): sha256(p) for p in source()}
        found |= {name: sha256(p) for own in named for name, p in modules.files(own).items()}
        campaign._once(path, found)
    if not campaign.events():
        campaign._record("frozen", path.name)


def source() -> list[Path]:
    """The files of this package, and PROGRAMS, that decide what a run computes and how it is read, sorted."""
    own = (p for kind in ("*.py", "*.md", "*.jinja") for p in PACKAGE.rglob(kind))
    return sorted({*own, *(shipped.ROOT / "experiments" / name for name in PROGRAMS)})


def code() -> str:
    """16 hex digits that name the content of `source`."""
    return _sha("".join(f"{p.relative_to(PACKAGE.parent)} {sha256(p)}\n" for p in source()).encode())[:16]


def sha256(path: Path) -> str:
    with open(path, "rb") as file:  # weights may be larger than memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def beginning(path: Path, size: int | None = None) -> dict[str, Any]:
    """Bytes and sha256 of a file that may grow, or of its first `size` bytes. A missing one is empty."""
    content = path.read_bytes()[:size] if path.exists() else b""
    return {"bytes": len(content), "sha256": _sha(content)}


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def was_read(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the test was read since it was last opened."""
    opened = max((i for i, row in enumerate(events) if row["event"] == "opened"), default=len(events))
    return any(row.get("file") == READ[-1] for row in events[opened:])


def _same(path: Path, digest: str, name: str) -> None:
    if not path.is_file():
        raise Tampered(f"{name} is gone: restore it, or begin another campaign.")
    if sha256(path) != digest:
        raise Tampered(f"{name} was changed since it was written: restore it, or begin another campaign.")
