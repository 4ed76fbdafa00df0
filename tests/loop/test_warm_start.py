"""The supervised warm start, with a real model and environment: demonstrations, loss, resume, runs."""

import json
import os
import shutil
import signal
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax import build, preemption
from coevolve_jax import config as configs
from coevolve_jax.comparison.cells import prepare
from coevolve_jax.comparison.plan import Cell, start_config
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import lora
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.loop import initial, supervised
from coevolve_jax.loop import warm_start as warm_start_module
from coevolve_jax.loop.demonstrations import Demonstrations, demonstrate, make_tasks
from coevolve_jax.loop.supervised import Supervised
from coevolve_jax.loop.warm_start import initial_model, notes, warm_start
from coevolve_jax.models import hf_io, peft_io
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.records import workdir as workdirs
from coevolve_jax.records.llm_calls import all_lines
from coevolve_jax.records.llm_calls import whole as unpacked
from coevolve_jax.rollout.reference_engine import ReferenceEngine
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.train import train
from tests.loop.test_train import comparable
from tests.rollout.test_chat import CHATML
from tests.strategies.test_strategies import rows, settings
from tests.support.checkpoints import latest_step
from tests.support.openai_server import SERVES, OpenAIServer

pytestmark = pytest.mark.slow

# The schedule ends with the last step: equal steps and rates share the update's program.
TINY = {
    "steps": 4, "tasks": 12, "batch": 4, "learning_rate": 3e-4, "held_out": 0.25, "eval_every": 2,
    "checkpoint_every": 3,
}  # fmt: skip
OBSERVED = {"eval_tasks": 2, "success_every": 2}
SHORT = {"steps": 2, "evolution.every": 1}  # a run of RL


def asked(name="static", more=None, **changes):
    """A small config with a warm start. changes: of its section; more: by dotted key."""
    section = {f"warm_start.{key}": value for key, value in {**TINY, **changes}.items()}
    return settings(name, **section, **(more or {}))


def of(folder, key):
    return [row[key] for row in rows(folder, "sft.jsonl") if key in row]


