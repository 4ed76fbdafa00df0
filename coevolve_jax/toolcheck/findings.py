"""Finds what is wrong with tools, with the line and the remedy, from the facts of exploration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from coevolve_jax.envs.tools.values import open_arguments
from coevolve_jax.toolcheck import servers
from coevolve_jax.toolcheck.facts import Facts
from coevolve_jax.toolcheck.lines import Lines
from coevolve_jax.toolcheck.remedies import OWN, SERVERS, Remedies
from coevolve_jax.types import Call

FEW_CALLS = 8  # below so many calls nothing is said of a tool's answers
MOST_TOOLS = 0.75  # share of a server's tools from which on their end is the server's
FEW_TASKS = 1 / 3  # share of different tasks among those asked for
MANY_LOOSE = 0.1  # share of tasks that pass with another argument
# A third of all words in the docstrings of examples/shop.py, and hardly any in another language.
ENGLISH = frozenset("the of to and for with from by that its which whose if are".split())
LEAST_ENGLISH, FEW_WORDS = 0.03, 15
LONG_PROMPT = 0.5  # share of a rollout's tokens that the prompt may take
DUE = {
    "clock": "asks a clock",
    "chance": "draws what no seed decides",
    "network": "may reach a network",
    "default": "has a default that all calls share, and what they do to it is no part of the state",
    "cached": "is a cached_property: the first look fills it, which is a change of state",
}
AVOIDED = {
    "default": "Let the default be None, and make the value in the body.",
    "cached": "Compute it in reset or at each look, or define state(self) without it.",
}


class Finding(NamedTuple):
    """stops: whether training on these tools is unsound before it is mended. place: FILE:LINE, or ""."""

    stops: bool
    place: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what} {self.remedy}".removeprefix(": ")


def findings(config: ConfigDict, facts: Facts, lines: Lines) -> list[Finding]:
    """Returns the findings, those that stop training first."""
    remedies = SERVERS.get(config.environment.name, OWN)
    found = [
        *_repeats(facts, lines, remedies),
        *_deaths(facts, lines, remedies),
        *_unreadable(facts, lines),
        *_reward(facts, lines),
        *_tasks(facts, lines),
        *(finding for name in facts.tools for finding in _tool(config, facts, name, lines, remedies)),
        *_twins(facts, lines),
        *_loose(facts, lines),
        *_state(facts, lines, remedies),
        *_worlds(facts, lines, remedies),
        *_suspects(facts, lines),
        *_left_out(lines),
        *_described(facts, lines),
        *_language(facts, lines),
        *_prompt(config, facts, lines, remedies),
        *(_server(facts) if servers.used(config) else ()),
    ]
    return sorted(found, key=lambda finding: not finding.stops)


def said(call: Call) -> str:
    """Writes a call as Python would."""
    return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"[:160]


def _repeats(facts: Facts, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    draws = any(suspect.kind == "chance" for suspect in lines.suspects())
    for unlike in facts.unlike:
        alone = unlike.alone or draws
        same = unlike.first == unlike.second
        texts = f"{unlike.first[:80]!r} " + ("both times" if same else f"and {unlike.second[:80]!r}")
        if same or unlike.paths:
            texts += f"; the worlds then differ in {', '.join(unlike.paths[:3]) or 'their state'}"
        cause = "a clock or on chance" if alone else "other worlds beside it"
        what = f"{unlike.call.name} depends on {cause}: {said(unlike.call)} gives {texts}."
        remedy = remedies.clock if alone else remedies.beside
        yield Finding(True, lines.of(unlike.call.name), what, remedy)


def _deaths(facts: Facts, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    dead = {name: tool.fatal for name, tool in facts.tools.items() if tool.fatal is not None}
    all_of_a_server = remedies is not OWN and len(dead) >= max(2, MOST_TOOLS * len(facts.tools))
    for name, (call, why) in dead.items():
        remedy = next(remedy for words, remedy in remedies.ends.items() if words in why)
        if all_of_a_server:
            share = f"{len(dead)} of {len(facts.tools)} tools"
            what = f"{share} end their world, as {said(call)} does ({why[:200]})."
            yield Finding(True, "", what, remedy.partition(", or leave")[0].rstrip(".") + ".")
            return
        what = f"{name} ends its world at {said(call)} ({why[:200]}), and was called no more."
        yield Finding(False, lines.of(name), what, remedy)


def _unreadable(facts: Facts, lines: Lines) -> Iterator[Finding]:
    if facts.unreadable is not None:
        call, why = facts.unreadable
        what = f"After {said(call)} the state cannot be read: {re.sub(r'^[^ ]+:[0-9]+: ', '', why)}"
        remedy = "A world in such a state fails every task."
        yield Finding(True, lines.of("state", call.name), what, remedy)


def _reward(facts: Facts, lines: Lines) -> Iterator[Finding]:
    if facts.reward:
        remedy = "Let it return a number from 0 to 1 that follows from the state alone."
        yield Finding(True, lines.of("get_reward"), facts.reward, remedy)


def _tasks(facts: Facts, lines: Lines) -> Iterator[Finding]:
    reasons = ", ".join(f"{why} {n}" for why, n in facts.refused.most_common(4))
    why = f" ({facts.proposed} were proposed; refused: {reasons})" if reasons else ""
    first = "Mend the findings above first: tasks are made of calls that repeat." if facts.unlike else ""
    if not facts.tasks:
        what = f"Exploration makes no task of these tools{why}."
        remedy = "See what the tools answer, below: most calls must succeed."
        yield Finding(True, lines.of(), what, first or remedy)
    elif len(facts.tasks) < FEW_TASKS * facts.asked:
        what = f"Exploration finds no more than {len(facts.tasks)} different tasks{why}."
        remedy = "More tools, more worlds or more values give more tasks."
        yield Finding(False, lines.of(), what, first or remedy)


def _tool(config: ConfigDict, facts: Facts, name: str, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    tool, place = facts.tools[name], lines.of(name)
    properties = tool.schema["function"]["parameters"].get("properties", {})
    if not tool.succeeded and tool.fatal is None:
        if tool.calls:
            error, count = tool.errors.most_common(1)[0]
            what = f"{name} never succeeded in {tool.calls} calls; most often ({count}): {error}."
        else:
            what = f"{name} was never called."
        remedy = "Let it succeed in some world."
        if properties:
            wanted = facts.unnamed.get(name) or list(properties)[:1]
            listed = ", ".join(f'"{argument}": [...]' for argument in wanted)
            remedy = remedies.values.format(listed=listed, arguments=" and ".join(wanted))
        yield Finding(False, place, what, remedy)
    if not tool.succeeded:
        return
    repeats = all(unlike.call.name != name for unlike in facts.unlike)
    if repeats and tool.succeeded >= FEW_CALLS and not tool.changed and len(tool.answers) == 1:
        what = f"{name} changed nothing and always answered {next(iter(tool.answers))[:60]!r}."
        remedy = "No task can tell whether it was called: let it answer or do something"
        if texts := open_arguments(tool.schema):
            listed = ", ".join(f'"{each}": [...]' for each in texts)
            remedy += f", or {remedies.others.format(listed=listed, arguments=' and '.join(texts))}"
        yield Finding(False, place, what, f"{remedy}.")
    required = tool.schema["function"]["parameters"].get("required", ())
    for parameter, schema in properties.items():
        left_out = [schema["default"]] if "default" in schema and parameter not in required else []
        missing = [
            v
            for v in schema.get("enum", ())
            if v not in left_out and json.dumps(v, ensure_ascii=False) not in tool.values[parameter]
        ]
        if missing and tool.calls >= 4 * len(schema["enum"]):
            what = f"{name} was never called with {parameter}={missing[0]!r}, which its type allows."
            yield Finding(False, place, what, "Exploration reaches it in longer runs only.")
    if tool.longest > config.rollout.max_observation:
        what = f"{name} answers with up to {tool.longest:,} characters."
        remedy = (
            f"An agent reads {config.rollout.max_observation} characters of an answer "
            "(config.rollout.max_observation): answer with less, or let an argument choose."
        )
        yield Finding(False, place, what, remedy)


def _twins(facts: Facts, lines: Lines) -> Iterator[Finding]:
    for a, b in facts.twins:
        what = f"Nothing tells {a} and {b} apart: on the same calls they answered and acted alike."
        yield Finding(False, lines.of(a), what, "Keep one of them.")


def _loose(facts: Facts, lines: Lines) -> Iterator[Finding]:
    passed, ranked = facts.loose.total(), facts.loose.most_common()
    if passed >= MANY_LOOSE * facts.swapped > 0:
        by_tool = ", ".join(f"{name} in {count}" for name, count in ranked[:3])
        what = (
            f"{passed} of {facts.swapped} tasks pass with another argument: {by_tool}. "
            "The call answers and does the same for several."
        )
        remedy = "Let the answer name what it is about, or name values that make a difference."
        yield Finding(False, lines.of(*(name for name, _ in ranked)), what, remedy)


def _state(facts: Facts, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    good = [tool for tool in facts.tools.values() if tool.succeeded]
    if good and not any(tool.changed for tool in good):
        what = "No call changes the state: tasks are graded by answers alone."
        yield Finding(False, lines.of(), what, remedies.no_state)
    if len(good) > 1 and not any(tool.looked for tool in good):
        where = f" in {', '.join(facts.logs[:3])}" if facts.logs else ""
        what = f"Every call changes the state{where}, also where it only looks something up."
        remedy = f"Then only the very calls of the reference can succeed. {remedies.logs}"
        yield Finding(False, lines.of(), what, remedy)


def _worlds(facts: Facts, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    for split, count in facts.worlds.items():
        if isinstance(count, str):
            yield Finding(False, lines.of("reset"), f"The split {split} has no worlds: {count}", "")
    numbers = [n for n in facts.worlds.values() if isinstance(n, int)]
    if numbers and max(numbers) == 1:
        what = "All worlds begin alike, so held-out tasks are other tasks in the same world."
        yield Finding(False, lines.of("reset"), what, remedies.alike)


def _suspects(facts: Facts, lines: Lines) -> Iterator[Finding]:
    for suspect in lines.suspects():
        what = f"`{suspect.code}` {DUE[suspect.kind]}."
        remedy = "Let it show in no answer and in no state: equal calls would be graded unequally."
        yield Finding(False, lines.at(suspect.line), what, AVOIDED.get(suspect.kind, remedy))


def _left_out(lines: Lines) -> Iterator[Finding]:
    found = list(lines.left_out())
    if found:
        names = ", ".join(f"{name} ({kind})" for _, name, kind in found)
        remedy = "Only plain functions are: write such a one that calls it, or begin its name with _."
        yield Finding(False, lines.at(found[0][0]), f"No tools, though public: {names}.", remedy)


def _described(facts: Facts, lines: Lines) -> Iterator[Finding]:
    for name, tool in facts.tools.items():
        properties = tool.schema["function"]["parameters"].get("properties", {})
        silent = [parameter for parameter, schema in properties.items() if not schema.get("description")]
        if silent and lines.path:
            what = f"The docstring of {name} does not describe {', '.join(silent)}."
            remedy = 'TRL and transformers refuse that: add "Args:" with a line for each argument.'
            yield Finding(False, lines.of(name), what, remedy)


def _language(facts: Facts, lines: Lines) -> Iterator[Finding]:
    texts = [text for tool in facts.tools.values() for text in _descriptions(tool.schema["function"])]
    words = re.findall(r"[^\W\d_]+", " ".join(texts).lower())
    share = sum(word in ENGLISH for word in words) / max(len(words), 1)
    if len(words) >= FEW_WORDS and share < LEAST_ENGLISH:
        what = "The docstrings are not in English, and the rules put English words around them."
        remedy = (
            "Queries mix both: write the docstrings in English, or let a language model word the tasks "
            "(config.explorer.wording, or the explorer llm)."
        )
        yield Finding(False, lines.of(*facts.tools), what, remedy)


def _descriptions(part: object) -> Iterator[str]:
    """Yields all descriptions in a schema."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "description" and isinstance(value, str):
                yield value
            else:
                yield from _descriptions(value)


