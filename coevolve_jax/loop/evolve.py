"""A strategy's evolution of D_t: synchronously, or in a thread while the next steps train."""

from __future__ import annotations

import copy
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
    """An evolution that is running in its thread.

    Attributes:
      step: the step after which it started.
      state: the strategy's state at the start, to restart from.
      size: the number of tasks in D_t at the start.
      lab: a fork, whose D_t takes the new tasks until it is merged.
      stats: the result, once it has ended.
    """

    step: int
    state: Mapping
    size: int
    lab: Laboratory
    stats: Future[SynthesisStats | None]


class Evolver:
    """Calls strategy.evolve for one step after the other.

    Asynchronous evolution: with config.evolution.async_steps = n above 0, an evolution that starts after step
    t runs in its own thread while training continues. It sees D_t as it was after step t. Its tasks join D_t
    after step t + n, no sooner and no later, so a seed still gives one result. The strategy is not called
    again before that.

    Resuming: an evolution that was pending in the checkpoint starts again. A fork with async_steps 0 runs it
    at the end of its first step instead, with the D_t and policy of that time.

    Giving up: with a model as explorer an evolution may take minutes. It is given up if the run is asked to
    end (preemption.py) or if it fails. D_t and the ledger are then as before it, and `to_json` restarts it.

    Args:
      saved: JSON of the checkpoint to resume from.

    Attributes:
      given_up: whether the evolution of this step was given up.
    """

    def __init__(self, config: ConfigDict, strategy: Strategy, lab: Laboratory, saved: Mapping | None = None):
        self._config, self._strategy, self._lab = config, strategy, lab
        self._async_steps = config.evolution.async_steps
        self._scheduled = configs.scheduled(config)
        self._pending: PendingEvolution | None = None
        self._slow = lab.synthesizer.roles.costs is not None  # the explorer asks a model
        self._before: dict | None = None  # the strategy's state when the present evolution started
        self._owed: Mapping | None = None  # the checkpoint's pending evolution, if async_steps is 0 now
        self.given_up = False
        own = saved["strategy"] if saved else {}
        # Another method cannot read this state: a fork that changes the strategy drops the pending evolution.
        if own.get("pending") and own["name"] == config.strategy.name:
            self._resume(own["pending"])

    def _resume(self, saved: Mapping) -> None:
        """Restarts the checkpoint's evolution, or notes that it is owed (async_steps 0)."""
        if not self._async_steps:
            self._owed = saved
            return
        # Use the records of that time: training has continued since, and the strategy may choose by them.
        fork = self._lab.fork(saved["records"])
        self._pending = start(saved["step"], self._past(saved), fork, saved["state"])

    def _past(self, saved: Mapping) -> Strategy:
        """Returns the strategy as it was when that evolution started, with a schedule by which it is due.

        A fork may have another schedule, by which it is not due. The current strategy has handed its evidence
        over already: a skipped evolution would be lost for good. Otherwise the schedule stays, since some
        strategies count its evolutions.
        """
        step, config = saved["step"], self._config
        if not evolves(config, step):
            due = {"evolution.every": step + 1, "evolution.freeze_last_steps": 0, "evolution.async_steps": 0}
            config = configs.override(config, due)
        return build.strategy(config, {"strategy": {"name": config.strategy.name, "state": saved["state"]}})

    def __call__(self, step: int) -> SynthesisStats | None:
        """Returns the stats of the evolution that ends with this step, or None."""
        if not self._async_steps:
            return self._at_once(step)
        stats, ending = None, self._pending
        if ending and step >= ending.step + self._async_steps:
            # Always wait here, however long: D_t must depend on the step, not on the thread's speed.
            with self._may_be_given_up():
                stats = ending.stats.result()
            self._lab.merge(ending.lab)
            self._pending = None
        if not self._pending:
            # Save the state before the strategy evolves, since that empties its evidence. Saving takes up to
            # a second, so skip it at steps without evolution. Copy it: a strategy may hand out parts that it
            # goes on to change.
            state = None if self._idle(step) else copy.deepcopy(self._strategy.to_json())
            self._pending = start(step, self._strategy, self._lab.fork(), state)
        return stats

    def _idle(self, step: int) -> bool:
        """Whether the strategy is known not to evolve after this step."""
        return self._scheduled and not evolves(self._config, step)

    def _at_once(self, step: int) -> SynthesisStats | None:
        # A scripted explorer is quick and not interrupted, so nothing needs undoing: D_t grows in place.
        if not self._slow or (self._idle(step) and not self._owed):
            return self._evolved(step, self._lab)
        self._before = copy.deepcopy(self._strategy.to_json())
        # Work on a fork: if the evolution is given up, its tasks and costs are dropped with the fork.
        lab = self._lab.fork(roller=self._lab.roller)
        with self._may_be_given_up():
            stats = self._evolved(step, lab)
        self._lab.merge(lab)
        self._before = None
        return stats

    def _evolved(self, step: int, lab: Laboratory) -> SynthesisStats | None:
        """Evolves the D_t of `lab`, first by the owed evolution, if there is one."""
        late = self._past(self._owed).evolve(self._owed["step"], lab) if self._owed else None
        stats = self._strategy.evolve(step, lab)
        self._owed = None  # only now: an evolution that is given up stays owed
        if late and stats:
            late.add(stats)
        return late or stats

    @contextmanager
    def _may_be_given_up(self) -> Iterator[None]:
        self.given_up = self._slow  # stays so if the block raises: train.py then saves the state before it
        with interruptible() if self._slow else nullcontext():
            yield
        self.given_up = False

    def close(self) -> None:
        """Waits for the pending evolution: a resumed run must not ask its questions while it still asks them.

        Raises Preempted if the run is asked to end.
        """
        if self._pending:
            with interruptible():
                self._pending.stats.exception()

    def to_json(self) -> dict:
        """The strategy's state and its pending evolution, as JSON values."""
        state = self._strategy.to_json() if self._before is None else self._before
        saved: dict[str, Any] = {"name": self._config.strategy.name, "state": state}
        if self._pending:
            step, state, size, lab, _ = self._pending
            # The checkpoint has the tasks; only their records are needed. The lab's D_t may have grown
            # meanwhile, so take the first `size`.
            records = {i: dict(vars(r)) for i, r in islice(lab.tasks.records.items(), size)}
            saved["pending"] = {"step": step, "state": state, "records": records}
        elif self._owed:
            saved["pending"] = self._owed
        return saved


