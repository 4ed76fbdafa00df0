"""Tables of a run as other tools read them, and the card of its policy."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from coevolve_jax import config as configs
from coevolve_jax.analysis.loading import load_run
from coevolve_jax.exports import model_card, tables
from coevolve_jax.grpo import lora
from coevolve_jax.models import hf_io, peft_io
from coevolve_jax.records import rollouts
from coevolve_jax.train import train
from coevolve_jax.types import Group, Task, TrainingSample
from tests.support import forked
from tests.support.paths import ROOT
from tests.support.report_cases import fake_with_queries, fake_workdir
from tests.support.step_cases import some_groups

CONFIG = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")


@pytest.fixture
def workdir(tmp_path):
    """A run's files: tasks, some trajectories, and two steps whose rollouts were kept whole."""
    folder = fake_workdir(tmp_path / "run")
    for step in (3, 7):
        rollouts.write_rollouts(folder, step, some_groups(np.random.default_rng(step)))
    first, *lines = (folder / "tasks.jsonl").read_text().splitlines()
    task = json.loads(first)
    task["turns"][0]["query"] = "half a \ud83d pair"  # as a model may write it
    task["record"] |= {"first_score": None, "last_score": None, "trained": 0}
    (folder / "tasks.jsonl").write_text("\n".join([json.dumps(task), *lines, ""]))
    return folder


def test_rows_have_the_columns_that_are_documented(workdir):
    run = load_run(workdir)
    tasks, shown = list(tables.task_rows(run)), list(tables.trajectory_rows(run))
    whole = list(tables.rollout_rows(str(workdir), 7))
    for rows, columns in ((tasks, tables.TASKS), (shown, tables.TRAJECTORIES), (whole, tables.ROLLOUTS)):
        assert rows and all(row.keys() == columns.keys() for row in rows)
    assert [json.loads(row["task"]) for row in tasks] == run.tasks
    assert tasks[0]["queries"][0] == "half a \\ud83d pair" and tasks[0]["first_score"] is None
    group = rollouts.read_rollouts(workdir, 7)[0]
    assert whole[0]["ids"] == group.trajectories[0].ids.tolist()
    assert (shown[0]["task_id"], shown[0]["step"]) == (run.trajectories[0][1][0]["task_id"], 2)


def test_the_rewards_and_scores_of_held_out_queries_are_null(tmp_path):
    path, query = fake_with_queries(tmp_path / "run")
    run = load_run(path)
    (row,) = [row for row in tables.task_rows(run) if row["id"] == query.id]
    assert row["visits"] == 5 and row["first_score"] is row["last_score"] is None
    *others, shown = tables.trajectory_rows(run)
    assert shown["task_id"] == query.id and shown["valid"] and shown["reward"] is shown["success"] is None
    assert all(row["reward"] is not None for row in others)
    told = some_groups(np.random.default_rng(3))
    asked = [Group(query, group.trajectories) for group in told]
    rollouts.write_rollouts(path, 3, [*told, *asked])
    rows = list(tables.rollout_rows(str(path), 3))
    outcomes = [(row["reward"], row["success"]) for row in rows]
    real = [(t.outcome.reward, t.outcome.success) for group in told for t in group.trajectories]
    assert outcomes == real + [(None, None)] * len(real)


def test_a_row_of_a_task_has_its_sizes_and_its_record(workdir):
    line = load_run(workdir).tasks[1]
    calls = [{"name": name, "arguments": {}} for name in ("mv", "cd", "mv")]
    line["turns"] = [{"query": "a", "calls": calls[:1]}, {"query": "b", "calls": calls[1:]}]
    line["record"] |= {"born": 3, "trained": 4, "first_score": 0.25, "last_score": 0.75}
    line["lineage"]["parent"] = "p"
    row = tables.task_row(line)
    assert (row["queries"], row["tools"], row["calls"]) == (["a", "b"], ["mv", "cd"], 3)
    assert (row["born"], row["visits"], row["first_score"], row["last_score"]) == (3, 4, 0.25, 0.75)
    assert row["parent"] == "p"


