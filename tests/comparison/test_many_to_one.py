"""Many methods against one: published tables, closed forms, brute force, simulations with a known truth."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from coevolve_jax.comparison import many_to_one as m

pytestmark = pytest.mark.slow


def layout(seed=0, arms=4, seeds=6, effects=None, missing=(), sd=1.0):
    rng = np.random.default_rng(seed)
    of_seed = rng.standard_normal(seeds)
    effects = np.zeros(arms) if effects is None else effects
    return {
        f"m{a}": {
            s: float(effects[a] + of_seed[s] + sd * rng.standard_normal())
            for s in range(seeds)
            if (a, s) not in missing
        }
        for a in range(arms)
    }


def critical(count, df, rho=0.5):
    """The bound by a double integral: |T_i| of equal correlation share one normal and one chi."""

    def inside(c, z, s):
        root = math.sqrt(1 - rho)
        high, low = ((sign * c * s - math.sqrt(rho) * z) / root for sign in (1, -1))
        return (stats.norm.cdf(high) - stats.norm.cdf(low)) ** count

    def coverage(c):
        law = stats.chi(df, scale=1 / math.sqrt(df))
        z, w = np.polynomial.hermite_e.hermegauss(60)
        over_z = lambda s: float((w * inside(c, z, s)).sum() / math.sqrt(2 * math.pi))
        return integrate.quad(lambda s: over_z(s) * law.pdf(s), *law.ppf([1e-9, 1 - 1e-9]))[0]

    low, high = 1.0, 6.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle) < 0.95 else (low, middle)
    return low


# Dunnett's two-sided 5% points (Dunnett, Biometrics 20, 1964, table II): arms beside the control, df, bound.
@pytest.mark.parametrize(
    "count, df, bound", [(1, 10, 2.23), (2, 20, 2.38), (3, 20, 2.54), (5, 20, 2.73), (9, 60, 2.77)]
)
def test_bounds_are_those_of_the_tables(count, df, bound):
    correlation = np.full((count, count), 0.5) + 0.5 * np.eye(count)
    assert m.within(bound, correlation, df) == pytest.approx(0.95, abs=0.002)
    assert critical(count, df) == pytest.approx(bound, abs=0.006)


def test_a_complete_layout_is_plain_means_and_the_two_way_error():
    values = layout(1, arms=5, seeds=7, effects=np.arange(5) / 3)
    found = m.fit(values)
    table = np.array([[values[a][s] for s in range(7)] for a in values])
    assert found.means == pytest.approx(table.mean(axis=1)) and found.df == 4 * 6
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    assert found.sd == pytest.approx(math.sqrt((rest**2).sum() / 24))
    got = m.dunnett(found, ["m1", "m2", "m3", "m4"], "m0")
    bound = critical(4, 24)
    for i, c in enumerate(got, start=1):
        difference = table[i].mean() - table[0].mean()
        half = bound * found.sd * math.sqrt(2 / 7)
        assert c.difference == pytest.approx(difference)
        assert (c.low, c.high) == pytest.approx((difference - half, difference + half), abs=2e-3)
        (alone,) = m.pooled(found, [c.a], "m0")
        t = difference / (found.sd * math.sqrt(2 / 7))
        assert alone.p == pytest.approx(2 * stats.t.sf(abs(t), 24)) and alone.p <= c.p + 1e-3
        half = stats.t.ppf(0.975, 24) * found.sd * math.sqrt(2 / 7)
        assert (alone.low, alone.high) == pytest.approx((difference - half, difference + half))


def test_one_method_is_the_paired_t_test_and_no_spread_gives_no_interval():
    values = layout(2, arms=2, seeds=9)
    (c,) = m.dunnett(m.fit(values), ["m1"], "m0")
    d = [values["m1"][s] - values["m0"][s] for s in range(9)]
    t = stats.ttest_1samp(d, 0)
    assert c.p == pytest.approx(t.pvalue) and (c.low, c.high) == pytest.approx(t.confidence_interval())
    flat = {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.7, 1: 0.8}}
    assert m.dunnett(m.fit(flat), ["b"], "a") == [m.Contrast("b", "a", pytest.approx(0.2))]
    alone = m.fit({"a": {0: 0.5}, "b": {0: 0.6}})
    assert (
        math.isnan(alone.sd)
        and m.dunnett(alone, ["b"], "a")[0].low is None
        and m.apart(alone, ["a", "b"]) == set()
    )


def test_missing_seeds_are_adjusted_for():
    """The arm without the two good seeds is no worse for that."""
    effect = {s: 10.0 * s for s in range(5)}
    values = {"x": {s: 1 + effect[s] for s in range(5)}, "y": {s: 3 + effect[s] for s in range(3)}}
    found = m.fit(values)
    assert found.means == pytest.approx([21, 23]) and found.df == 8 - 2 - 4
    assert m.contrasts(found, [("y", "x")])[0] == pytest.approx([2])
    # With noise: an independent solution of the same normal equations, by alternating means.
    values = layout(5, arms=4, seeds=6, missing={(1, 0), (1, 1), (3, 5)})
    arm, seed = dict.fromkeys(values, 0.0), dict.fromkeys(range(6), 0.0)
    for _ in range(4000):
        arm = {a: statistics.fmean(x - seed[s] for s, x in own.items()) for a, own in values.items()}
        seed = {s: statistics.fmean(own[s] - arm[a] for a, own in values.items() if s in own) for s in seed}
    level = statistics.fmean(seed.values())
    found = m.fit(values)
    assert found.means == pytest.approx([arm[a] + level for a in values])
    rest = sum((x - arm[a] - seed[s]) ** 2 for a, own in values.items() for s, x in own.items())
    assert found.df == 21 - 9 and found.sd == pytest.approx(math.sqrt(rest / 12))
    with pytest.raises(ValueError, match="groups without a seed in common"):
        m.fit({"a": {0: 1.0}, "b": {1: 2.0}})


@pytest.mark.parametrize("missing", [(), {(1, 0), (1, 1), (2, 4), (3, 7)}])
def test_intervals_hold_together_as_often_as_they_say(missing):
    """Simulation: the share of layouts in which every interval holds its true difference."""
    effects = np.array([0.0, 1.0, 0.5, -0.5, 2.0])
    arms = [f"m{k}" for k in range(1, 5)]
    pairs = [(arm, "m0") for arm in arms]
    hits, count, most = np.zeros(2), 500, None
    for i in range(count):
        values = layout(100 + i, arms=5, seeds=8, effects=effects, missing=missing)
        found = m.fit(values)
        difference, error, correlation = m.contrasts(found, pairs)
        most = most or m.bound(correlation, found.df)  # the layout alone decides it
        flips = m.max_t(values, arms, "m0")
        hits += (
            bool((np.abs(difference - effects[1:]) <= most * error).all()),
            all(c.low <= e <= c.high for c, e in zip(flips, effects[1:], strict=True)),
        )
    # 0.95 +- four standard errors of 500 layouts; sign flips of eight seeds are a rougher law.
    assert abs(hits[0] / count - 0.95) < 0.04, hits
    assert abs(hits[1] / count - 0.95) < 0.06, hits


def test_no_effect_is_rarely_found():
    """Simulation of the exact test: under no effect at all it errs in 5% of layouts."""
    arms = [f"m{k}" for k in range(1, 5)]
    wrong = [
        min(c.p for c in m.max_t(layout(900 + i, arms=5, seeds=7), arms, "m0")) <= 0.05 for i in range(500)
    ]
    assert 0.01 < np.mean(wrong) < 0.09


def test_sign_flips_by_brute_force():
    values = layout(3, arms=3, seeds=6, effects=np.array([0.0, 1.5, 0.2]), missing={(2, 1)})
    found = m.max_t(values, ["m1", "m2"], "m0")
    d = [{s: values[a][s] - values["m0"][s] for s in values[a]} for a in ("m1", "m2")]

    def t(x):
        return abs(statistics.fmean(x)) / (statistics.stdev(x) / math.sqrt(len(x)))

    own = [t(list(x.values())) for x in d]
    null, around = [], []
    for flip in itertools.product((1, -1), repeat=6):
        null.append(max(t([flip[s] * v for s, v in x.items()]) for x in d))
        around.append(max(t([flip[s] * (v - statistics.fmean(x.values())) for s, v in x.items()]) for x in d))
    bound = sorted(around)[math.ceil(0.95 * (len(around) - 1))]
    for c, x, mine in zip(found, d, own, strict=True):
        assert c.p == pytest.approx(sum(n >= mine - 1e-9 for n in null) / 64)
        half = bound * statistics.stdev(x.values()) / math.sqrt(len(x))
        mean = statistics.fmean(x.values())
        assert (c.low, c.high) == pytest.approx((mean - half, mean + half))
    assert len(m.signs(12)) == 4096 and len(m.signs(13)) == m.FLIPS and (m.signs(13)[0] == 1).all()
    same = {"m0": {0: 1.0, 1: 2.0, 2: 0.0}, "m1": {0: 2.0, 1: 3.0, 2: 1.0}}
    assert m.max_t(same, ["m1"], "m0") == [m.Contrast("m1", "m0", 1.0)]


def test_the_wider_interval_counts_and_the_larger_p():
    a, b = m.Contrast("x", "y", 1.0, 0.0, 2.0, 0.04), m.Contrast("x", "y", 1.1, -0.4, 2.6, 0.02)
    assert m.wider(a, b) == m.Contrast("x", "y", 1.0, -0.5, 2.5, 0.04)
    assert m.wider(a, b._replace(low=1.0, high=1.2)) == a
    assert m.wider(a, m.Contrast("x", "y", 1.1)) == m.Contrast("x", "y", 1.0)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 7), st.data())
def test_two_arms_share_a_letter_exactly_where_they_are_not_told_apart(count, data):
    arms = [f"m{i}" for i in range(count)]
    pairs = [frozenset(p) for p in itertools.combinations(arms, 2)]
    different = set(data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    found = m.letters(arms, different)
    for pair in pairs:
        a, b = pair
        assert bool(set(found[a]) & set(found[b])) == (pair not in different), (found, different)
    assert "a" in found["m0"] and all(found.values())


def test_pairs_are_told_apart_by_the_studentised_range():
    values = layout(4, arms=4, seeds=8, effects=np.array([0.0, 0.2, 3.0, 3.1]))
    found = m.fit(values)
    told = m.apart(found, list(values))
    bound = stats.studentized_range.ppf(0.95, 4, 21) * found.sd / math.sqrt(8)
    for a, b in itertools.combinations(values, 2):
        far = abs(statistics.fmean(values[a].values()) - statistics.fmean(values[b].values())) > bound
        assert (frozenset((a, b)) in told) == far
    assert 0 < len(told) < 6
    got = m.letters(["m3", "m2", "m1", "m0"], told)
    assert got == {"m3": "a", "m2": "a", "m1": "b", "m0": "b"}


def test_a_value_that_a_sample_lacks_is_left_out_in_whole_layouts_too():
    """The first seed has no value of x in this sample, and is drawn never, once, or twice."""
    by = {"x": {0: np.full(3, np.nan), 1: np.full(3, 0.5)}, "y": {0: np.full(3, 0.1), 1: np.full(3, 0.2)}}
    found = m.bootstrap_means(by, np.array([[0, 2], [1, 1], [2, 0]]))
    assert found[0] == pytest.approx([0.5, 0.2]) and found[1] == pytest.approx([0.45, 0.15])
    assert np.isnan(found[2, 0]) and found[2, 1] == pytest.approx(0.1)


def test_bootstrap_means_are_those_of_the_resampled_layout():
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(5, np.full(5, 0.2), size=40)
    whole = {a: {s: rng.standard_normal(40) for s in range(5)} for a in "xyz"}
    found = m.bootstrap_means(whole, drawn)
    for b in range(40):
        for i, a in enumerate("xyz"):
            again = [whole[a][s][b] for s in range(5) for _ in range(drawn[b, s])]
            assert found[b, i] == pytest.approx(statistics.fmean(again))
    del whole["y"][0], whole["y"][3]
    part = m.bootstrap_means(whole, drawn)
    for b in range(40):
        seeds = [(s, k) for s in range(5) for k in range(drawn[b, s])]
        values = {a: {n: own[s][b] for n, (s, _) in enumerate(seeds) if s in own} for a, own in whole.items()}
        if not values["y"]:
            assert np.isnan(part[b, 1])
            continue
        # Copies of a seed share its effect: their mean is as good as they are, at that weight.
        x = np.zeros((0, 8))
        y = []
        for i, a in enumerate("xyz"):
            for n, v in values[a].items():
                row = np.zeros(8)
                row[i], row[3 + seeds[n][0]] = 1, 1
                x, y = np.vstack([x, row]), [*y, v]
        effects = np.linalg.pinv(x) @ np.array(y)
        level = np.mean([effects[3 + s] for s, _ in seeds])
        assert part[b] == pytest.approx(effects[:3] + level)


def test_a_sample_without_a_value_of_a_seed_is_as_one_that_lacks_the_seed():
    rng, drawn = np.random.default_rng(0), np.array([[1, 1, 1], [2, 1, 0], [0, 2, 1], [1, 0, 2]])
    values = {a: {s: rng.standard_normal(4) for s in range(3) if (a, s) != ("y", 0)} for a in "xyz"}
    lacking = {**values, "z": {s: own for s, own in values["z"].items() if s != 1}}
    values["z"] = {**values["z"], 1: np.full(4, np.nan)}
    assert m.bootstrap_means(values, drawn) == pytest.approx(m.bootstrap_means(lacking, drawn), nan_ok=True)


def test_a_sample_without_a_value_of_any_arm_has_no_means():
    drawn = np.array([[1, 1], [2, 0], [1, 1]])
    by = {a: {s: np.array([0.1, np.nan, 0.3]) for s in (0, 1)} for a in "xy"}
    wanted = np.array([[0.1, 0.1], [np.nan, np.nan], [0.3, 0.3]])
    assert m.bootstrap_means(by, drawn) == pytest.approx(wanted, nan_ok=True)


def test_ranks_count_what_is_better():
    assert m.ranks(np.array([[0.3, 0.5, 0.5, 0.1]])).tolist() == [[3, 1, 1, 4]]
