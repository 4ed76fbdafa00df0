"""Writes a run's workdir: logs, checkpoints, the summary. records/workdir.py claims and forks the folder.

    config.json          the run's config
    lock                 held by the process that writes here (flock)
    forked.json          of a fork: the run and step that it goes on from
    held_out.jsonl       the held-out tasks
    tasks.jsonl          D_t with the lineage of every task
    evaluations.jsonl    success on the held-out sets, before, during and after training
    metrics.jsonl        numbers of each step
    signals.jsonl        the strategy's findings in each step
    explorations.jsonl   reflections, the steps explored under them, the verdicts on the proposals
    trajectories/        some rollouts of some steps, to read
    rollouts/            with config.logging.rollouts_every: all rollouts (records/rollouts.py)
    evaluations/         with config.logging.evaluations: the held-out rollouts, without tokens
    checkpoints/         see records/checkpoint.py
    tensorboard/         files of a tracker that config.logging.trackers names; also wandb/ and trackio/
    weights/             with config.engine.url: weights for the servers there (rollout/sglang/push.py)
    failure.json         if the run has diverged: the step and why
    warm_start/          with config.warm_start: the policy before RL (loop/warm_start.py)
    beginning/           of a comparison's start: the run whose first tasks it has (initial.begun_elsewhere)

With a model as explorer:

    explorer.json        the server and the model that answer
    llm_calls.jsonl      its prompts and answers (records/llm_calls.py)
    costs.jsonl          its costs, by evolution

At the end:

    policy/              the policy as a Hugging Face folder
    summary.json, ledger.json, report.html (a long run has report_data/ beside it)
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis import report
from coevolve_jax.analysis.summary import Progress, summary_table
from coevolve_jax.exports import model_card
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.loop.collect import Collected, describe
from coevolve_jax.loop.state import RunState
from coevolve_jax.loop.summary import ledger, summary
from coevolve_jax.loop.timing import throughput, timed
from coevolve_jax.loop.transcripts import readable
from coevolve_jax.preemption import interruptible
from coevolve_jax.records import checkpoint, health
from coevolve_jax.records.checkpoint import DIGEST
from coevolve_jax.records.costs import EXPLORER, SERVING, under
from coevolve_jax.records.files import read_lines, write_lines, write_text
from coevolve_jax.records.llm_calls import Packer
from coevolve_jax.records.logs import COSTS, EXPLORATIONS, LLM_CALLS, METRICS, SIGNALS, MetricsWriter
from coevolve_jax.records.rollouts import write_rollouts
from coevolve_jax.records.trackers.base import Tracker
from coevolve_jax.records.workdir import WARM_START, checkpoints, claimed, recorded_model
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.utilization import serving, slow_note
from coevolve_jax.strategies.base import StepReport
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import TrainingSample

FAILURE = "failure.json"


def restore(config: ConfigDict, learner: Any, workdir: Path) -> tuple[int, Any, dict] | None:
    """Restores the run's newest checkpoint as (step, the learner's TrainState, JSON); None: the run begins.

    learner: from `leader.lead`.

    Raises ValueError for a checkpoint of another config, and where a run that has gone on has none: without
    its checkpoints it would begin again and overwrite its logs.
    """
    folder = checkpoints(config, workdir)
    found = learner.restore(folder)
    if found and found[2].get(DIGEST, configs.digest(config)) != configs.digest(config):
        raise ValueError(
            f"config.checkpoint.folder is {str(folder)!r} and holds a checkpoint of a run of another config: "
            "name another folder."
        )
    path = workdir / METRICS
    done = path.read_bytes().count(b"\n") if path.exists() else 0
    # The folder of the first checkpoint is made before the step after it is logged. If the process ended
    # while that was being written, nothing was ever saved.
    lost = done > config.checkpoint.every and not checkpoint.begun(folder)
    if not found and (lost or (workdir / "summary.json").exists()):
        raise ValueError(
            f"config.checkpoint.folder is {str(folder)!r} and holds no checkpoint of this run, which has "
            f"done {done} steps: name the folder it had, or choose another --workdir to begin again."
        )
    return found


def finished(config: ConfigDict, workdir: Path) -> dict | None:
    """Reads the summary of a run that needs nothing more, writes its report and prints its table.

    None if the run has not ended, or if its checkpoint, its policy or a result of its end is not there.

    Raises ValueError as `claimed` does, for a run that has a summary.
    """
    if not (workdir / "summary.json").exists():
        return None
    with claimed(workdir, config):
        try:
            told = json.loads((workdir / "summary.json").read_text())
            evaluated = told["held_out"]["after"] in read_lines(workdir / "evaluations.jsonl")
            ours = told["config_digest"] == configs.digest(config)
            saved = checkpoint.steps(checkpoints(config, workdir))[-1:] == [told["steps"]]
            table = summary_table(told, workdir)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # of a kill or another version: the end is done again
        if not (evaluated and ours and saved and (workdir / "policy" / "config.json").exists()):
            return None
        report.write_report(workdir)
    print(table)
    return told


class Run:
    """A workdir that is being written to.

    Args:
      saved: JSON of the checkpoint to resume from, or None.
      trackers: receive the numbers of each step; `close` closes them.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        state: RunState,
        saved: Mapping | None,
        trackers: Sequence[Tracker],
    ):
        self.config, self.workdir, self.state = config, workdir, state
        self._logs = MetricsWriter(workdir, saved and saved["sizes"], trackers)
        asked, before = [], workdir / WARM_START / LLM_CALLS
        if saved and LLM_CALLS in saved["sizes"]:
            asked = read_lines(workdir / LLM_CALLS)
        elif saved is None and before.exists():
            asked = list(read_lines(before))
            self._logs.append(LLM_CALLS, asked)
        self._packer = Packer(asked)
        self._saved = None if saved is None else self._moment  # of the newest checkpoint
        self._paid = Counter() if saved is None else under(state.ledger, EXPLORER)
        self._progress = Progress(config.steps, state.step)
        self._watch = health.Watch(config.health)
        self._slow = False  # whether the user was told that messages are too slow
        path = workdir / FAILURE
        self._failed = json.loads(path.read_text())["step"] if path.exists() else None
        write_lines(workdir / "held_out.jsonl", [t.to_json() for t in state.held_out])
        # The rows of a final evaluation, which no checkpoint has, stay until there are new ones.
        if not (self.ended and (workdir / "summary.json").exists()):
            write_lines(workdir / "evaluations.jsonl", state.evaluations)
        self._logs.append(EXPLORATIONS, state.initial.explored)  # empty after a resume
        state.initial.explored.clear()
        state.tasks.write(workdir / "tasks.jsonl")
        self._log_costs(None)  # the cost of the held-out tasks and D_0

    @property
    def _moment(self) -> tuple[int, bool]:
        """Updates done, and whether the last step's evolution is done too."""
        return self.state.learned, self.state.pending is None

    @property
    def _spent(self) -> bool:
        """Whether the rollouts of config.budget are used up."""
        return 0 < self.config.budget.rollouts <= self.state.rollouts

    @property
    def ended(self) -> bool:
        """Whether training is over: config.steps are done, or the rollouts of config.budget used up.

        A step whose evolution is pending is not over. Only what a checkpoint holds decides, so a resumed run
        ends where it would have ended.
        """
        state = self.state
        return state.step >= self.config.steps or (self._spent and state.pending is None)

    def record(self, llm_calls: Sequence[LLMCall]) -> None:
        """Appends LLM calls to llm_calls.jsonl."""
        self._logs.append(LLM_CALLS, self._packer.pack(llm_calls))

    def _log_costs(self, step: int | None) -> None:
        """Appends a row with the explorer's costs since the last row, if there are any."""
        paid = under(self.state.ledger, EXPLORER)
        if spent := paid - self._paid:
            self._logs.append(COSTS, [{"step": step, "costs": dict(sorted(spent.items()))}])
        self._paid = paid

    def save(self, learner: Any, arrays: Any, strategy: Mapping) -> None:
        """Starts to save a checkpoint of the last update, unless there is one.

        If there is one from before the step's evolution, it gets the state from after it.

        Args:
          learner: from `leader.lead`.
          arrays: the learner's TrainState.
          strategy: from `Evolver.to_json`.
        """
        c, state = self.config, self.state
        state.tasks.write(self.workdir / "tasks.jsonl")  # rewritten for the tasks' records
        if self._saved == self._moment:
            return
        with timed(state.seconds, "checkpoint"):
            saved = {**state.to_json(), "strategy": strategy, "sizes": self._logs.sizes()}
            saved[DIGEST] = configs.digest(c)
            folder, step = checkpoints(c, self.workdir), state.learned
            if self._saved and self._saved[0] == step:
                learner.save_state(folder, step, saved)
            else:
                learner.save(folder, step, arrays, saved, keep=c.checkpoint.keep)
        self._saved = self._moment

    def note(
        self,
        collected: Collected,
        samples: Sequence[TrainingSample],
        learned: Mapping[str, Any],
        found: StepReport,
        seconds: Mapping[str, float],
        chat: Chat,
    ) -> None:
        """Collects a step's records, up to its evolution, in `state.pending`. `log` writes them."""
        c, state, groups, step = self.config, self.state, collected.groups, self.state.step
        state.signals = {
            k: state.signals.get(k, 0) + found.counts.get(k, 0) for k in {**state.signals, **found.counts}
        }
        state.ledger.update(collected.costs)
        state.ledger.update({SERVING + name: n for name, n in collected.usage.counts.items()})
        state.ledger["learned_trajectories"] += len(samples)
        state.ledger["learned_tokens"] += sum(int(s.trajectory.mask.sum()) for s in samples)
        values = health.diagnose(groups, samples)
        row = {
            "step": step,
            **describe(groups, step),
            **learned,
            "tasks": 0,
            "utilization": collected.usage.utilization,
            "serving": serving(collected.usage.counts),
            "throughput": throughput(c, collected, samples, learned["flops"], seconds),
            "groups": {
                "rolled_out": len(groups),
                "learned_from": sum(health.taught(groups, samples)),
            },
            "signals": found.counts,
            "evolution": None,
            "health": values,
            "alerts": health.alerts(values, c.health),
            "seconds": dict(seconds),
        }
        if (every := c.logging.rollouts_every) and step % every == 0:
            write_rollouts(self.workdir, step, groups, samples)
        last = step + 1 == c.steps or self._spent
        due = step % c.logging.trajectories_every == 0 or last
        shown = list(readable(chat, groups, samples, step, c.logging.trajectories)) if due else None
        state.pending = {"row": row, "signals": list(found.rows), "shown": shown}

    def seconds_so_far(self) -> dict[str, float]:
        """Returns the seconds spent so far on the step that starts now, or resumes with its evolution."""
        spent = dict(self.state.pending["row"]["seconds"]) if self.state.pending else {}
        return {**spent, "step": sum(spent.values())} if spent else {}

    def log(self, grown: SynthesisStats | None, seconds: Mapping[str, float]) -> None:
        """Completes the step of `note` with its evolution, and writes it."""
        state = self.state
        assert state.pending is not None
        row, found, shown = (state.pending[name] for name in ("row", "signals", "shown"))
        step, state.step, state.pending = state.step, state.step + 1, None
        if grown is not None:
            state.synthesis.add(dataclasses.replace(grown, explored=[]))
            self._logs.append(EXPLORATIONS, grown.explored)
            state.tasks.write(self.workdir / "tasks.jsonl")
        for phase in ("rollout", "update", "push", "evolution"):
            state.seconds[phase] = state.seconds.get(phase, 0.0) + seconds.get(phase, 0.0)
        row |= {"tasks": len(state.tasks), "evolution": grown and grown.to_json(), "seconds": dict(seconds)}
        self._logs.write_step(row)
        if self._failed is not None and step >= self._failed:
            self._forget_failure()
        self._logs.append(SIGNALS, found)
        self._log_costs(step)
        if shown is not None:
            self._logs.append(f"trajectories/step_{step:05d}.jsonl", shown)
        self._progress.update(row)
        for sentence in self._watch(row["health"], row["alerts"]):
            self._progress.note(sentence)
        if (slow := slow_note(row["serving"])) and not self._slow:
            self._slow = True
            self._progress.note(slow)

    def evaluated(self, evaluate: Callable[..., list[dict]]) -> None:
        """Evaluates the current policy and writes the rows of `evaluate(step=...)`."""
        with timed(self.state.seconds, "evaluation"):
            self.state.evaluations += evaluate(step=self.state.step)
        write_lines(self.workdir / "evaluations.jsonl", self.state.evaluations)

    def evaluate_if_due(self, evaluate: Callable[..., list[dict]]) -> None:
        """Calls `evaluated` if config.evaluation.every asks for it at this step and it was not done yet.

        Raises Preempted if the run is asked to end.
        """
        every, step = self.config.evaluation.every, self.state.step
        due = every and step % every == 0 and step > 0 and not self.ended
        if due and all(row["step"] != step for row in self.state.evaluations):
            self.evaluated(interruptible()(evaluate))

    @contextmanager
    def noting_divergence(self) -> Iterator[None]:
        """Writes FAILURE, {"step": int, "why": the error}, if the block raises FloatingPointError."""
        try:
            yield
        except FloatingPointError as error:
            failure = {"step": self.state.step, "why": str(error)}
            write_text(self.workdir / FAILURE, json.dumps(failure))
            raise

    def _forget_failure(self) -> None:
        (self.workdir / FAILURE).unlink(missing_ok=True)
        self._failed = None

    def close(self) -> None:
        self._progress.close()
        self._logs.close()

    def finish(self, versions: Mapping[str, str]) -> dict:
        """Writes summary.json, ledger.json and report.html; returns the summary.

        versions: of the software that the scores depend on (`inputs.versions`).
        """
        path, served = self.workdir / WARM_START / "summary.json", recorded_model(self.workdir)
        told = summary(
            self.config,
            self.state,
            versions,
            warm_start=json.loads(path.read_text()) if path.exists() else None,
            explorer_model=served["model"] if served else None,
        )
        self._forget_failure()
        model_card.write(self.workdir / "policy", self.config, told)
        # Write the summary last: its presence marks the run as finished.
        for name, content in (("ledger.json", ledger(self.state)), ("summary.json", told)):
            write_text(self.workdir / name, json.dumps(content, indent=1))
        report.write_report(self.workdir)
        print(summary_table(told, self.workdir))
        return told
