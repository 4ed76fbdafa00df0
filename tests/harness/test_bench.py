"""The measures of a campaign on a planted fault, by hand."""

import functools
import importlib
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from coevolve_jax import config as configs
from coevolve_jax.harness import bench, campaign, launch, levers, loop
from coevolve_jax.harness.bench import FAULTS
from coevolve_jax.harness.records import Verdict
from coevolve_jax.harness.start import without_harness
from coevolve_jax.harness.store import Store
from coevolve_jax.records.files import write_text
from coevolve_jax.testing.campaign import MADE_UP
from tests.harness.support import WITH_MADE_UP, config
from tests.support import forked
from tests.support.paths import ROOT


def judged(*kinds: str) -> list[Verdict]:
    return [Verdict(kind, ()) for kind in kinds]


def test_a_campaign_is_measured_by_its_first_moves_and_what_it_regains():
    moves = [("reward.terms", "add length"), ("learner.learning_rate", "/3"), ("learner.learning_rate", "x3")]
    told = [(*m, v) for m, v in zip(moves, judged("refused", "promoted", "promoted"), strict=True)]
    measured = functools.partial(bench.row, "slow", "fixed", 3, "c", told, faulty=0.5, healthy=0.7, runs=3)
    found = measured(reached={1: 0.45, 2: 0.69}, selected=2)
    assert (found.right_first, found.right_within_3, found.mended) == (0, 1, 2)
    assert (found.promoted, found.harmful, found.runs) == (2, 1, 3)
    assert found.lost == pytest.approx(0.2) and found.regained == pytest.approx(0.19)
    # 80% of what was lost is what counts.
    assert measured(reached={1: 0.45, 2: 0.65}, selected=2).mended == ""
    none = bench.row("none", "placebo", 0, "c", [], {}, 0, faulty=0.7, healthy=0.7, runs=1)
    assert (none.right_first, none.mended, none.regained) == (0, "", 0.0)


def test_the_gain_is_of_the_version_that_the_campaign_chose_and_not_of_the_luckiest():
    told = [("learner.learning_rate", "x3", v) for v in judged("promoted", "promoted", "promoted")]
    reached = {1: 0.6, 2: 0.9, 3: 0.55}
    gains = [bench.row("slow", "fixed", 0, "c", told, reached, n, 0.5, 0.7, 4).regained for n in range(4)]
    assert gains == pytest.approx([0.0, 0.1, 0.4, 0.05])


def test_the_rows_of_a_file_are_read_back_and_those_of_other_settings_refused(tmp_path):
    path = tmp_path / "campaigns.csv"
    assert bench.read_rows(path, "c") == {}
    rows = [
        bench.row("slow", "fixed", seed, "c", [], {1: 0.1 + 0.2} if seed else {}, seed, 1 / 3, 0.7, 2)
        for seed in (1, 0)
    ]
    bench.write_rows(path, rows)
    assert bench.read_rows(path, "c") == {("slow", "fixed", row.seed): row for row in rows}
    with pytest.raises(ValueError, match="has campaigns of c, and these are of d: name another --workdir"):
        bench.read_rows(path, "d")
    path.write_text("fault,arm,seed\nslow,fixed,0\n")
    with pytest.raises(ValueError, match="has other columns than fault, arm, seed, settings.*move that file"):
        bench.read_rows(path, "c")


