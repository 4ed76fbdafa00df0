"""A run's start and its end: summary.json and ledger.json, recounted from its raw files.

The runs are whole ones of `train`, with the world and the policy of loop_fakes.py.
"""

import dataclasses
import json
import re
import shutil
import sys
from collections import Counter, defaultdict
from statistics import fmean

import pytest

from coevolve_jax import build, seeding
from coevolve_jax import config as configs
from coevolve_jax.config import override
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.loop import initial as begin
from coevolve_jax.loop.evaluate import tally
from coevolve_jax.loop.state import RunState
from coevolve_jax.records import checkpoint, rollouts
from coevolve_jax.records.workdir import claimed
from coevolve_jax.strategies.base import StepReport
from tests.loop.test_loop import BASE, SMALL, rows, session
from tests.records.test_rollouts import assert_same
from tests.support import loop_fakes
from tests.support.families import lamps
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

WEAK = ("look",)
SEED = 3
CHANGES = {
    **SMALL, "steps": 6, "evolution.every": 2, "rollout.tasks_per_step": 2, "rollout.group_size": 3,
    "evaluation.tasks": 4, "evaluation.balanced_tasks": 3,
    "evaluation.balanced_candidates": 9, "evaluation.every": 2, "evaluation.num_rollouts": 2,
    "data.min_calls": 1, "data.leak_threshold": 0.99, "data.leak_call_threshold": 0.0,
    "logging.trajectories_every": 4, "logging.trajectories": 2,
    "environment.name": "tests.support.families.lamps", "environment.eval_split": "test",
}  # fmt: skip


def settings(testbed=True, **changes):
    config = override(BASE, {**CHANGES, **changes})
    if testbed:
        config.testbed = {"weak_tools": WEAK, "least": 1, "most": 2, "candidates": 20}
    return config


class Paid(loop_fakes.Lamplighter):
    """A role whose actions have costs and are asked of a model."""

    spent, asked = Counter(), []  # over all instances

    def roles(self):
        self.costs, self.llm_calls = Counter(), []
        return super().roles()._replace(costs=self.costs, llm_calls=self.llm_calls)

    def act(self, episodes):
        user = f"Some lamps.\nQuestion {len(self.asked)}\n"
        call = LLMCall("explore", {"episodes": len(episodes)}, "You explore.\nSome lamps.", user)
        for llm_calls in (self.llm_calls, self.asked):
            llm_calls.append(dataclasses.replace(call, answers=["set a lamp"], tokens_in=2, tokens_out=3))
        for costs in (self.costs, self.spent):
            costs.update({"llm_requests/explore": 1, "llm_tokens": len(episodes), "llm_tokens_in/explore": 2})
            costs.update({"money": 0.25, "money/explore": 0.25, "llm_tokens_out/explore": 3})
        return super().act(episodes)


