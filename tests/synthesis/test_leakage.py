"""Leak control: which tasks count as near copies of an evaluation task."""

import dataclasses
import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.envs.base import features
from coevolve_jax.loop.initial import leak_guard
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.similarity import (
    Containment,
    CountCosines,
    EmbeddingCosines,
    KnownCosines,
    calls,
    ngrams,
)
from coevolve_jax.types import Call, Task, Turn
from tests.support.paths import ROOT

TEMPLATES = {
    "cd": "Change the current working directory to the specified folder {}.",
    "mv": "Move a file from one location to another, namely {}.",
    "grep": "Search for lines in a file that contain the specified pattern {}.",
    "post_tweet": "Post a new tweet with the content {}.",
    "book_flight": "Book a flight for the traveller with the card {}.",
}
WORDS = [f"{a}_{b}" for a in ("final", "draft", "budget", "summer", "alpha", "omega") for b in range(12)]


def task(name, *calls):
    """A task worded from the tool documentation, like synthetic tasks."""
    query = " ".join(TEMPLATES[tool].format(value) for tool, value in calls)
    return Task(name, "bfcl", {}, (Turn(query, tuple(Call(t, {"x": v}) for t, v in calls)),))


def random_task(name, rng):
    tools = rng.choice(sorted(TEMPLATES), size=rng.integers(2, 6))
    return task(name, *((str(t), str(rng.choice(WORDS))) for t in tools))


EVALUATION = [random_task(f"e{i}", np.random.default_rng([0, i])) for i in range(60)]
GUARD = LeakGuard(EVALUATION)
COSINES = CountCosines(EVALUATION, features)


def test_an_identical_task_has_similarity_one_and_is_refused():
    for one in EVALUATION[:10]:
        copy = dataclasses.replace(one, id="copy")
        assert GUARD.nearest(copy) == ("calls", 1.0, one.id)
        assert COSINES(copy)[EVALUATION.index(one)] == pytest.approx(1.0, abs=1e-6)
        assert GUARD.check(one) == "near_evaluation"


def test_the_same_calls_in_other_words_and_turns_are_refused():
    one = EVALUATION[3]
    calls = one.turns[0].calls
    turns = (Turn("Please be so kind.", calls[:1]), Turn("And now something else entirely!", calls[1:]))
    other = dataclasses.replace(one, id="other", turns=turns, scenario={"other": 1})
    assert COSINES(other).max() < 0.9  # the threshold by default
    assert GUARD.check(other) == "near_evaluation"


def test_numbers_that_the_tools_take_as_equal_are_equal():
    def buy(amount):
        return Task("n", "bfcl", {}, (Turn(f"spend {amount!r}", (Call("buy", {"amount": amount}),)),))

    guard = LeakGuard([buy(5), *EVALUATION], threshold=1.0)
    assert guard.check(buy(5.0)) == "near_evaluation"
    assert guard.check(buy(5.5)) is None and guard.check(buy("5")) is None


def test_a_threshold_of_one_refuses_every_query_of_an_evaluation_task():
    rng = np.random.default_rng(0)
    queries = [" ".join(rng.choice(WORDS, 12)) for _ in range(60)]
    asked = [Task(f"q{i}", "bfcl", {}, (Turn(q, (Call("a", {"x": i}),)),)) for i, q in enumerate(queries)]
    guard = LeakGuard(asked, 1.0, query_threshold=1.0)
    for one in asked:
        other = dataclasses.replace(one, turns=(Turn(one.turns[0].query, (Call("b", {"y": 1}),)),))
        assert guard.check(other) == "near_evaluation"
    assert guard.check(task("x", ("cd", "pictures"))) is None


