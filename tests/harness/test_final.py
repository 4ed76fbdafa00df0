"""The reading of the test: once, on fresh seeds, with the gains recomputed from the CSV."""

import csv
import json
import re
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats

from coevolve_jax import config as configs
from coevolve_jax.harness import claim, evidence, final, references, start
from coevolve_jax.harness.campaign import Tampered
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.store import Store, config_changes, config_id
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.testing.campaign import MADE_UP, evaluate_made_up, train_made_up, truth
from tests.harness.support import WITH_MADE_UP, Kept, config, cut, evolution, lose_all_trials, rehash
from tests.support import forked
from tests.support.paths import ROOT


class Lacking(Kept):
    """The made-up trainer of an environment that lacks a split."""

    lacks = ""

    def launch(self, jobs, side_by_side):
        if any(job.config.environment.eval_split == self.lacks for job in jobs):
            return {job.workdir: f"exit status 1: there is no split {self.lacks!r}" for job in jobs}
        return super().launch(jobs, side_by_side)


@pytest.fixture(scope="module")
def kept():
    return Lacking()


@pytest.fixture(scope="module")
def over(tmp_path_factory, kept):
    """A campaign on `slow` that is over."""
    folder = tmp_path_factory.mktemp("final") / "campaign"
    found = evolution(folder, "slow", kept.launch, kept.evaluate, versions=2)
    with pytest.raises(ValueError, match="so its test stays sealed"):
        final.open_test(found, [100], {}, False)
    found.run()
    return found


@pytest.fixture(scope="module")
def ended(over):
    """Its readings on three fresh seeds."""
    final.open_test(over, [100, 101, 102], {"date": "today"}, False)
    final.read(over, [100, 101, 102])
    return over


def test_what_cannot_be_read_is_refused_before_the_test_is_opened(over, kept, monkeypatch):
    monkeypatch.setattr(kept, "lacks", "test")
    with pytest.raises(ValueError, match="The test tasks cannot be made: .*there is no split 'test'"):
        final.open_test(over, [100], {}, False)
    assert not (over.campaign.folder / "final").exists() and final.openings(over) == []


def test_another_engine_of_the_campaigns_own_evaluations_is_said_beside_the_luck_of_the_tasks():
    own = {"engine.name": "sglang", "engine.dtype": "bfloat16"}
    said = final._engines(configs.override(config(), own))
    assert "was read with config.engine.name 'sglang', the test by the native engine in bfloat16" in said
    row = {"value": 0.1, "low": None, "high": None}
    luck = dict.fromkeys(("luck_of_seeds", "luck_of_tasks", "optimism"), 0.0)
    result = {"gain": dict.fromkeys(("SD", "FD", "FT"), row), **luck, "openings": 2}
    assert claim.table({**result, "engines": said}).endswith(f" 2\n{said}")
    assert final._engines(config()) == "" and claim.table({**result, "engines": ""}).endswith(" 2")


def test_both_sides_of_the_luck_of_tasks_are_read_at_the_temperature_of_the_campaign():
    c = configs.override(config(), {"evaluation.temperature": 0.5, "engine.dtype": "bfloat16"})
    given = {name: protocol.given(c) for name, protocol in claim.PROTOCOLS.items()}
    told = {name: flags[1] for name, flags in given.items()}
    assert told == {
        name: f"--temperature={t}" for name, t in zip(given, (0.5, 0.0, 0.7, 0.5, 0.5), strict=True)
    }
    assert all("--dtype=bfloat16" in flags for flags in given.values())