def untimed(folder):
    """The rows and files that a warm start must reproduce bit for bit."""
    found = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder, "sft.jsonl")]
    summary = json.loads((folder / "summary.json").read_text())
    return found, {**summary, "seconds": 0}, (folder / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A warm start that nobody stopped."""
    folder = tmp_path_factory.mktemp("warm") / "whole"
    summary = warm_start(asked(**OBSERVED), folder)
    assert summary == json.loads((folder / "summary.json").read_text())
    return folder


@pytest.fixture(scope="module")
def policy():
    return build.policy(settings("static").model)


@pytest.fixture(scope="module")
def shown(whole, policy):
    """The demonstrations of `whole`."""
    tasks = list(TaskPool.read(whole / "tasks.jsonl"))
    assert len(tasks) == 12 and {t.lineage.kind for t in tasks} == {"warm_start"}
    with build.env_pool(asked()) as env_pool:
        return demonstrate(asked(), policy, env_pool, tasks)


# ---- Demonstrations ------------------------------------------------------------------------------


def by_hand(c, task, policy, env_pool):
    """ids and mask of a task's solution, put together message by message."""
    chat, ids, mask = policy.chat, [], []
    (env_id,) = env_pool.reset([task])

    def add(tokens, own):
        ids.extend(tokens)
        mask.extend([own] * len(tokens))

    add(chat.prompt(build.family(c).tools(task), task.turns[0].query), False)
    for n, turn in enumerate(task.turns):
        if n:
            add(chat.user(turn.query), False)
        for call in turn.calls:
            ((answer,),) = env_pool.step([env_id], [[call]])
            add(chat.message([call]), True)
            text, room = answer.text, c.rollout.max_observation
            add(chat.observations([text if len(text) <= room else text[:room] + "..."]), False)
        add([*policy.tokenizer.encode("Done.", add_special_tokens=False), *chat.stop_ids], True)
        env_pool.end_turn([env_id])
    (outcome,) = env_pool.score([env_id])
    env_pool.close([env_id])
    assert outcome.success
    return ids, mask


def test_demonstrations_are_the_solutions_in_the_prompts_of_rl(shown, policy):
    assert len(shown.tasks) == 12 and not shown.lost
    assert any(len(task.turns) > 1 for task in shown.tasks)
    with build.env_pool(asked()) as env_pool:
        for task, t in zip(shown.tasks, shown.trajectories):
            ids, mask = by_hand(asked(), task, policy, env_pool)
            assert t.ids.tolist() == ids and t.mask.tolist() == mask
            assert len(t.turn_starts) == len(task.turns) and [s.call for s in t.steps] == list(task.calls)


def test_only_the_messages_of_the_policy_are_learned(shown, policy):
    for task, t in zip(shown.tasks, shown.trajectories):
        said = policy.chat.decode(t.ids[t.mask])
        assert said.count("<|im_end|>") == len(task.calls) + len(task.turns)
        assert said.count("Done.<|im_end|>") == len(task.turns)
        assert "<tool_response>" not in said and not any(turn.query in said for turn in task.turns)


def test_where_the_prompt_opens_a_thought_every_message_closes_it(whole, tmp_path):
    shutil.copytree(settings("static").model, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    )
    policy, tasks = build.policy(tmp_path / "model"), list(TaskPool.read(whole / "tasks.jsonl"))[:3]
    config = asked(more={"rollout.max_length": 1024, "learner.pack_length": 1024})
    with build.env_pool(config) as env_pool:
        found = demonstrate(config, policy, env_pool, tasks)
    assert len(found.tasks) == 3
    for task, t in zip(found.tasks, found.trajectories):
        said = policy.chat.decode(t.ids[t.mask])
        assert said.count("\n</think>\n\n") == len(task.calls) + len(task.turns) == said.count("<|im_end|>")
        assert said.count("</think>\n\nDone.<|im_end|>") == len(task.turns)


def test_what_is_not_solved_is_left_out_and_counted(whole, policy):
    tasks = list(TaskPool.read(whole / "tasks.jsonl"))
    longest = max(tasks, key=lambda task: max(len(policy.chat.message([c])) for c in task.calls))
    room = max(len(policy.chat.message([c])) for c in longest.calls) - 1
    config = asked(more={"rollout.max_new_tokens": room})
    with build.env_pool(config) as env_pool:
        found = demonstrate(config, policy, env_pool, tasks)
    assert longest not in found.tasks and found.lost["token_limit"] >= 1
    assert len(found.tasks) + found.lost.total() == 12
    assert f"{len(found.tasks)} of 12 tasks" in str(found) and "token_limit" in str(found)


# ---- Learning ------------------------------------------------------------------------------------


def mean_loss(trajectories, policy):
    """Nats per token of the policy, from all logits of one trajectory after the other."""
    total, tokens, forward = 0.0, 0, jax.jit(Decoder(policy.config).apply)
    for t in trajectories:
        padded = np.pad(t.ids, (0, 512 - len(t.ids)))[None]  # one program; no token sees what follows it
        logits = np.asarray(forward({"params": policy.params}, padded)[0], np.float64)
        logits -= logits.max(-1, keepdims=True)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for n in np.flatnonzero(t.mask):
            total -= scores[n - 1, t.ids[n]]
            tokens += 1
    return total / tokens


def test_the_losses_are_those_of_all_logits(whole, shown, policy):
    order = rng_for(0, "warm start split").permutation(12)
    held_out, trained = ([shown.trajectories[i] for i in part] for part in (order[:3], order[3:]))
    batch = [trained[i] for i in rng_for(0, "warm start", 0).choice(9, 4, replace=False)]
    first = next(row for row in rows(whole, "sft.jsonl") if "loss" in row)
    assert first["loss"] == pytest.approx(mean_loss(batch, policy), rel=1e-4)
    assert first["tokens"] == sum(t.mask.sum() for t in batch) and first["step"] == 1
    assert of(whole, "held_out_loss")[0] == pytest.approx(mean_loss(held_out, policy), rel=1e-4)
    assert [row["step"] for row in rows(whole, "sft.jsonl") if "held_out_loss" in row] == [0, 2, 4]


def dying_at(step):
    """An update that is interrupted at this step. Raised here, since a shell may have SIGINT ignored."""
    update = Supervised._update

    def updates(course):
        if course.step == step:
            raise KeyboardInterrupt
        update(course)

    return updates


def test_it_learns_and_writes_the_parameters_with_the_lowest_loss(whole, shown):
    losses = of(whole, "held_out_loss")
    assert losses[-1] < losses[0]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["demonstrations"] == 9 and summary["held_out"] == 3
    assert summary["held_out_loss"] == {"before": losses[0], "after": min(losses)}
    assert [row["step"] for row in rows(whole, "sft.jsonl") if "success" in row] == [0, 2, 4]
    assert summary["success"]["before"] == of(whole, "success")[0]
    written = build.policy(whole / "policy")
    order = rng_for(0, "warm start split").permutation(12)
    held_out = [shown.trajectories[i] for i in order[:3]]
    assert mean_loss(held_out, written) == pytest.approx(min(losses), rel=1e-4)
    assert {leaf.dtype for leaf in jax.tree.leaves(written.params)} == {np.dtype(np.float32)}
    assert not (whole / "checkpoints").exists()
    rates = of(whole, "learning_rate")
    assert rates[0] == pytest.approx(3e-4) and np.all(np.diff(rates) < 0) and rates[-1] > 3e-5


def test_it_stops_when_the_held_out_loss_gets_no_better(tmp_path, monkeypatch):
    """Every step is so large that it does harm. Killed, it still has the parameters before them."""
    config = asked(learning_rate=0.3, eval_every=1, patience=2, checkpoint_every=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Supervised, "_update", dying_at(1))
        warm_start(config, tmp_path / "warm")
    summary = warm_start(config, tmp_path / "warm")
    assert summary["steps"] == 2 and summary["best_step"] == 0
    assert summary["held_out_loss"]["before"] == summary["held_out_loss"]["after"]
    written, before = (hf_io.load(f)[1] for f in (tmp_path / "warm" / "policy", settings("static").model))
    assert jax.tree.all(jax.tree.map(np.array_equal, written, before))


def test_without_held_out_demonstrations_it_writes_the_last_parameters(tmp_path):
    summary = warm_start(asked(held_out=0.0), tmp_path / "warm")
    assert summary["best_step"] == 4 and summary["held_out_loss"] is summary["success"] is None
    assert summary["demonstrations"] == 12 and not of(tmp_path / "warm", "held_out_loss")


# ---- Resume --------------------------------------------------------------------------------------


def asking_at(real, call):
    """A function that asks its process to end when it is called for the n-th time."""
    calls = []

    def asks(*arguments):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    return asks


def test_killed_and_asked_to_end_it_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch):
    """The update that was asked is finished first; the evaluation by rollouts is given up."""
    config, folder = asked(**OBSERVED), tmp_path / "warm"
    asked_in = lambda where, name, call: (where, name, asking_at(getattr(where, name), call))
    killed, ended = KeyboardInterrupt, preemption.Preempted
    for (where, name, function), ends, saved in (
        ((Supervised, "_update", dying_at(2)), killed, 0),  # nothing is saved since the beginning
        (asked_in(supervised, "learn", 2), ended, 2),
        ((Supervised, "_update", dying_at(3)), killed, 3),
        (asked_in(warm_start_module, "_success", 1), ended, 4),
    ):
        with monkeypatch.context() as patch, pytest.raises(ends), preemption.handle_signals():
            patch.setattr(where, name, function)
            warm_start(config, folder)
        assert latest_step(folder / "checkpoints") == saved
    warm_start(config, folder)
    assert untimed(folder) == untimed(whole)


