"""Strategies: the suite on each, faults that it must catch, and one with a memory that runs for real."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.comparison.consistency import check_run
from coevolve_jax.config import load_file, override, strategy
from coevolve_jax.strategies.blame import tool_weights
from coevolve_jax.synthesis.signals import task_scores
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, MadeUpRoll, made_up_task
from coevolve_jax.testing.strategy import check_order, check_strategy
from coevolve_jax.train import train
from coevolve_jax.types import QUERY
from tests.support.paths import ROOT
from tests.support.strategies import failing, faulty

pytestmark = pytest.mark.slow

OURS = (
    "coevolve",
    "random",
    "static",
    "blame",
    "oracle",
    "even",
    "weakest",
    "random_dev",
    "frontier",
    "panel",
)
DRAFTING = (
    "frontier", "agent0", "agent_world", "dr_zero", "seif", "webrl", "ttcs", "socratic", "infuser", "soar",
)  # fmt: skip
METHODS = (  # of the literature
    "sec", "eva", "webrl", "agent_world", "et_agent", "middo", "seal", "agent0",
    "dr_zero", "seif", "step_credit", "infuser", "socratic", "soar",
    "slea_rl", "evolver", "evolving_rl", "sage", "ttcs",
)  # fmt: skip
EXAMPLES = ("unsolved", "failing")  # the examples of docs/guides/add_strategy.md
MEMORY = "tests.support.strategies.memory"
SMALL = {
    "steps": 4, "data.initial_tasks": 8, "rollout.tasks_per_step": 2, "rollout.group_size": 4,
    "engine.max_concurrency": 8, "learner.rows_per_microbatch": 2, "evolution.every": 2,
    "evolution.freeze_last_steps": 1, "evolution.tasks": 3,
    "evolution.contexts": 4, "evaluation.tasks": 4, "evaluation.num_rollouts": 1, "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "environment.workers": 1, "signals.rare_percent": 20.0, "logging.trajectories_every": 1,
}  # fmt: skip
LOSSY = """
from coevolve_jax.strategies import {name} as whole

DEFAULTS, READS, NEEDS = whole.DEFAULTS, whole.READS, getattr(whole, "NEEDS", ())


class Lossy(whole.make):
    def to_json(self):
        return {{**super().to_json(), **{lost}}}


make = Lossy
"""


def settings(name: str, **changes):
    config = load_file(ROOT / "configs" / "bfcl_tiny.py", f"strategy={name}")
    return override(config, {**SMALL, "model": str(ROOT / "models" / "tiny_qwen3"), **changes})


def asked(name: str) -> dict[str, int]:
    """Held-out queries, for a strategy that learns from them."""
    return {"evaluation.queries": 8} if name == "ttcs" else {}


@pytest.mark.parametrize("learner", [{}, {"dynamic_sampling": 2, "group_filter": True}])
@pytest.mark.parametrize(
    "name", [*OURS, *METHODS, MEMORY, *(f"tests.support.strategies.{name}" for name in EXAMPLES)]
)
def test_every_strategy_passes_the_suite(name, learner):
    given = {f"learner.{k}": v for k, v in learner.items()}
    if name in ("sage", "evolving_rl"):  # they roll each batch once, and refuse it
        given |= {"learner.dynamic_sampling": 0}
    check_strategy(name, settings(name, **asked(name), **given), alone=False)


def test_every_strategy_does_the_same_whatever_the_order_of_sets():
    examples = [f"tests.support.strategies.{name}" for name in EXAMPLES]
    chosen = {name: settings(name, **asked(name)) for name in (*OURS, *METHODS, MEMORY, *examples)}
    for name in ("sage", "evolving_rl"):
        chosen[name] = settings(name, **{"learner.dynamic_sampling": 0})
    check_order(chosen)


SETS = """
from coevolve_jax.strategies.static import Static


class Sets(Static):
    def observe(self, step, groups):
        found = super().observe(step, groups)
        self.kept = {what}
        return found

    def to_json(self):
        return {{**super().to_json(), "kept": getattr(self, "kept", [])}}


