"""The language of formulas: what it gives, what it refuses, and that no text gets past it."""

import builtins

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.builtin import BUILTIN
from coevolve_jax.diagnosis.expressions import ExpressionError
from coevolve_jax.diagnosis.features import FIELDS, LABELS, UNITS, fields
from coevolve_jax.harness import campaign
from coevolve_jax.harness.skills import BUILT_IN
from coevolve_jax.harness.templates import templates
from tests.support.paths import ROOT

JOINED = "+".join(["tools"] * 16)  # formulas that took seconds and hundreds of MB on a rollout
COSTLY = {
    f"({JOINED}).map(t, {JOINED}).size() > 2": "goes over '\\)', which is no list or map of a trajectory",
    f"({JOINED}).size() > tools.filter(t, t in ({JOINED})).size()": "cannot read tools as a whole",
    "tools.map(t, tools).size() > 1": r"cannot read tools as a whole: read tools\[...\] or tools.size\(\)",
    "tools.map(t, [tools, actions]).size() > 1": "cannot read tools as a whole",
    "tools.all(t, size(actions) > 1)": "cannot read actions as a whole",
    "tools.all(t, (tools) == tools)": "cannot read tools as a whole",
    "tools.all(t, tools == actions)": "cannot read tools as a whole",
    "tools.all(t, t in tools && t in actions)": "cannot read tools as a whole",
    "tools.map(t, true, tools).size() > 1": "cannot read tools as a whole",
    "tools.map(t, [t, t]).map(t, [t, t]).map(t, [t, t]).size() > 1": "goes over '\\)'",
    "tools.filter(t, true).filter(t, true).size() > 1": "goes over '\\)'",
    "[tools, tools].all(t, t == tools)": "goes over '\\]'",
    "[1, 2].map(a, 1).size() > 1": "goes over '\\]'",
    "(tools).all(t, t == 'ls')": "goes over '\\)'",
    "stop.all(t, t == 'ls')": "goes over 'stop'",
    "tools[0].all(t, t == 'ls')": "goes over '\\]'",
    "'ls'.all(t, t == 'ls')": "goes over .*ls",
    ".all(t, t == 'ls')": "goes over ''",
    "tools.map(t, t + t + t + t).size() > 1": "cannot hold a \\+",
    "tools.map(t, ['ls'] + ['ls']).size() > 1": "cannot hold a \\+",
    "tools.map(t, (t + t)).size() > 1": "cannot hold a \\+",
    " && ".join(["tools.all(t, t == 'ls')"] * 3): "more than 2 comprehensions",
    "tools.all(t, t.matches('(a+)+b'))": "matches is no field",
    "stop * 1000000 == stop": "no matching overload",
    "2 ** 1000 > 1": "Syntax error",
    "+".join(["stop"] * 50) + " == stop": "recursion depth",
    "[" * 140: "recursion limit",
    "true?" * 28 + "true" + ":true" * 28: "Syntax error",
}
# To CEL the middle is code, and a text to whoever takes each quote for one.
HIDDEN = "'''ls'done''' == stop || tools.all(t, tools.all(u, t + u != '')) || stop == '''done'ls'''"
ROW = {
    "rollouts": 1, "calls": 3, "errors": 1, "malformed": 0, "tokens": 200, "policy_tokens": 40,
    "logprob_mean": -0.5, "turns": 2, "stop": "done", "tools": ["ls", "wc", "ls"],
    "actions": ["ls", "wc", "ls"], "distinct_tools": 2, "is_new_task": True,
}  # fmt: skip
NAMES = ("ls", "wc", "cat", "done", "token_limit", "failed_calls")
WHOLE = {"rollouts": 4, "tool_calls": {"ls": 6, "wc": 2}, "stops": {"done": 4}, "live": 0.25}

