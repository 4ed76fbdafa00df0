"""Registration: AUC and p against brute force, its error rates, and each condition by itself."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.features import fields
from coevolve_jax.harness import diagnostics, registry, separation
from coevolve_jax.harness.evidence import Half
from coevolve_jax.harness.registry import (
    Diagnostic,
    Evidence,
    Recorded,
    Registration,
    evidence,
    level,
    register,
)
from coevolve_jax.harness.separation import Separation, separate
from coevolve_jax.harness.templates import invent, templates
from tests.support.method_cases import a_group, a_rollout, a_step, a_task

EVEN = [f"t{i}" for i in range(400) if registry.testing_half(f"t{i}")]
ODD = [f"t{i}" for i in range(400) if not registry.testing_half(f"t{i}")]


def made_up(tasks, rng, *, size=8, runs=("v0/0", "v0/1"), auc=0.5) -> Evidence:
    """Evidence whose rows hold a field "x", higher in failures with this chance."""
    group = np.repeat(np.arange(len(tasks)), size)
    solved = rng.random(len(group)) < np.repeat(rng.uniform(0.3, 0.7, len(tasks)), size)
    apart = 2**0.5 * float(registry.scipy.stats.norm.ppf(auc))
    x = rng.normal(size=len(group)) + apart * ~solved
    run = np.repeat(np.array(runs)[np.arange(len(tasks)) % len(runs)], size)
    version = np.array([name.partition("/")[0] for name in run])
    return Evidence(
        tuple({"x": v} for v in x.tolist()), solved, np.repeat(tasks, size), group, version, run, 0 * group
    )


def x(rows):
    return np.array([row["x"] for row in rows], float)


def test_of(found, **how) -> Registration:
    how = {"number": 1, "permutations": 199, "rng": np.random.default_rng(0), **how}
    return register(how.pop("values", x), found, **how)


test_of.__test__ = False


def join(*parts: Evidence) -> Evidence:
    offset = itertools.accumulate((len(p.rows) for p in parts), initial=0)
    return Evidence(
        sum((p.rows for p in parts), ()),
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("solved", "task")),
        np.concatenate([p.group + at for p, at in zip(parts, offset)]),
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("version", "run", "step")),
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans()), max_size=24))
def test_the_auc_is_the_share_of_pairs_within_groups(members):
    group, values, marked, missing = (
        (np.array(column) for column in zip(*members)) if members else [np.zeros(0, int)] * 4
    )
    values = np.where(missing.astype(bool), np.nan, values.astype(float))
    told = separate(values, marked.astype(bool), group)
    pairs = [
        (a > b) + (a == b) / 2
        for (g, _, m, _), a in zip(members, values)
        for (h, _, n, _), b in zip(members, values)
        if g == h and m and not n and a == a and b == b
    ]
    assert told.auc == (pytest.approx(np.mean(pairs)) if pairs else None) and told.p is None


def test_p_is_exact_over_all_relabellings_and_the_normal_form_agrees(monkeypatch):
    rng, group = np.random.default_rng(0), np.repeat(np.arange(3), 4)
    values, marked = (
        np.array([3, 1, 1, 2, 5, 4, 4, 1, 9, 7, 8, 7.0]),
        np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]) > 0,
    )
    total = lambda mark: sum(
        (values[i] > values[j]) + (values[i] == values[j]) / 2
        for i in np.flatnonzero(mark) for j in np.flatnonzero(~mark) if group[i] == group[j]
    )  # fmt: skip
    parts = [
        list(itertools.combinations(range(4 * g, 4 * g + 4), int(marked[group == g].sum()))) for g in range(3)
    ]
    every = [total(np.isin(np.arange(12), sum(chosen, ()))) for chosen in itertools.product(*parts)]
    middle = np.mean(every)
    exact = np.mean([abs(t - middle) >= abs(total(marked) - middle) - 1e-9 for t in every])
    assert separate(values, marked, group, rng, 4000).p == pytest.approx(exact, abs=0.03)
    many = made_up(EVEN[:60], rng, auc=0.62)
    told = separate(x(many.rows), ~many.solved, many.group, rng, 400)
    shuffled = separate(x(many.rows), ~many.solved, many.group, rng, 20_000)
    assert told.p == shuffled.p < 1e-4  # too small for permutations: the normal form has it
    small = made_up(EVEN[:180], np.random.default_rng(1), size=4, auc=0.55)
    how = x(small.rows), ~small.solved, small.group
    resolved = separate(*how, np.random.default_rng(0), 4000).p
    monkeypatch.setattr(separation, "RESOLVED", 10**6)
    assert 0.05 < resolved < 0.1 and separate(*how, rng, 1).p == pytest.approx(resolved, rel=0.1)


def test_noise_is_not_registered_and_its_p_is_uniform():
    found = made_up(EVEN[:130], np.random.default_rng(1))
    told = [
        test_of(found, values=lambda rows, seed=seed: np.random.default_rng(seed).normal(size=len(rows)),
                rng=np.random.default_rng(seed))
        for seed in range(200)
    ]  # fmt: skip
    assert sum(t.refused is None for t in told) == 0  # 5% are allowed; the effect alone keeps noise out
    p = np.array([t.p for t in told])
    assert (p <= 0.05).mean() <= 0.08 and registry.scipy.stats.kstest(p, "uniform").pvalue > 0.01


def test_a_value_of_auc_065_is_found_in_130_groups_and_one_of_055_is_not():
    rng = np.random.default_rng(2)
    found = lambda auc: [test_of(made_up(EVEN[:130], rng, auc=auc), rng=rng).refused for _ in range(50)]
    assert sum(why is None for why in found(0.65)) >= 45
    weak = found(0.55)
    assert sum(why is None for why in weak) == 0 and "nearer than 0.1 to 0.5" in weak[0]


def test_the_half_that_a_proposer_sees_never_decides():
    rng = np.random.default_rng(3)
    strong, none = made_up(ODD[:150], rng, auc=0.99), made_up(EVEN[:130], rng)
    assert "It has 0 mixed groups of 0 runs" in test_of(strong).refused
    assert "nearer than" in test_of(join(strong, none)).refused
    assert registry.testable(join(strong, none)) and not registry.testable(strong)
    shown, tested = registry.halves(join(strong, none))
    assert set(shown.task) == set(strong.task) and set(tested.task) == set(none.task)


def test_a_later_version_is_told_by_the_half_that_tests_read():
    rng = np.random.default_rng(11)
    shown, tested = made_up(ODD[:40], rng, auc=0.9), made_up(EVEN[:40], rng, auc=0.1)
    told = registry.separation_in(x, join(shown, tested))
    assert told == registry.separation_in(x, tested) and told.auc < 0.3 and told.groups <= 40


def test_the_version_after_which_a_value_was_proposed_is_no_later_one():
    rng, known = np.random.default_rng(12), dict.fromkeys(fields("trajectory"), 1)

    def strong(version):
        found = made_up(EVEN[:40], rng, auc=0.9, runs=(f"{version}/0", f"{version}/1"))
        errors = tuple({**known, "errors": int(10 + 2 * row["x"])} for row in found.rows)
        return dataclasses.replace(found, rows=errors)

    rows = {v: strong(v) for v in ("v001", "v002", "v003")}
    test = Registration(1, 0.025, 0.9, 1e-4, 120, 0.0, {"v001": (0.9, 120)}, False, ("v001/0",), None)
    born = Diagnostic("errors", "trajectory", "double(errors)", "up_is_bad", "registered", "v001", test=test)
    for last, status in (("v002", "registered"), ("v003", "gating")):
        so_far = {v: own for v, own in rows.items() if v <= last}
        (found,) = diagnostics.evolved([born], last, so_far, ["v001"], rng)
        assert found.status == status
        own = rows["v001"]  # alone promoted
        means = [np.mean([r["errors"] for r in own.where(own.run == run).rows]) for run in set(own.run)]
        assert (found.warn, found.alert) == pytest.approx(tuple(np.percentile(means, (95, 99))))


def test_a_hash_of_the_task_says_nothing_and_a_constant_neither():
    found = made_up(EVEN[:130], np.random.default_rng(4))
    by_task = lambda rows: np.repeat(np.arange(130) * 7919 % 101, 8)[: len(rows)].astype(float)
    assert separate(by_task(found.rows), ~found.solved, found.group, np.random.default_rng(0), 99)[:2] == (
        0.5,
        1.0,
    )


def test_each_condition_refuses_by_itself():
    rng = np.random.default_rng(5)
    good = made_up(EVEN[:130], rng, auc=0.75)
    assert test_of(good).refused is None and test_of(good).direction == "up_is_bad"
    assert test_of(good, values=lambda rows: -x(rows)).direction == "down_is_bad"
    few = good.where(good.group < 80)
    assert "mixed groups of 2 runs: 100 of 2 are the least" in test_of(few).refused
    alone = dataclasses.replace(good, run=np.full(len(good.run), "v0/0"))
    assert "of 1 runs" in test_of(alone).refused
    sparse = lambda rows: np.where(np.arange(len(rows)) % 10, x(rows), np.nan)
    assert "missing for 10%" in test_of(good, values=sparse).refused
    mirror = dataclasses.replace(made_up(EVEN[130:175], rng, auc=0.2, runs=("v1/0",)))
    assert "0.5" in (why := test_of(join(good, mirror)).refused) and "in v1, on the other side" in why
    assert test_of(good, registered={"twin": lambda rows: x(rows) ** 3}).refused.startswith(
        "Its rank correlation with twin"
    )
    assert "above the level" in test_of(made_up(EVEN[:130], rng, size=5, auc=0.65), number=10**6).refused


def test_a_value_and_its_opposite_say_the_same():
    good = made_up(EVEN[:130], np.random.default_rng(5), auc=0.75)
    told = test_of(good, registered={"twin": lambda rows: -x(rows)}).refused
    assert told.startswith("Its rank correlation with twin is 1.00")


def test_levels_sum_to_005_and_runs_of_earlier_tests_are_left_out_where_others_are_enough():
    assert sum(level(j) for j in range(1, 10_000)) == pytest.approx(0.05, abs=1e-5) and level(1) == 0.025
    rng = np.random.default_rng(6)
    old, new = made_up(EVEN[:130], rng, auc=0.7), made_up(EVEN[:130], rng, auc=0.7, runs=("v1/0", "v1/1"))
    fresh, again = (
        test_of(join(old, new), used=used) for used in ({"v0/0", "v0/1"}, {"v0/0", "v0/1", "v1/0"})
    )
    assert fresh.runs == ("v1/0", "v1/1") and not fresh.nominal and set(fresh.by_version) == {"v1"}
    assert again.nominal and len(again.runs) == 4
    kept = Diagnostic("x", "trajectory", "double(calls)", "up_is_bad", "registered", born="v1", test=fresh)
    assert Diagnostic.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_evidence_of_recorded_groups_counts_valid_rollouts():
    task, other = a_task("t0", "ls"), a_task("t1", "ls")
    lost = a_rollout(task, 2, True, valid=False)
    group = a_group(task, True, False)
    group = dataclasses.replace(group, trajectories=(*group.trajectories, lost))
    found = evidence([Recorded("v0", "v0/0", [[group], [a_group(other, True, True)]])])
    assert found.solved.tolist() == [True, False, True, True] and found.group.tolist() == [0, 0, 1, 1]
    assert found.mixed.task.tolist() == ["t0", "t0"] and found.mixed.groups == 1
    assert found.rows[2]["staleness"] == 1.0  # the step counts
    assert evidence([]).mixed.groups == 0


def test_gating_and_retirement_follow_later_versions():
    test = test_of(made_up(EVEN[:130], np.random.default_rng(7), auc=0.7))
    held, weak, against = (Separation(auc, p, 50, 0.0) for auc, p in ((0.7, 0.01), (0.52, 0.6), (0.3, 0.01)))
    assert (
        registry.status(test, [held]) == "registered"
        and registry.status(test, [held, against]) == "registered"
    )
    assert registry.status(test, [held, weak, held]) == "gating"
    assert registry.status(test, [held, held, weak, weak, weak]) == "retired"
    assert registry.thresholds(np.arange(101), "up_is_bad") == (95, 99)
    assert registry.thresholds(np.arange(101), "down_is_bad") == (5, 1)


def runs_of(values, gains, seeds=2):
    """version -> (value, gain) of each run, whose seeds are alike."""
    return {f"v{i:03d}": [(x, y)] * seeds for i, (x, y) in enumerate(zip(values, gains, strict=True))}


def test_a_value_of_steps_is_registered_by_what_it_foretells():
    rng = np.random.default_rng(9)
    gains = rng.normal(size=8)
    told = registry.foretells(runs_of(gains**3, gains), number=1, rng=rng)
    assert told.refused is None and told.tau == pytest.approx(1) and told.direction == "down_is_bad"
    assert (told.versions, len(told.runs), told.nominal) == (8, 16, False)
    assert registry.foretells(runs_of(-gains, gains), number=1, rng=rng).direction == "up_is_bad"
    tied = np.arange(8) // 3
    tau = registry.scipy.stats.kendalltau(tied, gains).statistic
    assert registry.foretells(runs_of(tied, gains), number=1, rng=rng).tau == pytest.approx(tau)
    again = registry.foretells(runs_of(gains, gains), number=2, rng=rng, used=told.runs[:1])
    assert again.nominal and again.level == level(2)
    kept = Diagnostic("kl", "step", "kl", "down_is_bad", "registered", test=told)
    assert Diagnostic.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_what_foretells_nothing_is_refused_with_a_reason():
    rng, x = np.random.default_rng(9), np.arange(6.0)
    refused = lambda runs, number=1: registry.foretells(runs, number=number, rng=rng).refused
    assert "It has 10 runs of 5 versions: 12 of 6 are the least" in refused(runs_of(x[:5], x[:5]))
    assert "It has 12 runs of 3 versions" in refused(runs_of(x[:3], x[:3], seeds=4))
    assert "missing in 2 of 12 runs" in refused(runs_of([None, *x[1:]], x))
    assert "above the level" in refused(runs_of([3, 0, 5, 1, 4, 2], x))
    assert refused(runs_of(x, x)) is None  # p is 2 of 720 orders
    assert "above the level" in refused(runs_of(x, x), number=5)


def test_the_bounds_of_a_value_of_steps_are_those_of_promoted_versions():
    rng, kl = np.random.default_rng(13), Diagnostic("kl", "step", "kl", "either", "tracked")
    steps = {f"v{i:03d}": [{"kl": 10.0 * i + j} for j in range(4)] for i in range(7)}
    first = {v: [Half(own, -own[0]["kl"])] * 2 for v, own in steps.items()}
    rows = {v: made_up(EVEN[:2], rng, runs=(f"{v}/0", f"{v}/1")) for v in first}
    (found,) = diagnostics.evolved([kl], "v006", rows, ["v000", "v002"], rng, halves=lambda: first)
    assert (found.status, found.direction) == ("registered", "up_is_bad")
    values = [row["kl"] for v in ("v000", "v002") for row in steps[v]] * 2
    assert (found.warn, found.alert) == pytest.approx(tuple(np.percentile(values, (95, 99))))


def test_two_seeds_of_a_version_are_one_observation():
    """Without a true relation, versions whose seeds are alike are registered no more often than the level."""
    found = [
        registry.foretells(runs_of(*np.random.default_rng(i).normal(size=(2, 6))), number=1,
                           rng=np.random.default_rng(i), permutations=720)
        for i in range(200)
    ]  # fmt: skip
    p = np.array([f.p for f in found])
    assert (p <= 0.05).mean() <= 0.08 and sum(f.refused is None for f in found) <= 10


def test_the_inventor_finds_what_tells_failures_apart_and_proposes_nothing_twice():
    rng = np.random.default_rng(10)

    def rollout(task, i):
        failed = i % 2
        steps = [a_step(str(rng.choice(["ls", "wc", "cat"]))) for _ in range(rng.integers(2, 5))]
        return a_rollout(task, i, not failed, steps + [a_step("rm")] * (failed and rng.random() < 0.8))

    tasks = [a_task(name, "ls", "wc") for name in ODD[:60]]
    groups = [registry.Group(t, tuple(rollout(t, i) for i in range(6))) for t in tasks]
    found = evidence([Recorded("v0", "v0/0", [groups])])
    best = invent(found)
    assert len(best) == 2 and best[0].id == "share_of_rm" and best[0].auc > 0.8
    # What tells failures apart in the half that tests read decides nothing here.
    other = lambda task, i: a_rollout(task, i, i % 2 > 0, [a_step("cat" if i % 2 else "wc")])
    sealed = [registry.Group(t, tuple(other(t, i) for i in range(6))) for t in map(a_task, EVEN[:60])]
    assert invent(evidence([Recorded("v0", "v0/0", [groups, sealed])])) == best
    again = invent(found, tried=[best[0].formula])
    assert best[0] not in again
    known = expressions.compile(best[0].formula, "trajectory").values
    assert best[0] not in invent(found, known={"rm": known})
    assert all(c.id != "share_of_rm" for c in invent(found, known={"rm": known}))
    made = templates([f"tool_{i}" for i in range(20)], ["done", "step_limit"])
    assert 50 <= len(made) <= 80
    for formula in made.values():
        expressions.compile(formula, "trajectory")
