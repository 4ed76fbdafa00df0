"""Levers: what may be written, and what is refused."""

import copy
import dataclasses
from decimal import Decimal

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import config as configs
from coevolve_jax.config import keys
from coevolve_jax.diagnosis import rewards
from coevolve_jax.grpo.optimizer import learning_rate, make_optimizer
from coevolve_jax.harness import levers, start
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.templates import templates
from tests.harness.support import config

CONFIG = config("none")
TABLE = levers.table(CONFIG)
# What no campaign may move: the judge, the model, the luck and the start.
FROZEN = ("environment", "evaluation", "model", "seed", "testbed", "engine", "mesh", "health", "checkpoint")


@pytest.mark.parametrize("name", TABLE)
def test_a_move_changes_the_keys_of_its_lever_alone_and_can_run(name):
    lever, start = TABLE[name], CONFIG
    if name in ("learner.warmup_steps", "learner.schedule"):
        assert not lever.moves(CONFIG)  # no run could fork the start's optimiser
        start = configs.override(CONFIG, {"learner.warmup_steps": 8})
    assert lever.layer in levers.LAYERS and not {key.split(".")[0] for key in lever.keys} & {*FROZEN}
    assert lever.moves(start)
    for move, changes in lever.moves(start).items():
        assert changes and set(changes) <= set(lever.keys)
        before = start.to_dict()
        try:
            made = levers.changed(start, levers.move(TABLE, start, name, move))
        except levers.Refused as refused:
            assert "has no effect here" in str(refused)
            continue
        both = set(keys.names(made)) & set(keys.names(start))  # another strategy has settings of its own
        differ = {key for key in both if configs.find(made, key) != configs.find(start, key)}
        assert differ == {key for key in changes if changes[key] != configs.find(start, key)} and differ
        assert start.to_dict() == before


FAR = {  # key -> values beyond the bounds or beside the list, with the moves that lead back
    "learner.learning_rate": {1e-2: {"/3": 0.00333333}, 1e-8: {"x3": 3e-8}},
    "learner.max_grad_norm": {1e-3: {"x3": 3e-3}},
    "learner.clip_high": {0.01: {"x1.5": 0.015}, 0.0: {"on": 0.05}},
    "learner.clip_low": {0.0: {"on": 0.05}},
    "learner.filter_keep": {0.1: {"x1.5": 0.15}, 0.0: {"on": 0.3}},
    "learner.filter_z": {0.0: {"on": 0.5}},
    "learner.kl_coef": {30.0: {"/3": 10.0, "0": 0.0}},
    "learner.epochs": {3: {"up": 4, "down": 2}, 8: {"down": 4}},
    "learner.warmup_steps": {100: {"/3": 33}, 25: {"/3": 8}, 0: {}},
    "learner.dynamic_sampling": {8: {"down": 3}},
    "rollout.temperature": {2.5: {"/1.25": 2.0}, 0.2: {"x1.25": 0.25}},
    "rollout.max_staleness": {8: {"down": 6}},
    "rollout.group_size": {1: {"x2": 2}, 128: {"/2": 64}},
    "data.retire_after": {8: {"up": 0, "down": 4}, 3: {"up": 4, "down": 2}},
    "data.min_evolved_share": {0.9: {"down": 0.75}},
    "evolution.every": {1000: {"down": 20}, 1: {"up": 2}},
}


@pytest.mark.parametrize(
    ("key", "value", "moves"), [(k, v, m) for k, own in FAR.items() for v, m in own.items()]
)
def test_a_start_beyond_the_bounds_or_beside_the_list_has_the_moves_that_lead_back(key, value, moves):
    own = configs.override(CONFIG, {key: value, "rollout.tasks_per_step": 128})
    found = levers.table(own)[key].moves(own)
    assert {move: changes[key] for move, changes in found.items()} == moves


def test_every_number_that_may_be_0_has_a_move_from_there_but_the_warm_up():
    tried = set()
    for name in TABLE:
        if isinstance(configs.find(CONFIG, name), float):
            try:
                own = start.settled(configs.override(CONFIG, {name: 0.0}))
            except ValueError:
                continue  # it may not be 0
            tried.add(name)
            found = levers.table(own)[name].moves(own)
            assert found and all(changes[name] > 0 for changes in found.values()), name
    assert {"learner.clip_high", "learner.clip_low", "learner.filter_keep", "learner.filter_z"} < tried