VALUES = {
    "double(errors) / double(calls)": 1 / 3,
    "calls == 0 ? 0.0 : double(errors) / double(calls)": 1 / 3,
    "calls > 2": 1.0,
    "calls > 2 && errors > 1": 0.0,
    "calls > 2 || errors > 1": 1.0,
    "!is_new_task": 0.0,
    "is_new_task": 1.0,
    "-logprob_mean": 0.5,
    "logprob_mean * 2.0 - 1.5e-1": -1.15,
    "double(calls % 2)": 1.0,
    "double(tokens / 7)": 28.0,
    "double(int(logprob_mean * 5.0))": -2.0,
    "stop == 'done'": 1.0,
    'stop != "done"': 0.0,
    "stop in ['token_limit', 'done']": 1.0,
    "'cat' in tools": 0.0,
    "tools[0] == 'ls'": 1.0,
    "double(tools.filter(t, t == 'ls').size()) / double(tools.size())": 2 / 3,
    "double(size(tools))": 3.0,
    "tools.exists(t, t == 'wc')": 1.0,
    "tools.exists_one(t, t == 'wc')": 1.0,
    "tools.all(t, t in ['ls', 'wc'])": 1.0,
    "tools.map(t, t == 'ls').size() == 3": 1.0,
    "tools.filter(t, t == 'ls').size() > tools.filter(u, u == 'wc').size()": 1.0,
    "tools.exists(t, t != tools[0])": 1.0,
    "tools.all(t, tools.size() > 2)": 1.0,
    "tools == actions": 1.0,
    "(((calls)))\n >= 3": 1.0,
    "true": 1.0,
    "2.5": 2.5,
}
MISSING = (
    "double(calls) / 0.0", "0.0 / double(malformed)", "calls / malformed > 1", "tools[7] == 'ls'",
    "9223372036854775807 + calls > 0", "staleness", "double(missed_reference)",
)  # fmt: skip
REFUSED = {
    "": "is missing",
    " \n": "is missing",
    "calls": "is of type int: wrap it in double",
    "stop": "is of type string",
    "tools": "is of type list",
    "[1.0, 2.0]": "is of type list",
    "calls + 1.0": "no matching overload",
    "calls +": "Syntax error",
    "double(calls": "missing '\\)'",
    ")(": "Syntax error",
    "failures > 1": "failures is no field of a trajectory",
    "call > 1": "did you mean calls",
    "live > 0.5": "live is no field of a trajectory",
    **{f"{label} > 0.5": f"{label} is the outcome" for label in LABELS},
    "calls.real > 1": "real is no field",
    "tools.__class__.size() > 1": "__class__ is no field",
    "stop.matches('done')": "matches is no field",
    "timestamp('done') > timestamp('done')": "timestamp is no field",
    "type(calls) == int": "type is no field",
    "dyn(calls) > 1.0": "dyn is no field",
    "has(tools.x)": "has is no field",
    "__import__('ls')": "__import__ is no field",
    "null == null": "null is no field",
    "3u > 2u": "u is no field",
    "r'done' == stop": "'done' touches r: put a space or a sign between the two",
    "tools.all(r, r'done' == stop)": "'done' touches r",
    "'ls'in tools": "in touches 'ls'",
    "1'ls' == stop": "'ls' touches 1",
    "{'ls': 1}['ls'] > 0": "cannot have '{'",
    "stop == '''done'''": "'done' touches ''",
    HIDDEN: "'ls' touches ''",
    HIDDEN.replace("'", '"'): '"ls" touches ""',
    "stop == 'do' + 'ne'": "'do' is no name of a tool",
    r"stop == 'd\x6fne'": r"cannot have \"'\"",
    "stop == 'held_out_17'": "'held_out_17' is no name of a tool",
    "'" + "x" * 250 + "' == stop": "is no name of a tool",
    "calls > 1 // comment": "cannot have '/'",
    "calls > 1; errors > 1": "cannot have ';'",
    "caлls > 1": "cannot have 'л'",
    "calls > 1\0": r"cannot have '\\x00'",
    "1e999 > 1.0": "1e999 is too large",
    "99999999999999999999 > calls": "invalid int",
    "tools.all(t, tools.exists(u, u == t))": "a comprehension within another",
    "tools.map(a, [1, 2].map(b, [1, 2].map(c, 1))).size() > 1": "a comprehension within another",
    "tools.exists(calls, calls == 'ls')": "needs a variable of its own",
    "tools.exists(t == 'ls')": "needs a variable of its own",
    "tools.filter > 1": "filter is no field",
    "exists(t, t == 1)": "exists is no field",
    "(" * 40 + "calls" + ")" * 40 + " > 1": "recursion limit",
    "+".join(["1"] * 140) + " > 1": "recursion depth",
    "calls > 1 " * 40: "400 characters: 300 are the most",
    "a" * 10_000_000: "10000000 characters",
    None: "is missing",
    float("nan"): "is missing",
}


@pytest.mark.parametrize("source, value", VALUES.items())
def test_a_formula_has_its_value(source, value):
    assert expressions.compile(source, "trajectory", NAMES).value(ROW) == pytest.approx(value)


@pytest.mark.parametrize("source", MISSING)
def test_an_error_and_no_finite_number_are_missing(source):
    assert expressions.compile(source, "trajectory", NAMES).value(ROW) is None