def test_a_row_of_a_rollout_has_its_own_advantage(tmp_path):
    (tmp_path / "run").mkdir()
    groups = some_groups(np.random.default_rng(3))
    every = [t for group in groups for t in group.trajectories]
    own = lambda t, n: TrainingSample(t, np.full(len(t.ids), n, np.float32))
    samples = [own(t, n) for n, t in enumerate(every) if n % 3]
    rollouts.write_rollouts(tmp_path / "run", 4, groups, samples)
    rows = list(tables.rollout_rows(str(tmp_path / "run"), 4))
    assert [(row["step"], row["task_id"], row["rollout_index"]) for row in rows] == [
        (4, t.task_id, t.rollout_index) for t in every
    ]
    learned = [n % 3 and t.mask.any() for n, t in enumerate(every)]
    assert [row["advantage"] for row in rows] == [n if told else None for n, told in enumerate(learned)]


def test_a_run_without_tasks_is_told(tmp_path):
    with pytest.raises(ValueError, match="holds no training set"):
        tables.task_rows(load_run(tmp_path))


@pytest.mark.slow
def test_pandas_and_datasets_read_the_parquet_files_as_the_card_says(workdir, tmp_path):
    import datasets
    import pandas
    from pyarrow.parquet import read_schema

    from coevolve_jax.exports import parquet

    run, folder = load_run(workdir), tmp_path / "tables"
    shown = sum(len(rows) for _, rows in run.trajectories)
    folder.mkdir()
    (folder / "rollouts.parquet").write_bytes(b"of another run")
    shutil.copytree(workdir, tmp_path / "none", ignore=shutil.ignore_patterns("rollouts"))
    assert parquet.write(tmp_path / "none", folder).keys() == {"tasks", "trajectories"}
    assert not (folder / "rollouts.parquet").exists()
    counts = parquet.write(workdir, folder)
    kept = sum(len(g.trajectories) for step in (3, 7) for g in rollouts.read_rollouts(workdir, step))
    assert counts == {"tasks": len(run.tasks), "trajectories": shown, "rollouts": kept}
    tasks = pandas.read_parquet(folder / "tasks.parquet")
    assert [json.loads(text) for text in tasks["task"]] == run.tasks
    assert tasks["first_score"].isna().tolist() == [True] + [False] * (len(tasks) - 1)
    whole = pandas.read_parquet(folder / "rollouts.parquet")
    (t, *_), row = rollouts.read_rollouts(workdir, 3)[0].trajectories, whole.iloc[0]
    for name in ("ids", "mask", "logprobs", "versions"):
        np.testing.assert_array_equal(row[name], getattr(t, name))
    told = (folder / "README.md").read_text()
    for table, columns in (("tasks", tables.TASKS), ("rollouts", tables.ROLLOUTS)):
        schema = read_schema(folder / f"{table}.parquet")
        assert schema.names == list(columns)
        assert all(schema.field(n).metadata[b"about"].decode() == c.about for n, c in columns.items())
        assert all(f"| `{n}` | {c.kind} | {c.about} |" in told for n, c in columns.items())
        read = datasets.load_dataset(str(folder), table, split="train", cache_dir=str(tmp_path / "cache"))
        assert len(read) == counts[table] and read.column_names == list(columns)