def _prompt(config: ConfigDict, facts: Facts, lines: Lines, remedies: Remedies) -> Iterator[Finding]:
    limit = config.rollout.max_length
    if facts.tokenizer not in ("", config.model):
        what = f"{config.model} is not here: the tokens of a prompt are counted by {facts.tokenizer}."
        remedy = "The model's own template may take several times as many: fetch it, and check again."
        yield Finding(False, "", what, remedy)
    if facts.tokens > LONG_PROMPT * limit:
        what = f"The tools and the first request take {facts.tokens} of the {limit} tokens of a rollout."
        yield Finding(False, lines.of(), what, remedies.long)


def _server(facts: Facts) -> Iterator[Finding]:
    unfit = {unlike.call.name for unlike in facts.unlike}
    unfit |= {name for name, tool in facts.tools.items() if not tool.succeeded or tool.fatal}
    fit = [name for name in facts.tools if name not in unfit]
    if fit and len(fit) < len(facts.tools):
        what = f"Fit to train on are {len(fit)} of {len(facts.tools)} tools."
        yield Finding(False, "", what, f"Use no others: --config.environment.tools={','.join(fit)}")
    if facts.forgets:
        what = "The server remembers nothing of earlier worlds."
        remedy = "Let one process serve many, which saves their start: --config.environment.reuse_server=True"
        yield Finding(False, "", what, remedy)