@pytest.mark.nightly
def test_no_warm_start_goes_on_from_the_checkpoints_of_another(tmp_path, monkeypatch):
    of = lambda rate: asked(
        steps=2, eval_every=1, checkpoint_every=1, learning_rate=rate,
        more={"checkpoint.folder": str(tmp_path / "checkpoints")},
    )  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Supervised, "_update", dying_at(1))
        warm_start(of(3e-4), tmp_path / "one")
    with pytest.raises(ValueError, match="checkpoint of another warm start.*name another config.checkpoint"):
        warm_start(of(1e-6), tmp_path / "other")
    assert warm_start(of(3e-4), tmp_path / "one")["steps"] == 2


def test_a_demonstration_that_is_lost_on_resume_leaves_the_others_on_their_side(shown):
    def sides(kept):
        found = Demonstrations(kept, [], Counter())
        parts = warm_start_module._split(asked(), shown.tasks, found)
        return [{kept[i].id for i in part} for part in parts]

    held_out, trained = sides(shown.tasks)
    assert (len(held_out), len(trained)) == (3, 9)
    for lost in shown.tasks:
        kept = [task for task in shown.tasks if task != lost]
        assert sides(kept) == [held_out - {lost.id}, trained - {lost.id}]
    with pytest.raises(ValueError, match=r"too little to learn from: 9 of 9 .* and it holds 0 out"):
        sides([task for task in shown.tasks if task.id in trained])