@pytest.mark.parametrize("source, why", [*REFUSED.items(), *COSTLY.items()], ids=lambda text: str(text)[:40])
def test_a_hostile_or_wrong_formula_is_refused_in_a_sentence(source, why):
    with pytest.raises(ExpressionError, match=why) as refusal:
        expressions.compile(source, "trajectory", NAMES)
    sentence = str(refusal.value)
    assert "\n" not in sentence and len(sentence) < 400 and sentence[-1] in ".?"


def test_units_have_fields_of_their_own_and_none_of_a_trajectory_is_its_outcome():
    assert not set(fields("trajectory")) & set(LABELS) and len({f.name for f in FIELDS}) == len(FIELDS)
    value = lambda source: expressions.compile(source, "step", NAMES).value(WHOLE)
    assert value("double(tool_calls['ls']) / double(rollouts)") == 1.5
    assert value("stops['done'] > 3 && live < 0.5") == 1.0
    assert value("stops['token_limit'] > 0") is None
    with pytest.raises(ExpressionError, match="failed is no field of a step"):  # no row has it
        value("failed['failed_calls'] > 0.4")
    for unit in UNITS:
        for field in fields(unit).values():
            try:  # a value of each declared type can be read
                expressions.compile(field.name, unit)
            except ExpressionError as error:
                assert "is of type" in str(error)
    with pytest.raises(ExpressionError, match="no unit 'run': a formula is about one of trajectory"):
        expressions.compile("true", "run")


@pytest.mark.parametrize(
    "source", ["tools.filter(t, t == 'ls').size() > 1", "!tools.exists(t, t == tools[0] && tools.size() < 3)"]
)
def test_a_comprehension_over_more_elements_than_are_bounded_is_missing(source):
    formula = expressions.compile(source, "trajectory", NAMES)
    assert formula.value({"tools": ["ls"] * expressions.LONGEST}) == 1.0
    assert formula.value({"tools": ["ls"] * (expressions.LONGEST + 1)}) is None
    assert formula.value({}) is None
    plain = expressions.compile("tools.size() > 1 && tools[0] == 'ls'", "trajectory", NAMES)
    assert plain.value({"tools": ["ls"] * 5_000}) == 1.0


def test_what_the_binding_ends_by_its_own_bound_is_missing(monkeypatch):
    monkeypatch.setattr(expressions, "_check_tokens", lambda *formula: [])  # as if one had got past it
    nested = "tools.all(t, tools.all(u, tools.all(v, t + u != v)))"
    formula = expressions.compile(nested, "trajectory")
    assert formula.value({"tools": ["ls"]}) == 1.0
    assert formula.value({"tools": [str(i) for i in range(100)]}) is None


def test_the_formulas_that_are_ours_or_in_the_guide_are_in_the_language():
    for each in BUILTIN:
        for unit in each.units:
            expressions.compile(each.formula, unit)
    for formula in templates(["ls"], ["done"]).values():
        expressions.compile(formula, "trajectory", ["ls", "done"])
    for skill in BUILT_IN:
        expressions.compile(skill.trigger, "trend")
    guide = (
        (ROOT / "docs" / "diagnostics.md").read_text().partition("## Formulas")[2].partition("\nIt reads")[0]
    )
    there = [line.strip() for line in guide.splitlines() if line.startswith("    ")]
    assert len(there) == 3
    for formula in there:
        expressions.compile(formula, "trajectory")


def test_without_names_any_text_passes():
    assert expressions.compile("'rm -r' in tools", "trajectory").value(ROW) == 0.0


@given(
    st.one_of(
        st.text(max_size=60), st.text("calstop tools.filter(t,=='ls')><&|!?:+-*/%[]0123.\"", max_size=80)
    )
)
def test_no_text_gets_past_the_language(source):
    try:
        value = expressions.compile(source, "trajectory", NAMES).value(ROW)
        assert value is None or isinstance(value, float)
    except ExpressionError as error:
        assert "\n" not in str(error)


def test_a_missing_package_is_named_before_a_campaign_begins(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("cel_expr_python"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    expressions._environment.cache_clear()
    with pytest.raises(ExpressionError, match=r"needs the package cel-expr-python.*coevolve_jax\[harness\]"):
        expressions.compile("calls > 1", "trajectory")
    with pytest.raises(ExpressionError, match="needs the package"):
        campaign.begin(tmp_path / "campaign", {})
    assert not (tmp_path / "campaign").exists()