make = Sets
"""


@pytest.mark.parametrize(
    "name,what",
    [
        ("sets", "list({s.call.name for g in groups for t in g.valid for s in t.steps if s.call})"),
        ("hashes", "[hash(groups[0].task.id) % 1000]"),
    ],
)
def test_the_suite_finds_what_only_another_process_shows(name, what, tmp_path, monkeypatch):
    (tmp_path / f"own_{name}").mkdir()
    (tmp_path / f"own_{name}" / "method.py").write_text(SETS.format(what=what))
    (tmp_path / f"own_{name}" / "sorted.py").write_text(SETS.format(what=f"sorted({what})[:0]"))
    monkeypatch.syspath_prepend(tmp_path)
    config = settings("static")
    check_strategy(f"own_{name}.method", config, alone=False)
    with pytest.raises(AssertionError, match=f"own_{name}.method: step 0 differs between processes"):
        check_strategy(f"own_{name}.method", config)
    check_strategy(f"own_{name}.sorted", config)


@pytest.mark.parametrize("name", [*OURS, *METHODS])
def test_our_methods_return_every_group_that_they_roll_out(name):
    """So a bundle's ledger must have the rollouts of its groups (comparison/consistency.py)."""
    once = name in ("sage", "evolving_rl")
    config = settings(name, **asked(name), **{"learner.dynamic_sampling": 0 if once else 2})
    config.testbed = {"weak_tools": ["tool_0", "tool_1"]}
    rng, tasks, strategy = np.random.default_rng(0), TaskPool(), build.strategy(config)
    tasks.add([made_up_task(f"initial-0-{i}", rng) for i in range(8)])
    if asked(name):
        tasks.add([made_up_task(f"query-0-{i}", rng, QUERY).without_calls() for i in range(8)])
    for step in range(config.steps):
        roll = MadeUpRoll(config, step)
        groups = strategy.collect(step, tasks, roll)
        assert {*map(id, groups)} == {*map(id, roll.made)}
        assert {len(g.trajectories) for g in groups} == {config.rollout.group_size}
        strategy.compute_advantages(groups)
        strategy.observe(step, groups)
        strategy.evolve(step, MadeUpLab(config, tasks))


@pytest.mark.parametrize("name", DRAFTING)
def test_no_draft_is_made_for_a_full_training_set(name):
    config = settings(name, **asked(name))

    class Counting(MadeUpLab):
        drafts = rollouts = 0

        def synthesize(self, contexts, **wanted):
            self.drafts += len(contexts) if wanted.get("into") is not None else 0
            return super().synthesize(contexts, **wanted)

        def probe(self, tasks, k, step):
            self.rollouts += len(tasks) * k
            return super().probe(tasks, k, step)

    def evolved(full):
        rng, tasks, strategy = np.random.default_rng(0), TaskPool(), build.strategy(config)
        tasks.add([made_up_task(f"initial-0-{i}", rng) for i in range(8)])
        if asked(name):
            tasks.add([made_up_task(f"query-0-{i}", rng, QUERY).without_calls() for i in range(8)])
        tasks.max_size = len(tasks) if full else None
        for step in range(config.evolution.every):
            groups = strategy.collect(step, tasks, MadeUpRoll(config, step))
            tasks.record(task_scores(groups))
            strategy.observe(step, groups)
        before, lab = strategy.to_json(), Counting(config, tasks)
        grown = strategy.evolve(step, lab)
        return grown, lab, before == strategy.to_json()

    _, lab, _ = evolved(full=False)
    assert lab.drafts
    grown, lab, unchanged = evolved(full=True)
    assert (lab.drafts, lab.rollouts, unchanged) == (0, 0, True)
    assert (grown.added, grown.refused) == (0, {"pool_full": config.evolution.tasks})


