"""The real loop in small: real model and environment, few steps; killed, resumed, misconfigured."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from coevolve_jax.config import load_file, of_run
from coevolve_jax.records.workdir import claimed
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SMALL = {
    "steps": 5,
    "data.initial_tasks": 8,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 4,
    "engine.max_concurrency": 8,
    "learner.rows_per_microbatch": 2,
    "evolution.every": 2,
    "evolution.freeze_last_steps": 1,
    "evolution.tasks": 3,
    "evolution.contexts": 4,
    "evaluation.tasks": 6,
    "evaluation.num_rollouts": 1,
    "checkpoint.every": 1,
    "environment.workers": 1,
    "signals.rare_percent": 20.0,
    "logging.trajectories_every": 2,
}


def command(workdir, config="configs/bfcl_tiny.py", **changes) -> list[str]:
    options = [f"--config.{k}={v}" for k, v in {**SMALL, **changes}.items()]
    return ["experiments/main.py", f"--config={config}", f"--workdir={workdir}", *options]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick) -> Path:
    """A run that was never interrupted, started like a user's; the others are forked."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    program = [sys.executable, *command(workdir)]
    done = subprocess.run(program, cwd=ROOT, env=quick, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (workdir / "stdout.txt").write_text(done.stdout)
    return workdir


def rows(workdir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def test_a_run_leaves_everything_that_the_docs_name(finished):
    for name in (
        "metrics.jsonl",
        "tasks.jsonl",
        "signals.jsonl",
        "explorations.jsonl",
        "trajectories",
        "ledger.json",
        "checkpoints",
        "report.html",
        "summary.json",
        "held_out.jsonl",
        "config.json",
        "tensorboard",
        "policy",
    ):
        assert (finished / name).exists(), name
    assert not list(finished.glob("llm_calls*")) + list(finished.glob("costs*"))  # no model was asked
    summary = json.loads((finished / "summary.json").read_text())
    assert {
        "held_out_success_before",
        "held_out_success_after",
        "held_out_tasks",
        "signals",
        "tasks",
        "seconds",
        "steps",
        "seed",
        "config_digest",
        "versions",
    } <= summary.keys()
    assert {"rollout", "update", "evolution", "other"} <= summary["seconds"].keys()
    assert summary["held_out_tasks"] == 6 and summary["steps"] == 5
    for word in ("before", "after", "forgetting", "boundary", "rare", "proposed", "rollout"):
        assert word in (finished / "stdout.txt").read_text()


def test_the_training_set_grows_by_validated_tasks_with_lineage(finished):
    tasks, metrics = rows(finished, "tasks.jsonl"), rows(finished, "metrics.jsonl")
    born = [t["lineage"]["kind"] for t in tasks]
    assert born[:8] == ["initial"] * 8 and len(tasks) > 8
    new = [t for t in tasks if t["lineage"]["kind"] == "signal"]
    ids = {t["id"] for t in tasks}
    assert len(new) == len(tasks) - 8
    for t in new:
        lineage = t["lineage"]
        assert lineage["signal"] in ("forgetting", "boundary", "rare") and lineage["parent"] in ids
        assert (
            lineage["verdict"] in ("accept", "retain") and lineage["triplets"] and lineage["step"] in (1, 3)
        )
        assert 0 <= lineage["similarity"] < 0.9 and lineage["nearest"]
    sizes = [m["tasks"] for m in metrics]
    assert sizes == sorted(sizes) and sizes[-1] == len(tasks)
    assert [m["evolution"] is not None for m in metrics] == [False, True, False, True, False]


def test_held_out_tasks_lie_in_scenarios_that_are_never_trained_on(finished):
    starts = lambda name: {
        json.dumps([c, t["scenario"]["initial_state"].get(c)], sort_keys=True)
        for t in rows(finished, name)
        for c in t["scenario"]["toolsets"]
    }
    assert len(starts("held_out.jsonl")) > 1
    assert starts("held_out.jsonl").isdisjoint(starts("tasks.jsonl"))


def test_signals_are_those_of_the_logged_rollouts(finished):
    counts = [m["signals"] for m in rows(finished, "metrics.jsonl")]
    lines = rows(finished, "signals.jsonl")
    for kind in ("forgetting", "boundary", "rare"):
        assert sum(c[kind] for c in counts) == sum(s["kind"] == kind for s in lines)
    assert sum(sum(c.values()) for c in counts) > 0


def test_every_new_task_leads_to_what_was_explored_for_it(finished):
    evolved = {m["step"]: m["evolution"] for m in rows(finished, "metrics.jsonl") if m["evolution"]}
    explored = rows(finished, "explorations.jsonl")
    made = {p["task"]: (row, p) for row in explored for p in row["proposals"] if p["task"]}
    born = rows(finished, "tasks.jsonl")
    assert made.keys() == {t["id"] for t in born}
    assert {t["lineage"]["kind"] for t in born} == {"initial", "signal"}
    for task in born:
        row, proposal = made[task["id"]]
        assert row["context"]["id"] == task["lineage"]["context"] and row["context"]["summary"]
        assert row["context"]["task"] == task["lineage"]["parent"] and row["step"] == task["lineage"]["step"]
        assert proposal["verdict"] == task["lineage"]["verdict"]
        calls = [call for turn in task["turns"] for call in turn["calls"]]
        assert [row["triplets"][i]["call"] for i in task["lineage"]["triplets"]] == calls
    beginning = json.loads((finished / "ledger.json").read_text())["initial"]
    for step, grown in [(None, beginning), *evolved.items()]:
        now = [row for row in explored if (row["context"]["signal"] and row["step"]) == step]
        assert len(now) == grown["contexts"]
        assert sum(len(row["triplets"]) for row in now) == grown["environment_steps"]
        assert sum(len(row["proposals"]) for row in now) == grown["proposed"]


def test_a_step_says_how_fast_it_was(finished):
    for m in rows(finished, "metrics.jsonl"):
        # No vendor publishes a CPU's peak
        assert m["throughput"].keys() == {"rollout_tokens", "update_tokens"}
        assert m["throughput"]["rollout_tokens"] > 0 and m["seconds"]["push"] > 0
        assert (m["flops"] > 1e6 and m["throughput"]["update_tokens"] > 0) == (m["policy_tokens"] > 1)


def test_sampler_and_learner_agree_on_the_logprobs(finished):
    seen = [m for m in rows(finished, "metrics.jsonl") if m["policy_tokens"] > 1]
    assert seen and all(m["mismatch_max"] < 1e-3 for m in seen)


def comparable(workdir: Path) -> dict:
    """All that a run must reproduce bit for bit: everything but clock readings."""
    metrics = [
        {k: v for k, v in row.items() if k not in ("seconds", "throughput", "utilization")}
        for row in rows(workdir, "metrics.jsonl")
    ]
    summary = json.loads((workdir / "summary.json").read_text())
    summary = {k: v for k, v in summary.items() if k not in ("seconds", "evolution_share")}
    files = [
        "tasks.jsonl",
        "signals.jsonl",
        "explorations.jsonl",
        "held_out.jsonl",
        "policy/model.safetensors",
    ]
    folders = ("trajectories", "rollouts", "evaluations")
    files += sorted(str(p.relative_to(workdir)) for folder in folders for p in workdir.glob(f"{folder}/*"))
    saved = json.loads((max((workdir / "checkpoints").glob("step_*")) / "state.json").read_text())["state"]
    return {
        "metrics": metrics,
        "summary": summary,
        "strategy": saved["strategy"],
        "ledger": saved["ledger"],
        "pool": saved["tasks"],
        **{name: (workdir / name).read_bytes() for name in files},
    }


def kill_when(arguments, environ, ready, patience=300.0) -> bool:
    """Starts a run and sends SIGKILL once ready() holds. Returns False if the run ended before."""
    process = forked.Start(arguments, environ)
    deadline = time.monotonic() + patience
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline, "the run never came to the point where it was to be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_killed_again_and_again_it_ends_with_the_same_bits(finished, tmp_path, quick):
    workdir = tmp_path / "killed"
    steps_logged = lambda: (
        len((workdir / "metrics.jsonl").read_bytes().splitlines())
        if (workdir / "metrics.jsonl").exists()
        else 0
    )
    saving = lambda step: (
        lambda: (
            steps_logged() > step
            and any(not (p / "manifest.json").exists() for p in (workdir / "checkpoints").glob("*"))
        )
    )
    points = [
        lambda: (workdir / "config.json").exists(),  # before anything exists
        saving(1),  # in mid-save
        lambda: steps_logged() >= 4,  # between the log and the checkpoint
    ]
    killed = [kill_when(command(workdir), quick, ready) for ready in points]
    assert all(killed)
    done = forked.run(command(workdir), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    want, got = comparable(finished), comparable(workdir)
    assert want.keys() == got.keys()
    for name in want:
        assert got[name] == want[name], name


@pytest.mark.nightly
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(finished, tmp_path, quick):
    workdir = tmp_path / "damaged"
    shutil.copytree(finished, workdir)
    (workdir / "summary.json").unlink()  # of a run that is not finished
    newest = max((workdir / "checkpoints").glob("step_*"))
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    done = forked.run(command(workdir), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    assert newest.name in done.stderr
    want, got = comparable(finished), comparable(workdir)
    for name in want:
        assert got[name] == want[name], name


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"rollout.group_size": 1}, "config.rollout.group_size is 1"),
        ({"strategy.name": "evolve"}, "config.strategy.name is 'evolve'.*coevolve, .*random, .*static"),
        ({"learner.pack_length": 100}, "config.learner.pack_length is 100"),
        (
            {"learner.pack_length": 516, "mesh.context": 4},
            r"config.learner.pack_length is 516: .*2 . mesh.context .2 . 4.",
        ),
        (
            {"learner.pack_length_buckets": "(64,512)"},
            r"config.learner.pack_length_buckets is \(64, 512\).*below .* \(512\)",
        ),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"environment.toolsets": "('NoSuchClass',)"}, "NoSuchClass"),
        ({"no_such_key": 1}, "no_such_key"),
    ],
)
def test_bad_config_is_one_sentence_and_writes_nothing(tmp_path, quick, changes, why):
    import re

    workdir = tmp_path / "run"
    done = forked.run(command(workdir, **changes), quick)
    assert done.returncode != 0
    assert re.search(why, done.stderr, re.DOTALL), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert not workdir.exists() or not any(workdir.iterdir())