class Counting(loop_fakes.Engine):
    """Counts its work, like the engines of the package."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.counts = Counter()

    async def generate(self, requests):
        self.counts.update(
            {"prefill_tokens": sum(len(r.ids) for r in requests), "cached_tokens": 2, "queued": len(requests)}
        )
        self.counts.update({"decode_tokens": 5, "queue_seconds": 0.5 * len(requests)})
        return await super().generate(requests)


def told(folder, monkeypatch, config, stops=(None,)):
    """Runs in several sessions. Returns the workdir and, by step, (groups, samples)."""
    steps, Paid.spent, Paid.asked = {}, Counter(), []
    real = build.strategy

    def strategy(*arguments):
        made, learned = real(*arguments), []
        compute_advantages, observe = made.compute_advantages, made.observe

        def credited(groups):
            learned[:] = compute_advantages(groups)
            return list(learned)

        def observed(step, groups):
            steps[step] = groups, list(learned)
            return observe(step, groups)

        made.compute_advantages, made.observe = credited, observed
        return made

    with monkeypatch.context() as m:
        m.setattr(build, "strategy", strategy)
        m.setattr(loop_fakes, "Lamplighter", Paid)
        m.setattr(loop_fakes, "Engine", Counting)
        for until in stops:
            _, end = session(config, folder, batches=True, soon=True, until=until)
            assert not isinstance(end, BaseException), end
    return folder, steps


@pytest.mark.parametrize("stops", [(None,), (0, 2, None)])
def test_the_ledger_begins_with_what_the_explorer_of_a_warm_start_cost(tmp_path, monkeypatch, stops):
    folder, config = tmp_path / "run", settings(seed=SEED, steps=4)
    warm = {"llm_requests/explore": 5, "llm_tokens": 70, "money": 1.5}
    with claimed(folder, config):
        (folder / "warm_start").mkdir()
    (folder / "warm_start" / "made.json").write_text(json.dumps({"refused": {}, "costs": warm}))
    told(folder, monkeypatch, config, stops)
    summary, ledger = load(folder / "summary.json"), load(folder / "ledger.json")
    paid = dict(Paid.spent + Counter(warm))
    assert summary["explorer"] == summed(row["costs"] for row in rows(folder / "costs.jsonl")) == paid
    assert (ledger["llm_tokens"], ledger["money"]) == (paid["llm_tokens"], paid["money"])


def load(path):
    return json.loads(path.read_text())


def summed(rows):
    total = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def evolution_of(explored):
    """The counts of explorations.jsonl."""
    proposals = [p for row in explored for p in row["proposals"]]
    return {
        "contexts": len(explored),
        "environment_steps": sum(len(row["triplets"]) for row in explored),
        "proposed": len(proposals),
        "discarded": sum(p["verdict"] == "discard" for p in proposals),
        "added": sum(p["task"] is not None for p in proposals),
        "refused": dict(Counter(p["reason"] for p in proposals if p["task"] is None)),
    }


STOPS = {"whole": (None,), "stopped": (0, 3, None)}


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("strategy", ["coevolve", "random"])
def test_the_summary_and_the_ledger_are_those_of_the_files(tmp_path, monkeypatch, strategy, stops):
    config = settings(**{"strategy.name": strategy, "seed": SEED})
    folder, steps = told(tmp_path / "run", monkeypatch, config, STOPS[stops])
    summary, ledger = load(folder / "summary.json"), load(folder / "ledger.json")
    metrics, tasks, evaluations, explored, costs = (
        rows(folder / f"{name}.jsonl")
        for name in ("metrics", "tasks", "evaluations", "explorations", "costs")
    )
    by_set = defaultdict(list)
    for row in evaluations:
        by_set[row["set"]].append(row)
    assert {name: [row["step"] for row in found] for name, found in by_set.items()} == {
        "iid": [0, 2, 4, 6], "balanced": [0, 2, 4, 6],
    }  # fmt: skip
    before, after = by_set["iid"][0], by_set["iid"][-1]
    assert summary["held_out"] == {"before": before, "after": after} and "greedy_success" in after
    assert summary["held_out_success_before"] == before["success"]
    assert summary["held_out_success_after"] == after["success"]
    assert summary["held_out_tasks"] == 4 == len(before["by_task"])
    assert summary["balanced"] == {"before": by_set["balanced"][0], "after": by_set["balanced"][-1]}
    assert summary["held_out_split"] == "test" and summary["steps"] == len(metrics) == 6
    assert (summary["seed"], summary["strategy"]) == (SEED, strategy)
    assert summary["config_digest"] == configs.digest(config)

    # Tasks
    born = Counter(task["lineage"]["kind"] for task in tasks)
    trained = {
        t.task_id for groups, _ in steps.values() for g in groups for t in g.trajectories if t.outcome.valid
    }
    visits = Counter(
        id for groups, _ in steps.values() for id in {t.task_id for g in groups for t in g.valid}
    )
    assert {task["id"]: task["record"]["trained"] for task in tasks} == {
        t["id"]: visits[t["id"]] for t in tasks
    }
    found, kind = summary["tasks"], "signal" if strategy == "coevolve" else "random"
    assert (found["initial"], found["final"]) == (born["initial"], len(tasks)) == (6, 6 + born[kind])
    assert found["never_trained"] == len(tasks) - len(trained)

    # Recounts evolution from explorations.jsonl, but for counts that only its own rows hold
    evolutions = [row["evolution"] for row in metrics if row["evolution"]]
    first, later = (
        [e for e in explored if e["context"]["id"].startswith("initial-") == of] for of in (True, False)
    )
    for made, told_of in ((ledger["initial"], first), (ledger["evolution"], later)):
        wanted = evolution_of(told_of)
        if made is ledger["initial"]:  # the test bed takes some of the candidates
            assert wanted.pop("added") == 20 and made["added"] == 6
        refused = {reason: n for reason, n in made["refused"].items() if reason != "pool_full"}
        assert {**{key: made[key] for key in wanted}, "refused": refused} == wanted
        assert made["accepted"] + made["retained"] + made["discarded"] == made["proposed"]
        assert made["pass_rate"] == (made["accepted"] + made["retained"]) / made["proposed"]
    for key in ("proposed", "accepted", "retained", "discarded", "added", "contexts"):
        assert ledger["evolution"][key] == sum(e[key] for e in evolutions)
        assert found.get(key, ledger["evolution"][key]) == ledger["evolution"][key]
    assert found["refused"] == ledger["evolution"]["refused"] == summed(e["refused"] for e in evolutions)
    # If two of these were equal, a swap could not be seen: then choose another seed.
    different = (
        (before["success"], after["success"], after["greedy_success"]),
        (found["never_trained"], len(trained)),
        (found["accepted"], found["retained"], found["proposed"], 0),
        (len(before["by_task"]), len(before["by_calls"])),
    )
    assert all(len(set(numbers)) == len(numbers) for numbers in different), different

    # Signals, costs, time
    assert summary["signals"] == summed(row["signals"] for row in metrics)
    if strategy == "coevolve":
        shown = Counter(row["kind"] for row in rows(folder / "signals.jsonl"))
        assert {k: n for k, n in summary["signals"].items() if n} == shown
    learned = [s for _, samples in steps.values() for s in samples]
    rolled = [t for groups, _ in steps.values() for g in groups for t in g.trajectories]
    booked = ledger["costs"]
    assert booked["rollouts/policy"] == len(rolled) == 6 * 2 * 3
    assert booked["sampled_tokens/policy"] == sum(t.mask.tolist().count(True) for t in rolled)
    assert booked["learned_trajectories"] == len(learned)
    assert booked["learned_tokens"] == sum(s.trajectory.mask.tolist().count(True) for s in learned)
    assert booked[f"environment_steps/{kind}"] == ledger["evolution"]["environment_steps"]
    assert booked[f"tasks_proposed/{kind}"] == ledger["evolution"]["proposed"]
    assert booked[f"tasks_added/{kind}"] == born[kind] == ledger["evolution"]["added"] > 0
    if strategy == "coevolve":
        assert booked["reflections"] == len({row["context"]["id"] for row in later})
    paid = summed(row["costs"] for row in costs)
    assert summary["explorer"] == paid == dict(Paid.spent)
    assert {k.removeprefix("explorer/"): n for k, n in booked.items() if k.startswith("explorer/")} == paid
    assert (ledger["llm_tokens"], ledger["money"]) == (paid["llm_tokens"], paid["money"]) and paid["money"]
    assert [row["step"] for row in costs] == [None, *(m["step"] for m in metrics if m["evolution"])]
    llm_calls, lines = rows(folder / "llm_calls.jsonl"), []
    for row in llm_calls:
        lines += row.pop("lines")
        row |= {key: "\n".join(lines[n] for n in row[key]) for key in ("system", "user")}
    assert llm_calls == [dataclasses.asdict(call) for call in Paid.asked] and len(lines) == len({*lines})
    seconds = summary["seconds"]
    for phase in ("rollout", "update", "push", "evolution"):
        assert seconds[phase] == pytest.approx(sum(row["seconds"][phase] for row in metrics))
    assert seconds.keys() == {"rollout", "update", "push", "evolution", "evaluation", "checkpoint", "other"}
    assert summary["evolution_share"] == pytest.approx(seconds["evolution"] / sum(seconds.values()))
    assert ledger["seconds"] == seconds["evolution"]

    # The engine's own counts
    for name in ("prefill_tokens", "decode_tokens"):
        assert (
            summary["serving"][name] == booked[f"serving/{name}"] == sum(m["serving"][name] for m in metrics)
        )
    assert summary["serving"].keys() == {"prefill_tokens", "decode_tokens", "queue_seconds"}
    assert summary["serving"]["queue_seconds"] == 0.5
    assert not any("cached" in name for name in summary["serving"]) and booked["serving/cached_tokens"]

    # Rows of metrics that do not come from the rollouts alone (tests/loop/test_step_numbers.py)
    for row in metrics:
        groups, samples = steps[row["step"]]
        taught = {s.trajectory.task_id for s in samples if any(s.advantages)}
        assert row["groups"] == {"rolled_out": len(groups), "learned_from": len(taught)}
        assert len(samples) > len(taught) or not taught
        made_until = sum(e["step"] <= row["step"] for e in (t["lineage"] for t in tasks) if e["kind"] == kind)
        assert row["tasks"] == 6 + made_until
    shown = sorted(path.name for path in (folder / "trajectories").iterdir())
    assert shown == [f"step_{step:05d}.jsonl" for step in (0, 4, 5)]
    most, cut = CHANGES["logging.trajectories"], []
    for step in (0, 4, 5):
        ends = {(t.task_id, t.outcome.success) for g in steps[step][0] for t in g.trajectories}
        found = rows(folder / "trajectories" / f"step_{step:05d}.jsonl")
        assert len(found) == min(most, len(ends)) and {(r["task_id"], r["success"]) for r in found} <= ends
        cut.append(len(ends) > most)
    assert any(cut)


def test_a_summary_of_a_run_without_a_balanced_set_or_an_explorer_that_is_paid(tmp_path):
    config = settings(testbed=False, **{"evaluation.balanced_tasks": 0, "strategy.name": "static"})
    session(config, tmp_path / "run", batches=True, soon=True)
    summary, ledger = load(tmp_path / "run" / "summary.json"), load(tmp_path / "run" / "ledger.json")
    assert summary["balanced"] is None and not {"explorer", "serving"} & summary.keys()
    assert (ledger["llm_tokens"], ledger["money"]) == (0, 0)
    assert ledger["initial"]["added"] == summary["tasks"]["initial"] == summary["tasks"]["final"] == 6
    assert ledger["evolution"]["pass_rate"] is None and summary["tasks"]["proposed"] == 0
    assert not (tmp_path / "run" / "costs.jsonl").exists()
    assert all(row["success"] == fmean_of(row) for row in rows(tmp_path / "run" / "evaluations.jsonl"))


@pytest.mark.parametrize("strategy", ["static", "coevolve"])
def test_a_summary_says_what_had_no_effect_and_which_model_answered(tmp_path, strategy):
    config = settings(testbed=False, **{"strategy.name": strategy, "data.min_evolved_share": 0.3})
    folder = tmp_path / "run"
    session(config, folder, batches=True, soon=True, until=2)
    (folder / "explorer.json").write_text(json.dumps({"model": "a-model", "root": "its/weights"}))
    session(config, folder, batches=True, soon=True)
    summary = load(folder / "summary.json")
    why = "has no effect: the strategy static does not let the training set grow."
    noted = f"config.data.min_evolved_share = 0.3 {why}" in summary["notes"]
    assert noted == (strategy == "static") and summary["explorer_model"] == "a-model"
    assert ("signal" in {t["lineage"]["kind"] for t in rows(folder / "tasks.jsonl")}) == (not noted)


def test_a_state_comes_back_from_its_checkpoint_also_between_an_update_and_its_evolution(tmp_path):
    session(settings(seed=SEED), tmp_path / "run", batches=True, soon=True, until=3)
    path = tmp_path / "run" / "checkpoints" / checkpoint.name(3) / "state.json"
    saved = {
        key: value for key, value in load(path)["state"].items() if key not in ("strategy", "sizes", "digest")
    }
    assert saved["ledger"] and saved["signals"] and saved["evaluations"] and saved["seconds"]
    between = {"row": {"step": 3, "seconds": {"rollout": 2.0}}, "signals": [], "shown": None}
    for pending in ({}, {"pending": between}):
        state = RunState.from_json({**saved, **pending}, None, build.family(settings()).task_key)
        assert json.loads(json.dumps(state.to_json())) == {**saved, **pending}
        assert (state.step, state.learned, state.pending) == (3, 3 + len(pending), pending.get("pending"))


def test_a_run_whose_checkpoints_are_not_there_does_not_begin_again(tmp_path):
    """Also not with those of another run; a fork may have another config than its checkpoint."""
    go = lambda folder, until, **changes: session(settings(**changes), folder, True, soon=True, until=until)[
        1
    ]
    workdir, elsewhere = tmp_path / "run", {"checkpoint.folder": str(tmp_path / "elsewhere")}
    saved, every = {"checkpoint.folder": str(tmp_path / "saved")}, {"checkpoint.every": 2}
    assert go(workdir, 3, **saved, **every) == {}
    before = (workdir / "metrics.jsonl").read_bytes()
    named = str(tmp_path / "elsewhere")
    begins = f"config.checkpoint.folder is {named!r} and holds no checkpoint of this run, "
    assert str(go(workdir, None, **elsewhere, **every)) == (
        f"{begins}whose checkpoints are in {tmp_path / 'saved'}: name that folder, or move them first."
    )
    assert configs.of_run(workdir).checkpoint.folder == saved["checkpoint.folder"]
    (tmp_path / "saved").rename(tmp_path / "aside")
    assert str(go(workdir, None, **elsewhere, **every)) == (
        f"{begins}which has done 3 steps: name the folder it had, or choose another --workdir to begin again."
    )
    (tmp_path / "aside").rename(tmp_path / "saved")
    assert "holds a checkpoint of a run of another config" in str(go(tmp_path / "new", None, seed=9, **saved))
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert go(workdir, None, **saved, **every)["steps"] == 6
    (tmp_path / "saved").rename(tmp_path / "aside")
    assert "which has done 6 steps" in str(go(workdir, None, **elsewhere, **every))
    (tmp_path / "killed").mkdir()  # before the first checkpoint: it has lost nothing that was saved
    assert go(tmp_path / "killed", 2, **every) == {}
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    assert go(tmp_path / "killed", 3, **every) == {}
    first, last = sorted((tmp_path / "killed" / "checkpoints").iterdir())
    (first / "manifest.json").unlink()  # while the first checkpoint was being written, beside the next step
    shutil.rmtree(last)
    assert len((tmp_path / "killed" / "metrics.jsonl").read_bytes().splitlines()) == 3
    assert go(tmp_path / "killed", None, **every)["steps"] == 6


def test_a_run_does_not_go_on_with_other_files_of_its_model(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny_qwen3", model)
    config, workdir = settings(model=str(model), steps=3), tmp_path / "run"
    go = lambda until: session(config, workdir, batches=True, soon=True, until=until)[1]
    assert go(1) == {}
    weights = model / "model.safetensors"
    theirs = weights.read_bytes()
    weights.write_bytes(theirs[:-1] + bytes([theirs[-1] ^ 1]))
    assert str(go(2)) == (
        f"{model} (config.model) has another content than when this run began: restore it, or go on in a "
        "fork, which takes it as it is."
    )
    assert len(rows(workdir / "metrics.jsonl")) == 1
    weights.write_bytes(theirs)
    assert go(2) == {} and len(rows(workdir / "metrics.jsonl")) == 2
    path = workdir / "checkpoints" / checkpoint.name(2) / "state.json"
    saved = load(path)
    assert saved["state"].pop(checkpoint.INPUTS).keys() == {"config.model", "config.environment.name"}
    path.write_text(json.dumps(saved))  # as runs wrote it that kept no digests
    weights.write_bytes(theirs[:-1] + bytes([theirs[-1] ^ 1]))
    assert go(None)["steps"] == 3


def test_a_count_that_a_strategy_does_not_tell_in_every_step_stays(tmp_path, monkeypatch):
    real = build.strategy

    def strategy(*arguments):
        made = real(*arguments)
        made.observe = lambda step, groups: StepReport({"odd": step} if step % 2 else {"even": 1})
        return made

    monkeypatch.setattr(build, "strategy", strategy)
    config = settings(testbed=False, **{"strategy.name": "static", "seed": SEED})
    _, end = session(config, tmp_path / "run", batches=True, soon=True, until=5)
    _, end = session(config, tmp_path / "run", batches=True, soon=True)
    assert end["signals"] == {"even": 3, "odd": 1 + 3 + 5}


class Board:
    """A tracker."""

    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, step, values):
        self.logged.append((step, values))

    def close(self):
        self.closed = True


def test_trackers_get_the_numbers_of_each_step_and_are_closed(tmp_path, monkeypatch):
    boards = []
    monkeypatch.setattr(build, "trackers", lambda *_: boards.append(Board()) or boards[-1:])
    for until in (2, None):
        session(settings(seed=SEED), tmp_path / "run", batches=True, soon=True, until=until)
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [[step for step, _ in board.logged] for board in boards] == [[0, 1], [2, 3, 4, 5]]
    for row, (_, values) in zip(metrics, boards[0].logged + boards[1].logged, strict=True):
        assert values["tasks"] == row["tasks"] and values["success"] == row["success"]
        assert values["seconds/update"] == row["seconds"]["update"]
        assert values["groups/learned_from"] == row["groups"]["learned_from"]
    assert all(board.closed for board in boards)


def test_each_step_has_a_line_on_the_terminal_after_a_resume_too(tmp_path, capsys):
    told = []
    for until in (2, None):
        session(settings(seed=SEED), tmp_path / "run", batches=True, soon=True, until=until)
        shown = [line.rpartition("\r")[2] for line in capsys.readouterr().err.split("\n")]
        told += [line for line in shown if ": reward" in line]  # a warning of its health names rewards too
        assert not any(" tasks:" in line for line in shown)  # the bars of exploration are gone
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    wanted = [
        f"step {n}/6: reward {row['reward']:.2f}, success {row['success']:.0%}, "
        f"signals {sum(row['signals'].values())}, |D| {row['tasks']}, "
        for n, row in enumerate(metrics, 1)
    ]
    assert [line[: len(start)] for line, start in zip(told, wanted, strict=True)] == wanted


def fmean_of(row):
    outcomes = [x for solved, tried in row["by_task"].values() for x in [1] * solved + [0] * (tried - solved)]
    return pytest.approx(fmean(outcomes))


# The start of a run


def begun(folder, config):
    _, end = session(config, folder, batches=True, soon=True, until=0)
    assert end == {}, end
    held_out = rows(folder / "held_out.jsonl")
    own = {kind: [t for t in held_out if t["lineage"]["kind"] == kind] for kind in ("held_out", "balanced")}
    return own["held_out"], own["balanced"], rows(folder / "tasks.jsonl")


def test_the_evaluation_seed_alone_draws_the_held_out_sets_and_the_runs_seed_what_is_trained_on(tmp_path):
    bare = {"data.leak_threshold": 0.99999}
    made = {
        name: begun(tmp_path / name, settings(**{**bare, "seed": seed, "evaluation.seed": own}))
        for name, seed, own in (("one", 2, 50), ("same", 3, 50), ("other", 2, 51))
    }
    one, same, other = (made[name] for name in ("one", "same", "other"))
    assert (len(one[0]), len(one[1]), len(one[2])) == (4, 3, 6)
    assert one[0] == same[0] and one[1] == same[1] and one[2] != same[2]
    assert one[0] != other[0] and one[1] != other[1]
    fair = [lamps.scenario(n) for n in (4, 5)]  # the other evaluation scenarios start like training ones
    assert all(t["scenario"] in fair for t in one[0] + one[1])
    assert all(t["scenario"] not in fair for t in one[2])
    called = Counter(
        name for t in one[2] for name in {c["name"] for turn in t["turns"] for c in turn["calls"]}
    )
    assert all(1 <= called[name] <= 2 for name in WEAK)


def test_the_balanced_set_is_chosen_from_all_its_candidates_by_a_stream_of_its_own(tmp_path, monkeypatch):
    asked = []
    real = begin.choice.balanced

    def balanced(candidates, count, rng):
        asked.append((candidates, count, rng.bit_generator.state))
        return real(candidates, count, rng)

    monkeypatch.setattr(begin.choice, "balanced", balanced)
    _, chosen, _ = begun(tmp_path / "run", settings(**{"seed": 2, "evaluation.seed": 50}))
    ((candidates, count, state),) = asked
    assert (len(candidates), count) == (9, 3) and {t["id"] for t in chosen} <= {t.id for t in candidates}
    assert state == seeding.rng_for(50, "balanced choice").bit_generator.state


OF_EVALUATION = {"held_out", "balanced", "balanced choice", "evaluation"}
OF_TRAINING = {"initial", "testbed", "sample", "rollout", "evolve"}


@pytest.mark.parametrize("strategy", ["coevolve", "random"])
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_no_two_purposes_of_a_run_draw_from_one_stream(tmp_path, monkeypatch, strategy, seed):
    """It holds even if all seeds are equal. Only evaluations share draws, so that they compare."""
    drawn = []

    def rng_for(seed, purpose, step=0, *again):
        drawn.append((seed, purpose, step, *again))
        return seeding.rng_for(seed, purpose, step, *again)

    for name, module in list(sys.modules.items()):
        ours = name.startswith("coevolve_jax.") and module is not seeding
        if ours and getattr(module, "rng_for", None) is seeding.rng_for:
            monkeypatch.setattr(module, "rng_for", rng_for)
    own = {"learner.dynamic_sampling": 2, "strategy.name": strategy}
    config = settings(**{**own, "seed": SEED, "evaluation.seed": seed})
    _, end = session(config, tmp_path / "run", batches=True, soon=True)
    assert isinstance(end, dict), end
    times = Counter(drawn)
    assert {key for key, n in times.items() if n > 1} == {(seed, "evaluation", 0)}
    wanted = {(seed, purpose) for purpose in OF_EVALUATION} | {(SEED, purpose) for purpose in OF_TRAINING}
    assert {key[:2] for key in drawn} == wanted
    states = {tuple(key): seeding.rng_for(*key).bit_generator.state["state"]["state"] for key in times}
    assert len(set(states.values())) == len(times)


def test_what_a_run_begins_with_is_explored_by_the_roles_that_are_for_it(tmp_path, monkeypatch):
    class Two(loop_fakes.Lamplighter):
        def roles(self):
            roles = super().roles()
            return roles._replace(initial=roles._replace(name="the first"))

    monkeypatch.setattr(loop_fakes, "Lamplighter", Two)
    session(settings(seed=SEED), tmp_path / "run", batches=True, soon=True)
    tasks = [*rows(tmp_path / "run" / "held_out.jsonl"), *rows(tmp_path / "run" / "tasks.jsonl")]
    made_by = {(t["lineage"]["kind"], t["lineage"]["explorer"]) for t in tasks}
    first = {(kind, "the first") for kind in ("held_out", "balanced", "initial")}
    assert made_by == {*first, ("signal", "lamplighter")}


def given(tasks):
    """Writes the file of tasks for config.data.initial_file."""
    named = {"environment": CHANGES["environment.name"]}
    return "".join(json.dumps({**task, **named}) + "\n" for task in tasks)


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_of_as_many_tasks_as_a_batch_has_is_enough(tmp_path, count):
    _, _, made = begun(tmp_path / "one", settings(testbed=False, seed=SEED))
    path = tmp_path / "given.jsonl"
    path.write_text(given(made[:count]))
    config = settings(testbed=False, **{"data.initial_file": str(path), "seed": SEED})
    _, end = session(config, tmp_path / "run", batches=True, soon=True, until=0)
    if count == 1:
        assert isinstance(end, ValueError) and "gives 1 good tasks of 1" in str(end)
    else:
        assert end == {} and len(rows(tmp_path / "run" / "tasks.jsonl")) == 2


def test_a_held_out_task_is_nothing_to_train_on(tmp_path):
    """Tasks from a file may not lie in scenarios of the evaluation, as explored ones cannot."""
    held_out, balanced, made = begun(tmp_path / "one", settings(testbed=False, seed=SEED))
    path = tmp_path / "given.jsonl"
    taken = [{**task, "record": made[0]["record"]} for task in (held_out[0], balanced[0])]
    path.write_text(given([*made, *taken]))
    config = settings(testbed=False, **{"data.initial_file": str(path), "seed": SEED})
    _, end = session(config, tmp_path / "run", batches=True, soon=True, until=0)
    assert end == {} and len(rows(tmp_path / "run" / "tasks.jsonl")) == len(made)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    initial = load(saved / "state.json")["state"]["initial"]
    assert (initial["proposed"], initial["added"]) == (len(made) + 2, len(made))
    assert initial["refused"] == {"evaluation_scenario": 2}


def test_a_run_does_not_begin_with_fewer_tasks_than_it_is_to_have(tmp_path):
    config = settings(testbed=False, **{"data.max_calls": 1, "data.initial_tasks": 300})
    _, end = session(config, tmp_path / "run", batches=True, soon=True, until=0)
    assert isinstance(end, ValueError) and re.match(r"Unguided exploration found \d+ of 300 ", str(end))
    assert not (tmp_path / "run" / "tasks.jsonl").exists()


# Whole groups

WHOLE = {"logging.rollouts_every": 2, "logging.evaluations": True, "strategy.name": "coevolve"}


def test_whole_groups_are_kept_and_are_those_of_the_loop(tmp_path, monkeypatch):
    folder, steps = told(tmp_path / "run", monkeypatch, settings(**WHOLE))
    assert rollouts.steps(folder, rollouts.ROLLOUTS) == [0, 2, 4]
    used = []
    for step in (0, 2, 4):
        groups, samples = steps[step]
        assert_same(rollouts.read_rollouts(folder, step), list(groups))
        learned = {id(s.trajectory): s.advantages[0] for s in samples}
        used += (wanted := [[learned.get(id(t)) for t in g.trajectories] for g in groups])
        assert rollouts.read_advantages(folder, step) == wanted
    assert any(any(own) for own in used)
    assert rollouts.steps(folder, rollouts.EVALUATIONS) == [0, 2, 4, 6]
    for row in rows(folder / "evaluations.jsonl"):
        found = rollouts.read_evaluation(folder, row["step"])
        assert tally(found[row["set"]], 2, 1.0).by_task == row["by_task"]
        assert ("greedy" in found) == (row["step"] in (0, 6))


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95])
def test_a_killed_run_leaves_the_same_groups(tmp_path, share):
    config, files = settings(**WHOLE, **{"checkpoint.every": 3}), {}
    events, _ = session(config, tmp_path / "whole", True, True)
    session(config, tmp_path / "killed", True, True, kill_at=int(share * len(events)))
    session(config, tmp_path / "killed", True, True)
    for name in ("whole", "killed"):
        files[name] = {
            path.relative_to(tmp_path / name): path.read_bytes()
            for folder in (rollouts.ROLLOUTS, rollouts.EVALUATIONS)
            for path in (tmp_path / name / folder).iterdir()
        }
    assert files["killed"] == files["whole"] and len(files["whole"]) == 2 * 3 + 4


def test_without_their_keys_no_groups_are_kept(tmp_path):
    session(settings(), tmp_path, True, True)
    assert not {path.name for path in tmp_path.iterdir()} & {rollouts.ROLLOUTS, rollouts.EVALUATIONS}
