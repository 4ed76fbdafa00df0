"""A whole campaign of the made-up trainer, with transcripts, an audit and a reading of the test."""

import json
import shutil
from pathlib import Path

import numpy as np

from coevolve_jax import config as configs
from coevolve_jax.analysis import report
from coevolve_jax.harness import campaign, final, loop, references, start
from coevolve_jax.harness.parts import Parts
from coevolve_jax.harness.proposers.scripted import Scripted
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.registry import Diagnostic, Registration
from coevolve_jax.harness.store import Store
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.records.rollouts import write_evaluation
from coevolve_jax.testing.campaign import MADE_UP, train_made_up
from coevolve_jax.types import Group, Outcome, Step, Trajectory
from tests.harness.support import config
from tests.support.report_cases import CALLS, fake_task

DIAGNOSTICS = [
    Diagnostic(
        "share_of_ls", "trajectory", "double(tools.filter(t, t == 'ls').size())", "either", "refused", "v001",
        "scripted", test=Registration(2, 0.05 / 6, 0.55, 0.2, 140, 0.0, {"v000": (0.52, 70)}, True,
            ("v000 seed 0",), "Its AUC of 0.550 is nearer than 0.1 to 0.5."),
    ),
    Diagnostic(
        "tool_failures", "trajectory", "calls == 0 ? 0.0 : double(errors) / double(calls)", "up_is_bad",
        "registered", "v001", "scripted", 0.31, 0.44,
        Registration(1, 0.025, 0.68, 0.0021, 140, 0.0, {"v000": (0.67, 70), "v001": (0.69, 70)}, False,
            ("v000 seed 0", "v001 seed 0"), None),
    ),
]  # fmt: skip
REFERENCE = "configs/bfcl_harness.py:start=textbook"
REJECTED = [
    {"seed": 0, "task": f"held_out-{n}", "rollout": 1, "why": f"File {n} is still there."} for n in (0, 2)
]


class Proposes(Scripted):
    """The scripted proposer at first; then these moves, whatever the order that it would draw."""

    then = [("reward.terms", "add distinct_tools"), ("learner.skip_zero_variance_groups", "False")]

    def propose(self, history, rng):
        number = len(history.versions) - 2
        if number < 0:
            return super().propose(history, rng)
        found = history.first_that_runs(history.best.id, self.then[number : number + 1])
        expects = Expectation("success_last", "up")
        return Proposal(
            history.best.id, *found, because="It has rested.", proposer="scripted", expects=expects
        )


class Recorded(Parts):
    """Parts with made-up diagnostics, in which a verifier rejects successes of v003."""

    def _registered(self, version):
        return [] if version == loop.START else DIAGNOSTICS

    def evidence(self, version):
        more = {"audit": {"judged": 64, "rejected": REJECTED}} if version == "v003" else {}
        return super().evidence(version) | more


def launch(jobs, side_by_side):
    """Trains as the made-up trainer does, and writes transcripts of six tasks and the seconds."""
    failed = train_made_up(jobs, side_by_side)
    for job in (job for job in jobs if job.start and not job.until):
        rng = np.random.default_rng(job.config.seed)
        learner = job.config.learner
        solved = (0, 2, 4) if learner.skip_zero_variance_groups else (0, 1, 2)
        solved = solved if learner.learning_rate > 2e-5 else ()
        groups = [_group(rng, f"held_out-{i}", i in solved) for i in range(6)]
        write_evaluation(job.workdir, 12, {"iid": groups})
        if not learner.skip_zero_variance_groups:
            _look_better(job.workdir)
        told = {"rollout": 30.0, "update": 1e6 * learner.learning_rate}
        (job.workdir / "summary.json").write_text(json.dumps({"steps": 12, "seconds": told}))
    return failed


def _look_better(workdir: Path):
    """Raises the run's score on the selection set and lowers its success in training, whatever its luck."""
    *others, row = read_lines(workdir / "evaluations.jsonl")
    counts = {task: [2 - (i % 4 == 0), 2] for i, task in enumerate(row["by_task"])}
    write_lines(workdir / "evaluations.jsonl", [*others, row | {"by_task": counts}])
    steps = list(read_lines(workdir / "metrics.jsonl"))
    write_lines(workdir / "metrics.jsonl", [row | {"success": 0.9 * row["success"]} for row in steps])


def _group(rng, name, success):
    """Two rollouts of a task, both solved or both failed."""
    task, empty = fake_task(rng, name), np.zeros(0)
    steps = tuple(
        Step(number, f"call {k}", call, "done" if success else "no such file", not success)
        for number, _ in enumerate(task.turns)
        for k, call in enumerate(CALLS[:2])
    )
    outcome = Outcome(float(success), success)
    return Group(task, tuple(Trajectory(name, k, *[empty] * 4, (), steps, "done", outcome) for k in range(2)))


def fake_campaign(folder: Path) -> tuple[Path, Path]:
    """Returns a finished campaign whose test was read, and a copy from when v003 waited for its verdict.

    v001 is promoted, v002 refused by its backtest, and v003 scores higher but its target has not moved.
    """
    c, whole, half = config("slow", versions=2, seeds=(0,)), folder / "whole", folder / "half"
    told = {"command": "python experiments/evolve_harness.py", "machine": "2 cores", "date": "2026-11-24"}
    begun = campaign.begin(whole, {"config": json.loads(configs.to_json(c)), "told": told})
    store = Store(folder / "store", start.without_harness(c), MADE_UP._replace(launch=launch), jobs=1)
    found = loop.Evolution(begun, c, store, after=lambda: report.write_report(whole))
    found.parts = Recorded(begun, c, store, found.versions, print)
    found.parts.proposer = Proposes()
    for version in ("v001", "v002", "v003", None):
        try:
            found.run(gate="verdict")
        except loop.Waiting:
            assert begun.next() == (version, "verdict")
            if version == "v003":
                shutil.copytree(whole, half, symlinks=True)
            found.decide(version, True, "")
    others = {REFERENCE: references.changes(REFERENCE, c, store)}
    final.open_test(found, [100, 101], {"date": "2026-11-25"}, reopen=False, others=others)
    final.read(found, [100, 101])
    return whole, half
