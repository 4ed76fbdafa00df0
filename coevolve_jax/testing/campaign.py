"""A made-up trainer for campaigns: it writes what a run writes, in milliseconds, and knows the truth.

    store = Store(folder, config, MADE_UP, jobs=1)

Success in the end depends on a few levers, as `truth` says. The files show each fault's first symptom too,
and carry the luck of a run and of its rollouts. Nothing here is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.harness.registry import testing_half
from coevolve_jax.harness.store import Comparison, Job, Programs, Question, config_changes
from coevolve_jax.records.files import write_lines, write_text
from coevolve_jax.records.rollouts import write_evaluation, write_rollouts
from coevolve_jax.seeding import rng_for
from coevolve_jax.types import Call, Group, Lineage, Outcome, Step, Task, Trajectory, Turn

TASKS, ROLLOUTS, STEPS = 400, 2, 12
GROUPS = 12  # of every third step, kept on disk
NOISE = 0.017  # standard deviation of a run's success between seeds
STEP_NOISE = 0.01  # and of its success in training between steps
ACTIVE = 0.9  # share of the groups with spread that are learned from
SEALED = "sealed"  # a tool that only tasks call which no proposer may see
TURNS = (Turn("do it", (Call("tool_0", {}),)),)
NONE = np.zeros(0)


def truth(config: ConfigDict) -> float:
    """The success that the config's policy has in expectation after training."""
    c = config
    found = 0.80
    found -= 0.25 * min(1.5, abs(math.log10(c.learner.learning_rate / 1e-4)))
    found -= 0.12 * (c.learner.kl_coef > 0.3)
    found -= 0.10 * (c.rollout.max_length < 400)
    found -= 0.08 * (c.rollout.group_size < 4)
    found += 0.10 * hacked(c)
    found -= 0.05 * (abs(math.log(c.rollout.temperature)) > 0.4)
    return found


def hacked(config: ConfigDict) -> bool:
    """Whether the reward has led the policy into a hole of the made-up environment's verdict."""
    return any(term.startswith("distinct_tools") for term in config.reward.terms)


def symptoms(config: ConfigDict) -> dict[str, tuple[float, float]]:
    """Value of metrics.jsonl -> its mean at the first and at the last step."""
    c, end = config, truth(config)
    pace = math.log10(c.learner.learning_rate / 1e-4)
    held = c.learner.kl_coef > 0.3
    dead = 0.2 + 0.8 / c.rollout.group_size
    return {
        "success": (0.55, 0.55 + (0.0 if held or pace < -0.6 else end - 0.55)),
        "kl": (0.0, 0.001 if held or pace < -0.6 else 0.05 * 10 ** max(pace, -1)),
        "dead": (dead, dead + (0.3 if pace > 0.4 else 0.1)),
        "logprob": (-0.08, -0.01 if pace > 0.4 else -0.05),
        "truncated": (0.3, 0.3) if c.rollout.max_length < 400 else (0.02, 0.02),
    }


def _luck(config: ConfigDict) -> str:
    """Names the values that differ from the defaults. A key that is new, at its default, changes no luck."""
    theirs = configs.defaults(config.strategy.name)
    return json.dumps(
        config_changes(theirs, configs.override(config, {"seed": 0})), sort_keys=True, default=str
    )


def train_made_up(jobs: Sequence[Job], side_by_side: int) -> dict[Path, str]:
    """Writes the files of each job's run. A store takes it in the place of real training."""
    for job in jobs:
        job.workdir.mkdir(parents=True, exist_ok=True)
        write_text(job.workdir / "config.json", configs.to_json(job.config))
        tasks: list[dict] = [
            {"id": f"held_out-{i}", "scenario": f"s{i // 2}", "lineage": {"kind": "held_out"}}
            | {"turns": [{"calls": [{}] * (1 + i % 6)}]}
            for i in range(TASKS)
        ]
        if job.start is None:
            write_lines(job.workdir / "held_out.jsonl", tasks)
            saved = job.workdir / "checkpoints" / "step_00000000" / "manifest.json"
            saved.parent.mkdir(parents=True, exist_ok=True)
            write_text(saved, str(job.config.seed))
            continue
        rng = rng_for(job.config.seed, f"made up {_luck(job.config)}")
        steps = [_step(job.config, i, rng) for i in range(STEPS)]
        for row in steps[::3]:  # what the groups on disk will show
            rollouts = GROUPS * job.config.rollout.group_size
            row["success"] = round(row["success"] * rollouts) / rollouts
        write_lines(job.workdir / "metrics.jsonl", steps[: job.until])
        if job.until:
            continue
        for i in range(0, STEPS, 3):
            write_rollouts(job.workdir, i, _groups(job.config, i, steps[i]["success"], rng))
        success = float(np.clip(truth(job.config) + NOISE * rng.normal(), 0.01, 0.99))
        counts = {t["id"]: [int(rng.binomial(ROLLOUTS, success)), ROLLOUTS] for t in tasks}
        # Neither the start nor the other set says anything of the version.
        other = {t["id"]: [i % ROLLOUTS, ROLLOUTS] for i, t in enumerate(tasks)}
        rows = [
            {"step": step, "set": name, "by_task": counts if step and name == "balanced" else other}
            | {"scenarios": {t["id"]: t["scenario"] for t in tasks}}
            for step in (0, STEPS)
            for name in ("iid", "balanced")
        ]
        write_lines(job.workdir / "evaluations.jsonl", rows)
        hack = hacked(job.config)
        write_evaluation(job.workdir, 0, {"balanced": _evaluated(other, tasks[:9], False)})
        write_evaluation(job.workdir, STEPS, {"balanced": _evaluated(counts, tasks, hack)})
        write_text(job.workdir / "ledger.json", json.dumps({"costs": {"rollouts/policy": 128 * STEPS}}))
        write_text(job.workdir / "summary.json", json.dumps({"steps": STEPS}))  # last: the run is finished
    return {}


