"""Supervised learning on trajectories: updates, the loss on held-out ones, early stop, checkpoints.

sft.jsonl has a row per update and per evaluation. "step" counts the updates done, losses are in nats per
token of the policy, "seconds" are the row's own.

    update        loss, grad_norm, learning_rate, tokens (of the policy), all_tokens (prompts included)
    held out      held_out_loss, tokens
    rollouts      what `success` returns
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis.summary import Progress
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.grpo.optimizer import learning_rate
from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.preemption import Preempted, interruptible
from coevolve_jax.records import checkpoint
from coevolve_jax.records.files import write_lines
from coevolve_jax.records.logs import encode
from coevolve_jax.records.workdir import WARM_START
from coevolve_jax.seeding import rng_for
from coevolve_jax.types import TrainingSample, Trajectory

ROWS = "sft.jsonl"
Success = Callable[[TrainState, int], dict]  # state, updates done -> a row


class Supervised:
    """Learns trajectories by cross-entropy, from the last checkpoint on.

    A checkpoint has the learner's state, the parameters with the lowest held-out loss, all rows, and a digest
    of the config and the tasks. What else there is to know follows from the rows, so a run that was killed
    goes on to the same bits.

    Args:
      config: the run's, with a learner for cross-entropy alone; the section warm_start says how to learn.
      folder: has tasks.jsonl; for sft.jsonl and the checkpoints.
      begin: returns the state before the first update.
      trained, held_out: trajectories to learn from, and others, maybe none.
      success: rolls tasks out; None: nothing is rolled out.

    Raises ValueError if the last checkpoint is of another config or of other tasks.

    Attributes:
      rows: of sft.jsonl.
      step: updates done.
    """

    def __init__(
        self,
        config: ConfigDict,
        folder: Path,
        learner: Learner,
        begin: Callable[[], TrainState],
        trained: Sequence[Trajectory],
        held_out: Sequence[Trajectory],
        success: Success | None = None,
    ):
        self._c, self._learner, self._success = config, learner, success
        self._trained, self._held_out = trained, _packed(config, held_out) if held_out else None
        self._path, self._folder = folder / ROWS, checkpoints(config, folder)
        self._digest = _digest(config, folder)
        abstract = learner.abstract_state
        # The best parameters are in host memory: the devices have no room for another copy.
        empty = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract.params) if held_out else None
        if found := checkpoint.restore(self._folder, {"state": abstract, "best": empty}):
            self.step, arrays, saved = found
            if saved.get("digest") != self._digest:
                raise ValueError(
                    f"{self._folder} holds a checkpoint of another warm start, of other tasks or another "
                    "config: name another config.checkpoint.folder, or delete what is there."
                )
            self._state, self._best, self.rows = arrays["state"], arrays["best"], saved["rows"]
        else:
            self.step, self.rows, self._state = 0, [], begin()
            self._best = _on_host(self._state.params) if held_out else None
        self._saved = self.step if found else None
        write_lines(self._path, self.rows)
        self._writer = checkpoint.Writer()
        self._progress = Progress(config.warm_start.steps, self.step)

    def run(self) -> tuple[TrainState, int]:
        """Makes the updates. Returns the state with the best parameters, and after how many they were there.

        Without held-out trajectories the last parameters are returned.

        Raises:
          FloatingPointError: an update is not finite.
          Preempted: the run was asked to end. The last update is saved.
        """
        w = self._c.warm_start
        while True:
            try:
                with interruptible():
                    self._evaluate_if_due()
            except Preempted:
                self._save()
                raise
            done = self.step == w.steps or 0 < w.patience <= self._since_best
            if done or self.step % w.checkpoint_every == 0:
                self._save()
            if done:
                return self._best_state()
            self._update()

    def log(self, step: int, row: dict, start: float) -> None:
        """Appends a row. start: `time.perf_counter` at its beginning."""
        self.rows.append({"step": step, **row, "seconds": time.perf_counter() - start})
        with open(self._path, "ab") as file:
            file.write(encode(self.rows[-1]))

    def evaluations(self, key: str) -> list[dict]:
        """The rows that have this key: "held_out_loss" or "success"."""
        return [row for row in self.rows if key in row]

    def held_out_loss(self, score: Callable[[Batch], jax.Array]) -> float:
        """Nats per token of the policy in the held-out trajectories.

        score: batch -> log-probabilities, as `Learner.score` gives them.
        """
        assert self._held_out is not None
        logprobs = np.asarray(score(self._held_out), np.float64)  # 0 where the token is not the policy's
        return -float(logprobs.sum()) / int(self._held_out.mask.sum())

    def close(self) -> None:
        """Waits for the last checkpoint."""
        self._progress.close()
        self._writer.close()

    def _update(self) -> None:
        start, w, trained = time.perf_counter(), self._c.warm_start, self._trained
        rng = rng_for(self._c.seed, "warm start", self.step)
        batch = [trained[i] for i in rng.choice(len(trained), min(w.batch, len(trained)), replace=False)]
        samples = [TrainingSample(t, None, np.ones(len(t.ids), np.float32)) for t in batch]
        rate = learning_rate(self._c.learner, self._c.learner.learning_rate)
        row = {"learning_rate": np.asarray(rate(self.step) if callable(rate) else rate).item()}
        try:
            self._state, learned = learn(self._c, self._learner, self._state, samples)
        except FloatingPointError:
            own = " and config.checkpoint.folder" if self._c.checkpoint.folder else ""
            raise FloatingPointError(
                f"Update {self.step + 1} of the warm start is not finite: lower "
                f"config.warm_start.learning_rate ({w.learning_rate}) and start again in a new workdir{own}."
            ) from None
        self.step += 1
        row |= {"loss": learned["ce"], "grad_norm": learned["grad_norm"]}
        row |= {"tokens": sum(int(t.mask.sum()) for t in batch), "all_tokens": sum(len(t.ids) for t in batch)}
        self.log(self.step, row, start)
        held_out = [f", held out {r['held_out_loss']:.4f}" for r in self.evaluations("held_out_loss")[-1:]]
        self._progress.advance(f"loss {row['loss']:.4f}{''.join(held_out)}")

    def _evaluate_if_due(self) -> None:
        w, step = self._c.warm_start, self.step
        last, is_new = step == w.steps, lambda key: all(r["step"] != step for r in self.evaluations(key))
        if (step % w.eval_every == 0 or last) and self._held_out and is_new("held_out_loss"):
            start, tokens = time.perf_counter(), int(self._held_out.mask.sum())
            loss = self.held_out_loss(partial(self._learner.score, self._state))
            if all(loss < row["held_out_loss"] for row in self.evaluations("held_out_loss")):
                self._best = _on_host(self._state.params)
            self.log(step, {"held_out_loss": loss, "tokens": tokens}, start)
        due = step == 0 or (w.success_every and step % w.success_every == 0)
        if self._success and due and is_new("success"):
            start = time.perf_counter()
            self.log(step, self._success(self._state, step), start)

    @property
    def _since_best(self) -> int:
        """Measurements of the held-out loss since the best one."""
        losses = [row["held_out_loss"] for row in self.evaluations("held_out_loss")]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def _best_state(self) -> tuple[TrainState, int]:
        if self._best is None:
            return self._state, self.step
        put = lambda best, now: jax.device_put(best, now.sharding)
        best = min(self.evaluations("held_out_loss"), key=lambda row: row["held_out_loss"])
        return self._state._replace(params=jax.tree.map(put, self._best, self._state.params)), best["step"]

    def _save(self) -> None:
        if self._saved != self.step:
            arrays = {"state": self._state, "best": self._best}
            saved = {"rows": self.rows, "digest": self._digest}
            self._writer.save(self._folder, self.step, arrays, saved, keep=self._c.checkpoint.keep)
            self._saved = self.step


def checkpoints(config: ConfigDict, folder: Path) -> epath.Path:
    """The folder of the checkpoints."""
    own = config.checkpoint.folder
    return epath.Path(own) / WARM_START if own else epath.Path(folder / "checkpoints")


def _digest(config: ConfigDict, folder: Path) -> str:
    """Names what determines a warm start: the config and the tasks."""
    tasks = (folder / "tasks.jsonl").read_bytes()
    return hashlib.sha256(configs.digest(config).encode() + tasks).hexdigest()[:16]


def _packed(config: ConfigDict, trajectories: Sequence[Trajectory]) -> Batch[np.ndarray]:
    """A batch for `Learner.score`, which scores the policy's tokens of samples with advantages."""
    c = config.learner
    return pack(
        [TrainingSample(t, np.zeros(len(t.ids), np.float32)) for t in trajectories],
        pack_length=c.pack_length,
        pack_length_buckets=c.pack_length_buckets,
        rows_per_microbatch=c.rows_per_microbatch,
        max_rows=1,
    )


def _on_host(params: Any) -> Any:
    """Copies parameters to host memory: the update writes over those on the devices."""
    return jax.tree.map(lambda x: np.array(x, copy=True), params)
