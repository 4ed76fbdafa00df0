"""The folder of a campaign: the name of the code, and the version that a campaign ends with."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import config as configs
from coevolve_jax.harness import campaign, modules, start
from coevolve_jax.harness.store import Store
from coevolve_jax.testing.campaign import MADE_UP
from tests.harness.support import WITH_MADE_UP, config
from tests.support import forked
from tests.support.paths import ROOT


def test_the_name_of_the_code_is_that_of_every_source_file_and_page(tmp_path, monkeypatch):
    package, programs = tmp_path / "package", tmp_path / "experiments"
    monkeypatch.setattr(campaign, "PACKAGE", package)
    monkeypatch.setattr(campaign.shipped, "ROOT", tmp_path)
    (package / "inner").mkdir(parents=True)
    programs.mkdir()
    for name in campaign.PROGRAMS:
        (programs / name).write_text("0")
    named = {campaign.code()}
    own = ("a.py", "1"), ("a.py", "2"), ("inner/b.md", "1"), ("inner/b.md", "2"), ("inner/a.jinja", "1")
    written = [
        *((package / name, text) for name, text in own),
        *((programs / p, "1") for p in campaign.PROGRAMS),
    ]
    for path, text in written:
        path.write_text(text)
        named.add(campaign.code())
    assert len(named) == 1 + len(written)
    (package / "notes.txt").write_text("1")
    (programs / "other.py").write_text("1")
    assert campaign.code() in named


def test_the_programs_that_read_a_policy_are_frozen_in_a_checkout_and_in_a_wheel(tmp_path, monkeypatch):
    assert all(path.is_file() for path in campaign.source())
    names = [f"experiments/{name}" for name in campaign.PROGRAMS]
    assert {*names, "coevolve_jax/rollout/templates/chatml_tools.jinja"} <= {*frozen(tmp_path / "here")}
    package = tmp_path / "site" / "coevolve_jax"
    monkeypatch.setattr(campaign, "PACKAGE", package)
    monkeypatch.setattr(campaign.shipped, "ROOT", package / "checkout")
    (package / "checkout" / "experiments").mkdir(parents=True)
    for name in names:
        (package / "checkout" / name).write_text("0")
    assert {*frozen(tmp_path / "there")} == {"campaign.json"} | {f"coevolve_jax/checkout/{n}" for n in names}


def frozen(folder):
    """Names of the files of frozen.json, one of which is changed and found."""
    folder.mkdir()
    (folder / "campaign.json").write_text("{}")
    found = campaign.Campaign(folder)
    campaign.freeze(found, [])
    found.check()
    with pytest.MonkeyPatch.context() as during:
        true, changed = campaign.sha256, ("experiments", "evaluate.py")
        during.setattr(campaign, "sha256", lambda p: true(p) if p.parts[-2:] != changed else "0")
        with pytest.raises(campaign.Tampered, match="experiments/evaluate.py was changed"):
            found.check()
    return json.loads((folder / "frozen.json").read_text())


OWN = {
    "mover.py": "from coevolve_jax.harness.proposers.scripted import make as make",
    "still.py": "from coevolve_jax.strategies.static import make as make",
    "world.py": "AUDIT = 'own_modules.judge'\nscenarios = tasks = tools = make = print",
    "judge/__init__.py": "from own_modules.judge.rules import *",
    "judge/rules.py": "scenarios = tasks = tools = make = print",
}


def test_the_modules_that_a_config_names_are_frozen_and_name_the_runs(tmp_path, monkeypatch):
    for name, text in OWN.items():
        path = tmp_path / "own_modules" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    plain = config()
    assert modules.named(plain) == []
    changes = {"harness.proposer": "own_modules.mover", "strategy.name": "own_modules.still"}
    own = configs.override(plain, {**changes, "environment.name": "own_modules.world"})
    there = campaign.begin(tmp_path / "campaign", {"config": json.loads(configs.to_json(own))})
    campaign.freeze(there, [], modules.named(own))
    first, other = start.without_harness(own), start.without_harness(plain)
    of = lambda c: Store(tmp_path / "store", c, MADE_UP, 1, 1).workdir(c, 0).parent.name
    runs, others = {of(first)}, {of(other)}
    for name in OWN:
        path, text = tmp_path / "own_modules" / name, OWN[name]
        there.check()
        path.write_text(f"{text}  # another one")
        with pytest.raises(campaign.Tampered, match=rf"^modules/own_modules.*/{path.name} was changed since"):
            there.check()
        there.check(code=False)
        runs.add(of(first))
        others.add(of(other))
        path.write_text(text)
    assert len(runs) == len(OWN) and len(others) == 1  # no run depends on who proposes
    path.unlink()
    with pytest.raises(campaign.Tampered, match="^modules/own_modules.judge/rules.py is gone"):
        there.check()


@pytest.mark.parametrize("where", ["{folder}/frozen_tools.py", "frozen_tools"])
def test_a_users_own_tools_are_frozen_too(where, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "frozen_tools.py"
    path.write_text((ROOT / "examples" / "shop.py").read_text())
    named = f"{where.format(folder=tmp_path)}:Shop"
    own = config()
    own.environment.unlock()
    own.environment.update(name="tools", source=named)
    there = campaign.begin(tmp_path / "campaign", {"config": json.loads(configs.to_json(own))})
    campaign.freeze(there, [], modules.named(own))
    of = lambda: Store(tmp_path / "store", start.without_harness(own), MADE_UP, 1, 1)
    there.check()
    before = of().workdir(start.without_harness(own), 0)
    path.write_text(path.read_text() + "# another one\n")
    with pytest.raises(campaign.Tampered, match="^modules/environment.source=.*/frozen_tools.py was changed"):
        there.check()
    assert of().workdir(start.without_harness(own), 0) != before
    path.unlink()
    with pytest.raises(campaign.Tampered, match="frozen_tools.py is gone"):
        there.check()


@pytest.mark.slow
def test_a_bad_value_ends_in_a_sentence_and_the_folder_takes_the_corrected_command(tmp_path, quick):
    (tmp_path / "file").touch()
    flags = [f"--config={ROOT}/configs/bfcl_harness.py:fault=slow", f"--workdir={tmp_path}/campaign"]
    flags += ["--versions=1", "--seeds=0", "--diagnostics=fixed", "--audit=none"]

    def refused(*more):
        done = forked.run_after(WITH_MADE_UP, "evolve_harness", tmp_path, quick, *flags, *more)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and not done.stdout, done.stderr
        return done.stderr

    assert "config.harness.versions is -1: it must be at least 1" in refused("--versions=-1")
    assert "config.harness.proposer is 'hope': it must be one of llm," in refused("--proposer=hope")
    assert "has no section harness_model" in refused("--proposer=llm")
    assert "nowhere is not a Hugging Face model folder" in refused("--config.model=nowhere")
    assert "Error: --seeds='' is neither a range" in refused("--seeds=")
    assert "Error: --final_seeds='x' is neither a range" in refused("--final", "--final_seeds=x")
    assert "--final_seeds names 0, a seed of the campaign" in refused("--final", "--final_seeds=0:2")
    assert f"--workdir={tmp_path}/file is a file" in refused(f"--workdir={tmp_path}/file")
    assert f"--store={tmp_path}/file/x lies below" in refused(f"--store={tmp_path}/file/x")
    assert not (tmp_path / "campaign").exists()
    done = forked.run_after(WITH_MADE_UP, "evolve_harness", tmp_path, quick, *flags)
    assert done.returncode == 0, done.stderr
    assert "another campaign (config.harness.noise is 0.025 there and 0.5 here)" in refused(
        "--config.harness.noise=0.5"
    )


def test_questions_that_were_asked_stand_in_the_events(tmp_path):
    (tmp_path / "campaign.json").write_text("{}")
    found = campaign.Campaign(tmp_path)
    campaign.freeze(found, [])
    found.add_llm_calls([{"tokens": 7}])
    found.end()
    found.add_llm_calls([{"tokens": 8}])  # as a kill before the next event leaves it
    found.check()
    path = tmp_path / campaign.QUESTIONS
    for left in ("", path.read_text().replace("7", "1")):
        path.write_text(left)
        with pytest.raises(campaign.Tampered, match="llm_calls.jsonl lacks questions that were asked"):
            found.check()
    path.unlink()
    with pytest.raises(campaign.Tampered, match="llm_calls.jsonl"):
        found.check()


class Judged(campaign.Campaign):
    """A campaign whose parts are in memory."""

    def __init__(self, parts):
        super().__init__(Path())
        self.parts = parts

    def versions(self):
        return sorted(self.parts)

    def read(self, version, part):
        return self.parts[version][part]


@pytest.mark.parametrize(
    "kinds, left, over",
    [
        (["refused"] * 5, 2, False),
        (["refused"] * 6, 2, True),
        (["promoted"] + ["refused"] * 4, 1, False),
        (["rejected", "failed"], 0, True),
    ],
)
def test_refused_proposals_cost_no_version_and_end_a_campaign_at_three_for_each(
    kinds, left, over, monkeypatch
):
    """A campaign of two versions."""
    parts = {
        f"v{n:03d}": {part: {"kind": kind} for part in campaign.PARTS}
        for n, kind in enumerate(["start", *kinds])
    }
    found = Judged(parts)
    monkeypatch.setattr(found, "plan", lambda: {"config": {"harness": {"versions": 2}}})
    monkeypatch.setattr(found, "events", list)
    assert found.left() == left
    assert found.next() == (None if over else (f"v{len(parts):03d}", "proposal"))


GAINS = st.sampled_from([-0.25, 0.0, 0.25, 0.5])  # sums are exact
KINDS = st.sampled_from(["promoted", "promoted", "rejected"])


@given(st.lists(st.tuples(st.integers(0, 7), KINDS, GAINS), max_size=8))
def test_a_campaign_ends_with_the_largest_gain_of_the_promoted_versions_that_none_follows(later):
    """The success is over valid trials alone, and the reverse of the gain: it says nothing."""
    parts = {"v000": {"proposal": {"because": ""}, "verdict": {"kind": "start", "success": 0.9}}}
    gains = {"v000": 0.0}
    for number, (parent, kind, gain) in enumerate(later, 1):
        proposal, version = {"parent": f"v{parent % number:03d}"}, f"v{number:03d}"
        gains[version] = gains[proposal["parent"]] + gain
        verdict = {"kind": kind, "success": -gains[version], "difference": gain}
        parts[version] = {"proposal": proposal, "verdict": verdict}
    good = [v for v, own in parts.items() if own["verdict"]["kind"] == "promoted"]
    ends = [v for v in good if not any(parts[other]["proposal"]["parent"] == v for other in good)]
    chosen = Judged(parts).selected()
    if not good:
        assert chosen == "v000"
    else:
        assert chosen in ends
        assert all((gains[v], v) <= (gains[chosen], chosen) for v in ends)


def test_a_version_without_a_score_counts_nothing_and_one_that_is_judged_later_is_not_selected():
    refused = {"proposal": {"parent": "v001"}, "verdict": {"kind": "refused", "difference": None}}
    parts = {
        "v000": {"proposal": {"because": ""}, "verdict": {"kind": "start"}},
        "v001": {"proposal": {"parent": "v000"}, "verdict": {"kind": "promoted", "difference": 0.1}},
        "v002": refused,
        "v003": {"proposal": {"parent": "v000"}, "verdict": None},
    }
    assert Judged(parts).selected() == "v001"