@pytest.mark.parametrize(
    "fault, why",
    [
        ("unseeded", "differs after a restart"), ("forgets", "restart"), ("twice", "a rollout twice"),
        ("of the class", "step 1 differs after a restart"), ("later messages", "differs after a restart"),
        ("invalid", "invalid rollout"), ("shape", r"shape \(3,\) for \d+ tokens"), ("nan", "not finite"),
        ("heeds", r"step .* differs where invalid rollouts show something else or are absent; leave those"),
        ("baseline", "differs where invalid rollouts .* are absent"),
        ("aligned", "differs where invalid rollouts .* are absent"),
        ("collect counts", "collect changed the strategy's state at step 0, .* list fresh in NEEDS"),
        ("scores", "a score"), ("past the lab", "task 'own-0' came into D_t past the lab at step 0"),
        ("rows", "is not JSON"), ("uncounted", "grew by 1 tasks"),
        ("reads", "reads config.evolution.contexts, config.evolution.tasks, which READS of its"),
        ("late", "roll of step 0 was called after collect had returned; use lab.probe"),
    ],
)  # fmt: skip
def test_the_suite_catches_faults(monkeypatch, fault, why):
    monkeypatch.setitem(faulty.DEFAULTS, "fault", fault)
    with pytest.raises(AssertionError, match=why):
        # Enough steps for an invalid rollout: one in twenty made-up ones is.
        check_strategy(
            "tests.support.strategies.faulty", settings("static", **{"learner.group_filter": True}), steps=20
        )


def test_the_suite_shows_texts_that_are_no_call(monkeypatch):
    monkeypatch.setitem(faulty.DEFAULTS, "fault", "texts")
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'name'"):
        check_strategy("tests.support.strategies.faulty", settings("static"))


@pytest.mark.parametrize(
    "name, lost",
    [("socratic", {"skills": {}, "goal": []}), ("blame", {"tools": {}}), ("frontier", {"skills": {}})],
)
def test_the_suite_catches_a_lost_state_of_missed_calls(monkeypatch, tmp_path, name, lost):
    """Failed made-up rollouts miss calls, as real ones do."""
    assert build.strategy(settings(name)).to_json().keys() >= lost.keys()
    (tmp_path / f"lossy_{name}").mkdir()
    (tmp_path / f"lossy_{name}" / "method.py").write_text(LOSSY.format(name=name, lost=lost))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=f"lossy_{name}.method: step .* differs after a restart"):
        check_strategy(f"lossy_{name}.method", settings(name))


def test_the_reads_of_the_guide_name_all_that_its_example_reads(monkeypatch):
    page, space = (ROOT / "docs" / "guides" / "add_strategy.md").read_text(), {}
    exec("\n".join(re.findall(r"^    (from .* import schedule|READS = .*)", page, re.M)), space)
    monkeypatch.setattr(failing, "READS", space["READS"], raising=False)
    check_strategy("tests.support.strategies.failing", settings("static"))


def test_our_method_passes_with_the_batches_of_the_guides_config():
    """They are large enough for a group with a signal and an invalid rollout."""
    config = load_file(ROOT / "configs" / "bfcl_tiny.py")
    check_strategy("coevolve", override(config, {"evolution.every": 2}))


@pytest.mark.parametrize(
    "fault, needs, why",
    [
        ("help", (), r"a method help, and NEEDS of its module has \[\]"),
        ("", ("help",), r"no method help, and NEEDS of its module has \['help'\]"),
        ("help counts", ("help",), "an evaluation must leave no trace"),
        ("help in words", ("help",), "something else than a Hint"),
    ],
)
def test_the_suite_catches_faults_of_help(monkeypatch, fault, needs, why):
    monkeypatch.setitem(faulty.DEFAULTS, "fault", fault)
    monkeypatch.setattr(faulty, "NEEDS", needs, raising=False)
    with pytest.raises(AssertionError, match=why):
        check_strategy("tests.support.strategies.faulty", settings("static"), steps=1)


