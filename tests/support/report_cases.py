"""Made-up files of runs and comparisons: a policy that learns a little, and what it writes."""

import json
import re
from collections import Counter

import numpy as np

from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.records.llm_calls import Packer
from coevolve_jax.types import SIGNAL_KINDS, Call, Lineage, Signal, Task, Turn

QUERIES = (
    "Change into the folder 'reports' and tell me which files it holds.",
    "Move 'budget_2024.csv' to 'archive', then search it for 'total'.",
    "Post 'Quarterly numbers are in' with the tag '#finance' and pin it.",
    "What does a share of NVDA cost? Buy 12 of them at that price.",
)
CALLS = (
    Call("cd", {"folder": "reports"}),
    Call("ls", {}),
    Call("mv", {"source": "budget_2024.csv", "destination": "archive"}),
    Call("grep", {"file_name": "budget_2024.csv", "pattern": "total"}),
    Call("place_order", {"symbol": "NVDA", "amount": 12}),
)


def fake_task(rng, name, step=0, kind="initial", signal=None, parent="scenario_7"):
    turns = tuple(
        Turn(str(rng.choice(QUERIES)), tuple(CALLS[i] for i in rng.integers(0, 5, rng.integers(1, 4))))
        for _ in range(rng.integers(1, 3))
    )
    lineage = Lineage(
        kind,
        signal,
        parent,
        f"ctx_{name}" if signal else None,
        "scripted",
        (2, 3, int(rng.integers(4, 9))),
        "accept",
        "ran in a fresh environment",
        step,
        float(rng.beta(5, 6)),
        "multi_turn_base_17",
        measure="arguments" if kind == "signal" else "features",
    )
    return Task(name, "bfcl", {"root": {}}, turns, "", lineage)


def fake_trajectory(rng, task, step, rollout_index, success):
    steps = [
        {
            "turn": number,
            "text": json.dumps(call.to_json()),
            "call": call.to_json(),
            "observation": '{"current_directory_content": ["budget_2024.csv", "archive"]}',
            "error": False,
        }
        for number, turn in enumerate(task.turns)
        for call in turn.calls
    ]
    if not success:
        steps[-1].update(observation='{"error": "mv: cannot move: no such file or directory"}', error=True)
        steps.append(
            {
                "turn": len(task.turns) - 1,
                "text": '<tool_call>{"name": "mv", ',
                "call": None,
                "observation": '{"error": "not a JSON object"}',
                "error": True,
            }
        )
    return {
        "step": step,
        "task_id": task.id,
        "rollout_index": rollout_index,
        "reward": float(success),
        "success": success,
        "valid": True,
        "stop": "done",
        "policy_tokens": int(rng.integers(60, 200)),
        "steps": steps,
        "queries": [turn.query for turn in task.turns],
        "segments": fake_segments(rng, steps),
    }


def fake_segments(rng, steps):
    segments = [fed("<|im_start|>system\nYou are an agent.<|im_end|>\n" * 8)]
    for step in steps:
        pieces = [*re.findall(r"\s?\w+|\W", step["text"]), "<|im_end|>"]
        logprobs = (-rng.exponential(0.2, len(pieces))).round(4).tolist()
        segments.append({"tokens": len(pieces), "pieces": pieces, "logprobs": logprobs, "version": 2})
        segments.append(fed(f"<tool_response>{step['observation']}</tool_response>"))
    return segments