def test_no_move_leads_past_the_bounds():
    narrow = config("none", bounds=("learner.learning_rate=2e-4:2.5e-4",))
    assert not levers.table(narrow)["learner.learning_rate"].moves(narrow)  # x3 would be above them


@pytest.mark.parametrize(
    ("span", "on"), [("0.01:0.1", 0.01), ("1e-5:5e-4", 5e-4), ("1e-4:3.0", 0.001), ("0:0", None)]
)
def test_a_number_that_is_switched_on_lies_within_its_bounds(span, on):
    own = configs.override(config("none", bounds=(f"learner.kl_coef={span}",)), {"learner.kl_coef": 0.0})
    moves = levers.table(own)["learner.kl_coef"].moves(own)
    assert moves == ({} if on is None else {"on": {"learner.kl_coef": on}})


@pytest.mark.parametrize(("rounds", "budget"), [(0, 0), (2, 0), (2, 4096)])
def test_a_move_of_the_rounds_leaves_what_the_run_may_spend(rounds, budget):
    own = configs.override(CONFIG, {"learner.dynamic_sampling": rounds, "budget.rollouts": budget})
    batch = own.rollout.tasks_per_step * own.rollout.group_size
    found = TABLE["learner.dynamic_sampling"].moves(own)
    assert found.keys() == ({"up", "down"} if rounds else {"up"})
    for changes in found.values():
        assert changes["budget.rollouts"] == (budget or own.steps * batch * (1 + rounds))
        made = levers.changed(own, changes)
        for again in TABLE["learner.dynamic_sampling"].moves(made).values():
            assert again["budget.rollouts"] == changes["budget.rollouts"]


@pytest.mark.parametrize(("schedule", "warm"), [("cosine", 0), ("linear", 6)])
def test_more_epochs_stretch_the_schedule_and_fewer_shorten_it(schedule, warm):
    settings = {"learner.schedule": schedule, "learner.warmup_steps": warm, "learner.epochs": 2}
    own = configs.override(CONFIG, {**settings, "learner.decay_steps": 2 * CONFIG.steps})
    table = levers.table(own)
    rates = lambda c: [float(learning_rate(c.learner, 1.0)(i)) for i in range(c.steps * c.learner.epochs)]
    for move, epochs in (("up", 4), ("down", 1)):
        made = levers.changed(own, levers.move(table, own, "learner.epochs", move))
        assert made.learner.epochs == epochs and made.learner.decay_steps == epochs * CONFIG.steps
        assert made.learner.warmup_steps == warm * epochs // 2
        more, fewer = (rates(c) for c in ((made, own) if move == "up" else (own, made)))
        rise = min(own.learner.warmup_steps, made.learner.warmup_steps)
        assert more[::2][rise:] == pytest.approx(fewer[rise:], rel=1e-4) and fewer[-1] > 0
    short = configs.override(own, {"learner.warmup_steps": 1, "learner.decay_steps": 2})
    assert levers.table(short)["learner.epochs"].moves(short)["down"]["learner.decay_steps"] == 2
    constant = configs.override(CONFIG, {"learner.warmup_steps": warm})
    assert TABLE["learner.epochs"].moves(constant) == {"up": {"learner.epochs": 2}}


def test_a_schedule_comes_down_by_the_end_and_keeps_the_optimiser_that_a_fork_needs():
    names = lambda c: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(
        make_optimizer(c.learner, 0.0).init({"kernel": np.zeros((2, 2))})
    )]  # fmt: skip
    tried = set()
    for changes in ({"learner.warmup_steps": 3}, {"learner.schedule": "cosine", "learner.decay_steps": 9}):
        own = configs.override(CONFIG, changes)
        table = levers.table(own)
        for lever in ("learner.warmup_steps", "learner.schedule"):
            for move in table[lever].moves(own):
                made = levers.changed(own, levers.move(table, own, lever, move))
                assert names(made) == names(own)
                tried.add((own.learner.schedule, move, made.learner.decay_steps))
    twice = configs.override(CONFIG, {"learner.warmup_steps": 3, "learner.epochs": 2})
    ends = [changes["learner.decay_steps"] for changes in TABLE["learner.schedule"].moves(twice).values()]
    end = CONFIG.steps
    assert ends == [2 * end] * 2 and tried == {
        ("constant", "x3", 0), ("constant", "/3", 0), ("constant", "cosine", end),
        ("constant", "linear", end), ("cosine", "linear", 9),
    }  # fmt: skip


