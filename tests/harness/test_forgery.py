"""Campaigns whose files were forged, hashes and all: --replay tells, and no form ends in a traceback."""

import json
import shutil

import pytest

from coevolve_jax.harness import campaign, evidence
from coevolve_jax.harness.loop import Evolution
from coevolve_jax.records.files import read_lines, write_lines
from tests.harness.support import cut, evolution, files, rehash

pytestmark = pytest.mark.slow
SMALL = {"versions": 1, "seeds": (0,)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A campaign that is over."""
    found = evolution(tmp_path_factory.mktemp("forgery") / "campaign", "slow", **SMALL)
    found.run()
    return found


@pytest.fixture
def forged(whole, tmp_path) -> Evolution:
    """A copy of it, over the same store."""
    (tmp_path / "store").symlink_to(whole.campaign.folder.parent / "store")
    shutil.copytree(whole.campaign.folder, tmp_path / "campaign", symlinks=True)
    return evolution(tmp_path / "campaign", "slow", **SMALL)


def forge(found: Evolution, name: str, content) -> None:
    """Writes a file of the campaign by hand, and the hash of it into the events."""
    path = found.campaign.folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    rehash(found.campaign.folder)


def judge_again(found: Evolution, version: str) -> None:
    for part in ("verdict", "learned"):
        forge(found, f"versions/{version}/{part}.json", getattr(found.parts, part)(version))
    found.campaign.check()  # only the runs tell


@pytest.mark.parametrize("log", ["", "step 1\n"])
def test_a_finished_run_that_is_said_to_have_failed_is_found(log, forged):
    path = forged.versions.runs("v001")[0].with_name("seed_0.log")
    path.write_text(log)
    began = {"bytes": len(log), "sha256": campaign._sha(log.encode())}
    failed = {"failed": "seed 0: exit status 1", "rollouts": {"0": 1536}, "logs": {"0": began}}
    forge(forged, "versions/v001/evidence.json", failed)
    judge_again(forged, "v001")
    assert forged.versions.verdict("v001").kind == "failed"
    (told,) = forged.replay()
    assert told.startswith("v001 is said to have failed (evidence), and its runs are finished")
    path.unlink()


def test_a_table_of_evaluations_that_its_rollouts_contradict_is_found(forged):
    path = forged.versions.runs("v001")[0] / "evaluations.jsonl"
    was, rows = path.read_text(), list(read_lines(path))
    rows[-1]["by_task"] = dict.fromkeys(rows[-1]["by_task"], [2, 2])
    write_lines(path, rows)
    forge(forged, "versions/v001/evidence.json", forged.parts.evidence("v001"))
    judge_again(forged, "v001")
    (told,) = forged.replay()
    assert told.endswith("/seed_0/evaluations.jsonl differs from the rollouts of its last evaluation.")
    path.write_text(was)


def test_a_replay_asks_for_nothing_and_writes_nothing(forged, tmp_path):
    (forged.campaign.folder / "canary" / "v001.json").unlink()
    before = files(forged.campaign.folder)
    (told,) = forged.replay()
    assert "v001.json is gone, and a replay asks for nothing: restore it." in told
    assert files(forged.campaign.folder) == before
    with forged.parts.on_record(), pytest.raises(ValueError, match="checks.json is gone"):
        forged.store.gradients(tmp_path, forged.versions.config("v001"), tmp_path / "gradients")
    assert not (tmp_path / "gradients").exists() and forged.store.asks


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("versions/v001/evidence.json", [1], "evidence.json holds no JSON object"),
        ("versions/v001/evidence.json", {"files": [1]}, "evidence.json cannot be read"),
        ("versions/v001/verdict.json", {}, "verdict.json lacks 'kind'"),
        ("versions/v001/verdict.json", {"kind": "promoted", "rules": 1}, "verdict.json cannot be read"),
        ("versions/v001/proposal.json", "[" * 100_000, "proposal.json cannot be read"),
        ("frozen.json", [], "frozen.json holds no JSON object"),
    ],
)
def test_a_part_of_another_form_is_a_sentence_with_its_name(name, content, says, forged):
    forge(forged, name, content)
    with pytest.raises(campaign.Tampered, match=says):
        forged.run()
    assert any(says in told for told in forged.replay())


def test_a_version_from_itself_is_a_sentence_with_its_name(forged):
    forge(
        forged, "versions/v001/proposal.json", forged.campaign.read("v001", "proposal") | {"parent": "v001"}
    )
    with pytest.raises(campaign.Tampered, match="v001/proposal.json .*'v001' is no earlier version"):
        forged.run()
    assert len(forged.replay()) > 1


def test_events_and_a_plan_that_cannot_be_read_are_a_sentence_with_their_name(forged):
    events, plan = (forged.campaign.folder / name for name in ("events.jsonl", "campaign.json"))
    whole = events.read_text().splitlines(keepends=True)
    without = {k: v for k, v in json.loads(whole[-1]).items() if k != "sha256"}
    for content in ("".join(whole[:-1]) + json.dumps(without) + "\n", "\xff\n"):
        events.write_text(content, encoding="latin-1")
        with pytest.raises(campaign.Tampered, match=r"events\.jsonl"):
            forged.run()
    events.write_text("".join(whole))
    plan.chmod(0o644)
    for content in ("{", "[]", "{}", '{"config": {"harness": []}}'):
        plan.write_text(content)
        with pytest.raises(campaign.Tampered, match=r"campaign\.json"):
            forged.campaign.next()


def test_a_planted_decision_end_or_opening_is_not_adopted(forged):
    folder = forged.campaign.folder
    for name, content in (
        ("approved/v001_verdict.json", {"approved": False, "why": "no"}),
        (campaign.ENDED, {"why": "Nothing is left to propose."}),
    ):
        (folder / "approved").mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(campaign.Tampered, match=name):
            forged.run()
        (folder / name).unlink()
    forged.campaign.path("v001", "learned").unlink()
    cut(folder, -1)
    (folder / "final").mkdir()
    (folder / "final" / "opened.json").write_text("{}")
    with pytest.raises(campaign.Tampered, match="final/opened.json has no event in .* and is not due"):
        forged.run()


def test_a_link_to_another_run_is_neither_trained_nor_taken(forged, tmp_path):
    link = forged.campaign.folder / "versions/v001/runs/seed_0"
    link.unlink()
    link.symlink_to(forged.versions.runs("v000")[0])
    with pytest.raises(campaign.Tampered, match="runs/seed_0 leads to .* take it away"):
        forged._train("v001", "evidence")
    assert any("which is no run of v001 with seed 0" in told for told in forged.replay())


def test_a_run_of_another_config_than_its_folder_is_named_by_is_found_and_not_gone_on_with(forged):
    path = forged.versions.runs("v001")[0] / "config.json"
    was = path.read_text()
    for section, key, value in (("environment", "eval_split", "test"), ("learner", "learning_rate", 1.0)):
        config = json.loads(was)
        config[section][key] = value
        path.write_text(json.dumps(config))
        with pytest.raises(campaign.Tampered, match="runs/seed_0/config.json was changed"):
            forged.run()
        content = forged.campaign.read("v001", "evidence")
        content["files"]["seed_0/config.json"] = campaign.sha256(path)
        forge(forged, "versions/v001/evidence.json", content)
        forged.campaign.check()  # only the name of the folder tells
        says = "seed_0/config.json is not the config that the folder is named by: restore it."
        told = forged.replay()
        assert told and all(sentence.endswith(says) for sentence in told)
        with pytest.raises(campaign.Tampered, match="is not the config that the folder is named by"):
            forged.store.train(forged.versions.config("v001"), [0])
    path.write_text(json.dumps(json.loads(was) | {"seed": 7}))
    with pytest.raises(campaign.Tampered, match="is not the config that the folder is named by"):
        forged.store.train(forged.versions.config("v001"), [0])
    path.write_text(was)


def test_the_policy_of_a_run_is_one_of_the_files_by_which_it_is_judged(tmp_path):
    weights = tmp_path / "policy" / "model.safetensors"
    weights.parent.mkdir()
    weights.touch()
    assert "policy/model.safetensors" in evidence.files(tmp_path)