def test_a_workdir_of_another_config_is_left_alone(finished, quick):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    done = forked.run(command(finished, **{"learner.learning_rate": 0.5}), quick)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "config.learner.learning_rate" in done.stderr and "--workdir" in done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


def test_a_tokenizer_of_another_model_is_refused(tmp_path, quick):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny_qwen3", folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"].append({**data["added_tokens"][-1], "id": 5000, "content": "<|alien|>"})
    path.write_text(json.dumps(data))
    done = forked.run(command(tmp_path / "run", model=str(folder)), quick)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "vocab" in done.stderr and not (tmp_path / "run").exists()


def test_conversations_longer_than_the_models_context_are_refused(tmp_path, quick):
    long = {"rollout.max_length": 9000, "learner.pack_length": 9000}
    done = forked.run(command(tmp_path / "run", **long), quick)
    assert done.returncode != 0 and "Traceback" not in done.stderr and not (tmp_path / "run").exists()
    assert "config.rollout.max_length is 9000, and models/tiny_qwen3 reads 8192 tokens" in done.stderr


@pytest.mark.nightly
def test_an_update_that_overflows_stops_the_run_and_keeps_the_checkpoint(tmp_path, quick):
    """A checkpoint precedes it: the first rate is 1e-5, and every later one final_rate times as much."""
    workdir = tmp_path / "run"
    breaking = {
        "learner.max_grad_norm": 1e30, "learner.learning_rate": 1e-5, "learner.schedule": "linear",
        "learner.decay_steps": 1, "learner.final_rate": 1e35, "checkpoint.every": 1, "steps": 30,
    }  # fmt: skip
    done = forked.run(command(workdir, **breaking), quick)
    assert done.returncode != 0 and "not finite" in done.stderr and "Traceback" not in done.stderr
    assert any((workdir / "checkpoints").glob("step_*"))