def test_moves_of_a_number_stay_in_its_bounds_and_go_back():
    tight = config("none", bounds=("learner.learning_rate=5e-5:2e-4",))
    assert not levers.table(tight)["learner.learning_rate"].moves(tight)
    up = levers.changed(CONFIG, TABLE["learner.kl_coef"].moves(CONFIG)["x3"])
    back = TABLE["learner.kl_coef"].moves(up)["/3"]
    assert back["learner.kl_coef"] == pytest.approx(CONFIG.learner.kl_coef)
    none = levers.changed(CONFIG, TABLE["learner.kl_coef"].moves(CONFIG)["0"])
    assert TABLE["learner.kl_coef"].moves(none) == {"on": {"learner.kl_coef": 0.001}}


def test_a_batch_keeps_its_size_when_groups_grow():
    moves = TABLE["rollout.group_size"].moves(CONFIG)
    assert moves
    for changes in moves.values():
        made = levers.changed(CONFIG, changes).rollout
        assert (
            made.group_size * made.tasks_per_step == CONFIG.rollout.group_size * CONFIG.rollout.tasks_per_step
        )


def test_no_move_of_groups_leaves_half_a_task():
    odd = configs.override(CONFIG, {"rollout.group_size": 8, "rollout.tasks_per_step": 5})
    moves = levers.table(odd)["rollout.group_size"].moves(odd)
    assert moves == {"/2": {"rollout.group_size": 4, "rollout.tasks_per_step": 10}}


def test_reward_terms_stay_small_and_can_always_shrink():
    lever, found = TABLE["reward.terms"], CONFIG
    assert len(lever.moves(found)) == len(rewards.TERMS)
    for what in ("length", "errors", "progress"):
        found = levers.changed(found, lever.moves(found)[f"add {what}"])
    assert rewards.size(found.reward.terms) == pytest.approx(levers.MOST_TERMS)
    assert {move.split()[0] for move in lever.moves(found)} == {"remove", "halve"}
    heavy = config("length_pay")
    assert set(lever.moves(heavy)) == {"remove length", "halve length"}


def test_a_new_term_never_pays_for_calls_that_fail():
    """The template of the same count has a name of its own, so it hides no term."""
    counts = {name: (formula, False) for name, formula in templates((), ()).items()}
    lever = levers.table(CONFIG, counts)["reward.terms"]
    assert counts.keys().isdisjoint(rewards.TERMS)
    assert {f"add {name}" for name in (*rewards.TERMS, *counts)} == lever.moves(CONFIG).keys()
    paid = {"progress", "length", "brevity", "distinct_tools"}
    for what in rewards.TERMS:
        ((text,),) = lever.moves(CONFIG)[f"add {what}"].values()
        assert text == f"{what}:{'' if what in paid else '-'}0.1"


def test_a_registered_diagnostic_may_become_a_term_against_what_failures_have():
    formulas = {
        "failed_calls": ("double(errors) / double(calls)", True),
        "tools": ("distinct_tools > 1", False),
    }
    lever = levers.table(CONFIG, formulas)["reward.terms"]
    found = levers.changed(CONFIG, lever.moves(CONFIG)["add failed_calls"])
    assert tuple(found.reward.terms) == ("double(errors) / double(calls):-0.1",)
    assert {"halve failed_calls", "remove failed_calls", "add tools"} <= set(lever.moves(found))
    spaced = levers.table(CONFIG, {"failed_calls": (" double(errors) / double(calls)\n", True)})
    assert "add failed_calls" not in spaced["reward.terms"].moves(found)  # it is there
    both = levers.changed(found, lever.moves(found)["add tools"])
    assert rewards.parse(both.reward.terms)[1] == rewards.Term("distinct_tools > 1", 0.1)
    plain = levers.table(CONFIG)["reward.terms"]
    assert set(plain.moves(found)) > {"remove double(errors) / double(calls)"}


HOSTILE = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        ["environment.eval_split", "../../evaluate.py", "__import__('os').system('true')", "evaluation.tasks",
         "learner.learning_rate; seed", "v" * 10_000, "NaN", "reward.terms", "learner.learning_rate", "x3"]
    ),
)  # fmt: skip


def test_a_hypothesis_is_about_what_training_shows_and_not_about_its_setting():
    changes = levers.move(TABLE, CONFIG, "learner.learning_rate", "x3")
    for name, refused in (("learning_rate", True), ("success_last", False)):
        aim = Expectation(name, "up", 1e-6)
        proposal = Proposal(
            "v000", "learner.learning_rate", "x3", changes, because="b", proposer="p", expects=aim
        )
        if refused:
            with pytest.raises(levers.Refused, match="'learning_rate' is a setting of the run"):
                levers.check_proposal(TABLE, CONFIG, proposal)
        else:
            levers.check_proposal(TABLE, CONFIG, proposal)