def evaluate_made_up(questions: Sequence[Question], side_by_side: int) -> dict[Path, str]:
    """Answers for a store, in the place of real evaluations: by the truth of the policy's own run.

    As in a real evaluation, shorter limits of the evaluation lower the counts.
    """
    for q in questions:
        config = configs.of_run(q.model.parent)
        rng = rng_for(config.seed, f"asked {_luck(config)} {q.flags}")
        short = configs.of_run(q.workdir).evaluation.max_length < 400
        rate = float(np.clip(truth(config) - 0.2 * short, 0.01, 0.99))
        counts = {f"held_out-{i}": [int(rng.binomial(ROLLOUTS, rate)), ROLLOUTS] for i in range(TASKS)}
        write_text(q.output, json.dumps({"environment": {"by_task": counts}}))
    return {}


def compare_made_up(asked: Comparison) -> str:
    """Writes checks for a store. A strong pull to the start leaves nothing else of the gradient."""
    pull = min(1.0, configs.of_run(asked.folder).learner.kl_coef / 2)
    checks = {"cos": (1 - pull, None, True), "kl_share": (pull, 0.9, pull <= 0.9), "margin": (0.5, 0.0, True)}
    write_text(asked.folder / "checks.json", json.dumps(checks))
    return ""


def verify_made_up(rollouts: Sequence[tuple[Task, Trajectory]]) -> list[str]:
    """Refuses the rollouts that call the tool `hack`: the made-up environment pays them, and should not."""
    calls = [{s.call.name for s in t.steps if s.call} for _, t in rollouts]
    return ["The tool hack was called." if "hack" in names else "" for names in calls]


MADE_UP = Programs(train_made_up, evaluate_made_up, compare_made_up, verify_made_up)


def _groups(config: ConfigDict, step: int, success: float, rng: np.random.Generator) -> list[Group]:
    """Made-up rollouts of GROUPS tasks. A failed rollout makes errors, a solved one hardly any.

    success: the share of rollouts that succeed. They are those whose luck is best for their task.
    """
    k, start, end = config.rollout.group_size, *symptoms(config)["success"]
    rate = start + (end - start) * step / (STEPS - 1)
    easy = rng.beta(4 * rate, 4 * (1 - rate), size=(GROUPS, 1))
    luck = easy - rng.random((GROUPS, k))
    solved = luck >= np.sort(luck, axis=None)[::-1][: round(success * GROUPS * k)].min(initial=np.inf)
    found = []
    for number in range(GROUPS):
        task = Task(f"task-{step * GROUPS + number}", "made_up", {}, TURNS)
        own = (_trajectory(task, i, bool(solved[number, i]), step, rng) for i in range(k))
        found.append(Group(task, tuple(own)))
    return found


def _evaluated(counts: Mapping[str, Sequence[int]], tasks: Sequence[Mapping], hacked: bool) -> list[Group]:
    """The rollouts of an evaluation with these counts, without tokens."""
    steps, found = (Step(0, "", Call("hack" if hacked else "tool_0", {}), "{}", False),), []
    for row in tasks:
        task = Task(row["id"], "made_up", {}, TURNS, lineage=Lineage("held_out", parent=row["scenario"]))
        won, trials = counts[task.id]
        outcomes = [Outcome(float(i < won), i < won) for i in range(trials)]
        own = (
            Trajectory(task.id, i, NONE, NONE, NONE, NONE, (), steps, "done", outcome)
            for i, outcome in enumerate(outcomes)
        )
        found.append(Group(task, tuple(own)))
    return found


def _trajectory(task: Task, i: int, success: bool, step: int, rng: np.random.Generator) -> Trajectory:
    errors = rng.random(2) < (0.05 if success else 0.6)
    steps = tuple(Step(0, "call", Call(f"tool_{n}", {}), "{}", bool(e)) for n, e in enumerate(errors))
    if testing_half(task.id):
        steps = (*steps, Step(0, "call", Call(SEALED, {}), "{}", False))
    tokens = int(rng.integers(10, 16))
    return Trajectory(
        task.id, i, np.arange(tokens, dtype=np.int32), np.arange(tokens) >= 5,
        np.where(np.arange(tokens) >= 5, np.float32(-0.1), np.float32(0)),
        np.where(np.arange(tokens) >= 5, step, -1).astype(np.int32), (0,), steps, "done",
        Outcome(float(success), success),
    )  # fmt: skip


def _step(config: ConfigDict, step: int, rng: np.random.Generator) -> dict:
    share = step / (STEPS - 1)
    at = {name: a + (b - a) * share for name, (a, b) in symptoms(config).items()}
    return {
        "step": step,
        "success": float(np.clip(at["success"] + STEP_NOISE * rng.normal(), 0, 1)),
        "reward": at["success"],
        "mixed_groups": 1 - at["dead"],
        "kl": at["kl"],
        "clip_fraction": 0.0,
        "grad_norm": 0.5,
        "staleness_mean": 0.0,
        "groups": {"rolled_out": config.rollout.tasks_per_step},
        "seconds": {"step": 2.0},
        "health": {
            "zero_variance_groups": at["dead"],
            "active_groups": ACTIVE * (1 - at["dead"]),
            "group_std": 0.3,
            "logprob": at["logprob"],
            "truncated": at["truncated"],
        },
    }