def test_the_gains_are_those_of_the_rows(ended):
    folder = ended.campaign.folder / "final"
    rows = list(csv.DictReader(open(folder / "readings.csv")))
    assert len(rows) == 2 * 5 * (1 + len(claim.PROTOCOLS))  # harnesses x seeds x readings

    def gain(seeds: str, tasks: str, protocol: str = "P1") -> float:
        chosen = [r for r in rows if (r["seeds"], r["tasks"], r["protocol"]) == (seeds, tasks, protocol)]
        mean = lambda h: statistics.mean(float(r["success"]) for r in chosen if r["harness"] == h)
        return mean("selected") - mean("start")

    result = final.result_of(ended.campaign.folder)
    for name, found in result["gain"].items():
        assert found["value"] == pytest.approx(gain(*name)) and found["low"] < found["value"] < found["high"]
    assert result["optimism"] == pytest.approx(gain("S", "D") - gain("F", "T"))
    assert result["luck_of_seeds"] + result["luck_of_tasks"] == pytest.approx(result["optimism"])
    for name, found in result["transfer"].items():
        own = [r for r in rows if (r["seeds"], r["tasks"], r["protocol"]) == ("F", "T", name)]
        by = {(r["harness"], r["seed"]): float(r["success"]) for r in own}
        paired = scipy.stats.ttest_rel(
            *([by[h, s] for s in ("100", "101", "102")] for h in ("selected", "start"))
        )
        assert name == "P1" or found["p"] == pytest.approx(paired.pvalue)
    p = [result["transfer"][name]["p"] for name in ("P2", "P3", "P4", "P5")]
    adjusted, order = [result["transfer"][n]["p_holm"] for n in ("P2", "P3", "P4", "P5")], np.argsort(p)
    held = np.minimum(1, np.maximum.accumulate(np.array(p)[order] * (4, 3, 2, 1)))
    assert np.array(adjusted)[order] == pytest.approx(held)
    transfer = {name: found["value"] for name, found in result["transfer"].items()}
    assert transfer == pytest.approx({name: gain("F", "T", name) for name in claim.PROTOCOLS})
    # The made-up truth: three times the learning rate is worth 12 points, and so once more.
    known = ended.versions
    true = truth(known.config(ended.campaign.selected())) - truth(known.config("v000"))
    assert true == pytest.approx(0.24, abs=0.01) and result["gain"]["FT"]["value"] == pytest.approx(
        true, abs=0.03
    )
    assert "the claim" in claim.table(result)
    assert all((r["lost"], r["worst"]) == ("0", r["success"]) for r in rows)
    assert result["lost"] == {"start": 0, "selected": 0} and "lost" not in claim.table(result)


OTHER = "configs/bfcl_harness.py:start=textbook"


def test_references_are_read_beside_it_and_the_differences_are_those_of_the_rows(tmp_path, monkeypatch):
    """One is a config file, the other what a campaign from another start has selected."""
    monkeypatch.chdir(ROOT)
    other = evolution(tmp_path / "other", "leash", versions=2)
    other.run()
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    found.run()
    c, seeds = config("slow", versions=1), ("100", "101", "102")
    given = [OTHER, str(tmp_path / "other")]
    others = {name: references.changes(name, c, found.store) for name in given}
    assert {"learner.learning_rate", "learner.aggregate", "learner.kl_coef"} < {*others[OTHER]}
    mine = other.versions.config(other.campaign.selected())
    assert others[given[1]]["learner.learning_rate"] == mine.learner.learning_rate
    final.open_test(found, [100, 101, 102], {}, False, others)
    final.open_test(found, [100, 101, 102], {}, False)  # the same command without them goes on
    final.read(found, [100, 101, 102])
    folder = found.campaign.folder / "final"
    rows = list(csv.DictReader(open(folder / "readings.csv")))
    result, p = final.result_of(found.campaign.folder), {}
    theirs = {text: configs.override(found.versions.config("v000"), others[text]) for text in given}
    names = {text: f"reference_{config_id(theirs[text])[:8]}" for text in given}
    assert {r["harness"] for r in rows} == {"start", "selected", *names.values()}
    assert result["given"] == {name: text for text, name in names.items()}
    for name, over in result["over"].items():
        for way, told in over["transfer"].items():
            by = {
                (r["harness"], r["seed"]): float(r["success"])
                for r in rows
                if (r["seeds"], r["tasks"], r["protocol"]) == ("F", "T", way)
            }
            ours, other_ones = ([by[h, s] for s in seeds] for h in ("selected", name))
            assert told["value"] == pytest.approx(np.subtract(ours, other_ones).mean())
            assert told["p"] == pytest.approx(scipy.stats.ttest_rel(ours, other_ones).pvalue)
            p[name, way] = told["p"], told["p_holm"]
    least, most = sorted(p[name, "P1"] for name in result["over"])
    assert least[1] == pytest.approx(min(1, 2 * least[0]))
    assert most[1] == pytest.approx(max(least[1], most[0]))
    known = found.versions  # and the made-up truth
    true = truth(known.config(found.campaign.selected())) - truth(theirs[OTHER])
    value = result["over"][names[OTHER]]["transfer"]["P1"]["value"]
    assert value == pytest.approx(true, abs=0.03)
    assert f"{names[OTHER]}: {OTHER}\nselected over {names[OTHER]}" in claim.table(result)
    assert final.differences(found) == []
    opened, last = folder / "opened.json", folder / "final.json"
    opened.chmod(0o644)
    forged = [
        (opened, '"learner.kl_coef": 0.04', '"evaluation.tasks": 1', "which no reference may"),
        (opened, '"learner.kl_coef": 0.04', '"learner.kl_coef": 0.05', "is not the name of its config"),
        (opened, '"fresh_seeds"', '"seeds"', "cannot be made again"),
        (opened, '"number": 1', '"number": 1, "date": "never"', "lacks the opening 1"),
        (last, OTHER, given[1], "final/final.json differs from what the readings give (given)"),
        (last, '"openings": 1', '"openings": 0', "tells of 0 openings"),
        (last, '"engines": ""', '"engines": "All is well."', "readings give (engines)"),
    ]
    for path, was, now, says in forged:
        text = path.read_text()
        assert was in text
        path.write_text(text.replace(was, now))
        rehash(found.campaign.folder)
        assert any(says in sentence for sentence in final.differences(found)), says
        path.write_text(text)
        rehash(found.campaign.folder)
    assert final.differences(found) == []