def test_the_same_tools_with_other_values_are_far_below_the_threshold():
    evaluation = [*EVALUATION, task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"))]
    other = task("x", ("cd", "pictures"), ("mv", "cat.png"), ("grep", "budget"))
    assert CountCosines(evaluation, features)(other)[-1] < 0.5
    assert LeakGuard(evaluation).check(other) is None


def test_a_copy_with_one_small_change_lies_between():
    mine = task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"))
    cosines = CountCosines([*EVALUATION, mine], features)
    near = cosines(task("x", ("cd", "docs"), ("mv", "note.txt"), ("grep", "warning")))[-1]
    far = cosines(task("x", ("cd", "pictures"), ("mv", "cat.png"), ("grep", "budget")))[-1]
    assert far + 0.2 < near < 1.0


def test_reworded_near_copies_are_refused_by_the_threshold():
    mine = task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"), ("post_tweet", "done"))
    calls = (*mine.calls, Call("cd", {"x": "docs"}))
    longer = dataclasses.replace(mine, turns=(Turn(mine.turns[0].query, calls),))
    assert LeakGuard([*EVALUATION, mine]).check(longer) == "near_evaluation"


def test_unrelated_tasks_are_near_zero():
    other = Task("z", "bfcl", {}, (Turn("zebras ahoy", (Call("sail", {"y": 1}),)),))
    assert GUARD.nearest(other).similarity == 0.0 and GUARD.check(other) is None


def test_shared_wording_weighs_little():
    # The whole corpus shares query and tools; only the value differs.
    corpus = [task(f"c{i}", ("cd", f"folder{i}")) for i in range(100)]
    assert CountCosines(corpus[:1], features)(corpus[1])[0] > 0.3
    assert CountCosines(corpus[:1], features, corpus[2:])(corpus[1])[0] < 0.05


def test_no_evaluation_tasks_and_scenarios_without_calls():
    guard = LeakGuard([])
    assert guard.nearest(EVALUATION[0]) == ("features", 0.0, None) and guard.check(EVALUATION[0]) is None
    scenario = Task("scenario", "bfcl", {})
    assert LeakGuard([scenario]).check(dataclasses.replace(scenario, id="other")) is None


def test_a_task_without_calls_is_near_those_of_worlds_that_begin_as_its_own():
    game = lambda name, world, *calls: Task(name, "tools", world, (Turn("Guess the number.", calls),))
    others = [game("e0", {"begins": "b"}), game("e1", {"begins": "a"}, Call("guess", {"n": 1}))]
    nearest = lambda task, tasks: LeakGuard(tasks, 0.1).nearest(task)
    ours = game("new", {"begins": "a"})
    assert nearest(ours, others[:1]) == ("features", 0.0, None)
    assert nearest(ours, others).task == "e1" and LeakGuard(others, 0.1).check(ours)
    assert nearest(ours, [game("e", {"begins": "a", "reset": {"seed": 8}})]).similarity == pytest.approx(1)
    # A scenario that does not tell is no other world, and calls are compared in any world.
    for one, other in (({}, {"begins": "b"}), ({"begins": "a"}, {})):
        assert nearest(game("new", one), [game("e", other)]).similarity == pytest.approx(1)
    call = Call("guess", {"n": 1})
    assert nearest(game("new", {"begins": "c"}, call, call), others).similarity > 0.5


def test_threshold_is_inclusive_and_checked():
    one = task("x", ("cd", "docs"), ("mv", "draft_1"), ("cd", "draft_2"))
    similarity = GUARD.nearest(one).similarity
    assert LeakGuard(EVALUATION, similarity).check(one) == "near_evaluation"
    assert LeakGuard(EVALUATION, float(np.nextafter(similarity, 1))).check(one) is None
    for bad in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            LeakGuard(EVALUATION, bad)


class Dense:
    """The same by one dense matrix [features, evaluation tasks] in float32, as in published similarities."""

    def __init__(self, evaluation, features, corpus=()):
        self.features = features
        counts = [features(t) for t in evaluation]
        documents = [*counts, *(features(t) for t in corpus)]
        self.total, self.frequency = len(documents) + 1, Counter(f for d in documents for f in d)
        self.row = {f: i for i, f in enumerate(dict.fromkeys(f for c in counts for f in c))}
        self.weights = np.zeros((len(self.row), len(counts)), np.float32)
        for column, count in enumerate(counts):
            for feature, weight in self.weigh(count).items():
                self.weights[self.row[feature], column] = weight

    def weigh(self, count):
        weights = {f: n * math.log(self.total / (self.frequency[f] + 0.5)) for f, n in count.items()}
        norm = math.sqrt(math.fsum(w * w for w in weights.values()))
        return {f: w / norm for f, w in weights.items()}

    def __call__(self, task):
        known = {f: w for f, w in self.weigh(self.features(task)).items() if f in self.row}
        values = np.array(list(known.values()), np.float32)
        return np.clip(values @ self.weights[[self.row[f] for f in known]], 0.0, 1.0)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 10), st.sampled_from([features, ngrams]))