def test_a_command_measures_the_selected_version_and_leaves_the_rows_of_others(tmp_path, monkeypatch):
    """The fresh tasks favour v001. The campaign ends with v003, the second version that it trained."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    program = importlib.import_module("harness_bench")
    promoted, refused = judged("promoted", "refused")
    versions = SimpleNamespace(
        verdict=lambda v: refused if v == "v002" else promoted,
        proposal=lambda v: SimpleNamespace(lever="learner.learning_rate", move="x3"),
        row=lambda v: {} if v == "v002" else {"success": 0.5},
        config=lambda v: None,
    )
    ended = SimpleNamespace(
        claimed=nullcontext, versions=lambda: ["v000", "v001", "v002", "v003"], selected=lambda: "v003"
    )
    reading = {"start": 0.5, "v001": 0.9, "v003": 0.6, "healthy": 0.7}
    monkeypatch.setattr(launch, "programs", lambda *args: MADE_UP)
    monkeypatch.setattr(campaign, "begin", lambda *args: ended)
    monkeypatch.setattr(loop, "Evolution", lambda *args: SimpleNamespace(run=lambda: 0, versions=versions))
    monkeypatch.setattr(bench, "success", lambda store, folder, name, *args: reading[name.split("_")[-1]])

    def command(fault, versions=3):
        flags = {"_FAULTS": [fault], "_ARMS": ["fixed"], "_SEEDS": "0", "_WORKDIR": str(tmp_path), "_JOBS": 1}
        flags |= {"_CONFIG": f"{ROOT}/configs/bfcl_harness.py", "_VERSIONS": versions, "_FRESH": "100:102"}
        for name, value in flags.items():
            monkeypatch.setattr(program, name, SimpleNamespace(value=value, name=name))
        program.run()
        return (tmp_path / "campaigns.csv").read_text().splitlines()[1:]

    (first,) = command("slow")
    (row,) = bench.read_rows(tmp_path / "campaigns.csv", first.split(",", 3)[3].split('"')[1]).values()
    assert (row.regained, row.mended, row.promoted, row.runs) == (pytest.approx(0.1), 1, 2, 3)
    second, there = command("leash")
    assert there == first and second.startswith("leash,fixed,0,")
    assert command("slow") == [second, first]  # the same command goes on
    with pytest.raises(ValueError, match="--versions=3 --fresh_seeds=100,101, and these are of .*versions=6"):
        command("slow", versions=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "given", "says"),
    [
        ("harness_bench", "--faults=", "--faults names nothing: use some of none, slow, "),
        ("harness_bench", "--arms=", "--arms names nothing: use some of evolving, fixed, placebo."),
        ("harness_bench", "--fresh_seeds=x", "--fresh_seeds='x' is neither a range"),
        ("harness_bench", "--campaign_seeds=3:1", "--campaign_seeds='3:1' must name at least one seed"),
        ("harness_bench", "--campaign_seeds=100", "--fresh_seeds names 100, a seed of the campaign"),
        ("calibrate_harness", "--faults=", "--faults names nothing: use some of none, slow, "),
        ("calibrate_harness", "--salts=", "--salts='' is neither a range"),
        ("calibrate_harness", "--set=learner.learning_rate=-1", "config.learner.learning_rate is -1.0: it"),
        ("check_backtests", "--salts=", "--salts='' is neither a range"),
        ("check_backtests", "--config={folder}/broken.py", "broken.py cannot be loaded ("),
        ("check_verdicts", "--workdir={folder}/broken.py", "broken.py is a file: choose another."),
    ],
)
def test_what_could_not_run_ends_in_one_sentence_before_anything_is_run(
    program, given, says, tmp_path, quick
):
    (tmp_path / "broken.py").write_text("def get_config(")
    flags = f"--workdir={tmp_path}/out", given.format(folder=tmp_path)
    done = forked.run([f"experiments/{program}.py", *flags], quick)
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("Error: ") and says in done.stderr and not (tmp_path / "out").exists()


def answers(counts):
    """An evaluation that answers each question with these counts, and keeps the files of the questions."""

    def evaluate(questions, side_by_side):
        for q in questions:
            evaluate.asked.append(q.output)
            write_text(q.output, json.dumps({"environment": {"by_task": counts}}))
        return {}

    evaluate.asked = []
    return evaluate


def test_lost_trials_are_failures_of_the_policy_that_lost_them(tmp_path):
    start, read = without_harness(config("none")), {}
    for name, counts in {"some": {"a": [2, 2], "b": [1, 1], "c": [0, 0]}, "all": {"a": [0, 0]}}.items():
        programs = MADE_UP._replace(evaluate=answers(counts))
        store = Store(tmp_path / name / "store", start, programs, jobs=1)
        read[name] = bench.success(store, tmp_path / name / "readings", "healthy", start, [100])
    assert read == {"some": pytest.approx(3 / 6), "all": 0.0}


def test_what_another_setting_or_another_code_has_trained_is_read_anew(tmp_path, monkeypatch):
    start, evaluate = without_harness(config("none")), answers({"a": [1, 2]})

    def read(start):
        store = Store(tmp_path / "store", start, MADE_UP._replace(evaluate=evaluate), jobs=1)
        assert bench.success(store, tmp_path / "readings", "healthy", start, [100, 101]) == 0.5
        return len(evaluate.asked)

    assert [read(start), read(start)] == [2, 2]
    other = configs.override(start, {"learner.learning_rate": 3e-4})
    assert [read(other), read(start)] == [4, 4]
    monkeypatch.setattr(campaign, "code", lambda: "0123456789abcdef")
    assert [read(other), read(start), read(start)] == [6, 8, 8]
    assert len({*evaluate.asked}) == 8


def test_campaigns_keep_the_cores_that_the_first_was_begun_with(tmp_path, monkeypatch):
    start, folder = without_harness(config("none")), tmp_path / "campaigns"
    cores = lambda jobs: bench.cores_of_campaigns(folder, jobs)
    runs = lambda jobs: Store(tmp_path, start, MADE_UP, jobs, cores(jobs)).workdir(start, 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert cores(2) == 4 and runs(2) != runs(1)
    campaign.begin(folder / "before_this", {"config": {"harness": {"versions": 1}}})  # says nothing of cores
    assert cores(2) == 4
    plan = {"config": {"harness": {"versions": 1}}, "told": {"cores": cores(2)}}
    campaign.begin(folder / "slow_fixed_0", plan)
    assert runs(2) == runs(1) == runs(8)


@pytest.mark.slow
def test_a_bench_that_was_killed_goes_on_with_other_jobs_and_trains_nothing_anew(tmp_path, quick):
    killed = """
