"""A strategy's evolution of D_t: at once, or beside the training of the next steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, cast

from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.config.schedule import KEYS
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.preemption import interruptible
from coevolve_jax.strategies.base import Lab, Strategy, evolves
from coevolve_jax.synthesis.pipeline import SynthesisStats


class PendingEvolution(NamedTuple):
    """An evolution that started after `step`, by a strategy of this state, with D_t of this size then.

    lab: D_t grows here until it is merged. stats: what became of the evolution, once it has ended.
    """

    step: int
    state: Mapping
    size: int
    lab: Laboratory
    stats: Future[SynthesisStats | None]


class Evolver:
    """strategy.evolve for one step after the other.

    With config.evolution.async_steps = n above 0 an evolution that starts after step t goes on in a thread of its own while
    training does. It explores with D_t as it was after step t, and D_t grows by what it found after step t + n, however
    soon or late that is ready, so that a seed still gives one result. The strategy is not asked again before.

    saved: the JSON of the checkpoint that the run goes on from. An evolution that was pending then starts again. A fork
    whose async_steps is 0 makes up for it at the end of its first step, with D_t and the policy of then.

    An evolution may take minutes where its explorer asks a model. It is then given up where the run is asked to end
    (preemption.py), or where it fails: D_t and the books are as before it, and `to_json` is what it starts again from.
    given_up: whether that is so.
    """

    def __init__(self, config: ConfigDict, strategy: Strategy, lab: Laboratory, saved: Mapping | None = None):
        self._config, self._strategy, self._lab = config, strategy, lab
        self._async_steps = config.evolution.async_steps
        self._scheduled = configs.scheduled(config)
        self._pending: PendingEvolution | None = None
        self._slow = lab.synthesizer.roles.costs is not None  # the explorer asks a model
        self._before: dict | None = None  # the strategy's state when the present evolution started
        self._owed: Mapping | None = None  # what the checkpoint had pending, where async_steps is 0 now
        self.given_up = False
        own = saved["strategy"] if saved else {}
        # Another method cannot read this one's state: a fork that changes the strategy leaves the evolution.
        if own.get("pending") and own["name"] == config.strategy.name:
            self._resume(own["pending"])

    def _resume(self, saved: Mapping) -> None:
        """Starts the checkpoint's evolution again, or remembers that it is owed."""
        if not self._async_steps:
            self._owed = saved
            return
        # The records of then: training has gone on since, and the strategy may choose by them.
        fork = self._lab.fork(saved["records"])
        self._pending = start(saved["step"], self._past(saved), fork, saved["state"])

    def _past(self, saved: Mapping) -> Strategy:
        """The strategy as it was when that evolution started.

        The evolution was due then. A fork may have another schedule, by which it is not: the present strategy has given
        its evidence away, so that an evolution left out would be lost for good.
        """
        step = saved["step"]
        due = {"evolution.every": step + 1, "evolution.freeze_last_steps": 0, "evolution.async_steps": 0}
        config = configs.override(self._config, due)
        return build.strategy(config, {"strategy": {"name": config.strategy.name, "state": saved["state"]}})

    def __call__(self, step: int) -> SynthesisStats | None:
        """What became of the evolution that ends with this step; None where none does."""
        if not self._async_steps:
            return self._at_once(step)
        stats, ending = None, self._pending
        if ending and step >= ending.step + self._async_steps:
            # Waiting here, however long, is what makes D_t a function of the step and not of the thread's speed.
            with self._may_be_given_up():
                stats = ending.stats.result()
            self._lab.merge(ending.lab)
            self._pending = None
        if not self._pending:
            # To write the state down takes up to a second: only where it may be needed. It is written before the
            # strategy evolves, which empties its evidence.
            state = None if self._idle(step) else self._strategy.to_json()
            self._pending = start(step, self._strategy, self._lab.fork(), state)
        return stats

    def _idle(self, step: int) -> bool:
        """Whether the strategy is known not to evolve after this step."""
        return self._scheduled and not evolves(self._config, step)

    def _at_once(self, step: int) -> SynthesisStats | None:
        # A quick explorer is not interrupted, so nothing needs to be undone: D_t grows in place.
        if not self._slow or (self._idle(step) and not self._owed):
            return self._evolved(step, self._lab)
        self._before = self._strategy.to_json()
        # The fork is dropped where the evolution is given up, with all that it had added and booked.
        lab = self._lab.fork(roller=self._lab.roller)
        with self._may_be_given_up():
            stats = self._evolved(step, lab)
        self._lab.merge(lab)
        self._before = None
        return stats

    def _evolved(self, step: int, lab: Laboratory) -> SynthesisStats | None:
        """Evolves D_t of `lab`, first by what the checkpoint still owed, if anything."""
        late = self._past(self._owed).evolve(self._owed["step"], lab) if self._owed else None
        stats = self._strategy.evolve(step, lab)
        self._owed = None  # only now: an evolution that is given up is owed again
        if late and stats:
            late.add(stats)
        return late or stats

    @contextmanager
    def _may_be_given_up(self) -> Iterator[None]:
        self.given_up = self._slow  # stays so where the block raises: train.py then saves what was before
        with interruptible() if self._slow else nullcontext():
            yield
        self.given_up = False

    def close(self) -> None:
        """Waits for the pending evolution, so that nothing asks for its answers a second time while it does. Raises
        Preempted where the run is asked to end."""
        if self._pending:
            with interruptible():
                self._pending.stats.exception()

    def to_json(self) -> dict:
        """The strategy and its pending evolution, as JSON values."""
        state = self._strategy.to_json() if self._before is None else self._before
        saved: dict[str, Any] = {"name": self._config.strategy.name, "state": state}
        if self._pending:
            step, state, size, lab, _ = self._pending
            # The tasks themselves are in the checkpoint. The lab's D_t may have grown meanwhile; only the first count.
            records = {i: dict(vars(r)) for i, r in islice(lab.tasks.records.items(), size)}
            saved["pending"] = {"step": step, "state": state, "records": records}
        elif self._owed:
            saved["pending"] = self._owed
        return saved


