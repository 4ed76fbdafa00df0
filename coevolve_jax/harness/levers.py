"""Levers: the config keys that a campaign may move, and the moves of each.

A move is a name, such as "x3", and gives values of the lever's own keys. No other key can be written, so all
other keys, `environment`, `evaluation`, `model` and `seed` among them, are frozen by construction.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.config import idle
from coevolve_jax.diagnosis import rewards
from coevolve_jax.diagnosis.trends import MEANINGS, SETTINGS
from coevolve_jax.harness.records import LONGEST, Expectation, Proposal, is_text

Changes = dict[str, Any]  # dotted config key -> value
NEW_WEIGHT = 0.1  # of a reward term that is added
# Terms that are higher where calls fail, or run out of room. They are added below 0.
BAD = ("overlong", "errors", "repeats", "malformed")
MOST_TERMS = 0.3  # sum of the sizes of the weights of reward terms
DESIGN = "search"  # the lever of a proposal that moves several
LAYERS = ("reward", "filter", "credit", "optimiser", "sampling", "limits", "tasks", "evolution")


class Refused(ValueError):
    """A lever, a move or its outcome is not allowed. The message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Lever:
    """A part of the harness that can be moved.

    Attributes:
      name: the dotted config key, the first of several that move together, which every move writes.
      layer: one of LAYERS.
      keys: all config keys that it may write.
      moves: config -> move -> its changes. Moves that would change nothing or leave the bounds are absent.
        From a value beyond the bounds there are those that come nearer to them.
    """

    name: str
    layer: str
    keys: tuple[str, ...]
    moves: Callable[[ConfigDict], dict[str, Changes]]


def _scale(
    layer: str,
    key: str,
    low: float,
    high: float,
    factor: float = 3.0,
    *,
    zero: float = 0.0,
    whole: bool = False,
) -> Lever:
    """A number that is multiplied or divided.

    zero: where above 0, the number may become 0, and 0 becomes this, or the bound that is nearest to it. Any
      other number that is 0 becomes `low`, but for whole ones: such a 0 is no size.
    """

    def moves(config: ConfigDict) -> dict[str, Changes]:
        now = configs.find(config, key)
        found = {f"x{factor:g}": now * factor, f"/{factor:g}": now / factor}
        if zero:
            found = {**found, "0": 0.0} if now else {"on": min(max(zero, low), high)}
        elif not now and not whole:
            found = {"on": low}
        rounded = {m: round(v) if whole else float(f"{v:.6g}") for m, v in found.items()}
        fits = lambda v: (zero and v == 0) or _allowed(now, v, low, high)
        return {m: {key: v} for m, v in rounded.items() if v != now and fits(v)}

    return Lever(key, layer, (key,), moves)


def _allowed(now: float, then: float, low: float, high: float) -> bool:
    """Whether a value is within bounds, or nearer to them than the present one and not past them."""
    return low <= then <= high or now < then < low or high < then < now


def _choice(layer: str, key: str, values: Sequence[Any]) -> Lever:
    """One of several values, in no order."""

    def moves(config: ConfigDict) -> dict[str, Changes]:
        now = configs.find(config, key)
        return {str(v): {key: v} for v in values if v != now}

    return Lever(key, layer, (key,), moves)


def _steps(layer: str, key: str, values: Sequence[float]) -> Lever:
    """A value of a list in order, where a last 0 is never. A move goes to the next one of the list."""
    size = lambda v: math.inf if v == values[-1] == 0 else v

    def moves(config: ConfigDict) -> dict[str, Changes]:
        now = size(configs.find(config, key))
        above, below = ([v for v in values if size(v) > now], [v for v in values if size(v) < now])
        beside = {"up": above[:1], "down": below[-1:]}
        return {name: {key: v} for name, found in beside.items() for v in found}

    return Lever(key, layer, (key,), moves)


def _again() -> Lever:
    """Rounds in which groups without spread are replaced. They cost rollouts, so the run may end sooner.

    The bound is what the run may spend before the move. So no version gets more than the start, nor less.
    """
    key, budget = "learner.dynamic_sampling", "budget.rollouts"
    plain = _steps("sampling", key, (0, 1, 2, 3))

    def moves(config: ConfigDict) -> dict[str, Changes]:
        bound = {budget: config.budget.rollouts or most_rollouts(config)}
        return {name: {**changes, **bound} for name, changes in plain.moves(config).items()}

    return Lever(key, "sampling", (key, budget), moves)


def most_rollouts(config: ConfigDict) -> int:
    """The rollouts that the steps of a run take at most, without a budget and without probes."""
    batch = config.rollout.tasks_per_step * config.rollout.group_size
    return config.steps * batch * (1 + config.learner.dynamic_sampling)


