"""The reading of the test: once, on fresh seeds, with the gains recomputed from the CSV."""

import csv
import json
import statistics

import pytest

from coevolve_jax.harness import final
from coevolve_jax.harness.campaign import Tampered
from coevolve_jax.testing.campaign import truth
from tests.harness.support import Kept, evolution


@pytest.fixture(scope="module")
def kept():
    return Kept()


@pytest.fixture(scope="module")
def ended(tmp_path_factory, kept):
    """A campaign on `slow` that is over, and its readings on three fresh seeds."""
    folder = tmp_path_factory.mktemp("final") / "campaign"
    found = evolution(folder, "slow", kept.launch, kept.evaluate, versions=2)
    with pytest.raises(ValueError, match="so its test stays sealed"):
        final.open_test(found, [100], {}, False)
    found.run()
    final.open_test(found, [100, 101, 102], {"date": "today"}, False)
    final.read(found, [100, 101, 102])
    return found


def test_the_gains_are_those_of_the_rows(ended):
    folder = ended.campaign.folder / "final"
    rows = list(csv.DictReader(open(folder / "readings.csv")))
    assert len(rows) == 2 * 5 * (1 + len(final.PROTOCOLS))  # harnesses x seeds x readings

    def gain(seeds: str, tasks: str, protocol: str = "P1") -> float:
        chosen = [r for r in rows if (r["seeds"], r["tasks"], r["protocol"]) == (seeds, tasks, protocol)]
        mean = lambda h: statistics.mean(float(r["success"]) for r in chosen if r["harness"] == h)
        return mean("selected") - mean("start")

    result = final.result_of(ended.campaign.folder)
    for name, found in result["gain"].items():
        assert found["value"] == pytest.approx(gain(*name)) and found["low"] < found["value"] < found["high"]
    assert result["optimism"] == pytest.approx(gain("S", "D") - gain("F", "T"))
    assert result["luck_of_seeds"] + result["luck_of_tasks"] == pytest.approx(result["optimism"])
    transfer = {name: found["value"] for name, found in result["transfer"].items()}
    assert transfer == pytest.approx({name: gain("F", "T", name) for name in final.PROTOCOLS})
    # The made-up truth: three times the learning rate is worth 12 points, and so once more.
    known = ended.versions
    true = truth(known.config(ended.campaign.selected())) - truth(known.config("v000"))
    assert true == pytest.approx(0.24, abs=0.01) and result["gain"]["FT"]["value"] == pytest.approx(
        true, abs=0.03
    )
    assert "the claim" in final.table(result)


def test_one_start_has_the_test_of_its_own_seed_and_all_is_asked_on_it(ended, kept):
    (sealed,) = [job for job in kept.jobs if job.config.environment.eval_split == "test"]
    assert sealed.start is None and sealed.config.evaluation.seed == final.TEST_SEED
    assert final.TEST_SEED not in {job.config.evaluation.seed for job in kept.jobs if job is not sealed}
    asked = {q.flags for q in kept.questions if q.workdir == sealed.workdir}
    assert asked == {protocol.given for protocol in final.PROTOCOLS.values()}
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