def test_a_second_opening_with_another_reference_reads_that_one(tmp_path, monkeypatch):
    """Also where the first reading was killed before it was told of."""
    monkeypatch.chdir(ROOT)
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    found.run()
    c = config("slow", versions=1)
    value = {}
    for i, given in enumerate((OTHER, "configs/bfcl_harness.py:start=tuned")):
        changes = references.changes(given, c, found.store)
        final.open_test(found, [100, 101], {}, reopen=i > 0, others={given: changes})
        with monkeypatch.context() as during:
            if not i:
                during.setattr(found.campaign, "tell_final", lambda *names: None)
            final.read(found, [100, 101])
        (over,) = final.result_of(found.campaign.folder)["over"].values()
        truths = [truth(configs.override(found.versions.config("v000"), x)) for x in (changes, {})]
        value[given] = over["transfer"]["P1"]["value"], truths
    mine = truth(found.versions.config(found.campaign.selected()))
    for told, (theirs, _) in value.values():
        assert told == pytest.approx(mine - theirs, abs=0.03)
    assert final.differences(found) == []
    final.read(found, [100, 101])  # what was read stays as it is
    assert final.differences(found) == []


def test_a_reference_gets_as_many_rollouts_and_an_altered_campaign_is_refused(tmp_path, over):
    c, text = config("slow", versions=2), "from coevolve_jax import config\n\n\ndef get_config(arg=''):\n"
    text += f"    c = config.load_file({str(ROOT / 'configs/bfcl_harness.py')!r}, 'start=tuned')\n"
    more, again = tmp_path / "more.py", tmp_path / "again.py"
    more.write_text(text + "    c.rollout.tasks_per_step *= 4\n    return c\n")
    again.write_text(text + "    c.learner.dynamic_sampling = 3\n    return c\n")
    with pytest.raises(ValueError, match=r"has \d+ rollouts a step, and the campaign's start \d+"):
        references.changes(str(more), c, over.store)
    found = references.changes(str(again), c, over.store)
    a_step = c.rollout.tasks_per_step * c.rollout.group_size
    assert found["budget.rollouts"] == c.steps * a_step
    other = evolution(tmp_path / "other", "leash", versions=2)
    other.run()
    path = other.campaign.path(other.campaign.versions()[-1], "verdict")
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"kind": "', '"kind":  "'))
    with pytest.raises(Tampered, match="verdict.json was changed"):
        references.changes(str(tmp_path / "other"), c, over.store)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("configs/bfcl_harness.py:fault=slow", "is the campaign's start itself"),
        ("configs/bfcl_tiny.py", "differs from the campaign's start in config.steps, which is no lever"),
        ("configs/textworld_tiny.py", "differs from the campaign's start in config.model"),
        ("tests", "holds no campaign.json"),
        ("configs/nothing.py", "configs/nothing.py is no Python file"),
        ("{unfinished}", "is a campaign that is not over"),
    ],
)
def test_a_reference_that_could_not_be_compared_is_refused(given, says, over, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    unfinished = evolution(tmp_path / "unfinished", "slow").campaign.folder
    with pytest.raises(ValueError, match=re.escape(says)):
        references.changes(given.format(unfinished=unfinished), config("slow", versions=2), over.store)


def test_a_reference_with_another_strategy_brings_its_settings(over, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = "configs/bfcl_harness.py:strategy=blame,fault=slow"
    found = references.changes(given, config("slow", versions=2), over.store)
    assert found["strategy.name"] == "blame"
    assert all(key.startswith(("strategy.", "evolution.")) for key in found)


def written(path, arg, settings):
    """A config file that changes some settings of configs/bfcl_harness.py with an argument."""
    source = str(ROOT / "configs" / "bfcl_harness.py")
    text = "from coevolve_jax import config\n\n\ndef get_config():\n"
    text += f"    c = config.load_file({source!r}, {arg!r})\n    return config.override(c, {settings!r})\n"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "bounded"),
    [
        ({"strategy.name": "random"}, False),
        ({"strategy.name": "random", "strategy.probe": 4}, True),
        ({"strategy.name": "agent_world"}, True),  # which always asks for rollouts
        ({"learner.dynamic_sampling": 1}, True),
    ],
)
def test_only_a_reference_that_may_spend_more_than_its_batches_is_bounded(settings, bounded, over, tmp_path):
    c = config("slow", versions=2)
    found = references.changes(written(tmp_path / "given.py", "fault=slow", settings), c, over.store)
    most = c.steps * c.rollout.tasks_per_step * c.rollout.group_size
    assert settings.items() <= found.items()
    assert found.get("budget.rollouts") == (most if bounded else None)