def test_sparse_equals_dense_to_the_last_bit(seed, evaluated, more, compared):
    rng = np.random.default_rng(seed)
    evaluation = [random_task(f"e{i}", rng) for i in range(evaluated)]
    evaluation += [dataclasses.replace(evaluation[i], id=f"again {i}") for i in range(0, evaluated, 3)]
    corpus = [random_task(f"c{i}", rng) for i in range(more)]
    dense, cosines = (kind(evaluation, compared, corpus) for kind in (Dense, CountCosines))
    alone, guard = Dense(evaluation, compared, []), LeakGuard(evaluation, 0.9, compared)
    strangers = [Task("no turns", "bfcl", {}), Task("z", "bfcl", {}, (Turn("zebras ahoy"),))]
    for one in (*evaluation[:3], *corpus[:3], *(random_task("new", rng) for _ in range(5)), *strangers):
        assert np.array_equal(cosines(one), dense(one))
        expected = alone(one)
        assert np.array_equal(CountCosines(evaluation, compared)(one), expected)
        same_calls = any(one.calls == t.calls for t in evaluation if t.calls)
        if not same_calls:
            nearest = evaluation[int(np.argmax(expected))].id
            assert guard.nearest(one) == ("features", expected.max(), nearest)
        assert (guard.check(one) is not None) == (same_calls or float(expected.max()) >= 0.9)


def test_only_what_the_evaluation_tasks_have_is_kept():
    evaluation = [random_task(f"e{i}", np.random.default_rng([0, i])) for i in range(300)]
    cosines = CountCosines(evaluation, features)
    kept = sum(a.nbytes for a in vars(cosines).values() if isinstance(a, np.ndarray))
    counts = [features(t) for t in evaluation]
    entries, distinct = sum(map(len, counts)), len({f for c in counts for f in c})
    assert kept == 8 * entries + 16 * (distinct + 1)  # a column and a weight for each; an idf and a start


def test_it_says_which_measure_refuses_and_for_which_task():
    def embed(texts):  # counts each letter
        return np.array(
            [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        )

    options = dict(query_threshold=0.8, embed=embed, embedding_threshold=0.99, call_threshold=0.88)
    one, guard = EVALUATION[3], LeakGuard(EVALUATION, **options)
    others = tuple(Call("other", {"y": i}) for i in range(2 * len(one.calls)))
    said = lambda query, calls: Task("new", "bfcl", {}, (Turn(query, calls),))
    query = one.turns[0].query
    refused = {
        "calls": said("Entirely new.", one.calls),
        "arguments": said("Entirely new.", (*others, *one.calls[::-1])),
        "ngrams": said(query.upper().replace(" ", "\n  "), others),
        "embedding": said("".join(sorted(query)), others),
    }
    for measure, task in refused.items():
        near = guard.nearest(task)
        assert guard.refuses(near) and (near.measure, near.task) == (measure, one.id)
        assert near.to_json() == {"measure": measure, "similarity": round(near.similarity, 4), "task": one.id}
    assert LeakGuard(EVALUATION).check(refused["ngrams"]) is None
    assert not guard.refuses(guard.nearest(said("Zzz qqq!", others)))
    altered = [dataclasses.replace(c, arguments={**c.arguments, "z": 1}) for c in one.calls]
    near = LeakGuard(EVALUATION, 0.6, call_threshold=0.88).nearest(said(query, tuple(altered)))
    assert (near.measure, near.task) == ("features", one.id)


@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
@settings(max_examples=40)
def test_the_nearest_is_by_the_measure_that_comes_closest_to_refusing(seed, features_from, arguments_from):
    """The deciding similarity (shown by lineage and report) against plain loops over measures and tasks."""
    rng = np.random.default_rng(seed)
    evaluation, new = [random_task(f"e{i}", rng) for i in range(8)], random_task("new", rng)
    kept = new.calls[: rng.integers(1, len(new.calls) + 1)]
    evaluation.append(dataclasses.replace(new, id="near", turns=(Turn("In other words.", kept),)))
    guard = LeakGuard(evaluation, features_from, call_threshold=arguments_from)
    near = guard.nearest(new)
    if kept == new.calls:
        assert near == ("calls", 1.0, "near") and guard.refuses(near)
        return
    ratios = []
    for measure, least, cosines in (
        ("features", features_from, CountCosines(evaluation, features)),
        ("arguments", arguments_from, KnownCosines(evaluation, calls)),
        ("arguments", arguments_from, lambda task: [share(task, e, evaluation) for e in evaluation]),
    ):
        ratios += [(float(c) / min(least, 1 - 1e-6), measure, t.id) for c, t in zip(cosines(new), evaluation)]
    best = max(ratios)[0]
    assert any(
        (near.measure, near.task) == (m, t) for r, m, t in ratios if math.isclose(r, best, rel_tol=1e-5)
    )
    assert guard.refuses(near) == (guard.check(new) == "near_evaluation") == (best >= 1)


def share(new, one, evaluation):
    """The share of one evaluation task's calls, by idf, that a new task has; 0 where there is none."""
    holds = lambda task, call: task.calls.count(call)
    idf = lambda call: math.log((len(evaluation) + 1) / (sum(call in e.calls for e in evaluation) + 0.5))
    different = [call for n, call in enumerate(one.calls) if call not in one.calls[:n]]
    if sum(bool(call.arguments) for call in different) < 2:
        return 0.0
    had = sum(min(holds(one, call), holds(new, call)) * idf(call) for call in different)
    return had / sum(idf(call) for call in one.calls)


@given(st.integers(0, 10**6))
@settings(max_examples=40)
def test_the_share_of_an_evaluation_tasks_calls(seed):
    rng = np.random.default_rng(seed)
    pool = [Call("pwd", {}), Call("ls", {}), *(Call("cd", {"folder": f}) for f in "abcd")]
    draw = lambda id: Task(id, "bfcl", {}, (Turn(id, tuple(rng.choice(pool, rng.integers(1, 6)))),))
    evaluation, new = [draw(f"e{n}") for n in range(6)], draw("new")
    found = Containment(evaluation)(new)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [share(new, one, evaluation) for one in evaluation], atol=1e-6)


