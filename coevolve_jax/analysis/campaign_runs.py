"""Reads the runs of a campaign's versions for the page: what they took, and transcripts worth reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coevolve_jax.analysis.run_view import call_text
from coevolve_jax.records import rollouts
from coevolve_jax.types import Group, Trajectory


def seconds(runs: Mapping[str, Path]) -> dict[str, float]:
    """Seconds by seed, of the runs whose summary has them."""
    paths = {seed: run / "summary.json" for seed, run in runs.items()}
    told = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}
    return {seed: sum(found["seconds"].values()) for seed, found in told.items() if "seconds" in found}


def seconds_of_steps(runs: Mapping[str, Path], first: int | None = None) -> dict[str, float]:
    """Seconds by seed, of the steps of runs that ended early, or of their first steps alone."""
    paths = {seed: run / "metrics.jsonl" for seed, run in runs.items()}
    texts = {seed: path.read_text() for seed, path in paths.items() if path.exists()}
    whole = {seed: text[: text.rfind("\n") + 1].splitlines()[:first] for seed, text in texts.items()}
    second = lambda line: json.loads(line).get("seconds", {}).get("step", 0.0)
    return {seed: sum(map(second, lines)) for seed, lines in whole.items()}


def evaluated(run: Path | None) -> dict[str, Group]:
    """Rollouts by task, of the evaluation that selects; {} where they are not on disk.

    Raises ValueError where their file is damaged.
    """
    steps = rollouts.steps(run, rollouts.EVALUATIONS) if run else []
    if not run or not steps:
        return {}
    sets = rollouts.read_evaluation(run, steps[-1])
    return {group.task.id: group for group in sets.get("balanced", sets.get("iid", []))}


def transcripts(own: Mapping[str, Group], parents: Mapping[str, Group]) -> list[dict]:
    """Two successes and two failures, of tasks in which the parent did otherwise where there are such."""
    share = lambda group: sum(t.outcome.success for t in group.valid) / max(len(group.valid), 1)
    theirs = {task: share(parents[task]) if task in parents else 0.5 for task in own}
    found = []
    for success in (True, False):
        each = {k: [t for t in g.valid if t.outcome.success == success] for k, g in own.items()}
        tasks = [task for task in sorted(own, key=theirs.__getitem__, reverse=not success) if each[task]]
        for task in tasks[:2]:
            note = f"its parent solved {theirs[task]:.0%} of its rollouts of this task"
            found.append(_transcript(own[task], each[task][0], note if task in parents else ""))
    return found


def rejected(audit: Mapping, runs: Mapping[str, Path]) -> list[dict]:
    """Up to two successes that the audit rejected, of {"rejected": [{"seed", "task", "rollout", "why"}]}."""
    found = []
    for told in (audit.get("rejected") or [])[:2]:
        if group := evaluated(runs.get(str(told["seed"]))).get(told["task"]):
            chosen = [t for t in group.trajectories if t.rollout_index == told["rollout"]]
            found += [_transcript(group, t, told.get("why", "")) for t in chosen]
    return found


def _transcript(group: Group, trajectory: Trajectory, note: str) -> dict:
    """A row for the viewer's reader."""
    turns = group.task.turns
    return {
        **trajectory.to_json(),
        "note": note,
        "queries": [turn.query for turn in turns],
        "turns": [{"calls": [call_text(call.to_json()) for call in turn.calls]} for turn in turns],
    }