@pytest.mark.parametrize(("own", "others"), [(2, 2), (2, 1), (1, 2), (2, 0)])
@pytest.mark.parametrize("budget", [0, 4096])
def test_a_reference_gets_what_the_start_may_spend_where_that_replaces_groups(own, others, budget, tmp_path):
    again = {"learner.dynamic_sampling": own, "budget.rollouts": budget}
    c = configs.override(config("slow", versions=2), again)
    settings = {"learner.dynamic_sampling": others, "budget.rollouts": 0}
    found = references.changes(written(tmp_path / "given.py", "fault=none", settings), c, None)
    first = start.without_harness(c)
    most = budget or c.steps * c.rollout.tasks_per_step * c.rollout.group_size * (1 + own)
    assert found.get("budget.rollouts", budget) == (most if others > own else budget)
    assert configs.override(first, found).learner.dynamic_sampling == others


def test_a_reference_whose_rollouts_run_ahead_is_taken(over, tmp_path):
    """No run with config.rollout.max_staleness may have a bound on its rollouts, and nobody sets one."""
    ahead = {"rollout.max_staleness": 1}
    given = written(tmp_path / "given.py", "strategy=random,fault=slow", ahead)
    found = references.changes(given, configs.override(config("slow", versions=2), ahead), over.store)
    assert found["strategy.name"] == "random" and "budget.rollouts" not in found


def test_what_a_campaign_selected_comes_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "coevolve_jax.testing.campaign.truth", lambda c: truth(c) + 0.1 * (c.strategy.name == "random")
    )
    other, name = evolution(tmp_path / "other", "none", versions=1), "strategy.name"
    aim = Expectation("success_last", "up")
    drawn = Proposal("v000", name, "random", {name: "random"}, "It is static.", "p", expects=aim)
    other.parts.proposer, other.parts._rules = SimpleNamespace(propose=lambda *given: drawn), ("score",)
    other.run()
    assert other.campaign.selected() == "v001"
    own = config_changes(*map(other.versions.config, ("v000", "v001")))
    assert references.changes(str(tmp_path / "other"), config("none", versions=1), other.store) == own


def test_the_program_reads_the_test_with_a_reference(tmp_path, quick):
    flags = [f"--config={ROOT}/configs/bfcl_harness.py:fault=slow", f"--workdir={tmp_path}/campaign"]
    flags += ["--versions=1", "--seeds=0", "--diagnostics=fixed", "--audit=none"]
    run = lambda *more: forked.run_after(WITH_MADE_UP, "evolve_harness", tmp_path, quick, *flags, *more)
    reference = f"--reference={ROOT}/configs/bfcl_harness.py:start=textbook"
    early = run(reference)
    assert early.returncode and "has no effect without --final: give both" in early.stderr
    assert not (tmp_path / "campaign").exists()
    flags.append("--config.rollout.max_steps=16")
    done = run(reference, "--final", "--final_seeds=100:102")
    assert done.returncode == 0, done.stderr
    assert "beside config.rollout.max_steps (16), so it keeps the same in all versions" in done.stdout
    assert re.search(rf"reference_\w+: {ROOT}/configs/bfcl_harness.py:start=textbook\n", done.stdout)
    assert re.search(r"selected over reference_\w+ +[+-]\d+\.\d points .*\(Holm, of 1\)", done.stdout)
    again = run("--replay", "--jobs=2")  # more runs at once are no other campaign
    assert "max_steps" not in again.stdout  # it was said
    assert again.returncode == 0 and again.stdout.endswith("Everything is as the runs give it.\n"), (
        again.stdout
    )