def test_a_task_that_holds_a_whole_evaluation_task_is_refused():
    """Also where its other calls are those of further evaluation tasks: the cosine falls with them."""
    c = [Call("mv", {"source": f"s{n}", "destination": f"d{n}"}) for n in range(8)]
    pwd, ls = Call("pwd", {}), Call("ls", {})
    said = lambda id, *own: Task(id, "bfcl", {}, (Turn(f"Query {id}.", own),))
    evaluation = [
        said("A", c[0], c[1]), said("B", c[2], c[3]), said("pwd", pwd), said("bare", pwd, ls),
        said("one", c[4]), said("twice", c[5], c[5]), said("with pwd", pwd, c[6], c[7]),
    ]  # fmt: skip
    guard, off = (LeakGuard(evaluation, call_threshold=least) for least in (0.88, 0.0))
    cosines = KnownCosines(evaluation, calls)
    for own, near in (
        ((c[0], c[1], c[2]), "A"),
        ((c[1], c[2], c[0]), "A"),
        ((c[2], c[0], c[3], c[1]), "A"),
    ):
        task = said("new", *own)
        assert guard.check(task) == "near_evaluation" and off.check(task) is None
        assert guard.nearest(task) == ("arguments", 1.0, near) and cosines(task).max() < 0.83
    for own in (
        (c[0], c[2]),
        (c[0], pwd, c[2]),
        (c[4], c[0]),
        (c[5], c[0], c[5], c[2]),
        (pwd, ls, c[0], c[2]),
    ):
        assert guard.check(said("new", *own)) is None, own
    assert guard.nearest(said("new", c[6], c[7], c[0])).similarity > 0.7  # without its pwd


@pytest.mark.parametrize("said", [True, False])
def test_a_copy_that_says_a_default_or_leaves_it_out_is_refused(said):
    """Copies all tasks of BFCL's development and test halves, in new words."""
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
    tools, guard = build.family(config).tools, leak_guard(config, [])
    changed = 0
    for one in build.benchmark_tasks(config):
        functions = [doc["function"] for doc in tools(one)]
        optional = {
            f["name"]: {
                name: schema["default"]
                for name, schema in f["parameters"]["properties"].items()
                if name not in f["parameters"]["required"] and "default" in schema
            }
            for f in functions
        }

        def other(call):
            own, mine = dict(call.arguments), optional[call.name]
            if said:
                return Call(call.name, mine | own)
            return Call(call.name, {k: v for k, v in own.items() if k not in mine or mine[k] != v})

        turns = [Turn(f"Kindly do {n}.", tuple(map(other, t.calls))) for n, t in enumerate(one.turns)]
        copy = dataclasses.replace(one, id="copy", turns=tuple(turns))
        changed += copy.calls != one.calls
        assert guard.nearest(copy)[:2] == ("calls", 1.0)
    assert changed >= 9