def train(jobs, side_by_side):
    moved = any(job.start and job.config.learner.learning_rate > 2e-5 for job in jobs)
    return os._exit(9) if moved else campaign.train_made_up(jobs, side_by_side)
launch.programs = lambda config, compiled: campaign.MADE_UP._replace(launch=train)
"""
    two = f"import os\n{WITH_MADE_UP}\nos.sched_getaffinity = lambda pid: {{0, 1}}\n"
    flags = [f"--workdir={tmp_path}", "--arms=fixed", "--campaign_seeds=0", "--versions=1"]
    run = lambda jobs, end="": forked.run_after(
        two + end, "harness_bench", tmp_path, quick, *flags, f"--jobs={jobs}"
    )
    assert run(2, killed).returncode == 9
    done = run(1)
    assert done.returncode == 0, done.stderr
    assert "begun with 1 cores a run. Runs made here have 2, so other last digits." in done.stdout
    made = lambda: set((tmp_path / "store").glob("**/seed_*"))
    before, again = made(), run(1)
    assert again.returncode == 0 and made() == before
    assert {path.parent.name.rpartition("-")[2] for path in before} == {"1"}


@pytest.mark.parametrize("name", [n for n in FAULTS if n != "none"])
def test_the_right_moves_of_a_fault_are_moves_of_its_start(name):
    start = config(name)
    table = levers.table(start)
    for lever, moves in FAULTS[name].right.items():
        assert set(moves) & set(table[lever].moves(start)), (lever, moves)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_of_training_and_leaves_the_evaluation_as_it_is(name):
    assert config(name).evaluation == config("none").evaluation
    kept = ("max_calls", "max_turns", "min_calls", "initial_tasks")
    assert [config(name).data[key] for key in kept] == [config("none").data[key] for key in kept]