def test_a_campaign_keeps_its_store_and_another_one_is_refused_before_anything_is_written(tmp_path, quick):
    shared = tmp_path / "shared"
    flags = [f"--config={ROOT}/configs/bfcl_harness.py:fault=slow", "--versions=1", "--seeds=0"]
    flags += ["--diagnostics=fixed", "--audit=none", "--final_seeds=100:102"]

    def run(name, *more):
        workdir = f"--workdir={tmp_path}/{name}"
        return forked.run_after(WITH_MADE_UP, "evolve_harness", tmp_path, quick, *flags, workdir, *more)

    first = run("a", f"--store={shared}", "--final")
    assert first.returncode == 0 and first.stdout.endswith(" 1\n"), first.stderr
    assert run("b", f"--store={shared}").returncode == 0
    before = set(tmp_path.rglob("*"))
    other = run("b", f"--store={tmp_path}/b/store", "--final")
    assert other.returncode and other.stderr.count("\n") == 1
    says = f"/b has its runs in {shared}, and not in {tmp_path}/b/store: give --store={shared}."
    assert says in other.stderr
    assert set(tmp_path.rglob("*")) == before
    second = run("b", "--final")  # the test was opened in that store before
    assert second.returncode == 0 and second.stdout.endswith(" 2\n"), second.stderr
    replay = run("a", "--replay")
    assert replay.returncode == 0 and replay.stdout.endswith("Everything is as the runs give it.\n")
    assert len(list(shared.glob("openings/*/*.json"))) == 2
    assert not (tmp_path / "a" / "store").exists() and not (tmp_path / "b" / "store").exists()


def test_a_fresh_run_or_a_reading_without_a_valid_trial_stops_before_anything_is_told(tmp_path):
    def launch(jobs, side_by_side):
        new = [job for job in jobs if job.config.seed == 101 and not job.workdir.exists()]
        came = train_made_up(jobs, side_by_side)
        for job in new if lost["run"] else ():
            if job.start and job.config.learner.learning_rate > 2e-5:
                lose_all_trials(job.workdir)
        return came

    def evaluate(questions, side_by_side):
        came = evaluate_made_up(questions, side_by_side)
        for q in questions:
            if lost["reading"] and q.output.name == "start_100_P2.json":
                counts = dict.fromkeys(json.loads(q.output.read_text())["environment"]["by_task"], [0, 0])
                q.output.write_text(json.dumps({"environment": {"by_task": counts}}))
        return came

    lost = {"run": True, "reading": True}
    found = evolution(tmp_path / "campaign", "slow", launch, evaluate, versions=1, seeds=(0,))
    found.run()
    folder = found.campaign.folder / "final"
    final.open_test(found, [100, 101], {}, False)
    run = found.store.workdir(found.versions.config("v001"), 101)
    says = f"^Every trial of the selected harness on the fresh seed 101 .* was lost: .* take {run} away and"
    with pytest.raises(ValueError, match=says):
        final.read(found, [100, 101])
    assert not (folder / "readings.csv").exists() and not (folder / "readings").exists()
    lost["run"] = False
    shutil.rmtree(run)
    reading = folder / "readings" / "start_100_P2.json"
    says = f"^Every trial of the start harness, seed 100, was lost in the reading P2 .* take {reading} away"
    with pytest.raises(ValueError, match=says):
        final.read(found, [100, 101])
    assert not (folder / "readings.csv").exists()
    lost["reading"] = False
    reading.unlink()
    final.read(found, [100, 101])
    assert "NaN" not in (folder / "final.json").read_text()
    assert found.replay() == final.differences(found) == []


LOST = {
    "all that it fails": [[2, 2]] * 20 + [[0, 0]] * 20,
    "half of what it fails": [[2, 2]] * 20 + [[0, 1]] * 20,
    "all but one task": [[2, 2]] + [[0, 0]] * 39,
}