def test_an_argument_other_than_the_default_still_tells_calls_apart():
    schema = {"type": "object", "properties": {"a": {"default": 1}, "b": True, "c": {"default": 0}}}
    schema["required"] = ["c"]
    tools = lambda task: [{"function": {"name": "f", "parameters": schema}}]
    said = lambda id, **own: Task(id, "bfcl", {}, (Turn(f"Query {id}.", (Call("f", own),)),))
    guard = LeakGuard([said("one", a=1, b=2, c=0)], tools=tools)
    assert guard.nearest(said("new", b=2, c=0)).measure == "calls"
    for own in ({"a": 2, "b": 2, "c": 0}, {"b": 2}, {"a": 1, "b": 2, "c": 3}):
        assert guard.nearest(said("new", **own)).measure == "features", own


def test_ngrams_are_of_each_query_and_pass_over_case_and_blanks():
    turns = lambda *queries: Task("x", "bfcl", {}, tuple(Turn(query) for query in queries))
    assert ngrams(turns("a b")) == Counter([" a ", "a b", " b ", " a b", "a b ", " a b "])
    assert ngrams(turns("  A\n B")) == ngrams(turns("a b"))
    assert ngrams(turns("a b", "a b")) == ngrams(turns("a b")) + ngrams(turns("a b"))
    assert ngrams(Task("x", "bfcl", {})) == Counter()


def test_ngrams_that_no_evaluation_task_has_do_not_count():
    evaluation, new = EVALUATION[:20], [random_task("new", np.random.default_rng(i)) for i in (7, 8)]
    cosines, counts = KnownCosines(evaluation, ngrams), [ngrams(t) for t in evaluation]
    frequency = Counter(g for count in counts for g in count)
    vector = lambda count: np.array([count[g] * math.log(21 / (n + 0.5)) for g, n in frequency.items()])
    unit = lambda count: vector(count) / np.linalg.norm(vector(count))
    for task in (*evaluation[:3], *new):
        np.testing.assert_allclose(cosines(task), [unit(ngrams(task)) @ unit(c) for c in counts], atol=1e-5)
        longer = dataclasses.replace(task, turns=(*task.turns, Turn("ZZZZ!?!?")))
        np.testing.assert_allclose(cosines(longer), cosines(task), atol=1e-5)
    assert not cosines(Task("z", "bfcl", {}, (Turn("0000"),))).any()


def test_calls_count_with_all_their_arguments_and_in_any_order():
    call = lambda **arguments: Call("mv", arguments)
    asks = lambda *own: Task("x", "bfcl", {}, (Turn("Any words.", own[:1]), Turn("Others.", own[1:])))
    assert calls(asks(call(a=1, b=2.0), call())) == calls(asks(call(), call(b=2, a=1)))
    evaluation = [asks(call(n=i), call(n=i + 100), call()) for i in range(20)]
    cosines = KnownCosines(evaluation, calls)
    found = cosines(asks(call(n=103), Call("pwd", {}), call(n=3), call(), call(n=999)))
    assert (
        found[3] == pytest.approx(1.0) and max(np.delete(found, 3)) < 0.1
    )  # a call of every task weighs next to nothing
    assert cosines(asks(call(n=3), call())).max() < 0.75 and not cosines(asks(Call("pwd", {}))).any()


def test_an_embedding_must_answer_with_a_vector_for_each_text():
    for answer in (np.zeros(3), np.zeros((1, 3)), np.full((60, 3), np.nan)):
        with pytest.raises(ValueError, match="embedding of 60 texts"):
            LeakGuard(EVALUATION, embed=lambda texts, answer=answer: answer, embedding_threshold=0.9)
    with pytest.raises(ValueError, match="function of config.data.leak_embedding fails .must be real number"):
        LeakGuard(EVALUATION, embed=math.sqrt, embedding_threshold=0.9)
    nothing = LeakGuard(EVALUATION, embed=lambda texts: np.zeros((len(texts), 3)), embedding_threshold=0.9)
    assert nothing.check(random_task("new", np.random.default_rng(7))) is None
    unasked = LeakGuard([], query_threshold=0.9, embed=lambda texts: 1 / 0, embedding_threshold=0.9)
    assert unasked.nearest(EVALUATION[0]) == ("features", 0.0, None) and unasked.check(EVALUATION[0]) is None


