"""The tables of a run for other tools: their columns, documented, and their rows as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coevolve_jax.analysis.loading import Run, asked_for, is_query
from coevolve_jax.records import rollouts

Row = dict[str, Any]


class Column(NamedTuple):
    """kind: "text", "int", "float" or "bool", or a list of these with [] behind. about: what it holds."""

    kind: str
    about: str


TASKS = {
    "task": Column("text", "JSON: the whole task, its lineage and its record, as in tasks.jsonl"),
    "id": Column("text", "of the task"),
    "queries": Column("text[]", "what the user says, turn by turn"),
    "asked_for": Column("text", "kind of the signal that it was made for; or random, initial, benchmark"),
    "parent": Column("text", "id of the task whose rollout carried the signal; else of the scenario"),
    "born": Column(
        "int",
        "GRPO step after which the evolution that made it began; 0 for D_0. It joins D_t "
        "config.evolution.async_steps later",
    ),
    "tools": Column("text[]", "that its solution calls, in order of the first call"),
    "calls": Column("int", "of its solution, in all turns"),
    "visits": Column("int", "steps that rolled it out and scored it"),
    "first_score": Column("float", "mean reward at the first visit; null before it and for held-out queries"),
    "last_score": Column("float", "mean reward at the last visit; null before it and for held-out queries"),
}
OUTCOME = {
    "step": Column("int", "GRPO step of the rollout"),
    "task_id": Column("text", "id of its task"),
    "rollout_index": Column("int", "its place in the task's group"),
    "reward": Column(
        "float", "as the environment graded it; null for a held-out query, whose answer is not told"
    ),
    "success": Column("bool", "whether the task was solved; null for a held-out query"),
    "valid": Column("bool", "false where our own infrastructure failed; such rollouts count in no rate"),
    "stop": Column("text", "why it ended: done, token_limit, step_limit, context_limit, call_failed, ..."),
    "advantage": Column("float", "mean over the policy's tokens; null where nothing was learned from it"),
    "steps": Column("text", "JSON: a list of calls with the observation of each"),
}
TRAJECTORIES = {
    **OUTCOME,
    "advantage": Column("float", f"{OUTCOME['advantage'].about}; to 4 digits"),
    "queries": Column("text[]", "what the user said, turn by turn"),
    "text": Column("text", "the conversation as the policy read and wrote it, control tokens included"),
    "policy_tokens": Column("int", "tokens that the policy sampled"),
    "segments": Column(
        "text", "JSON: pieces of text, fed or sampled, with log-probabilities in nats to 4 digits"
    ),
}
ROLLOUTS = {
    **OUTCOME,
    "ids": Column("int[]", "tokens of the conversation, as fed or sampled"),
    "mask": Column("bool[]", "true for tokens that the policy sampled"),
    "logprobs": Column("float[]", "the sampler's, in nats; 0 where not sampled"),
    "versions": Column("int[]", "of the policy that sampled the token; -1 where not sampled"),
    "turn_starts": Column("int[]", "index of each user turn's first token"),
}


def task_rows(run: Run) -> Iterator[Row]:
    """Rows of TASKS: D_t, in order of birth. Raises ValueError if the run has none yet."""
    if not run.tasks:
        raise ValueError(
            f"{run.name} holds no training set (no tasks.jsonl): give the workdir of a run that has begun."
        )
    return map(task_row, run.tasks)


def task_row(line: Mapping[str, Any]) -> Row:
    """A row of TASKS from a line of tasks.jsonl."""
    lineage, record = line["lineage"], line["record"]
    told = not is_query(line)
    calls = [call["name"] for turn in line["turns"] for call in turn["calls"]]
    return {
        "task": json.dumps(line),
        "id": plain(line["id"]),
        "queries": [plain(turn["query"]) for turn in line["turns"]],
        "asked_for": plain(asked_for(line)),
        "parent": plain(lineage["parent"] or ""),
        "born": record["born"],
        "tools": [plain(name) for name in dict.fromkeys(calls)],
        "calls": len(calls),
        "visits": record["trained"],
        "first_score": record["first_score"] if told else None,
        "last_score": record["last_score"] if told else None,
    }


def trajectory_rows(run: Run) -> Iterator[Row]:
    """Rows of TRAJECTORIES: the rollouts in trajectories/, up to config.logging.trajectories of a step."""
    for _, rows in run.trajectories:
        for row in rows:
            told = row["task_id"] not in run.queries
            yield {
                **{key: row[key] for key in ("step", "rollout_index", "valid")},
                **{key: row[key] if told else None for key in ("reward", "success")},
                "advantage": row.get("advantage"),
                "policy_tokens": row["policy_tokens"],
                "task_id": plain(row["task_id"]),
                "stop": row["stop"],
                "steps": json.dumps(row["steps"]),
                "queries": [plain(query) for query in row["queries"]],
                "text": plain("".join(piece for part in row["segments"] for piece in part["pieces"])),
                "segments": json.dumps(row["segments"]),
            }


def rollout_rows(workdir: str, step: int) -> Iterator[Row]:
    """Rows of ROLLOUTS: all rollouts of a step, token by token. Raises as `rollouts.read_rollouts`."""
    learned = rollouts.read_advantages(workdir, step)
    for group, advantages in zip(rollouts.read_rollouts(workdir, step), learned, strict=True):
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            yield {
                "step": step,
                "task_id": plain(t.task_id),
                "rollout_index": t.rollout_index,
                "reward": None if group.task.is_query else t.outcome.reward,
                "success": None if group.task.is_query else t.outcome.success,
                "valid": t.outcome.valid,
                "stop": t.stop,
                "advantage": advantage,
                "steps": json.dumps([s.to_json() for s in t.steps]),
                **{name: getattr(t, name).tolist() for name in ("ids", "mask", "logprobs", "versions")},
                "turn_starts": list(t.turn_starts),
            }


def plain(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates, which a model may write, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