@pytest.mark.parametrize("counts", LOST.values(), ids=LOST)
def test_a_harness_gains_nothing_by_losing_what_it_fails(counts):
    """The start solves half of the tasks. The selected harness solves no more, and loses trials."""
    sides = {"start": [[2, 2]] * 20 + [[0, 2]] * 20, "selected": counts}
    read = [("D", "P1"), *(("T", name) for name in claim.PROTOCOLS)]
    found = [
        (claim.Reading(h, "v", kind, seed, *how), evidence.Selection(dict(enumerate(own)), {}))
        for h, own in sides.items()
        for kind, seed in (("S", 0), ("F", 100), ("F", 101))
        for how in read
    ]
    readings = final._told(found)
    result, lost = claim.result(readings), sum(2 - n for _, n in counts)
    values = [row["value"] for row in (*result["gain"].values(), *result["transfer"].values())]
    assert len(values) == 4 + 5 and max(values) <= 0
    assert any(r.success > 0.5 for r in readings) and all(r.worst <= 0.5 for r in readings)
    assert result["lost"] == {"start": 0, "selected": 3 * 5 * lost}  # P4 has the rollouts of P1
    told = f"0 of start, {15 * lost} of selected"
    assert f"trials lost                                  {told}\n" in claim.table(result)


def test_lost_trials_stand_in_the_row_of_their_run(ended):
    path = ended.campaign.folder / "final" / "readings" / "selected_100_P2.json"
    text = path.read_text()
    raw = json.loads(text)
    counts = raw["environment"]["by_task"]
    counts["held_out-0"], counts["held_out-1"] = [0, 0], [1, 1]
    path.write_text(json.dumps(raw))
    found = final._read(ended, [100, 101, 102])
    (told,) = [r for r in found if r.lost]
    path.write_text(text)
    assert (told.harness, told.seed, told.protocol, told.lost) == ("selected", 100, "P2", 3)
    solved = sum(s for s, _ in counts.values())
    assert told.worst == solved / (2 * len(counts)) < told.success == solved / (2 * len(counts) - 3)


@pytest.mark.parametrize(
    ("name", "was", "now", "says"),
    [
        (
            "final.json",
            r'"optimism": ',
            '"optimism": 9',
            "final/final.json differs from what",
        ),
        ("readings.csv", r",T,P5,0", ",T,P5,1", "final/readings.csv differs from what the runs and"),
        ("readings/selected_100_P1.json", r"\[1, 2\]", "[2, 2]", "final/readings.csv differs from what"),
        ("runs/start/seed_100/evaluations.jsonl", r"\[1, 2\]", "[0, 2]", "final/readings.csv differs from"),
        (
            "readings.csv",
            r".*,F,102,.*\n",
            "",
            "has the fresh seeds [100, 101], for which",
        ),
    ],
)
def test_replay_finds_what_was_written_into_a_reading_by_hand_with_its_hash(name, was, now, says, ended):
    path = ended.campaign.folder / "final" / name
    text = path.read_text()
    assert final.differences(ended) == []
    path.write_text(re.sub(was, now, text))
    rehash(ended.campaign.folder)
    ended.campaign.check()  # only the comparison tells
    assert any(says in sentence for sentence in final.differences(ended)), final.differences(ended)
    path.write_text(text)
    rehash(ended.campaign.folder)


