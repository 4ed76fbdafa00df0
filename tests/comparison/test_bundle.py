"""Bundles: the guide's commands on a small comparison; a lost one goes on; what does not fit is refused."""

import csv
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coevolve_jax import build
from coevolve_jax.comparison import (
    bundle,
    cell_files,
    leaderboard,
    notes,
    plan_file,
    results,
    testbed,
    variations,
)
from coevolve_jax.comparison.plan import Cell, cells
from coevolve_jax.config import load_file, override
from coevolve_jax.loop import initial
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.records.workdir import BEGINNING
from tests.comparison.test_comparison import SMALL
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

GUIDE = (ROOT / "docs" / "guides" / "enter_the_arena.md").read_text()
NAME = "my_package.half_solved"
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
PLAN = [  # the frozen plan in small: both ends of a run are there, the budget's and the last evaluation's
    *SMALL, "budget.rollouts=12", "evaluation.last_rollouts=2",
]  # fmt: skip
CONFIG = override(
    load_file(ROOT / "configs" / "bfcl_tiny.py"),
    {
        key: variations.parse_value(load_file(ROOT / "configs" / "bfcl_tiny.py"), key, value)
        for key, value in (text.split("=", 1) for text in PLAN)
    },
)


def commands(text: str) -> list[list[str]]:
    """The whole commands of a guide: indented blocks that start a program."""
    blocks = re.findall(r"(?:^    .*\n)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    found = [shlex.split(block.replace("\\\n", " "), comments=True) for block in blocks]
    return [words for words in found if "python" in words]


def follow(words: list[str], home: Path, environ) -> str:
    """Runs a command of the guide from the folder `home`, with the plan in small and one seed."""
    environ = dict(environ)
    if words[0] == "PYTHONPATH=.":
        words, path = words[1:], [str(home), str(ROOT), environ["PYTHONPATH"]]
    else:  # the package of the method is not there
        path = [str(ROOT), environ["PYTHONPATH"]]
    environ["PYTHONPATH"] = os.pathsep.join(path)
    small = [f"--config={ROOT / 'configs' / 'bfcl_tiny.py'}", *(f"--set={text}" for text in PLAN)]
    swap = {
        "python": [],
        "experiments/compare.py": [str(ROOT / "experiments" / "compare.py")],
        "--config=configs/leaderboard_bfcl.py": small,
        "--config=configs/leaderboard_bfcl.py:split=test": small,
        "--seeds=0:4": ["--seeds=0"],
        "--seeds=200:210": ["--seeds=0"],
        "--arms=ARMS": ["--arms=random"],
        "--join=docs/results/bundles/bfcl": ["--join=runs/random"],
    }  # fmt: skip
    program = [
        new for word in words for new in swap.get(word, [word.replace("configs/", f"{ROOT}/configs/")])
    ]
    if program[0] == "-c":
        start: Any = subprocess.Popen([sys.executable, *program], cwd=home, env=environ, **PIPES)
    else:
        start = forked.Start(program, environ, home)
    out, err = start.communicate(timeout=900)
    assert start.wait() == 0, err[-3000:]
    return out + err


@pytest.fixture(scope="module")
def home(tmp_path_factory, quick) -> Path:
    """A stranger's folder after the guide's first commands: the method, its runs and its bundle."""
    folder = tmp_path_factory.mktemp("home")
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert 20 <= len(code.splitlines()) <= 32
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    (folder / "my_package" / "half_solved.py").write_text(code)
    said = [follow(words, folder, quick) for words in commands(GUIDE)[:3]]
    assert "random_probe" in said[0] and "runs/half_solved holds 2 of 2 cells, digest " in said[2]
    return folder


def rows(path: Path) -> list[dict]:
    with open(path) as f:
        return list(csv.DictReader(f))


@pytest.mark.nightly
def test_a_method_enters_from_the_guide_and_a_lost_comparison_goes_on(home, quick):
    read, enter, again = commands(GUIDE)[3:]
    theirs = home / "runs" / "arena_test"
    forge(home / "runs" / "half_solved", home / "runs" / "random", of_random)
    assert "runs/half_solved_test holds 2 of 2 cells" in follow(read, home, quick)
    said = follow(enter, home, quick)
    joined = home / "runs" / "leaderboard"
    assert rows(joined / "outcomes.csv") == rows(theirs / "outcomes.csv")
    assert rows(joined / "cells.csv") == rows(theirs / "cells.csv")
    assert f"{NAME} - random: 1 seeds in common" in said
    told = f"{NAME} (seed 0), 1 cells of this comparison's own arms. Its files agree"
    assert told in said and "really run cannot be checked" in said
    kept = json.loads((joined / "plan.json").read_text())
    (late,) = kept["planned_later"]  # its numbers were there before the plan
    assert (kept["planned"], late["planned"], kept["arms"]) == ([], [[NAME, "random"]], ["random"])
    assert (joined / "cells" / NAME / "seed_0" / "report.html").exists()
    assert follow(enter, home, quick).count("From the bundle") == 1  # once more changes nothing
    assert json.loads((joined / "plan.json").read_text())["joined"] == kept["joined"]
    without = [word for word in enter if not word.startswith("--join")]
    assert f"{NAME} - random: 1 seeds" in follow([*without, "--only_read"], home, quick)  # it stays

    boards = [  # of the folder, and of the bundle itself
        leaderboard.board(testbed.load("tiny", [path]))
        for path in (joined, home / "runs" / "half_solved_test")
    ]
    told = [[{k: v for k, v in r.items() if k not in ("commit", "date")} for r in b.rows] for b in boards]
    assert told[0] == told[1] and {r["method"] for r in told[0]} == {NAME, "random"}
    assert boards[0].testbed.plan["joined"] == kept["joined"] and boards[1].testbed.plan["joined"] == []

    first = home / "runs" / "arena"
    before = json.loads((first / "plan.json").read_text())
    shutil.rmtree(first)
    said = follow(again, home, quick)
    assert "2 cells of this comparison's own arms" in said and "0%" not in said.split("\n")[0]
    found = json.loads((home / "runs" / "again" / "plan.json").read_text())
    assert {k: found[k] for k in ("planned", "planned_later", "date", "command")} == {
        k: before[k] for k in ("planned", "planned_later", "date", "command")
    }
    assert rows(home / "runs" / "again" / "outcomes.csv") == rows(joined / "outcomes.csv")


def test_a_bundle_is_small_and_the_same_bytes_each_time(home, tmp_path):
    first = home / "runs" / "half_solved"
    opened = bundle.read(first)
    files = sorted(p.name for p in (first / "files").iterdir())
    assert len(files) < sum(map(len, opened.cells.values()))  # what cells share is there once
    assert sum(p.stat().st_size for p in first.rglob("*.gz")) < 40_000 * len(opened.cells)
    for cell, contents in opened.cells.items():
        workdir = cell.workdir(tmp_path / "folder")
        workdir.mkdir(parents=True)
        for name, content in contents.items():
            (workdir / name).write_bytes(content)
    (tmp_path / "again" / "files").mkdir(parents=True)
    (tmp_path / "again" / "bundle.json").write_text("{}")
    (tmp_path / "again" / "files" / "old.gz").write_bytes(b"")
    count, digest = bundle.write(
        tmp_path / "folder",
        opened.plan,
        [*opened.cells, Cell("static", 5)],
        tmp_path / "again",
        **opened.told,
    )
    assert (count, digest) == (2, opened.digest)
    for path in first.rglob("*"):
        assert (
            path.is_dir() or path.read_bytes() == (tmp_path / "again" / path.relative_to(first)).read_bytes()
        )
    assert sorted(p.name for p in (tmp_path / "again" / "files").iterdir()) == files
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    for target, chosen, why in (
        ("other", opened.cells, "other is not empty and holds no bundle: choose another"),
        ("empty", [Cell("static", 5)], "No cell of .*folder has a result yet"),
    ):
        with pytest.raises(ValueError, match=why):
            bundle.write(tmp_path / "folder", opened.plan, chosen, tmp_path / target, **opened.told)


# What is refused


def forge(source: Path, target: Path, edit) -> Path:
    """Writes a bundle whose digests are right after `edit(made, files)`; files: (arm, name) -> text."""
    made = json.loads((source / "bundle.json").read_text())
    del made["digest"]
    files = {
        (entry["arm"], name): gzip.decompress((source / "files" / f"{sha}.gz").read_bytes()).decode()
        for entry in made["cells"]
        for name, sha in entry["files"].items()
    }
    edit(made, files)
    (target / "files").mkdir(parents=True)
    for entry in made["cells"]:
        for name in entry["files"]:
            content = files[entry["arm"], name].encode()
            entry["files"][name] = hashlib.sha256(content).hexdigest()
            (target / "files" / f"{entry['files'][name]}.gz").write_bytes(gzip.compress(content))
    text = json.dumps(made, sort_keys=True, separators=(",", ":"))
    (target / "bundle.json").write_text(
        json.dumps({**made, "digest": hashlib.sha256(text.encode()).hexdigest()})
    )
    return target


def of_random(made, files):
    """An edit that leaves the cell of `random` alone."""
    made["cells"] = [entry for entry in made["cells"] if entry["arm"] == "random"]


def changed(name: str, change, arm: str = NAME):
    """An edit of one cell's file: of its value, or of the list of its lines' values."""

    def edit(made, files):
        text = files[arm, name]
        many = name.endswith("jsonl")
        value = [json.loads(line) for line in text.splitlines()] if many else json.loads(text)
        change(value)
        lines = [json.dumps(v) + "\n" for v in value] if many else [json.dumps(value)]
        files[arm, name] = "".join(lines)

    return edit


def rows_changed(change):
    return changed("evaluations.jsonl", change)


def else_asked(name: str):
    """An edit of the words of the first task in a file."""
    return changed(name, at(0, "turns", 0, "query", value="Something else."))


def at(*path, value):
    """Sets a value within a value."""

    def change(found):
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value(found[path[-1]]) if callable(value) else value

    return change


def first_task(counts):
    """Changes the counts of the first task of the last evaluation of the i.i.d. set."""

    def change(rows):
        row = [r for r in rows if r["set"] == "iid"][-1]
        row["by_task"][next(iter(row["by_task"]))] = counts

    return change


CELL = rf"{NAME}, seed 0: "
UP = f"{CELL}its numbers do not add up .*"
AGAIN = ".*ask for the bundle that python experiments/compare.py --bundle wrote, or leave it out"


def test_an_arm_begins_with_the_tasks_of_a_bundle_whatever_this_code_would_explore(home, tmp_path, quick):
    """The bundle is as earlier code would have made it: its first tasks are in another order."""

    def edit(made, files):
        of_random(made, files)
        changed("tasks.jsonl", lambda rows: rows.insert(0, rows.pop(1)), "random")(made, files)

    forge(home / "runs" / "half_solved", tmp_path / "older", edit)
    folder = tmp_path / "comparison"
    words = ["python", "experiments/compare.py", "--config=configs/leaderboard_bfcl.py", "--seeds=0:4"]
    flags = ["--arms=random,static", "--run=static", f"--join={tmp_path / 'older'}", f"--workdir={folder}"]
    assert "1 cells of this comparison's own arms" in follow([*words, *flags], home, quick)
    theirs, ours = (Cell(arm, 0).workdir(folder) for arm in ("random", "static"))
    assert results.start_digests(ours) == results.start_digests(theirs)
    first = lambda run: [task["id"] for task in read_lines(run / "tasks.jsonl")][:4]
    assert first(ours) == first(theirs) == [f"initial-0-{n}" for n in (1, 0, 2, 3)]
    made = lambda run: json.loads((run / "ledger.json").read_text())["initial"]
    assert made(ours) == made(theirs) and made(ours)["environment_steps"] > 0
    assert {row["arm"] for row in rows(folder / "outcomes.csv")} == {"random", "static"}

    given = Cell("static", 0).start(folder) / BEGINNING
    tasks = list(read_lines(given / "tasks.jsonl"))
    tasks[2]["turns"][0]["calls"][0]["name"] = "no_such_tool"
    for scenario, why in (
        (tasks[2]["scenario"], "does not pass in .*step_failed"),
        ({}, "is in no scenario"),
    ):
        tasks[2]["scenario"] = scenario
        write_lines(given / "tasks.jsonl", tasks)
        why = f"Task {tasks[2]['id']} of .* {why}"
        with build.env_pool(CONFIG) as pool, pytest.raises(ValueError, match=why):
            initial.begun_elsewhere(CONFIG, given, SimpleNamespace(env_pool=pool))


@pytest.mark.parametrize(
    "edit, why",
    [
        (changed("config.json", at("learner", "kl_coef", value=0.5)),
         f"{CELL}its config is not the plan's .config.learner.kl_coef is 0.5 there and 0.01 here"),
        (changed("config.json", at("strategy", "name", value="my_package.other")),
         f"{CELL}.*config.strategy.name is 'my_package.other', which is not the arm's name"),
        (changed("config.json", at("explorer", "name", value="antigravity.x")),
         f"{CELL}.*config.explorer.name is 'antigravity.x' there and 'scripted' here"),
        (changed("config.json", at("strategy", "probe", value=4), "random"),
         "random, seed 0: its config is not the plan's .config.strategy.probe is 4 there and 0 here"),
        (changed("config.json", at("seed", value=7)), f"{CELL}.*config.seed is 7 there and 0 here"),
        (rows_changed(first_task([3, 2])), f"{UP}3 successes in 2 of 2 trials{AGAIN}"),
        (rows_changed(first_task([2, 9])), f"{UP}2 successes in 9 of 2 trials"),
        (rows_changed(first_task([True, 2])), f"{UP}True successes"),
        (rows_changed(first_task([1, 1])), f"{UP}invalid rollouts of set iid after step 2"),
        (rows_changed(lambda rows: rows[-1].update(success=0.99)), f"{UP}success of set"),
        (rows_changed(lambda rows: rows[-1].update(samples=8)), f"{UP}samples of set"),
        (rows_changed(lambda rows: rows[-1].update(split="test")), f"{UP}split of set"),
        (rows_changed(lambda rows: rows.pop()), f"{UP}was evaluated after the steps"),
        (rows_changed(lambda rows: rows.append(rows[-1])), f"{UP}was evaluated after the steps"),
        (rows_changed(lambda rows: rows[0].update(weak_tools={"cp": [0, 0]})), f"{UP}weak tools"),
        (rows_changed(lambda rows: rows[0].pop("by_task")), f"{UP}KeyError: 'by_task'"),
        (changed("summary.json", at("held_out", "after", "success", value=0.77)),
         f"{UP}set iid after training"),
        (changed("summary.json", at("config_digest", value="0" * 16)), f"{UP}config_digest"),
        (changed("summary.json", at("steps", value=3)), f"{UP}steps in metrics.jsonl"),
        (changed("ledger.json", at("costs", "rollouts/policy", value=-1)),
         f"{UP}the cost rollouts/policy is -1"),
        (changed("ledger.json", at("costs", "rollouts/probe", value=30)),
         f"{UP}it spent 46 rollouts of a budget of 12, and 21 are the most"),
        (changed("ledger.json", at("costs", "rollouts/policy", value=12), "random"),
         "random, seed 0: .* .rollouts/policy in ledger.json: 12, where its other files have 16"),
        (changed("metrics.jsonl", at(0, "groups", "rolled_out", value=64), "random"),
         "random, seed 0: .* .rollouts/policy in ledger.json: 16, where its other files have"),
        (changed("metrics.jsonl", at(0, "groups", "rolled_out", value=64)),
         f"{UP}16 rollouts in ledger.json, and 6. groups in metrics.jsonl"),
        (changed("metrics.jsonl", at(0, "groups", "rolled_out", value=0)),
         f"{UP}groups.rolled_out in metrics.jsonl is no whole number above 0"),
        (changed("ledger.json", at("costs", "rollouts/probe", value=10**400)), f"{UP}OverflowError"),
        (lambda made, files: files.update({(NAME, "ledger.json"): "[" * 200_000}), f"{UP}RecursionError"),
        (changed("ran.json", at(0, "commit", value="\x1b[31mred")),
         rf"{UP}the text '\\x1b.31mred' cannot be printed"),
        (changed("ran.json", at(0, "date", value=[1])), f"{UP}date in ran.json is .1., which is no text"),
        (changed("ran.json", at(0, "diverged", value={"step": "\x1b[2J", "why": ""})),
         rf"{UP}it diverged at step '\\x1b.2J', which is no whole number"),
        (changed("summary.json", at("explorer_model", value="\x1b[2J")), f"{UP}cannot be printed"),
        (changed("evaluations.jsonl", at(0, "samples", value="\x1b[2J")), f"{UP}samples of set"),
        (changed("tasks.jsonl", lambda rows: rows.pop()), f"{UP}tasks.final"),
        (else_asked("tasks.jsonl"),
         f"{CELL}the tasks of D_0 have the digest '.*', and those of random, seed 0 '.*': all runs of"),
        (else_asked("held_out.jsonl"), f"{CELL}the .* held-out tasks have the digest"),
        (lambda made, files: made["plan"]["config"]["learner"].update(kl_coef=0.5),
         "is of another plan .config.learner.kl_coef is 0.5 there and 0.01 here.: run its arms with this"),
        (lambda made, files: made["cells"][1].update(arm="hope") or files.update(
            {("hope", n): t for (a, n), t in list(files.items()) if a == NAME}),
         "hope, seed 0: there is no arm 'hope': an arm of one's own has the dotted path"),
        (lambda made, files: made["cells"][1].update(seed=3),
         "seed 3: the seeds of this comparison are 0: name"),
        (lambda made, files: made["cells"][1].update(setting=[["steps", 3]]),
         "steps=3, seed 0: its setting is none of this"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence_and_changes_nothing(home, tmp_path, edit, why):
    opened = bundle.read(forge(home / "runs" / "half_solved", tmp_path / "forged", edit))
    folder = tmp_path / "comparison"
    with pytest.raises(ValueError, match=f"forged.*{why}") as error:
        join(folder, opened)
    assert str(error.value).isprintable() and str(error.value).endswith(".")
    assert not list(folder.glob("cells/*")) and not list(folder.glob(".join*"))


@pytest.mark.parametrize(
    "edit, why",
    [
        (rows_changed(first_task([2, 9])), f"{UP}2 successes in 9 of 2 trials"),
        (changed("config.json", at("learner", "kl_coef", value=0.5)), f"{CELL}its config is not the plan's"),
        (lambda made, files: made["plan"]["config"]["explorer"].update(name="antigravity.x"),
         "its plan cannot be read .config.explorer.name is 'antigravity.x', which is none of ours"),
    ],
)  # fmt: skip
def test_the_leaderboard_refuses_a_bundle_as_join_does(home, tmp_path, edit, why):
    path = forge(home / "runs" / "half_solved", tmp_path / "forged", edit)
    with pytest.raises(ValueError, match=f"forged.*{why}"):
        testbed.load("tiny", [path])
    assert "antigravity" not in sys.modules


def test_the_plan_is_written_before_a_cell_moves(home, tmp_path):
    """A command that is killed while it joins leaves a folder with which it goes on."""
    opened, folder = bundle.read(home / "runs" / "half_solved"), tmp_path / "comparison"

    def killed(entries):
        assert not list(folder.glob("cells/*"))
        plan_file.write(folder, {"config": _numbers(), "joined": entries})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        join(folder, opened, keep=killed)
    assert plan_file.read(folder)["joined"] == join(folder, opened) and list(folder.glob("cells/*"))
    (tmp_path / "earlier" / f"{plan_file.JOINING}x").mkdir(parents=True)  # killed before that
    assert plan_file.written(tmp_path / "earlier", {}) is None


def test_a_difference_of_cells_that_exist_is_planned_later(home, quick, tmp_path):
    """Also where the cells are of arms that the comparison runs itself."""
    words = [*commands(GUIDE)[4], f"--workdir={tmp_path / 'late'}"]
    swap = {
        "--arms=ARMS": "--arms=random,static",
        f"--planned={NAME}-random": "--planned=random-static",
        "--join=runs/half_solved_test": "--join=runs/half_solved",
    }
    follow([swap.get(word, word) for word in words], home, quick)
    kept = plan_file.read(tmp_path / "late")
    assert [kept["planned"], [e["planned"] for e in kept["planned_later"]]] == [[], [[["random", "static"]]]]


def join(folder: Path, opened: bundle.Bundle, arms=("random",), **how) -> list[dict]:
    config = json.loads(json.dumps(_numbers()))
    made = {"config": config, "seeds": [0], "settings": [{}], "arms": list(arms)}
    return bundle.join(folder, [opened], CONFIG, made, cells(arms, [0]), **how)


def _numbers():
    from coevolve_jax import config as configs

    return configs.numbers(CONFIG.to_dict())


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda path, made: made.update(date="2020-01-01"), "its digest is '.*', and its content has"),
        (lambda path, made: made.update(machine="\x1b]0;m\x07"), r"the text '\\x1b.*' cannot be printed"),
        (lambda path, made: made.pop("cells"), "must have the keys cells, commit"),
        (lambda path, made: next((path / "files").iterdir()).write_bytes(b"no gzip"), "Not a gzipped file"),
        (
            lambda path, made: next((path / "files").iterdir()).write_bytes(gzip.compress(b"x")),
            "has the sha256",
        ),
        (lambda path, made: next((path / "files").iterdir()).unlink(), "No such file"),
    ],
)
def test_a_damaged_bundle_is_refused(home, tmp_path, spoil, why):
    path = tmp_path / "spoilt"
    shutil.copytree(home / "runs" / "half_solved", path)
    made = json.loads((path / "bundle.json").read_text())
    spoil(path, made)
    (path / "bundle.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=f"spoilt is no whole bundle .*{why}.*ask its author"):
        bundle.read(path)


@pytest.mark.parametrize(
    "edit, why",
    [
        (lambda made: made["plan"].pop("arms"), "arms of its plan is missing, or has another shape"),
        (lambda made: made["plan"].update(seeds=["0"]), "seeds of its plan is missing, or has another"),
        (lambda made: made["plan"].update(planned=[["random"]]), "planned of its plan is"),
        (lambda made: made["plan"].update(extended=[{"date": "then"}]), "extended of its plan is"),
        (lambda made: made["plan"].update(primary="luck"), "primary of its plan is 'luck'"),
        (lambda made: made["plan"].update(date="\x9b2J"), r"the text '\\x9b2J' cannot be printed"),
        (lambda made: made["cells"][1].update(seed=10**300), f"the seed of {NAME} is 1000"),
        (lambda made: made["cells"][1].update(setting=[["a\0b", 1]]), "cannot be printed"),
        (lambda made: made["cells"][1].update(setting=[["\ud800", 1]]), "cannot be printed"),
        (lambda made: made["cells"][1].update(setting=[["a" * 300, 1]]), "a name of more than 200 bytes"),
        (lambda made: made["cells"].extend({**made["cells"][1], "setting": [["a", x]]} for x in ("/", "_")),
         "or stands twice"),
    ],
)  # fmt: skip
def test_a_bundle_that_cannot_be_read_is_refused_in_a_sentence(home, tmp_path, edit, why):
    path = forge(home / "runs" / "half_solved", tmp_path / "forged", lambda made, files: edit(made))
    with pytest.raises(ValueError, match=f"forged is no whole bundle .*{why}.*ask its author") as error:
        bundle.read(path)
    assert str(error.value).isprintable()


def test_deep_nesting_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "bundle.json").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(ValueError, match="is no whole bundle .RecursionError: .*ask its author"):
        bundle.read(tmp_path)


def test_a_content_is_held_once_and_all_of_them_are_bounded(home, monkeypatch):
    """Few compressed bytes may stand for many, in many cells."""
    path = home / "runs" / "half_solved"
    held = [content for files in bundle.read(path).cells.values() for content in files.values()]
    assert len({*map(id, held)}) == len(list((path / "files").iterdir())) < len(held)
    monkeypatch.setattr(bundle, "WHOLE", sum(map(len, held)))
    bundle.read(path)
    monkeypatch.setattr(bundle, "WHOLE", sum(map(len, held)) - 1)
    with pytest.raises(ValueError, match="half_solved is no whole bundle .*have more than [0-9]* bytes toge"):
        bundle.read(path)


@pytest.mark.parametrize("arm", ["..", ".", "a/b", "../x", "a..b", "", 3])
def test_no_arm_names_a_folder_elsewhere(home, tmp_path, arm):
    def edit(made, files):
        made["cells"][1]["arm"] = arm
        files.update({(arm, name): text for (a, name), text in list(files.items()) if a == NAME})

    path = forge(home / "runs" / "half_solved", tmp_path / "forged", edit)
    with pytest.raises(ValueError, match="the arm .* is neither a name nor the dotted path"):
        bundle.read(path)


def test_cells_that_are_here_already_stand_and_the_agreement_is_told(home, tmp_path):
    opened = bundle.read(home / "runs" / "half_solved")
    folder = tmp_path / "comparison"
    (first,) = join(folder, opened)
    assert (first["taken"], first["repeated"], first["alike"]) == (1, 0, 0)
    (again,) = join(folder, opened)
    assert (again["taken"], again["repeated"], again["alike"]) == (0, 1, 1)
    mine = Cell("random", 0).workdir(folder)
    lines = (mine / "evaluations.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    task = next(iter(row["by_task"]))
    row["by_task"][task] = [2 - row["by_task"][task][0], 2]
    (mine / "evaluations.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    (other,) = join(folder, opened)
    assert (other["repeated"], other["alike"]) == (1, 0)
    assert json.loads((mine / "evaluations.jsonl").read_text().splitlines()[-1]) == row
    told = notes.notes({"reads": "test", "joined": [other]}, [], [])[1]
    assert "Of 1 cells that were run in both places, 0 have the same counts; those of here stand." in told
    theirs = Cell(NAME, 0).workdir(folder)  # of others' cells there is nothing of ours to stand
    (theirs / "evaluations.jsonl").write_text((mine / "evaluations.jsonl").read_text())
    with pytest.raises(ValueError, match=f"{NAME}, seed 0 has other counts than the cell of that name"):
        join(folder, opened)
    (theirs / "summary.json").unlink()
    with pytest.raises(ValueError, match=f"{NAME}, seed 0 is being run in .*: let it end and leave it out"):
        join(folder, opened)


def test_two_bundles_with_the_same_cells_are_compared_with_each_other(home, tmp_path, monkeypatch):
    first, config = bundle.read(home / "runs" / "half_solved"), json.loads(json.dumps(_numbers()))
    made = {"config": config, "seeds": [0], "settings": [{}], "arms": ["random"]}
    both = lambda folder, *bundles: bundle.join(folder, bundles, CONFIG, made, cells(["random"], [0]))
    copy = bundle.read(forge(home / "runs" / "half_solved", tmp_path / "copy", lambda made, files: None))
    entries = both(tmp_path / "alike", first, copy)
    assert [(e["taken"], e["repeated"], e["alike"]) for e in entries] == [(1, 0, 0), (0, 1, 1)]
    for cell in first.cells:
        names = {p.name for p in cell.workdir(tmp_path / "alike").iterdir()}
        assert names == {*bundle.FINISHED, cell_files.RAN}

    monkeypatch.setattr(bundle, "_check_cell", lambda *cell: None)  # which sees more than the counts
    flipped = lambda own: own.update({min(own): [2 - own[min(own)][0], own[min(own)][1]]})
    changes = rows_changed(lambda rows: flipped(rows[-1]["by_task"]))
    other = bundle.read(forge(home / "runs" / "half_solved", tmp_path / "other", changes))
    with pytest.raises(
        ValueError, match=f"other: {NAME}, seed 0 has other counts than the cell of that name"
    ):
        both(tmp_path / "unlike", first, other)


def test_a_bundle_that_joins_again_keeps_its_first_entry():
    first, again, other = ({"digest": d, "taken": n} for d, n in (("a", 2), ("a", 0), ("b", 1)))
    assert bundle.merged([first], [other, again]) == [first, other]


def test_a_comparison_goes_on_with_the_plan_of_a_bundle_that_asks_for_no_more():
    ours = {"arms": ["random", "static"], "seeds": [0, 1], "settings": [{}]}
    of = lambda **more: bundle.Bundle("b", "d", {**ours, "date": "then", "joined": [1], **more}, {}, {})
    assert bundle.plan_of([of()], ours) == {**ours, "date": "then", "joined": []}
    less = bundle.plan_of([of(seeds=[0, 2]), of(arms=["random"])], ours)
    assert less is not None and less["arms"] == ["random"]
    for more in ({"arms": ["blame"]}, {"seeds": [0, 1, 2]}, {"settings": [{}, {"steps": 3}]}):
        assert bundle.plan_of([of(**more)], ours) is None


def test_a_run_that_diverged_is_in_the_bundle_as_one(home, tmp_path):
    opened = bundle.read(home / "runs" / "half_solved")
    folder = tmp_path / "comparison"
    workdir = Cell(NAME, 0).workdir(folder)
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_bytes(opened.cells[Cell(NAME, 0)]["config.json"])
    (workdir / "failure.json").write_text(json.dumps({"step": 1, "why": "not finite"}))
    bundle.write(folder, opened.plan, [Cell(NAME, 0)], tmp_path / "bundle", **opened.told)
    join(tmp_path / "other", bundle.read(tmp_path / "bundle"))
    assert cell_files.diverged(Cell(NAME, 0).workdir(tmp_path / "other")) == {"step": 1, "why": "not finite"}