def start(step: int, strategy: Strategy, lab: Laboratory, state: Mapping | None) -> PendingEvolution | None:
    """Lets a strategy evolve in a thread of its own, from its first use of `lab` on: what it does before is done on
    return. None where it does not use it. state: the strategy's, to start again with.

    Raises ValueError where it uses it and there is no state.
    """
    size = len(lab.tasks)
    stats: Future[SynthesisStats | None] = Future()
    past, used = threading.Event(), threading.Event()
    # Until it uses the lab a strategy may change its state, which the next steps do too: they wait for `past`.
    noticed = cast(Lab, FirstUse(lab, lambda: (used.set(), past.set())))

    def evolve() -> None:
        try:
            stats.set_result(strategy.evolve(step, noticed))
        except BaseException as error:  # it is raised where the result is asked for
            stats.set_exception(error)
        finally:
            past.set()

    # A daemon: a run that is asked to end does not wait for a model's answers.
    threading.Thread(target=evolve, name=f"evolution of step {step}", daemon=True).start()
    past.wait()
    if not used.is_set():
        stats.result()  # raises what `evolve` raised
        return None
    if state is None:
        raise ValueError(
            f"The strategy evolves after step {step}, and READS of its module names {KEYS[0]}: evolve where "
            "strategies.base.evolves is true, or leave that key out of READS."
        )
    return PendingEvolution(step, state, size, lab, stats)


class FirstUse:
    """A Lab that calls `notice` before each use of it."""

    def __init__(self, lab: Lab, notice: Callable[[], object]):
        self._lab, self._notice = lab, notice

    def __getattr__(self, name: str) -> Any:
        self._notice()
        return getattr(self._lab, name)