def stored(folder, dtype):
    """A copy of the tiny model whose config.json tells this dtype."""
    shutil.copytree(settings("static").model, folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "dtype": dtype, "torch_dtype": dtype}))
    return str(folder)


def test_a_policy_is_loaded_in_the_dtype_of_its_master_weights(tmp_path, monkeypatch, capsys):
    """With adapters it is the frozen base, which learner.dtype may round: then the user is told."""
    loaded, more = [], {"learner.dtype": "bfloat16", "model": stored(tmp_path / "model", "float32")}
    rounded = "are stored in float32, and LoRA's base is read in bfloat16, config.learner.dtype"

    def policy(folder, mesh, dtype):
        loaded.append(dtype)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "policy", policy)
    for changes in (more, {**more, "learner.lora_rank": 2}):
        for begin, config in ((warm_start, asked(more=changes)), (train, settings("static", **changes))):
            with pytest.raises(KeyboardInterrupt):
                begin(config, tmp_path / "begun")
        assert (rounded in capsys.readouterr().err) == ("learner.lora_rank" in changes)
    assert loaded == ["float32", "float32", "bfloat16", "bfloat16"]


def test_with_adapters_rl_begins_as_the_policy_that_was_written(shown, tmp_path, capsys):
    """In bfloat16 most of the small changes are rounded away, which the command tells."""
    more = {"learner.lora_rank": 2, "learner.dtype": "bfloat16"}
    config = asked(more=more, steps=2, eval_every=1)
    summary, folder = warm_start(config, tmp_path / "warm"), tmp_path / "warm" / "policy"
    read = lambda dtype: hf_io.load(folder, dtype, sharding.make_mesh())
    (model, whole), (_, begun) = read("float32"), read(build.trained_dtype(config.learner))
    assert hf_io.dtype_of(folder) == "bfloat16" and jax.tree.all(jax.tree.map(jnp.array_equal, whole, begun))

    own = peft_io.load(folder / "adapter", model)
    assert (own.base, own.base_dtype) == (config.model, "bfloat16")
    base = hf_io.load(own.base, own.base_dtype)[1]
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-8, atol=1e-9)
    jax.tree.map(near, whole, lora.merge(base, own.params, own.scale))
    share = lora.rounded_away(base, own.params, own.scale, "bfloat16")
    assert summary["rounded_away"] == pytest.approx(share, abs=0.01) and 0.1 < share < 1
    assert f"policy/ is in bfloat16, as RL reads it: {share:.0%} of the weights" in capsys.readouterr().err

    learner = Learner(model, config.learner, begun, temperature=1.0, mesh=sharding.make_mesh())
    order = rng_for(0, "warm start split").permutation(12)
    held_out = supervised._packed(config, [shown.trajectories[i] for i in order[:3]])
    loss = -np.asarray(learner.score(learner.init(begun), held_out)).sum() / held_out.mask.sum()
    assert summary["held_out_loss"]["after"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.nightly
def test_adapters_are_resumed_and_merged(tmp_path, monkeypatch):
    more = {"learner.lora_rank": 2}
    config = asked(more=more, steps=2, eval_every=1, checkpoint_every=1)
    warm_start(config, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Supervised, "_update", dying_at(1))
        warm_start(config, tmp_path / "warm")
    warm_start(config, tmp_path / "warm")
    assert untimed(tmp_path / "warm") == untimed(tmp_path / "whole")
    written, before = (hf_io.load(f)[1] for f in (tmp_path / "warm" / "policy", config.model))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), written, before)
    assert jax.tree.structure(written) == jax.tree.structure(before) and 0 < max(jax.tree.leaves(moved)) < 0.1


# ---- Sources and refusals ------------------------------------------------------------------------


