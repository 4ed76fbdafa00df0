"""The measures of a campaign on a planted fault, by hand."""

import pytest

from coevolve_jax.harness import bench, levers
from coevolve_jax.harness.bench import FAULTS
from coevolve_jax.harness.records import Verdict
from tests.harness.support import config


def judged(*kinds: str) -> list[Verdict]:
    return [Verdict(kind, ()) for kind in kinds]


def test_a_campaign_is_measured_by_its_first_moves_and_what_it_regains():
    moves = [("reward.terms", "add length"), ("learner.learning_rate", "/3"), ("learner.learning_rate", "x3")]
    told = [(*m, v) for m, v in zip(moves, judged("refused", "promoted", "promoted"), strict=True)]
    found = bench.row("slow", "fixed", 3, told, {1: 0.45, 2: 0.69}, faulty=0.5, healthy=0.7, runs=3)
    assert (found.right_first, found.right_within_3, found.mended) == (0, 1, 2)
    assert (found.promoted, found.harmful, found.runs) == (2, 1, 3)
    assert found.lost == pytest.approx(0.2) and found.regained == pytest.approx(0.19)
    # 80% of what was lost is what counts.
    short = bench.row("slow", "fixed", 3, told, {1: 0.45, 2: 0.65}, faulty=0.5, healthy=0.7, runs=3)
    assert short.mended == ""
    none = bench.row("none", "placebo", 0, [], {}, faulty=0.7, healthy=0.7, runs=1)
    assert (none.right_first, none.mended, none.regained) == (0, "", 0.0)


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