@given(lever=HOSTILE, move=HOSTILE)
def test_text_of_a_model_becomes_a_move_of_the_table_or_one_sentence(lever, move):
    before = copy.deepcopy(CONFIG.to_dict())
    try:
        changes = levers.move(TABLE, CONFIG, lever, move)
    except levers.Refused as refused:
        # A name is quoted, cut short, so that the sentence stays one line.
        assert "\n" not in str(refused) and len(str(refused)) < 1500
    else:
        assert changes == TABLE[lever].moves(CONFIG)[move]
    assert CONFIG.to_dict() == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"levers": ("environment.eval_split",)}, "'environment.eval_split': use some of reward.terms"),
        ({"bounds": ("seed=0:1",)}, "'seed', which is no lever with bounds"),
        ({"bounds": ("learner.learning_rate=low",)}, "write KEY=LOW:HIGH"),
        ({"bounds": ("learner.learning_rate=nan:nan",)}, "has 'learner.learning_rate=nan:nan': write KEY="),
        ({"bounds": ("learner.learning_rate=0:inf",)}, "0:inf': write KEY=LOW:HIGH with finite numbers"),
        ({"bounds": ("learner.learning_rate=1e-3:1e-6",)}, "1e-3:1e-6': .* the lower first"),
        (
            {"bounds": ("learner.kl_coef=0.01:0.1", "learner.kl_coef=0.01:0.2")},
            "names 'learner.kl_coef' twice: give it one range",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        levers.table(config("none", **settings))


GOOD = Proposal(
    "v000", "learner.learning_rate", "x3", TABLE["learner.learning_rate"].moves(CONFIG)["x3"], "It is slow.",
    "anybody", {"kl_last": 0.1}, Expectation("kl_last", "up", 0.05), "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"lever": ["learner.learning_rate"]},
            "The proposal's lever is longer than 4000 characters, or no text",
        ),
        ({"because": "x" * 4001}, "The proposal's because is longer than 4000 characters"),
        (
            {"changes": [("learner.learning_rate", 3e-5)]},
            "The proposal's changes are .*: a mapping from names",
        ),
        ({"evidence": {"kl_last": "0.1"}}, "evidence 'kl_last' is '0.1': a number or None"),
        ({"evidence": {"kl_last": float("nan")}}, "evidence 'kl_last' is nan: a number or None"),
        ({"expects": "kl_last up"}, "The proposal expects 'kl_last up': an Expectation or None"),
        (
            {"expects": Expectation("kl_last", "up", True)},
            "asks for a change of True: name a number from 0 on",
        ),
        ({"expects": Expectation("kl_last", "up", float("inf"))}, "asks for a change of inf"),
        ({"expects": Expectation("kl_last", "up", 10**400)}, "asks for a change of '1000"),
        ({"expects": Expectation(["kl_last"], "up")}, "name a value of training, and up or down"),
        ({"expects": Expectation("kl_last", {"up": 1})}, "name a value of training, and up or down"),
        ({"evidence": {"kl_last": 10**400}}, "evidence 'kl_last' is '1000.*: a number or None"),
        ({"evidence": {"kl_last": 10**5000}}, "evidence 'kl_last' is a value of the type int: a number"),
        ({"because": "half a \ud800 character"}, "because is longer .* or no text that UTF-8 can write"),
    ],
)
def test_a_proposal_of_the_wrong_types_is_refused_in_one_sentence(wrong, sentence):
    levers.check_proposal(TABLE, CONFIG, GOOD)
    with pytest.raises(levers.Refused, match=sentence):
        levers.check_proposal(TABLE, CONFIG, dataclasses.replace(GOOD, **wrong))
    with pytest.raises(levers.Refused, match="The proposer gave .*: a Proposal or None is wanted"):
        levers.check_proposal(TABLE, CONFIG, GOOD.to_json())


@given(st.decimals("-1", "1", places=3), st.decimals("0", "1", places=3), st.sampled_from(["up", "down"]))
def test_a_change_as_large_as_expected_counts_however_floats_round(before, least, direction):
    after = before + least if direction == "up" else before - least
    aim = Expectation("kl_last", direction, float(least))
    assert aim.holds(float(before), float(after)) == (least > 0)
    short = least - Decimal("0.001")
    after = before + short if direction == "up" else before - short
    assert not aim.holds(float(before), float(after))