def test_fresh_runs_are_as_they_were_and_agree_with_their_own_rollouts(ended):
    """A forger may set the successes of a fresh run, and what was read of them."""
    folder = ended.campaign.folder / "final"
    run = folder / "runs/selected/seed_100"
    recorded = sorted((run / "rollouts").glob("step_*"))
    content = recorded[0].read_bytes()
    recorded[0].write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(
        Tampered, match=f"^final/runs/selected/seed_100/rollouts/{recorded[0].name} was changed"
    ):
        ended.campaign.check()
    recorded[0].write_bytes(content)
    paths = run / "evaluations.jsonl", folder / "readings.csv", folder / "final.json"
    kept = [path.read_text() for path in paths]
    rows = list(read_lines(paths[0]))
    rows[-1]["by_task"] = dict.fromkeys(rows[-1]["by_task"], [2, 2])
    write_lines(paths[0].resolve(), rows)
    found = final._read(ended, [100, 101, 102])
    with open(paths[1], "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([claim.Reading._fields, *found])
    told = json.loads(kept[2])
    paths[2].write_text(json.dumps({**told, **claim.result(found)}, indent=1))
    rehash(ended.campaign.folder)
    ended.campaign.check()
    assert final.differences(ended) == [
        "selected/seed_100/evaluations.jsonl differs from the rollouts of its last evaluation."
    ]
    for path, text in zip(paths, kept, strict=True):
        path.write_text(text)
    rehash(ended.campaign.folder)
    assert final.differences(ended) == []


def test_a_link_of_the_reading_that_leads_to_another_harness_is_found(ended):
    link = ended.campaign.folder / "final/runs/selected/seed_100"
    right = link.resolve()
    link.unlink()
    link.symlink_to(ended.campaign.folder.absolute() / "final/runs/start/seed_100")
    told = final.differences(ended)
    assert any("selected/seed_100 leads to" in s and "which is no run of v002" in s for s in told), told
    with pytest.raises(Tampered, match="selected/seed_100 leads to"):
        final.read(ended, [100, 101, 102])
    link.unlink()
    link.symlink_to(right)
    assert final.differences(ended) == []


def test_a_campaign_that_is_reached_through_a_link_is_the_same_one(ended, tmp_path):
    (tmp_path / "link").symlink_to(ended.campaign.folder.parent)
    before = final.openings(ended)
    same = evolution(tmp_path / "link" / "campaign", "slow", versions=2)
    final.open_test(same, [100, 101, 102], {"date": "today"}, False)  # the same command goes on
    assert final.openings(ended) == before


@pytest.mark.parametrize("name", ["tasks/seed_4321", "runs/selected/seed_100"])
def test_tasks_and_runs_whose_config_was_changed_are_not_read_and_found_after(name, ended):
    """A shorter limit of the tasks' evaluations may suit the selected harness alone."""
    folder = ended.campaign.folder / "final"
    path = folder / name / "config.json"
    was = path.read_text()
    config = json.loads(was)
    config["evaluation"]["max_length"] = 64
    path.write_text(json.dumps(config))
    with pytest.raises(Tampered, match=f"^final/{name}/config.json was changed"):
        ended.campaign.check()
    rehash(ended.campaign.folder)
    ended.campaign.check()  # only the name of its folder tells
    says = "is not the config that the folder is named by: restore it."
    assert [s for s in final.differences(ended) if s.endswith(says)] == final.differences(ended) != []
    with pytest.raises(Tampered, match=re.escape(says)):
        final.read(ended, [100, 101, 102])
    final.open_test(ended, [100, 101, 102], {}, False)  # the same command goes on
    with pytest.raises(Tampered, match=re.escape(says)):  # nor before there is a reading
        ended.store.held_out(final.TEST_SEED, "test")
        ended.store.train(final.harnesses(ended)[1].config, [100])
    path.write_text(was)
    rehash(ended.campaign.folder)
    assert final.differences(ended) == []


def test_campaigns_that_read_the_same_tasks_count_their_openings_together(tmp_path):
    def notes(fault, **changes):
        own = configs.override(start.without_harness(config(fault)), changes)
        return Store(tmp_path, own, MADE_UP, 1).openings(final.TEST_SEED, "test")

    assert notes("slow") == notes("leash") == notes("slow", **{"environment.workers": 7})
    assert notes("slow") != notes("slow", **{"environment.train_split": "development"})


@pytest.mark.nightly
def test_the_test_is_read_on_the_set_that_the_campaign_selects_on(ended):
    path = ended.campaign.folder / "final" / f"tasks/seed_{final.TEST_SEED}/held_out.jsonl"
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    balanced = {row["id"] for row in rows[: len(rows) // 2]}
    for row in rows[: len(rows) // 2]:
        row["lineage"]["kind"] = "balanced"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = final._read(ended, [100, 101, 102])
    raw = json.loads((ended.campaign.folder / "final/readings/start_100_P2.json").read_text())
    counts = [count for id, count in raw["environment"]["by_task"].items() if id in balanced]
    (told,) = [r for r in found if r[:4] == ("start", "v000", "F", 100) and r.protocol == "P2"]
    assert told.success == sum(s for s, _ in counts) / sum(n for _, n in counts)
    path.write_text(text)


def test_the_long_tasks_of_every_reading_are_those_with_five_and_six_calls(ended):
    """The made-up tasks have one to six calls, and P4 is read out of the rollouts of P1."""
    folder = ended.campaign.folder / "final"
    rows = [r for r in csv.DictReader(open(folder / "readings.csv")) if r["protocol"] == "P4"]
    assert len(rows) == 2 * 5 and not list((folder / "readings").glob("*_P4.json"))
    for row in rows:
        raw = json.loads((folder / "readings" / f"{row['harness']}_{row['seed']}_P1.json").read_text())
        by_task = raw["environment"]["by_task"]
        counts = [count for id, count in by_task.items() if int(id.split("-")[1]) % 6 >= 4]
        assert 0 < len(counts) < len(by_task) / 2
        assert float(row["success"]) == sum(s for s, _ in counts) / sum(n for _, n in counts)


def test_one_start_has_the_test_of_its_own_seed_and_all_is_asked_on_it(ended, kept):
    (sealed,) = [job for job in kept.jobs if job.config.environment.eval_split == "test"]
    assert sealed.start is None and sealed.config.evaluation.seed == final.TEST_SEED
    assert final.TEST_SEED not in {job.config.evaluation.seed for job in kept.jobs if job is not sealed}
    asked = {q.flags for q in kept.questions if q.workdir == sealed.workdir}
    given = {p.given(ended.versions.config("v000")) for p in claim.PROTOCOLS.values()}
    assert asked == given
    others = {q.flags for q in kept.questions if q.workdir != sealed.workdir}
    assert others == {("--temperature=0",)}  # the canary


def test_it_is_read_once_and_a_second_time_stands_there_for_ever(ended):
    final.open_test(ended, [100, 101, 102], {}, False)  # the same command goes on
    assert not list((ended.campaign.folder / "final").glob("opened_*"))
    with pytest.raises(ValueError, match="a second reading needs --reopen"):
        final.open_test(ended, [200, 201], {}, False)
    with pytest.raises(ValueError, match="--final_seeds names 0, a seed of the campaign"):
        final.open_test(ended, [0, 200], {}, True)
    final.open_test(ended, [200, 201], {}, True)
    opened = json.loads((ended.campaign.folder / "final" / "opened_2.json").read_text())
    assert opened["fresh_seeds"] == [200, 201]
    ended.campaign.check()
    assert [e["file"] for e in ended.campaign.events() if e["event"] == "opened"] == [
        "final/opened.json",
        "final/opened_2.json",
    ]


@pytest.mark.nightly
def test_a_kill_while_the_test_is_read_again_stops_nothing(ended, monkeypatch):
    """The files of the first reading are written anew before the event of it."""

    class Killed(BaseException):
        pass

    def kill(*names):
        raise Killed

    final.open_test(ended, [300, 301], {}, True)
    with monkeypatch.context() as during, pytest.raises(Killed):
        during.setattr(ended.campaign, "tell_final", kill)
        final.read(ended, [300, 301])
    ended.run()  # as the same command does first
    final.open_test(ended, [300, 301], {}, True)
    final.read(ended, [300, 301])
    ended.run()
    assert final.result_of(ended.campaign.folder)["gain"]["FT"]["seeds"] == 2
    path = ended.campaign.folder / "final" / "final.json"
    was = path.read_text()
    path.write_text(was.replace("0.", "1."))
    with pytest.raises(Tampered, match="final/final.json was changed"):
        ended.run()
    path.write_text(was)


def test_a_reading_that_was_changed_is_found_and_never_read_again(ended):
    path = next((ended.campaign.folder / "final" / "readings").glob("selected_100_P1.json"))
    was = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(was.replace(b"[1, 2]", b"[2, 2]") if b"[1, 2]" in was else was + b" ")
    with pytest.raises(Tampered, match="final/readings/selected_100_P1.json was changed"):
        ended.run()
    path.write_bytes(was)
    ended.campaign.check()


@pytest.mark.nightly
def test_a_reading_that_was_taken_away_stands_in_the_store(ended):
    folder, events = ended.campaign.folder, ended.campaign.events()
    before = len(final.openings(ended))
    shutil.rmtree(folder / "final")
    cut(folder, [event["event"] for event in events].index("opened"))
    ended.run()
    with pytest.raises(ValueError, match=f"openings in the store: {before}\\).* needs --reopen"):
        final.open_test(ended, [400, 401], {}, False)
    final.open_test(ended, [400, 401], {}, True)
    assert [path.name for path in (folder / "final").glob("opened*")] == [f"opened_{before + 1}.json"]
    final.read(ended, [400, 401])
    result = final.result_of(folder)
    assert result["openings"] == before + 1 and claim.table(result).endswith(f" {before + 1}")
    other = evolution(folder.with_name("other"), "slow", versions=2)  # begun anew over the same store
    assert len(final.openings(other)) == before + 1