@pytest.mark.slow
def test_an_export_that_fails_leaves_the_tables_that_were_there(workdir, tmp_path, monkeypatch):
    from coevolve_jax.exports import parquet

    parquet.write(workdir, folder := tmp_path / "tables")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = tables.rollout_rows

    def damaged(workdir, step):
        yield from list(whole(workdir, step))[:2]
        raise ValueError("the file is damaged")

    monkeypatch.setattr(tables, "rollout_rows", damaged)
    (workdir / "tasks.jsonl").write_text((workdir / "tasks.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="the file is damaged"):
        parquet.write(workdir, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # nor other tables


@pytest.mark.slow
def test_a_readme_that_no_export_wrote_stays(workdir, tmp_path):
    from coevolve_jax.exports import parquet

    (folder := tmp_path / "mine").mkdir()
    for text in ("# My project\n", model_card.card(CONFIG, a_summary(workdir))):
        (folder / "README.md").write_text(text)
        with pytest.raises(ValueError, match=r"mine/README.md is not of such an export.*: name another"):
            parquet.write(workdir, folder)
        assert [path.name for path in folder.iterdir()] == ["README.md"]
        assert (folder / "README.md").read_text() == text


@pytest.mark.slow
def test_datasets_reads_the_training_set_from_disk(workdir, tmp_path):
    import datasets

    from coevolve_jax.exports import hf_datasets

    run = load_run(workdir)
    assert hf_datasets.write(workdir, tmp_path / "set") == len(run.tasks)
    read = datasets.load_from_disk(str(tmp_path / "set"))
    assert [Task.from_json(json.loads(text)) for text in read["task"]] == [
        Task.from_json(t) for t in run.tasks
    ]
    assert read[0]["first_score"] is None and read[1]["tools"] == list(tables.task_row(run.tasks[1])["tools"])
    hf_datasets.write(workdir, tmp_path / "set")  # a data set that is there is replaced
    assert len(datasets.load_from_disk(str(tmp_path / "set"))) == len(run.tasks)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_lora_leaves_adapters_that_give_its_policy(tmp_path):
    small = {
        "steps": 1, "data.initial_tasks": 4, "rollout.tasks_per_step": 4, "rollout.group_size": 4,
        "evaluation.tasks": 4, "environment.workers": 1, "learner.lora_rank": 4, "strategy.name": "static",
    }  # fmt: skip
    train(configs.override(CONFIG, small), tmp_path / "run")  # the base is named as it is shipped
    policy = tmp_path / "run" / "policy"
    adapter = policy / model_card.ADAPTER
    command = [sys.executable, ROOT / "experiments" / "export.py", "--to=policy", f"--adapter={adapter}"]
    command.append("--dtype=float32")  # that of the run's policy; the base's is bfloat16
    run = lambda output: subprocess.run(
        [*command, f"--output={output}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert peft_io.base_of(adapter) == str(ROOT / CONFIG.model)  # peft reads it from any folder
    done = run("merged")
    assert done.returncode == 0, done.stderr
    refused = run(ROOT / CONFIG.model)
    assert refused.returncode == 1 and "is the base itself: name another folder" in refused.stderr
    merged, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", policy))
    assert merged.keys() == own.keys()
    for name, tensor in own.items():
        np.testing.assert_allclose(merged[name], tensor, atol=1e-6)
    before = load_file(ROOT / CONFIG.model / "model.safetensors")
    assert any((before[name] != own[name]).any() for name in own if "q_proj" in name)
    assert "LoRA of rank 4" in (policy / "README.md").read_text()
    assert (tmp_path / "merged" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_merged_policy_has_the_bases_dtype_and_the_command_tells_what_that_rounds_away(tmp_path, quick):
    base, key = ROOT / CONFIG.model, "model.layers.1.self_attn.q_proj.weight"
    model, rng = hf_io.load_config(base), np.random.default_rng(0)
    fresh = lora.init(jax.random.key(0), hf_io.abstract_params(model), 2, "q_proj")
    whole = jax.tree.map(lambda p: rng.normal(0, 1, p.shape).astype(np.float32), fresh)
    before = load_file(base / "model.safetensors")
    for alpha, dtype, warned in ((1.0, None, False), (1e-7, None, True), (1e-7, "float32", False)):
        peft_io.save(tmp_path / "lora", model, peft_io.Adapters(whole, 2, alpha, str(base)))
        command = ["experiments/export.py", "--to=policy", f"--adapter={tmp_path / 'lora'}"]
        flags = [f"--output={tmp_path / 'merged'}", *([f"--dtype={dtype}"] if dtype else [])]
        done = forked.run([*command, *flags], quick)
        assert done.returncode == 0, done.stderr
        told = json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"]
        assert told == (dtype or "bfloat16") and done.stdout.endswith(f"merged, {told}\n")
        after, pairs = (
            load_file(tmp_path / "merged" / "model.safetensors"),
            load_file(tmp_path / "lora" / peft_io.WEIGHTS),
        )
        a, b = (pairs[f"base_model.model.{key.replace('weight', f'lora_{half}.weight')}"] for half in "AB")
        exact = before[key].astype(np.float64) + alpha / 2 * (b.astype(np.float64) @ a)
        np.testing.assert_allclose(
            after[key].astype(np.float64), exact, rtol=2.0**-8 if told == "bfloat16" else 1e-6, atol=1e-9
        )
        assert after[key].dtype == before[key].dtype or dtype
        share = np.mean([after[k] == before[k] for k in after if "q_proj" in k])
        assert (share > 0.5) == warned
        note = (
            f"In bfloat16, {share:.0%} of the weights that the adapters of {tmp_path / 'lora'} change round"
        )
        assert (note in done.stderr) == ("--dtype=float32 keeps them" in done.stderr) == warned
    np.testing.assert_array_equal(after["model.norm.weight"], before["model.norm.weight"].astype(np.float32))


@pytest.mark.slow
def test_the_base_is_read_in_the_dtype_that_the_adapters_were_trained_on(tmp_path, quick):
    base, (model, params) = tmp_path / "base", hf_io.load(ROOT / CONFIG.model)
    shutil.copytree(ROOT / CONFIG.model, base)
    params = jax.tree.map(lambda p: p * np.float32(1.001), params)  # bfloat16 would round them
    hf_io.save(base, model, params)
    own = jax.tree.map(lambda p: p + 0.1, lora.init(jax.random.key(0), params, 2, "q_proj"))
    adapters = peft_io.Adapters(own, 2, 1.0, str(base), "bfloat16")
    peft_io.save(tmp_path / "lora", model, adapters)
    command = ["experiments/export.py", "--to=policy", f"--adapter={tmp_path / 'lora'}"]
    done = forked.run([*command, f"--output={tmp_path / 'merged'}"], quick)
    assert done.returncode == 0 and done.stdout.endswith("merged, float32\n"), done.stderr
    want = lora.merge(hf_io.load(base, "bfloat16")[1], own, adapters.scale)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    jax.tree.map(near, hf_io.load(tmp_path / "merged")[1], want)


@pytest.mark.slow
@pytest.mark.parametrize("form, package", [("parquet", "pyarrow"), ("datasets", "datasets")])
def test_the_command_names_what_is_missing(workdir, tmp_path, form, package):
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.modules[{!r}] = None;"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program.format(package), "experiments/export.py", f"--to={form}"]
    done = subprocess.run(
        [*command, f"--run={workdir}", f"--output={tmp_path / 'x'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and f"pip install coevolve_jax[{form}]" in done.stderr
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("form, flag", [("parquet", "run"), ("datasets", "run"), ("policy", "adapter")])
def test_the_command_names_the_flag_that_it_needs(tmp_path, form, flag, quick):
    done = forked.run(["experiments/export.py", f"--to={form}", f"--output={tmp_path}"], quick)
    assert (done.returncode, done.stderr) == (1, f"Error: --to={form} needs --{flag}.\n")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_a_file_is_no_output_and_stays(workdir, tmp_path, form, quick):
    (file := tmp_path / "file").write_text("mine")
    command = ["experiments/export.py", f"--to={form}", f"--run={workdir}", f"--output={file}"]
    done = forked.run(command, quick)
    assert done.returncode == 1 and done.stderr.startswith(f"Error: --output={file} cannot be written (")
    assert done.stderr.count("\n") == 1 and file.read_text() == "mine"


def a_summary(folder) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    tasks = {**summary["tasks"], "initial": 8, "final": 24}
    return {**summary, "tasks": tasks, "held_out_split": "development"}


def test_a_card_has_base_data_method_figures_versions_and_command(workdir):
    summary = a_summary(workdir)
    config = configs.override(CONFIG, {"learner.lora_rank": 8, "steps": 12, "warm_start.steps": 20})
    warm = {**summary, "warm_start": {"steps": 9, "best_step": 7}}  # patience ended it
    told = model_card.card(config, warm)
    assert "| warm start | 9 supervised updates, those up to 7 kept |" in told
    onto = "on the policy after the warm start, the run's `warm_start/policy`, in float32"
    assert f"| LoRA of rank 8 (`adapter/`, for peft, {onto}) |" in told
    elsewhere = configs.override(config, {"checkpoint.folder": "gs://bucket/run"})
    model_card.write(workdir / "policy", elsewhere, summary)
    text = (workdir / "policy" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: ")
    for told in (
        "| base model | `models/tiny_qwen3` |",
        "| trained parameters | LoRA of rank 8 (`adapter/`, for peft, on the base model in float32) |",
        "| strategy | `coevolve` |",
        "| updates | 12 GRPO steps, seed 0 |",
        "| tasks at the end | 24 |",
        "## Success on 20 held-out tasks",
        f"| after | {summary['held_out']['after']['success']:.1%}, 95% interval ",
        "| gain | +",
        "| first tasks | 8, explored |",
        "The tasks are synthetic, of the split `development`. Their answers are not trained on. "
        "Rollouts of each: 4 before and 4 after, at temperature 1.",
        "They are no score of a benchmark.",
        "The same versions on a machine of the same kind give the same bits.",
        "| jax | 0.10.2 |",
        "coevolve train --workdir=again",
    ):
        assert told in text, told
    assert json.loads((workdir / "policy" / model_card.RUN_CONFIG).read_text()) == json.loads(
        configs.to_json(config)  # without the folder whose checkpoints a second run would go on from
    )


def test_the_card_of_a_run_on_own_tasks_says_so(workdir):
    summary = a_summary(workdir)
    text = model_card.card(configs.override(CONFIG, {"data.own_tasks": True}), summary)
    assert "| first tasks | 8, the environment's own of the split `train` |" in text
    assert "The tasks are the environment's own, of the split `development`, without those that are" in text
    assert "synthetic" not in text and "no score of a benchmark" not in text
    others = {**summary, "balanced": summary["held_out"]}
    text = model_card.card(configs.override(CONFIG, {"data.own_tasks": True}), others)
    assert "The tasks of other sets (balanced) are synthetic." in text
    given = configs.override(CONFIG, {"data.initial_file": "runs/one/tasks.jsonl"})
    text = model_card.card(given, summary)
    assert "| first tasks | 8, from the file `runs/one/tasks.jsonl` |" in text and "are synthetic, of" in text


@pytest.mark.parametrize(
    "changes, told, why",
    [
        ({"rollout.max_staleness": 1}, {}, "rollouts are sampled beside updates (`rollout.max_staleness`)"),
        ({"engine.name": "sglang"}, {}, "the engine `sglang` generates"),
        ({}, {"explorer_model": "big"}, "a model explores"),
        ({"explorer.wording": "policy"}, {}, "a model explores"),
        (
            {"engine.name": "sglang"}, {"explorer_model": "big"},
            "the engine `sglang` generates and a model explores",
        ),
    ],
)  # fmt: skip
def test_a_card_promises_the_same_bits_only_where_they_come(workdir, changes, told, why):
    text = model_card.card(configs.override(CONFIG, changes), {**a_summary(workdir), **told})
    assert f"It need not give the same bits, since {why}.\n" in text
    assert "coevolve train --workdir=again" in text and "give the same bits." not in text


def test_a_card_names_the_base_on_the_hub_where_the_base_tells(workdir, tmp_path, monkeypatch):
    def name_of(folder, **told):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **told}))
        text = model_card.card(configs.override(CONFIG, {"model": str(folder)}), a_summary(workdir))
        front = text.split("---\n")[1].splitlines()
        return [line.removeprefix("base_model: ") for line in front if line.startswith("base_model: ")]

    monkeypatch.chdir(tmp_path)
    assert name_of(tmp_path / "a", _name_or_path="Qwen/Qwen3-0.6B") == ["Qwen/Qwen3-0.6B"]
    assert name_of(tmp_path / "models--Qwen--Qwen3-4B-Base" / "snapshots" / "9f3a") == ["Qwen/Qwen3-4B-Base"]
    (link := tmp_path / "link").symlink_to(tmp_path / "models--Qwen--Qwen3-4B-Base" / "snapshots" / "9f3a")
    assert model_card.hub_name(str(link)) == "Qwen/Qwen3-4B-Base"
    for n, name in enumerate(("/raid/models/x", "out/ckpt/7", "mine", "", None, 7, "models/tiny_qwen3")):
        assert name_of(tmp_path / f"no_{n}", _name_or_path=name) == []  # the last one is a folder here
    assert name_of(tmp_path / "owner" / "name") == []
    assert model_card.hub_name("models/tiny_qwen3") is model_card.hub_name("owner/none") is None


def test_the_card_of_a_fork_names_its_run_and_has_no_command_beyond_step_0(workdir):
    summary = a_summary(workdir)
    told = {"run": "/runs/one", "step": 6, "config_digest": "9f3a", "strategy": "static"}
    (workdir / "forked.json").write_text(json.dumps(told))
    model_card.write(workdir / "policy", CONFIG, summary)
    text = (workdir / "policy" / "README.md").read_text()
    assert "| fork | goes on from step 6 of one (config 9f3a), whose strategy was static |" in text
    assert "## Again" not in text and "same bits" not in text
    first = model_card.card(CONFIG, summary, {**told, "step": 0})
    assert "goes on from step 0 of one" in first and "## Again" in first
    assert "| fork |" not in model_card.card(CONFIG, summary)


def test_a_card_says_what_was_lost(workdir):
    summary = a_summary(workdir)
    after = summary["held_out"]["after"]
    after["by_task"] = {name: [min(s, 3), 3] for name, (s, _) in after["by_task"].items()}
    assert "| lost after, i.i.d. set | 20, of 80 trials (25.0%)" in model_card.card(CONFIG, summary)


def test_the_plain_text_of_a_column_is_utf8():
    assert tables.plain("é\ud800") == "é\\ud800"
