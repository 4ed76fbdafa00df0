"""A campaign of the made-up trainer, which the tests of this folder share."""

import json
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.harness import campaign, loop, start
from coevolve_jax.harness.store import Store
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.testing.campaign import MADE_UP, evaluate_made_up, train_made_up
from tests.support.paths import ROOT

# A program that runs after this takes the made-up trainer for its runs (tests/support/forked.run_after).
WITH_MADE_UP = """
from coevolve_jax.harness import launch
from coevolve_jax.testing import campaign
launch.programs = lambda config, compiled: campaign.MADE_UP
"""
MODEL: dict = {}  # config.harness_model, for a proposer that asks


def config(fault: str = "slow", diagnostics: str = "fixed", **settings):
    """configs/bfcl_harness.py with a fault and values of its section harness."""
    settings["diagnostics"] = diagnostics
    found = configs.load_file(ROOT / "configs" / "bfcl_harness.py", f"fault={fault}")
    if MODEL:
        found.harness_model = ConfigDict(MODEL)
    return start.settled(configs.override(found, {f"harness.{k}": v for k, v in settings.items()}))


class Kept:
    """The made-up trainer and evaluation, which keep what they were given."""

    def __init__(self):
        self.jobs, self.questions = [], []

    def launch(self, jobs, side_by_side):
        self.jobs += jobs
        return train_made_up(jobs, side_by_side)

    def evaluate(self, questions, side_by_side):
        self.questions += questions
        return evaluate_made_up(questions, side_by_side)


def evolution(
    folder: Path, fault: str = "slow", launch=train_made_up, evaluate=evaluate_made_up, **settings
) -> loop.Evolution:
    """A campaign in `folder`, begun or gone on with. Its store lies beside it."""
    c = config(fault, **settings)
    begun = campaign.begin(folder, {"config": json.loads(configs.to_json(c))})
    programs = MADE_UP._replace(launch=launch, evaluate=evaluate)
    store = Store(folder.parent / "store", start.without_harness(c), programs, jobs=1)
    return loop.Evolution(begun, c, store)


def rehash(folder: Path) -> None:
    """Writes the hashes of a campaign's files, as they are now, into its events, as a forger would."""
    events, before, lines = folder / "events.jsonl", "", []
    if (kept := folder / "final" / "files.json").exists():
        hashes = {name: campaign.sha256(kept.parent / name) for name in json.loads(kept.read_text())}
        kept.write_text(json.dumps(hashes, indent=1))
    for row in map(json.loads, events.read_text().splitlines()):
        if "file" in row:
            row["sha256"] = campaign.sha256(folder / row["file"])
        lines.append(json.dumps({**row, "previous": before}))
        before = campaign._sha(lines[-1].encode())
    events.write_text("\n".join(lines) + "\n")


def rewritten(found: loop.Evolution, version: str, part: str, **values) -> None:
    """Writes other values into a part by hand, and the hash of it into the events, as a forger would."""
    path = found.campaign.path(version, part)
    path.chmod(0o644)
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    rehash(found.campaign.folder)
    found.campaign.check()  # only the runs tell


def lose_all_trials(run: Path) -> None:
    """Takes every trial from the evaluations of a run."""
    rows = read_lines(run / "evaluations.jsonl")
    lost = [{**row, "by_task": dict.fromkeys(row["by_task"], [0, 0])} for row in rows]
    write_lines(run / "evaluations.jsonl", lost)


def cut(folder: Path, kept: int) -> None:
    """Leaves the first lines of a campaign's events."""
    events = folder / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:kept]))


def files(folder: Path) -> dict[str, str]:
    """The content of every file of a campaign but its lock, by name."""
    paths = [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.name != "lock" and not {"starts", "runs"} & {*p.parts}
    ]
    return {str(p.relative_to(folder)): p.read_text() for p in paths}