def test_tasks_of_a_run_are_learned_but_none_near_an_evaluation_task(whole, tmp_path):
    run = tmp_path / "run"
    train(settings("static"), run, until=0)
    made, near = rows(run, "tasks.jsonl"), rows(run, "held_out.jsonl")[0]
    near["record"], moved = made[0]["record"], {"scenario": made[0]["scenario"], "id": "moved"}
    given = [*made, near, {**near, **moved}, {**made[0], "id": "again"}]
    (run / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    summary = warm_start(asked(source=str(run), held_out=0.5), tmp_path / "warm")
    assert summary["demonstrations"] + summary["held_out"] == len(made)
    assert summary["lost"] == {"evaluation_scenario": 1, "near_evaluation": 1, "duplicate": 1}
    assert [t["turns"] for t in rows(tmp_path / "warm", "tasks.jsonl")] == [t["turns"] for t in made]


def test_refusals_are_one_sentence(whole, tmp_path, monkeypatch):
    def refused(match, **changes):
        with pytest.raises(ValueError, match=match) as error:
            warm_start(asked(**changes), tmp_path / "warm")
        assert "\n" not in str(error.value)

    refused("config.warm_start.steps is 0: give the number of updates", steps=0)
    refused("config.warm_start.source is .*nowhere.* no file", source=str(tmp_path / "nowhere"))
    refused("eval_tasks is 2: it must be 0 where config.warm_start.held_out is 0", held_out=0.0, eval_tasks=2)
    long = {"rollout.max_length": 9000, "learner.pack_length": 9000}
    refused("max_length is 9000, and .* reads 8192 tokens .*: lower it", more=long)
    code = {"rollout.tool_call_format": "python"}
    refused("tool_call_format is 'python': environment bfcl offers no execute", more=code)
    refused("attention is 'flash', a kernel for a gpu, and this", more={"learner.attention": "flash"})
    made = rows(whole, "tasks.jsonl")
    (tmp_path / "other.jsonl").write_text(json.dumps({**made[0], "environment": "tau2"}) + "\n")
    refused("belongs to the environment 'tau2'", source=str(tmp_path / "other.jsonl"))
    assert not (tmp_path / "warm").exists()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        refused("is for one process, and these are 2: run python experiments/sft.py in one")
    long = {"name": "echo", "arguments": {"content": "word " * 100}}
    for row in made:
        row["turns"][0]["calls"] = [long, *row["turns"][0]["calls"]]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    why = r"too little to learn from: 0 of 12 tasks give a demonstration \(others: token_limit 12\)"
    refused(why, source=str(tmp_path / "long.jsonl"))


def test_the_user_is_told_what_has_no_effect_and_what_is_replaced(tmp_path):
    model = stored(tmp_path / "model", "float32")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    plain = asked(held_out=0.0, patience=9, more={"model": model, "learner.learning_rate": 1e-6})
    told = " ".join(notes(plain))
    assert (
        "config.warm_start.patience = 9 has no effect" in told and "has no chat template with tools" in told
    )
    assert "of its own" not in told and "LoRA's base" not in told
    adapted = configs.override(plain, {"learner.lora_rank": 2, "learner.dtype": "bfloat16"})
    assert f"config.model ({model}) are stored in float32, and LoRA's base is" in " ".join(notes(adapted))
    more = {"learner.learning_rate": 0.5, "learner.schedule": "cosine", "learner.decay_steps": 9}
    own = "a schedule and a loss of its own, not config.learner.{}."
    named = "decay_steps, config.learner.learning_rate, config.learner.schedule"
    assert own.format(named) in notes(configs.override(plain, more))[-1]


def test_a_mistyped_source_leaves_the_workdir_free(whole, tmp_path):
    with pytest.raises(ValueError, match="no file"):
        train(asked(source="nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a warm start, which stops on the way and learns no demonstration again."""
    workdir, config = tmp_path_factory.mktemp("warm") / "run", asked("coevolve", SHORT)
    with pytest.MonkeyPatch.context() as patch:
        # The run makes no held-out tasks; the warm start calls the function by a name of its own.
        patch.setattr(initial, "held_out_tasks", None)
        assert train(config, workdir, until=1) == {}
        patch.setattr(Supervised, "run", None)
        train(config, workdir)
    return workdir


@pytest.mark.nightly
def test_the_held_out_tasks_of_a_run_are_those_of_its_warm_start(run):
    """Where the policy explores, the one that has learned would make others, maybe near what it learned."""
    made = rows(run, "held_out.jsonl")
    assert made and made == rows(run / "warm_start", "held_out.jsonl")


@pytest.mark.nightly
def test_a_run_begins_as_one_from_the_written_policy(run, tmp_path):
    config = asked("coevolve", SHORT)
    warm_start(config, tmp_path / "warm")
    assert untimed(tmp_path / "warm") == untimed(run / "warm_start")
    after = {"warm_start.steps": 0, "model": str(tmp_path / "warm" / "policy")}
    train(configs.override(config, after), tmp_path / "run")
    want, got = comparable(tmp_path / "run"), comparable(run)
    told = got["summary"].pop("warm_start")
    assert told == json.loads((run / "warm_start" / "summary.json").read_text())
    models = {found["summary"]["versions"].pop("config.model") for found in (want, got)}
    assert len(models) == 2  # each names the folder that it began with
    for name in want:
        if name == "summary":
            own = ("config_digest", "notes")
            want[name], got[name] = ({k: v for k, v in x[name].items() if k not in own} for x in (want, got))
        assert got[name] == want[name], name


@pytest.mark.nightly
def test_cells_of_a_comparison_share_the_warm_start_of_their_start(tmp_path, monkeypatch):
    config, cells = asked("coevolve", SHORT), [Cell("random", 0), Cell("static", 0)]
    start = cells[0].start(tmp_path)
    assert cells[1].start(tmp_path) == start
    train(start_config(config, cells[0]), start, until=0)

    def no_link(source, target):
        raise OSError

    monkeypatch.setattr(Supervised, "run", None)  # nothing is learned again
    for cell, links in zip(cells, (True, False)):
        if not links:
            monkeypatch.setattr(os, "link", no_link)
        prepare(tmp_path, config, cell)
        mine, theirs = (
            (w / "warm_start" / "policy" / "model.safetensors") for w in (cell.workdir(tmp_path), start)
        )
        assert mine.read_bytes() == theirs.read_bytes() and mine.samefile(theirs) == links
    assert train(configs.of_run(cells[0].workdir(tmp_path)), cells[0].workdir(tmp_path))["steps"] == 2
    with pytest.raises(ValueError, match="config.warm_start.steps cannot differ in a fork"):
        workdirs.fork(start, 0, tmp_path / "other", {"warm_start.steps": 3})


# ---- A model as explorer -------------------------------------------------------------------------


def explored_by(server, **changes):
    """A small config whose explorer is the server's model, before and after the warm start."""
    more = {"explorer.name": "llm", "explorer.base_url": server.url, "explorer.cache": "", **changes}
    small = {"data.initial_tasks": 4, "evaluation.tasks": 2, "evolution.rounds": 1, "evolution.steps": 6}
    return asked("coevolve", {**small, **more}, steps=1, tasks=4, batch=2, held_out=0.0)


def test_a_run_goes_on_with_the_model_of_its_warm_start_and_keeps_its_questions(tmp_path):
    run = tmp_path / "run"
    with OpenAIServer() as server:
        config = explored_by(server)
        initial_model(config, run)
        assert workdirs.recorded_model(run)["model"] == "scripted-1"
        server.serves, before = {"weak": ""}, len(server.seen)
        with pytest.raises(ValueError, match="began with the answers of 'scripted-1'"):
            train(config, run, until=0)
        assert len(server.seen) == before > 0
        server.serves = SERVES
        train(config, run, until=0)
        assert len(server.seen) > before
        told = [(m[0]["content"], m[1]["content"]) for m in (body["messages"] for body in server.seen)]
    packed = rows(run, "llm_calls.jsonl")
    kept = [unpacked(row, all_lines(packed)) for row in packed]
    assert sorted((row["system"], row["user"]) for row in kept) == sorted(told)
    assert packed[:before] == rows(run / "warm_start", "llm_calls.jsonl")
    (paid,) = rows(run, "costs.jsonl")
    assert paid["step"] is None and paid["costs"]["llm_tokens"] == 120 * len(told)


def test_a_budget_is_for_the_warm_start_and_what_comes_after_it(policy, tmp_path):
    run = tmp_path / "run"
    (run / "warm_start").mkdir(parents=True)
    with OpenAIServer() as server, build.env_pool(asked()) as env_pool:
        make_tasks(explored_by(server), policy, None, env_pool, run / "warm_start", run)
        before = len(server.seen)
        c = explored_by(server, **{"explorer.budget_tokens": 120 * before})
        roles = build.explorer(c, policy, recorded=workdirs.recorded_model(run))
        agent = build.agent(c, policy, ReferenceEngine(()), env_pool)
        synthesizer = lambda guard, fits=agent.fits: build.synthesizer(c, roles, env_pool, guard, fits)
        with pytest.raises(ValueError, match="budget"):
            initial.bootstrap(c, synthesizer, agent, run)
        agent.close()
        assert len(server.seen) == before and roles.costs["llm_tokens"] == 120 * before
        (run / "warm_start" / "tasks.jsonl").unlink()  # as if it had been killed before its end
        server.serves = {"weak": ""}
        with pytest.raises(ValueError, match="began with the answers of 'scripted-1'"):
            make_tasks(explored_by(server), policy, None, env_pool, run / "warm_start", run)