def _epochs() -> Lever:
    """Passes over each batch. A schedule counts updates, so it is stretched with them: its end stays."""
    key, warm, end = "learner.epochs", "learner.warmup_steps", "learner.decay_steps"
    plain = _steps("optimiser", key, (1, 2, 4))

    def moves(config: ConfigDict) -> dict[str, Changes]:
        own, found = config.learner, plain.moves(config)
        if own.schedule == "constant" or own.final_rate == 1:
            return found
        stretched = {}
        for name, changes in found.items():
            ratio = changes[key] / own.epochs
            rise = own.warmup_steps and max(1, round(own.warmup_steps * ratio))
            stretched[name] = {**changes, end: max(rise + 1, round(own.decay_steps * ratio))}
            if rise != own.warmup_steps:
                stretched[name][warm] = rise
        return stretched

    return Lever(key, "optimiser", (key, warm, end), moves)


def _schedule() -> Lever:
    """How the learning rate goes on after its warm-up. Without decay_steps it is down by the end of the run.

    Without a warm-up a constant rate has no moves, and no other schedule becomes constant. The optimiser of
    the start then counts no updates, or would count too many: no run could fork it.
    """
    key, end = "learner.schedule", "learner.decay_steps"
    plain = _choice("optimiser", key, ("constant", "cosine", "linear"))

    def moves(config: ConfigDict) -> dict[str, Changes]:
        own = config.learner
        if own.warmup_steps == 0 and own.schedule == "constant":
            return {}
        kept = {m: c for m, c in plain.moves(config).items() if own.warmup_steps or m != "constant"}
        until = {} if own.decay_steps > own.warmup_steps else {end: _updates(config)}
        return {m: c if m == "constant" else {**c, **until} for m, c in kept.items()}

    return Lever(key, "optimiser", (key, end), moves)


def _updates(config: ConfigDict) -> int:
    """Updates of the whole run."""
    return config.steps * config.learner.epochs