@pytest.mark.nightly
def test_programs_are_kept_where_a_user_says_so(tmp_path, quick):
    env = {**quick, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    few = {"data.initial_tasks": 2, "evaluation.tasks": 1}
    program = [sys.executable, *command(tmp_path / "run", **few), "--until=0"]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "compiled").glob("jit_*-cache"))


def test_resuming_a_finished_run_changes_no_result(finished, quick):
    before = comparable(finished)
    done = forked.run(command(finished), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    after = comparable(finished)
    assert before == after
    assert np.isfinite(json.loads((finished / "summary.json").read_text())["held_out_success_after"])


@pytest.mark.parametrize("program", ["main", "plan", "show_prompt", "synthesize"])
def test_a_config_that_cannot_be_read_is_one_sentence(program, quick, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    script = ROOT / "experiments" / f"{program}.py"
    for flags, why in (
        (["--config=configs/none.py"], "configs/none.py is no Python file: "),
        (["--config=README.md"], "README.md cannot be loaded"),
        ([f"--config={tmp_path}/notes.txt"], "notes.txt:1: NameError: name 'hello' is not defined"),
        (["--config=configs/bfcl_tiny.py", "--config.nope=1"], "no key 'nope'"),
    ):
        others = {"main": ["--workdir=runs/none"], "show_prompt": ["--task=none"]}.get(program, [])
        done = forked.run([script, *flags, *others], quick)
        assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr[-1000:]
        assert re.search(f"Error: .*{why}", done.stderr), done.stderr[-1000:]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_file_heeds_its_arguments(path):
    for engine in ("native", "sglang"):
        config = load_file(path, f"engine={engine},seed=3,strategy=static")
        assert (config.engine.name, config.seed, config.strategy.name) == (engine, 3, "static")
    assert load_file(path).engine.name == ("sglang" if re.search("qwen3|_7b", path.stem) else "native")


def test_a_run_is_gone_on_with_by_one_process_at_a_time(finished, quick):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    config = of_run(finished)
    with claimed(finished, config):
        done = forked.run(command(finished), quick)
    assert done.returncode != 0 and "Another process goes on with the run in" in done.stderr
    assert "Traceback" not in done.stderr
    assert before == {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    with claimed(finished, config):  # the claim was released
        pass


@pytest.mark.nightly
def test_a_run_is_evaluated_within_its_own_limits(finished, quick, tmp_path):
    ours = json.loads((finished / "config.json").read_text())["rollout"]
    program = [ROOT / "experiments" / "evaluate.py", f"--workdir={finished}", "--benchmark=held_out"]
    program.append(f"--max_concurrency={SMALL['engine.max_concurrency']}")  # the run's compiled programs
    for more, limits in (((), "as in the run's evaluations"), (("--max_new_tokens=8",), "by the flags")):
        output = tmp_path / f"{len(more)}.json"
        done = forked.run([*program, f"--output={output}", *more], quick)
        assert done.returncode == 0, done.stderr[-2000:]
        told = json.loads(output.read_text())["protocol"]
        assert told["limits"] == limits and told["max_new_tokens"] == (8 if more else ours["max_new_tokens"])
        for name in ("max_length", "max_observation", "tool_call_format"):
            assert told[name] == ours[name]
    tasks = rows(finished, "held_out.jsonl")
    for task in tasks[::2]:
        task["lineage"]["kind"] = "balanced"
    shutil.copytree(finished, tmp_path / "sets")
    (tmp_path / "sets" / "held_out.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    program[1] = f"--workdir={tmp_path / 'sets'}"
    done = forked.run([*program, f"--output={tmp_path / 'sets.json'}"], quick)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, told = (json.loads((tmp_path / name).read_text()) for name in ("0.json", "sets.json"))
    counts, sets = whole["environment"]["by_task"], {t["id"]: t["lineage"]["kind"] for t in tasks}
    own = [counts[id] for id, kind in sets.items() if kind == "held_out"]
    assert told["environment"]["by_task"] == counts and 0 < len(own) < len(counts)
    assert told["success"] == sum(n for n, _ in own) / sum(n for _, n in own)
    assert "the i.i.d. set" in told["protocol"]["success_of"] and "success_of" not in whole["protocol"]
    assert f"of {sum(n for _, n in own)} rollouts" in done.stdout
    program[1] = f"--workdir={finished}"
    done = forked.run([*program, f"--output={finished / 'config.json' / 'x.json'}"], quick)
    assert done.returncode != 0 and "cannot be written" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("program", ["main", "synthesize"])
def test_ctrl_c_ends_a_command_with_a_line_and_what_was_made_is_kept(program, tmp_path, quick):
    places = {
        "main": ("--workdir", tmp_path / "run", tmp_path / "run" / "config.json"),
        "synthesize": ("--output", tmp_path / "tasks.jsonl", tmp_path / "tasks.jsonl"),
    }
    flag, place, begun = places[program]
    more = ["--tasks=100000"] if program == "synthesize" else []
    script = ROOT / "experiments" / f"{program}.py"
    start = forked.Start([script, "--config=configs/bfcl_tiny.py", f"{flag}={place}", *more], quick)
    try:
        while not any(path.stat().st_size for path in begun.parent.glob(begun.name)):
            assert start.poll() is None, start.communicate()[1]
            time.sleep(0.05)
        start.send_signal(signal.SIGINT)
        _, told = start.communicate(100)
    finally:
        start.kill()
    assert start.wait() == 130 and "Traceback" not in told, told[-2000:]
    assert told.splitlines()[-1].startswith("Interrupted: "), told[-2000:]
    if program == "synthesize":
        assert len([json.loads(line) for line in place.read_text().splitlines()]) >= 4