def start(step: int, strategy: Strategy, lab: Laboratory, state: Mapping | None) -> PendingEvolution | None:
    """Runs `strategy.evolve` in a thread and returns once it first touches `lab`.

    By then the strategy has finished changing its own state, so the next steps may change it.

    Args:
      state: the strategy's state before, to restart from; None if the schedule says that it does not evolve
        now.

    Returns:
      None if it finished without using `lab`.

    Raises:
      ValueError: it uses `lab`, and state is None.
    """
    size = len(lab.tasks)
    stats: Future[SynthesisStats | None] = Future()
    past, used = threading.Event(), threading.Event()
    # `past` is set at the first use of the lab or at the end. The next steps wait for it: before it the
    # strategy may still change its state, and they change it too.
    noticed = cast(Lab, FirstUse(lab, lambda: (used.set(), past.set())))

    def evolve() -> None:
        try:
            stats.set_result(strategy.evolve(step, noticed))
        except BaseException as error:  # raised by stats.result()
            stats.set_exception(error)
        finally:
            past.set()

    # A daemon thread: a run that is asked to end does not wait for a model's answers.
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
    """Wraps a Lab; calls `notice` before each use."""

    def __init__(self, lab: Lab, notice: Callable[[], object]):
        self._lab, self._notice = lab, notice

    def __getattr__(self, name: str) -> Any:
        self._notice()
        return getattr(self._lab, name)