def fed(text):
    return {"tokens": len(text) // 4, "pieces": [text]}


def fake_row(rng, step, skill, signals, evolution, tasks):
    """A row of metrics.jsonl for a policy that succeeds at rate `skill`."""
    noise = rng.standard_normal(8)
    success = float(np.clip(skill + 0.06 * noise[0], 0, 0.9))
    seconds = {
        "rollout": 2.6,
        "environment": 0.3,
        "update": 0.8,
        "signals": 0.01,
        "checkpoint": 0.1,
        "evolution": 3.0 if evolution else 0.0,
    }
    return {
        "step": step,
        "reward": success + 0.06,
        "success": success,
        "valid": 1.0,
        "loss": 0.01 * noise[1],
        "policy_loss": 0.01 * noise[1],
        "kl": 0.002 * step + abs(0.002 * noise[2]),
        "ratio_max": 1.1,
        "entropy": 1.2 - 0.4 * skill + 0.02 * noise[3],
        "grad_norm": 0.6 + abs(0.2 * noise[4]),
        "clip_fraction": 0.01,
        "mismatch_mean": abs(2e-6 * noise[5]),
        "mismatch_max": 1e-5,
        "policy_tokens": 9000,
        "mean_turn_calls": 3.1,
        "malformed": 0.02,
        "mixed_groups": 0.6 + 0.05 * noise[6],
        "success_initial": success + 0.05,
        "success_new": success - 0.1 if tasks[-1].lineage.signal else None,
        "tasks": len(tasks),
        "signals": {k: sum(s.kind == k for s in signals) for k in SIGNAL_KINDS},
        "evolution": evolution,
        "held_out": None,
        "health": {
            "zero_variance_groups": 0.4,
            "logprob": -0.2,
            "success": {"tool_failures": 0.1, "stops": {"done": 9}},
            "failure": {"tool_failures": 0.3, "stops": {"done": 3}},
        },
        "alerts": ["zero_variance_groups"] if step in (1, 4, 5, 6) else ["truncated"] if step == 2 else [],
        "throughput": {"rollout_tokens": 900.0 + step, "update_tokens": 4000.0, "mfu": 0.4},
        "utilization": {"engine": 0.7, "cached": 0.9},
        "serving": {"prefill_tokens": 5000, "decode_tokens": 900 + step, "queue_seconds": 0.02},
        "seconds": {**seconds, "step": sum(seconds.values()) - 0.3},
    }


def _exploration(task):
    """The row of explorations.jsonl that gave a task: some of ten steps."""
    said = {"summary": f"{task.id} went wrong", "failure_cause": "no such folder", "instability_pattern": ""}
    plan = {"focus_pattern": ["mkdir", "cd"], "avoid": [], "must": []}
    born = task.lineage
    return {
        "step": born.step,
        "context": {"id": born.context, "signal": born.signal, "task": born.parent, **said, **plan},
        "triplets": [
            {"index": i, "round": 0, "call": call.to_json(), "observation": f"answer {i}", "error": False}
            for i, call in enumerate([*CALLS, *CALLS])
        ],
        "proposals": [
            {"task": None, "description": "", "triplets": [0], "verdict": "discard", "reason": "too_short"},
            {"task": task.id, "description": "", "triplets": list(born.triplets), "verdict": "accept",
                "reason": ""},
        ],
    }  # fmt: skip


def _llm_calls(exploration):
    """A model's calls for a row of explorations.jsonl: of two proposed tasks the second was kept."""
    context, tools = {"context": exploration["context"]["id"]}, '{"name": "cd"}\n{"name": "mkdir"}'
    kept = exploration["proposals"][1]["triplets"]
    ask = lambda role, about, user, *answers, **more: LLMCall(
        role,
        {**context, **about},
        f"You {role}.\n{tools}",
        user,
        list(answers),
        tokens_in=100,
        tokens_out=20,
        **more,
    )
    return [
        ask("reflect", {}, "The attempt failed.", '{"summary": "lost"}'),
        *(
            ask("explore", {"round": 0, "step": i}, f"Steps so far: {i}", f'{{"tool": "{call.name}"}}')
            for i, call in enumerate([*CALLS, *CALLS])
        ),
        ask("abstract", {}, "Make tasks.", "Sure!", '{"tasks": []}', complaint="it holds no JSON object"),
        ask("judge", {"triplets": [0]}, "The first proposal.", '{"reason": "two_goals"}'),
        ask("judge", {"triplets": kept}, "The second proposal.", '{"reason": "ok"}'),
        ask(
            "solve",
            {"triplets": kept, "turn": 0, "step": 0},
            "The user said.",
            '{"tool": "mk',
            fault="truncated",
        ),
    ]


def _costs(llm_calls, step):
    costs = Counter()
    for d in llm_calls:
        costs[f"llm_requests/{d.role}"] += len(d.answers)
        costs[f"llm_tokens_in/{d.role}"] += d.tokens_in
        costs[f"llm_tokens_out/{d.role}"] += d.tokens_out
        costs[f"money/{d.role}"] += 0.001
        costs["llm_tokens"] += d.tokens_in + d.tokens_out
        costs["money"] += 0.001
    if step == 11:
        costs["llm_faults/budget"] = 7
    return {"step": step, "costs": costs}


def fake_workdir(path, steps=12, every=3, initial=8, added=4, held_out=20, finished=True, seed=0):
    """Writes the files of a run that learns a little."""
    rng = np.random.default_rng(seed)
    rows, found = [], []
    tasks = [fake_task(rng, f"init_{i:03d}") for i in range(initial)]
    (path / "trajectories").mkdir(parents=True)
    for step in range(steps):
        skill = 0.3 + 0.35 * step / steps
        signals = [
            Signal(k, tasks[int(rng.integers(len(tasks)))].id, 3, step, "mkdir" if k == "rare" else None)
            for k, rate in zip(SIGNAL_KINDS, (5, 9, 3))
            for _ in range(1 + rng.poisson(rate * (1.3 - skill)))
        ]
        evolution = None
        if (step + 1) % every == 0:
            for i in range(added):
                s = signals[int(rng.integers(len(signals)))]
                tasks.append(fake_task(rng, f"{s.kind}_{step:03d}_{i}", step, "signal", s.kind, s.task_id))
            refused = {"duplicate": 1, "near copy of an evaluation task": added - 1}
            evolution = {
                "proposed": 2 * added,
                "accepted": added,
                "retained": 0,
                "discarded": added,
                "added": added,
                "refused": refused,
                "pass_rate": 0.6 + 0.2 * rng.random(),
            }
            trajectories = [fake_trajectory(rng, tasks[-1 - m], step, m, m % 2 == 0) for m in range(3)]
            _dump(path / f"trajectories/step_{step:05d}.jsonl", trajectories)
        rows.append(fake_row(rng, step, skill, signals, evolution, tasks))
        found += signals
    explored = [_exploration(t) for t in tasks if t.lineage.signal]
    asked = {step: [] for step in (None, *(row["step"] for row in rows if row["evolution"]))}
    for row in explored:
        asked[row["step"]] += _llm_calls(row)
    asked[None] = [
        LLMCall(
            "explore",
            {"context": "initial-0-context-0", "round": 0, "step": 0},
            "You explore.",
            "Begin.",
            ["{}"],
        )
    ]
    visited = lambda t: {"born": t.lineage.step, "trained": 3, "first_score": 0.25, "last_score": 0.75}
    for name, lines in (
        ("metrics", rows),
        ("tasks", [{**t.to_json(), "record": visited(t)} for t in tasks]),
        ("held_out", [fake_task(rng, f"held_{i:03d}", kind="held_out").to_json() for i in range(held_out)]),
        ("signals", [s.to_json() for s in found]),
        ("explorations", explored),
        ("llm_calls", Packer().pack(d for own in asked.values() for d in own)),
        ("costs", [_costs(own, step) for step, own in asked.items()]),
    ):
        _dump(path / f"{name}.jsonl", lines)
    config = {
        "seed": seed,
        "strategy": {"name": "coevolve"},
        "data": {"leak_threshold": 0.9, "leak_call_threshold": 0.88, "leak_query_threshold": 0.0},
    }
    config["explorer"] = {"name": "llm", "budget_tokens": 30_000, "budget_money": 0.0}
    config |= {"steps": steps, "environment": {"name": "bfcl"}, "health": {"patience": 3}}
    (path / "config.json").write_text(json.dumps(config))
    if finished:
        (path / "summary.json").write_text(json.dumps(_summary(rng, rows, held_out, seed)))
    return path


def fake_with_queries(path):
    """Writes a run that learned from a held-out query, and returns the path and the query.

    Its last logged trajectory is one of the query.
    """
    fake_workdir(path)
    rng = np.random.default_rng(1)
    query = fake_task(rng, "query-0-0", kind="query")
    record = {"born": 0, "trained": 5, "first_score": 0.0, "last_score": 0.0}
    row = fake_trajectory(rng, query, 11, 0, False)
    outcome = {"reward": 0.0, "success": False, "valid": True, "progress": 0.0, "reason": "not told"}
    for name, line in (
        ("held_out.jsonl", query.to_json()),
        ("tasks.jsonl", {**query.without_calls().to_json(), "record": record}),
        ("trajectories/step_00011.jsonl", {**row, "outcome": outcome}),
    ):
        with open(path / name, "a") as file:
            file.write(json.dumps(line) + "\n")
    summary = json.loads((path / "summary.json").read_text())
    side = lambda n: {"by_task": {"query-0-0": [n, 4]}, "samples": 4}
    summary["queries"] = {"before": side(0), "after": side(4)}
    (path / "summary.json").write_text(json.dumps(summary))
    return path, query


def _summary(rng, rows, held_out, seed):
    def evaluation(rate):
        skill = np.clip(rate + 0.25 * rng.standard_normal(held_out), 0, 1)
        counts = {f"held_{i:03d}": [int(rng.binomial(4, p)), 4] for i, p in enumerate(skill)}
        by_calls = {
            str(n): [sum(s for s, _ in list(counts.values())[n - 2 :: 5]), 4 * held_out // 5]
            for n in range(2, 7)
        }
        success = sum(s for s, _ in counts.values()) / (4 * held_out)
        return {"temperature": 1.0, "samples": 4, "success": success, "by_calls": by_calls, "by_task": counts}

    before, after = evaluation(0.3), evaluation(0.55)
    evolutions = [row["evolution"] for row in rows if row["evolution"]]
    return {
        "held_out_success_before": before["success"],
        "held_out_success_after": after["success"],
        "held_out_tasks": held_out,
        "held_out": {"before": before, "after": after},
        "signals": {kind: sum(row["signals"][kind] for row in rows) for kind in SIGNAL_KINDS},
        "tasks": {
            **{k: sum(e[k] for e in evolutions) for k in ("proposed", "accepted", "retained")},
            "refused": {k: sum(e["refused"][k] for e in evolutions) for k in evolutions[0]["refused"]},
        },
        "seconds": {
            **{k: sum(row["seconds"][k] for row in rows) for k in ("rollout", "update", "evolution")},
            "evaluation": 31.0,
            "other": 12.0,
        },
        "evolution_share": 0.108,
        "steps": len(rows),
        "seed": seed,
        "strategy": "coevolve",
        "config_digest": "9f3a6c1e55d0aa",
        "versions": {"jax": "0.10.2", "flax": "0.12.8"},
    }


def _dump(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fake_comparison(path, arms=("coevolve", "random", "static"), seeds=(0, 1, 2), finished=True):
    """Writes the folder of a comparison, with a small run in each cell."""
    rng = np.random.default_rng(0)
    for arm in arms:
        for seed in seeds:
            fake_workdir(path / "cells" / arm / f"seed_{seed}", steps=4, finished=finished, seed=seed)
    plan = {
        "arms": arms,
        "seeds": seeds,
        "config": {"steps": 4},
        "reads": "test",
        "date": "2026-11-22",
    }
    (path / "plan.json").write_text(json.dumps(plan))
    if not finished:
        return path
    means = {arm: 0.8 - 0.1 * k for k, arm in enumerate(arms)}
    spread = lambda mean: {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "iqm": mean}
    curve = lambda mean: {
        "step": [0, 10, 20],
        **{name: [0.3, mean - 0.1 + shift, mean + shift]
            for name, shift in (("mean", 0), ("low", -0.05), ("high", 0.05))},
    }  # fmt: skip
    difference = lambda a, b: {
        "a": a, "b": b, "difference": means[a] - means[b], "low": means[a] - means[b] - 0.06,
        "high": means[a] - means[b] + 0.06,
        "boot_low": 0.01, "boot_high": 0.2, "p": 0.012, "p_holm": 0.024, "n": len(seeds),
        "p_improvement": 0.78,
    }  # fmt: skip
    result = {
        "metric": {"name": "macro success on weak tools, final step", "set": "balanced", "group": "weak"},
        "arms": [
            {
                "arm": arm,
                "n": len(seeds),
                **spread(mean),
                "values": {str(seed): mean + 0.01 * rng.standard_normal() for seed in seeds},
                "budgets": {"rollouts": 7680, "environment_steps": 2400},
            }
            for arm, mean in means.items()
        ],
        "planned": [difference(arms[0], other) for other in arms[1:]],
        "curves": {
            "iid": {arm: curve(mean) for arm, mean in means.items()},
            "balanced": {arm: curve(mean - 0.1) for arm, mean in means.items()},
        },
        "notes": ["One arm had a longer warm-up."],
    }
    result["secondary"] = [{**result, "metric": {"name": "success on the i.i.d. set"}}]
    (path / "comparison.json").write_text(json.dumps(result))
    return path


# Dictionaries whose keys are names from models, tasks and tools.
NAMED = (
    "arguments",
    "by_task",
    "signals",
    "refused",
    "versions",
    "seconds",
    "budgets",
    "curves",
    "iid",
    "balanced",
)


def poisoned(value, evil, name=""):
    """JSON values with `evil` before every text and every such name."""
    if isinstance(value, dict):
        key = lambda k: evil + k if name in NAMED and k != "step" else k
        return {key(k): poisoned(v, evil, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, evil) for v in value]
    return evil + value if isinstance(value, str) else value