def test_weights_of_tools_do_not_depend_on_the_order_in_which_they_were_met():
    """A resumed strategy has them in order of their names."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        attempts = rng.uniform(0.1, 40, 12).tolist()
        tools = {
            f"tool_{i}": (n, float(n * rng.random())) for i, n in zip(rng.permutation(12).tolist(), attempts)
        }
        again = {name: tools[name] for name in sorted(tools)}
        assert tool_weights(tools) == tool_weights(again), seed


def rows(workdir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def with_memory(tmp_path_factory):
    """The workdir of a run of memory.py, for real on BFCL."""
    workdir = tmp_path_factory.mktemp("runs") / "memory"
    train(settings(MEMORY, **{"evaluation.every": 2}), workdir)
    return workdir


def test_hints_reach_the_prompt_masked_and_are_recorded(with_memory):
    paths = sorted((with_memory / "trajectories").iterdir())
    shown = [t for path in paths for t in map(json.loads, path.open())]
    hinted = [t for t in shown if t["hints"]]
    assert hinted and not any(t["rollout_index"] % 2 for t in hinted)
    for t in hinted:
        at, text = t["hints"][0]
        assert at == 0 and text.startswith("Note: ")
        whole = "".join(piece for segment in t["segments"] for piece in segment["pieces"])
        head, _, rest = whole.partition("<|im_start|>assistant")
        assert text[:30] in head and t["queries"][0] in head
        for at, text in t["hints"][1:]:
            assert text == "Try again." and t["steps"][at - 1]["error"] and text in rest
    assert sum(m["signals"]["hinted"] for m in rows(with_memory, "metrics.jsonl")) > 0


def test_evaluation_gives_the_same_tasks_with_help_once_there_is_a_memory(with_memory):
    """A run that is killed before the last evaluations makes them again, to the same bits."""
    workdir = with_memory
    evaluated = rows(workdir, "evaluations.jsonl")
    assert [(r["step"], r["set"]) for r in evaluated] == [
        (0, "iid"), *((step, name) for step in (2, 4) for name in ("iid", "iid+help"))
    ]  # fmt: skip
    for plain, helped in (evaluated[1:3], evaluated[3:]):
        assert helped["hinted"] > 0 and "hinted" not in plain
        assert helped.keys() - {"hinted"} == plain.keys() - {"greedy_success", "greedy_invalid"}
        assert helped["by_task"].keys() == plain["by_task"].keys()
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["help"] == {"iid+help": evaluated[-1]}
    assert summary["held_out"]["after"] == evaluated[-2]
    check_run(workdir)
    (workdir / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in evaluated[:-1]))
    with pytest.raises(ValueError, match=r"steps of set iid\+help: \[2\], where its other files have \[2, 4"):
        check_run(workdir)

    (workdir / "summary.json").unlink()
    for step in (3, 4):
        shutil.rmtree(workdir / f"checkpoints/step_{step:08d}")
    train(settings(MEMORY, **{"evaluation.every": 2}), workdir)
    assert rows(workdir, "evaluations.jsonl") == evaluated


def test_settings_of_a_strategy_are_config_keys():
    name = "tests.support.strategies.faulty"
    config = settings(name, **{"strategy.fault": "late"})
    assert config.strategy.to_dict() == {"name": name, "fault": "late"}
    assert settings("static", **{"strategy.name": name}).strategy.fault == faulty.DEFAULTS["fault"]
    config = settings("static")
    config.strategy.name = name
    with pytest.raises(ValueError, match=f"config.strategy lacks fault.*strategy={name}"):
        configs.check(config)
    with pytest.raises(
        ValueError,
        match="config.strategy.name is 'no.such': it must be one of .*blame, coevolve, .*random, .*static",
    ):
        strategy("no.such")


def test_the_examples_of_the_docs_are_the_tested_ones():
    page = (ROOT / "docs" / "guides" / "add_strategy.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert codes == [
        (ROOT / "tests" / "support" / "strategies" / f"{name}.py").read_text() for name in EXAMPLES
    ]
    assert len(codes[0].splitlines()) <= 25


@pytest.mark.parametrize("name", [EXAMPLES[0], pytest.param(EXAMPLES[1], marks=pytest.mark.nightly)])
def test_an_example_of_the_docs_grows_the_training_set(name, tmp_path):
    train(settings(f"tests.support.strategies.{name}"), tmp_path / "run")
    born = [t["lineage"]["signal"] for t in rows(tmp_path / "run", "tasks.jsonl")]
    assert born.count(name) == 3