def _trade(layer: str, key: str, against: str, low: int, high: int) -> Lever:
    """Two whole numbers whose product stays. A move doubles or halves the first."""

    def moves(config: ConfigDict) -> dict[str, Changes]:
        now, other = configs.find(config, key), configs.find(config, against)
        found = {"x2": (now * 2, other // 2), "/2": (now // 2, other * 2)}
        return {
            m: {key: a, against: b}
            for m, (a, b) in found.items()
            if _allowed(now, a, low, high) and a * b == now * other
        }

    return Lever(key, layer, (key, against), moves)


def _terms(formulas: Mapping[str, tuple[str, bool]]) -> Lever:
    """config.reward.terms: one term is added, removed, halved or doubled.

    formulas: name -> (formula, whether it is higher in failures), of terms besides rewards.TERMS.
    """
    key = "reward.terms"
    new = {what: (what, -NEW_WEIGHT if what in BAD else NEW_WEIGHT) for what in rewards.TERMS}
    named = {name: (what.strip(), bad) for name, (what, bad) in formulas.items()}  # as `parse` reads it
    new |= {name: (what, -NEW_WEIGHT if bad else NEW_WEIGHT) for name, (what, bad) in named.items()}
    names = {what: name for name, (what, _) in new.items()}

    def moves(config: ConfigDict) -> dict[str, Changes]:
        now = {term.what: term.weight for term in rewards.parse(config.reward.terms)}
        found = {f"add {n}": {**now, what: weight} for n, (what, weight) in new.items() if what not in now}
        for what, weight in now.items():
            name, rest = names.get(what, what), {w: v for w, v in now.items() if w != what}
            found |= {
                f"remove {name}": rest,
                f"halve {name}": {**now, what: weight / 2},
                f"double {name}": {**now, what: weight * 2},
            }
        texts = {m: tuple(str(rewards.Term(*term)) for term in terms.items()) for m, terms in found.items()}
        # What makes the terms smaller is always open, also from beyond the bound.
        smaller = ("remove", "halve")
        return {
            m: {key: t}
            for m, t in texts.items()
            if m.startswith(smaller) or rewards.size(t) < MOST_TERMS + 1e-9
        }

    return Lever(key, "reward", (key,), moves)


def table(config: ConfigDict, formulas: Mapping[str, tuple[str, bool]] | None = None) -> dict[str, Lever]:
    """The levers that the campaign may move, by name: those of config.harness.levers, within its bounds.

    formulas: name -> (formula, whether it is higher in failures) of the registered diagnostics, which may
      become terms of the reward.

    Raises ValueError for an unknown lever, and for a bound that is unknown, no range or given twice.
    """
    settings = config.harness
    bounds: dict[str, tuple[float, float]] = {}
    for text in settings.bounds:
        key, span = _bound(text)
        if key in bounds:
            raise ValueError(f"config.harness.bounds names {key!r} twice: give it one range.")
        bounds[key] = span

    def scale(layer: str, key: str, low: float, high: float, *rest: Any, **more: Any) -> Lever:
        low, high = bounds.pop(key, (low, high))
        return _scale(layer, key, low, high, *rest, **more)

    on = (False, True)
    known = [
        _terms(formulas or {}),
        _choice("filter", "learner.group_filter", on),
        scale("filter", "learner.filter_z", 0.5, 2.5, 1.5),
        scale("filter", "learner.filter_keep", 0.3, 1.0, 1.5),
        _choice("filter", "learner.skip_zero_variance_groups", on),
        _choice("credit", "learner.advantage", ("group_std", "group_mean", "leave_one_out")),
        _choice("credit", "learner.aggregate", ("token", "sequence", "constant")),
        _choice("credit", "learner.ratio", ("token", "sequence")),
        scale("credit", "learner.clip_high", 0.05, 0.5, 1.5),
        scale("credit", "learner.clip_low", 0.05, 0.5, 1.5),
        scale("credit", "learner.kl_coef", 1e-4, 3.0, zero=0.001),
        scale("optimiser", "learner.learning_rate", 1e-7, 3e-3),
        _epochs(),
        # Neither is the warm-up switched on or off: see `_schedule`. 1 is as good as none.
        scale("optimiser", "learner.warmup_steps", 1, max(1, _updates(config)), whole=True),
        _schedule(),
        scale("optimiser", "learner.max_grad_norm", 0.01, 10.0),
        scale("sampling", "rollout.temperature", 0.4, 1.6, 1.25),
        _trade("sampling", "rollout.group_size", "rollout.tasks_per_step", 2, 64),
        _again(),
        _steps("sampling", "rollout.max_staleness", (0, 1, 2, 4, 6)),
        scale("limits", "rollout.max_length", 64, config.learner.pack_length, 2.0, whole=True),
        scale("limits", "rollout.max_new_tokens", 16, 4096, 2.0, whole=True),
        scale("limits", "rollout.max_steps", 2, 200, 2.0, whole=True),
        _choice("tasks", "data.sampling", ("uniform", "variance")),
        _steps("tasks", "data.retire_after", (1, 2, 4, 0)),  # 0 is never
        _steps("tasks", "data.min_evolved_share", (0.0, 0.25, 0.5, 0.75)),
        _choice("evolution", "strategy.name", ("static", "random", "coevolve", "blame")),
        _steps("evolution", "evolution.every", (2, 5, 10, 20)),
        _steps("evolution", "evolution.tasks", (8, 16, 24, 32, 64)),
    ]
    levers = {lever.name: lever for lever in known}
    for name in bounds:
        raise ValueError(f"config.harness.bounds names {name!r}, which is no lever with bounds.")
    for name in settings.levers:
        if name not in levers:
            raise ValueError(f"config.harness.levers names {name!r}: use some of {', '.join(levers)}.")
    return {name: levers[name] for name in settings.levers or levers}


def _bound(text: str) -> tuple[str, tuple[float, float]]:
    key, _, span = text.partition("=")
    low, _, high = span.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = math.nan, math.nan
    if not -math.inf < found[0] <= found[1] < math.inf:
        raise ValueError(
            f"config.harness.bounds has {text!r}: write KEY=LOW:HIGH with finite numbers, the lower first."
        )
    return key, found


def move(levers: Mapping[str, Lever], config: ConfigDict, lever: str, name: str) -> Changes:
    """Returns the changes of a move, after every check of the config that results.

    Raises Refused for an unknown lever or move, where the changed config could not run, and where the move
    has no effect in it.
    """
    if lever not in levers:
        raise Refused(f"{short(lever)} is no open lever: use one of {', '.join(levers)}.")
    moves = levers[lever].moves(config)
    if name not in moves:
        raise Refused(f"{short(name)} is no move of {lever} now: use one of {', '.join(moves) or 'none'}.")
    check_effect(config, moves[name])
    return moves[name]


def check_effect(config: ConfigDict, changes: Mapping[str, Any]) -> None:
    """Raises Refused where the changed config could not run, or one of its changed keys has no effect."""
    without = idle.idle(changed(config, changes))
    if key := next((k for k in changes if k in without), ""):
        raise Refused(f"{key} has no effect here ({without[key]}).")


def plain(given: Any) -> Proposal:
    """A proposal as its file will hold it, read once: an object of a proposer may answer otherwise later.

    Raises Refused for anything else than a Proposal of values that JSON can hold.
    """
    if problem := _malformed(given):
        raise Refused(problem)
    try:
        return Proposal.from_json(json.loads(json.dumps(dataclasses.asdict(given), default=dict)))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise Refused(f"The proposal {short(given)} is more than JSON can hold: give plain values.") from None


def check_proposal(
    levers: Mapping[str, Lever], config: ConfigDict, proposal: Proposal, several: bool = False
) -> None:
    """Checks all that a proposer has written, as it may be anybody's code.

    One lever is moved once, or, where the lever is DESIGN, each of several once. several: this is allowed.

    Raises Refused: a change is not what a move of an open lever gives, the hypothesis names no value of a
    training run, or a text is too long.
    """
    if problem := _malformed(proposal):
        raise Refused(problem)
    p, aim = proposal, proposal.expects
    if several and p.lever == DESIGN:
        left = dict(p.changes)
        for lever in sorted(levers.values(), key=lambda x: -len(x.keys)):  # one may write another one's key
            if lever.name not in left:
                continue
            own = {key: p.changes[key] for key in lever.keys if key in p.changes}
            given = [m for m in lever.moves(config).values() if _same({k: own.get(k) for k in m}, m)]
            if not given:
                raise Refused(f"No move of {lever.name} gives {short(own)}.")
            left = {key: value for key, value in left.items() if key not in given[0]}
        if left:
            raise Refused(f"{short(next(iter(left)))} belongs to no open lever.")
        if not p.changes:
            raise Refused(f"The proposal of {DESIGN} changes nothing: move one lever at least.")
        check_effect(config, p.changes)
    elif not _same(p.changes, own := move(levers, config, p.lever, p.move)):
        raise Refused(f"{p.lever} {p.move} gives {short(own)}, not {short(dict(p.changes))}.")
    if aim and (aim.diagnostic not in MEANINGS or aim.direction not in ("up", "down")):
        raise Refused(f"{short(aim.diagnostic)} {short(aim.direction)} is no change of a value of training.")
    if aim and aim.diagnostic in SETTINGS:
        raise Refused(f"{short(aim.diagnostic)} is a setting of the run: name a value that training shows.")
    if not {*p.evidence} <= {*MEANINGS}:
        raise Refused("The proposal's evidence names a value that no training run has.")


def _same(ours: Mapping[str, Any], theirs: Changes) -> bool:
    """Whether two changes are written alike: 2.0 and True equal whole numbers, and a config takes neither."""
    return json.dumps(dict(ours), sort_keys=True) == json.dumps(theirs, sort_keys=True)


def _malformed(p: Any) -> str:
    """A sentence on what of a proposal has not the type that its records need; "" if all has."""
    if not isinstance(p, Proposal):
        return f"The proposer gave {short(p)}: a Proposal or None is wanted."
    for name in ("parent", "lever", "move", "because", "proposer", "skill"):
        if not is_text(getattr(p, name)):
            return (
                f"The proposal's {name} is longer than {LONGEST} characters, or no text that UTF-8 can write."
            )
    for name in ("changes", "evidence"):
        pairs = getattr(p, name)
        if not isinstance(pairs, Mapping) or not all(isinstance(key, str) for key in pairs):
            return f"The proposal's {name} are {short(pairs)}: a mapping from names is wanted."
    for name, value in p.evidence.items():
        if value is not None and not _finite(value):
            return f"The proposal's evidence {short(name)} is {short(value)}: a number or None is wanted."
    if p.expects is not None and not isinstance(p.expects, Expectation):
        return f"The proposal expects {short(p.expects)}: an Expectation or None is wanted."
    if p.expects and not (_finite(p.expects.least) and p.expects.least >= 0):
        return f"A hypothesis asks for a change of {short(p.expects.least)}: name a number from 0 on."
    if p.expects and not (is_text(p.expects.diagnostic) and is_text(p.expects.direction)):
        return f"The proposal expects {short(p.expects)}: name a value of training, and up or down."
    return ""


def _finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """The config with the changes of moves. Raises Refused where it could not run."""
    try:
        made = configs.override(config, changes)
        configs.check(made)
        configs.check_evolution(made)
    except ValueError as error:
        raise Refused(f"{', '.join(f'{k}={v}' for k, v in changes.items())} cannot run: {error}") from None
    return made


def short(text: Any) -> str:
    """A value as a message shows it, in one line of some 60 characters."""
    try:
        return repr(text if len(str(text)) <= 60 else str(text)[:57] + "...")
    except Exception:  # a whole number of thousands of digits, or a value that is anybody's code
        return f"a value of the type {type(text).__name__}"