def test_thresholds_of_further_measures_are_checked():
    for options in (
        dict(query_threshold=1.1),
        dict(query_threshold=-1.0),
        dict(call_threshold=2.0),
        dict(embed=len),
    ):
        with pytest.raises(ValueError, match="leak threshold of (ngrams|arguments|embedding)"):
            LeakGuard([], **options)


def test_the_test_split_is_guarded_while_the_development_split_is_judged_on():
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
    own = {split: build.family(config).tasks(split, {}) for split in ("development", "test", "evaluation")}
    theirs = {task.id for task in build.benchmark_tasks(config)}
    assert theirs == {task.id for task in own["evaluation"]}
    copy = dataclasses.replace(own["test"][0], id="copy")
    assert leak_guard(config, []).nearest(copy).task == own["test"][0].id
    older = configs.override(config, {"data.leak_splits": ()})
    assert {task.id for task in build.benchmark_tasks(older)} == {task.id for task in own["development"]}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_compares_the_calls_with_their_arguments(path):
    assert configs.load_file(path).data.leak_call_threshold == 0.88


def test_copies_of_the_benchmark_with_an_idle_call_in_other_words_are_refused():
    """Adds an idle call to a task of BFCL's development or test split, and words it differently."""
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
    family, copies = build.family(config), []
    for task in build.benchmark_tasks(config):
        offered = {tool["function"]["name"] for tool in family.tools(task)} - {c.name for c in task.calls}
        if idle := sorted(offered & {"pwd", "ls", "message_get_login_status", "ticket_get_login_status"}):
            calls = (*task.calls[:1], Call(idle[0], {}), *task.calls[1:])
            copies.append(dataclasses.replace(task, id="copy", turns=(Turn("Do all of it.", calls),)))
    assert len(copies) == 57
    guard = leak_guard(config, [])
    assert all(guard.check(copy) for copy in copies)
    off = leak_guard(configs.override(config, {"data.leak_call_threshold": 0.0}), [])
    assert not any(off.check(copy) for copy in copies)  # the features do not see them


def letters(texts):
    """An embedding model, which the next test names."""
    return np.array(
        [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
    )


@pytest.mark.parametrize(
    "measure, key, also, cosines",
    [
        ("ngrams", "data.leak_query_threshold", {}, lambda tasks: KnownCosines(tasks, ngrams)),
        (
            "embedding",
            "data.leak_embedding_threshold",
            {"data.leak_embedding": f"{__name__}.letters"},
            lambda tasks: EmbeddingCosines(tasks, letters),
        ),
    ],
)
def test_a_config_turns_on_each_measure_of_the_words_and_sets_its_threshold(measure, key, also, cosines):
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
    held_out = task("held out", ("mv", "summer_3"), ("grep", "alpha_1"))
    held_out = dataclasses.replace(held_out, scenario={"toolsets": ["GorillaFileSystem"], "excluded": []})
    words = held_out.turns[0].query.replace("another", "one more")
    near = Task("near", "bfcl", {}, (Turn(words, (Call("quite_another", {}),)),))
    assert leak_guard(config, [held_out]).check(near) is None
    *_, cosine = cosines([*build.benchmark_tasks(config), held_out])(near).tolist()
    assert 0.8 < cosine < 1
    for threshold, refusal in ((cosine - 1e-4, "near_evaluation"), (cosine + 1e-4, None)):
        guard = leak_guard(configs.override(config, {**also, key: threshold}), [held_out])
        assert guard.check(near) == refusal, threshold
        assert guard.nearest(near) == (measure, pytest.approx(cosine), "held out")


def test_what_a_config_cannot_ask_of_further_measures():
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
    for values, why in (
        ({"data.leak_query_threshold": 1.5}, "leak_query_threshold is 1.5: it must be between 0 and 1"),
        (
            {"data.leak_embedding": "math.sqrt"},
            "leak_embedding_threshold is 0.0: it must be a cosine above 0",
        ),
        ({"data.leak_embedding": "math.nothing"}, "math defines no function nothing"),
        ({"data.leak_embedding": "no_such_module.embed"}, "cannot be imported"),
        ({"data.leak_embedding": "embed"}, "cannot be imported"),
    ):
        with pytest.raises(ValueError, match=why):
            configs.check(configs.override(config, values))
    asked = {"data.leak_embedding": "math.sqrt", "data.leak_embedding_threshold": 0.9}
    configs.check(configs.override(config, asked))
