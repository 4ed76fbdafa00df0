"""Whole campaigns of the made-up trainer with all that a page can show: backtests, diagnostics, transcripts."""

import json
from pathlib import Path

import numpy as np

from coevolve_jax import config as configs
from coevolve_jax.harness import campaign, final, loop
from coevolve_jax.harness.backtest import Backtest, Check
from coevolve_jax.harness.registry import Diagnostic, Registration
from coevolve_jax.harness.store import Store
from coevolve_jax.records.rollouts import write_evaluation
from coevolve_jax.testing.campaign import train_made_up
from coevolve_jax.types import Group, Outcome, Step, Trajectory
from tests.harness.support import config
from tests.support.report_cases import CALLS, fake_task

DIAGNOSTICS = [
    Diagnostic(
        "tool_failures", "trajectory", "calls == 0 ? 0.0 : double(errors) / double(calls)", "up_is_bad",
        "registered", "v001", "scripted", 0.31, 0.44,
        Registration(1, 0.025, 0.68, 0.0021, 140, 0.0, {"v000": (0.67, 70), "v001": (0.69, 70)}, False,
            ("v000/0", "v001/0"), None),
    ),
    Diagnostic(
        "share_of_ls", "trajectory", "double(tools.filter(t, t == 'ls').size())", "either", "refused", "v001",
        "scripted",
        test=Registration(2, 0.05 / 6, 0.55, 0.2, 140, 0.0, {"v000": (0.52, 70)}, True, ("v000/0",),
            "Its AUC of 0.550 is nearer than 0.1 to 0.5."),
    ),
]  # fmt: skip


class Wired(loop.Evolution):
    """A campaign that records what a page shows besides. It refuses the backtest of version `refuses`."""

    refuses = "v002"

    def _backtest(self, version):
        if version == loop.START:
            return super()._backtest(version)
        bad = version == self.refuses
        checks = {
            "live_groups": Check(0.4 if bad else 0.97, 0.8, not bad),
            "order_tiers": Check(0.02, None, True),
        }
        why = "0.40 times as many groups are learned from, below 0.8." if bad else None
        return Backtest(
            "v000", "", checks, {"live": 0.62}, why, ("3 groups get a spread.",), ("rollout.temperature",)
        ).to_json()

    def _evidence(self, version):
        found = super()._evidence(version)
        if "row" in found and version == "v001":
            rejected = [{"seed": 0, "task": "held_out-0", "rollout": 0, "why": "The file is still there."}]
            found |= {"came": {"live": 0.58}, "audit": {"rejected": rejected}}
        return found

    def _learned(self, version):
        told = {} if version == loop.START else {"diagnostics": [d.to_json() for d in DIAGNOSTICS]}
        return {**super()._learned(version), **told}


def launch(jobs, side_by_side):
    """Trains as the made-up trainer does, and writes transcripts of six tasks and the seconds."""
    failed = train_made_up(jobs, side_by_side)
    for job in jobs:
        if job.start is None:
            continue
        rng = np.random.default_rng(job.config.seed)
        groups = [_group(rng, f"held_out-{i}", job.config.learner.learning_rate > 2e-5) for i in range(6)]
        write_evaluation(job.workdir, 12, {"iid": groups})
        told = {"steps": 12, "seconds": {"rollout": 30.0, "update": 11.5}}
        (job.workdir / "summary.json").write_text(json.dumps(told))
    return failed


def _group(rng, name, good):
    """Two rollouts of a task. A good policy solves tasks that end in an even number."""
    task = fake_task(rng, name)
    success = good and name[-1] in "024"
    steps = tuple(
        Step(number, f"call {k}", call, "done" if success else "no such file", not success)
        for number, _ in enumerate(task.turns)
        for k, call in enumerate(CALLS[:2])
    )
    empty = np.zeros(0)
    return Group(
        task,
        tuple(
            Trajectory(name, k, empty, empty, empty, empty, turn_starts=(), steps=steps, stop="done",
                outcome=Outcome(float(success), success))
            for k in range(2)
        ),
    )  # fmt: skip


def fake_campaign(folder: Path, versions: int = 3, read: bool = True, **settings) -> Wired:
    """A finished campaign. v001 scores higher and a person refuses it; v002 is refused by its backtest.

    read: the test was read. settings: of the section harness.
    """
    c = config("slow", versions=versions, **settings)
    told = {"command": "python experiments/evolve_harness.py", "machine": "2 cores", "date": "2026-11-24"}
    begun = campaign.begin(folder, {"config": json.loads(configs.to_json(c)), "told": told})
    found = Wired(begun, c, Store(folder.parent / "store", loop.without_harness(c), launch, jobs=1))
    for approved, why in ((False, "the successes look odd"), *[(True, "")] * 9):
        try:
            found.run(gate="verdict")
        except loop.Waiting:
            found.decide(found.next()[0], approved, why)
    if read:
        final.open_test(found, [100, 101, 102], {"date": "2026-11-25"}, reopen=False)
        final.read(found, [100, 101, 102], evaluate)
    return found


def evaluate(tasks, run, protocol, path):
    """Reads a run as its own selection set says, with three tasks lost."""
    row = json.loads((run / "evaluations.jsonl").read_text())
    counts = {task: [0 if task in ("held_out-1", "held_out-2", "held_out-3") else c[0], c[1]]
              for task, c in row["by_task"].items()}  # fmt: skip
    path.write_text(json.dumps({"by_task": counts}))
