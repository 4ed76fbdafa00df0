"""What a run is on disk: the claim on a workdir, logs, checkpoints and resume, the summary, and forks.

config.json     held_out.jsonl   tasks.jsonl     D_t with the lineage of every task
explorer.json                                    where the explorer is a model: which server and which model answer
lock                                             held by the process that writes here (flock)
evaluations.jsonl                                success on the held-out sets, before, during and after
metrics.jsonl   signals.jsonl    trajectories/   some rollouts of some steps, to read
explorations.jsonl                               reflections, the steps explored under them, verdicts on what came of it
dialogues.jsonl  costs.jsonl                     where the explorer is a model: what it was asked and answered (dialogues.py), and what
                                                 it has cost, by evolution
checkpoints/    policy/          a Hugging Face folder, at the end
tensorboard/    wandb/           what trackers keep here, where config.logging.trackers names them
summary.json    ledger.json      report.html     with report_data/ beside it where the run is long
failure.json                                     where the run has diverged: the step and why
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from coevolve_jax import checkpoint, config_idle, health
from coevolve_jax import config as configs
from coevolve_jax.analysis import report
from coevolve_jax.analysis.summary import Progress, summary_table
from coevolve_jax.collect import Collected, describe
from coevolve_jax.dialogues import Packer
from coevolve_jax.explorers.base import Dialogue
from coevolve_jax.lab import explorer_costs
from coevolve_jax.logs import COSTS, DIALOGUES, EXPLORATIONS, SIGNALS, MetricsWriter, encode
from coevolve_jax.preemption import interruptible
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.strategies.base import Findings
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.timing import serving, slow_note, throughput, timed
from coevolve_jax.trackers.base import Tracker
from coevolve_jax.transcripts import readable
from coevolve_jax.types import Sample, Task

SERVING = "serving/"  # before the names of the engine's counts in the ledger
LOCK = "lock"
ANSWERING = {
    f"explorer.{key}" for key in ("name", "model", "base_url")
}  # a fork that has others may ask another model
MODEL = "explorer.json"
FAILURE = "failure.json"
STARTED = ("config.json", MODEL, "tensorboard", "weights", "sglang_*.log")  # what may be there before D_0 is


@dataclasses.dataclass
class RunState:
    """What goes into every checkpoint besides the learner's arrays and the strategy's own state.

    step: GRPO steps done. tasks: D_t. held_out: the evaluation tasks. evaluations: the rows of evaluations.jsonl, the
    first of each set by the policy before RL. initial: how D_0 was made; synthesis: what evolution made since. signals: counts by kind. ledger:
    what was asked for, by whom (lab.py, collect.py). seconds: by phase. pending: what `Run.note` has of a step whose
    evolution is not done; the learner's arrays are those after that step.
    """

    step: int
    tasks: TaskPool
    held_out: list[Task]
    evaluations: list[dict]
    initial: SynthesisStats
    synthesis: SynthesisStats = dataclasses.field(default_factory=SynthesisStats)
    signals: dict[str, int] = dataclasses.field(default_factory=dict)
    ledger: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    pending: dict[str, Any] | None = None

    @property
    def learned(self) -> int:
        """GRPO updates done."""
        return self.step + (self.pending is not None)

    def to_json(self) -> dict:
        pending = {"pending": json.loads(encode(self.pending))} if self.pending else {}
        return {
            "step": self.step,
            "tasks": self.tasks.to_json(),
            "held_out": [t.to_json() for t in self.held_out],
            "evaluations": self.evaluations,
            "initial": self.initial.to_json(),
            "synthesis": self.synthesis.to_json(),
            "signals": self.signals,
            "ledger": dict(sorted(self.ledger.items())),
            "seconds": self.seconds,
            **pending,
        }

    @classmethod
    def from_json(cls, data: Mapping, max_tasks: int | None, key: Callable[[Task], str]) -> RunState:
        """max_tasks, key: of the task pool."""
        return cls(
            step=data["step"],
            tasks=TaskPool.from_json(data["tasks"], max_tasks, key),
            held_out=[Task.from_json(t) for t in data["held_out"]],
            evaluations=list(data["evaluations"]),
            initial=SynthesisStats.from_json(data["initial"]),
            synthesis=SynthesisStats.from_json(data["synthesis"]),
            signals=dict(data["signals"]),
            ledger=Counter(data["ledger"]),
            seconds=dict(data["seconds"]),
            pending=data.get("pending"),
        )


class Run:
    """A workdir that is being written to. saved: the JSON of the checkpoint that it goes on from, if any. trackers: of the
    numbers of each step; it closes them."""

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
        self._packer = Packer(
            read_lines(workdir / DIALOGUES) if saved and DIALOGUES in saved["sizes"] else ()
        )
        self._saved = None if saved is None else state.learned
        self._paid = Counter() if saved is None else explorer_costs(state.ledger)
        self._progress = Progress(config.steps, state.step)
        self._watch = health.Watch(config.health)
        self._slow = False  # whether it was said that messages are too slow
        path = workdir / FAILURE
        self._failed = json.loads(path.read_text())["step"] if path.exists() else None
        write_lines(workdir / "held_out.jsonl", [t.to_json() for t in state.held_out])
        write_lines(workdir / "evaluations.jsonl", state.evaluations)
        self._logs.append("explorations.jsonl", state.initial.explored)  # none where the run goes on
        state.initial.explored.clear()
        state.tasks.write(workdir / "tasks.jsonl")
        self._log_costs(None)  # of the tasks that the run begins with

    def record(self, dialogues: Sequence[Dialogue]) -> None:
        """Notes what was asked of a model."""
        self._logs.append(DIALOGUES, self._packer.pack(dialogues))

    def _log_costs(self, step: int | None) -> None:
        """A row of what the explorer has spent since the last one, if anything."""
        paid = explorer_costs(self.state.ledger)
        if spent := paid - self._paid:
            self._logs.append(COSTS, [{"step": step, "costs": dict(sorted(spent.items()))}])
        self._paid = paid

    def save(self, learner: Any, arrays: Any, strategy: Mapping) -> None:
        """Begins a checkpoint of the last update, unless there is one. learner: grpo's, or the leader's (hosts.py).
        strategy: as Evolver.to_json has it."""
        c, state = self.config, self.state
        state.tasks.write(self.workdir / "tasks.jsonl")  # their records
        if self._saved == state.learned:
            return
        with timed(state.seconds, "checkpoint"):
            saved = {**state.to_json(), "strategy": strategy, "sizes": self._logs.sizes()}
            learner.save(checkpoints(c, self.workdir), state.learned, arrays, saved, keep=c.checkpoint.keep)
        self._saved = state.learned

    def note(
        self,
        collected: Collected,
        samples: Sequence[Sample],
        learned: Mapping[str, Any],
        found: Findings,
        seconds: Mapping[str, float],
        chat: Chat,
    ) -> None:
        """Notes one step up to its evolution, in the state: `log` writes it."""
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
            "throughput": throughput(c, collected, samples, learned["operations"], seconds),
            "groups": {
                "rolled_out": len(groups),
                "learned_from": len(health.taught(samples)),
            },
            "signals": found.counts,
            "evolution": None,
            "health": values,
            "alerts": health.alerts(values, c.health),
            "seconds": dict(seconds),
        }
        due = step % c.logging.trajectories_every == 0 or step + 1 == c.steps
        shown = list(readable(chat, groups, samples, step, c.logging.trajectories)) if due else None
        state.pending = {"row": row, "signals": list(found.rows), "shown": shown}

    def seconds_so_far(self) -> dict[str, float]:
        """Of the step that begins now, or goes on with its evolution."""
        spent = dict(self.state.pending["row"]["seconds"]) if self.state.pending else {}
        return {**spent, "step": sum(spent.values())} if spent else {}

    def log(self, grown: SynthesisStats | None, seconds: Mapping[str, float]) -> None:
        """Writes the step that `note` has, with its evolution, after which it is whole."""
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
        """Notes the rows of `evaluate(step=...)`, by the policy as it is now."""
        with timed(self.state.seconds, "evaluation"):
            self.state.evaluations += evaluate(step=self.state.step)
        write_lines(self.workdir / "evaluations.jsonl", self.state.evaluations)

    def evaluate_if_due(self, evaluate: Callable[..., list[dict]]) -> None:
        """`evaluated` where config.evaluation.every asks for it at this step and it was not done yet.

        Raises Preempted where the run is asked to end.
        """
        every, step = self.config.evaluation.every, self.state.step
        due = every and step % every == 0 and 0 < step < self.config.steps
        if due and all(row["step"] != step for row in self.state.evaluations):
            self.evaluated(interruptible()(evaluate))

    @contextmanager
    def noting_divergence(self) -> Iterator[None]:
        """Writes FAILURE where the block raises FloatingPointError: {"step": the one under way, "why"}."""
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
        """Writes summary.json, ledger.json and report.html; returns the summary. versions: of what a score depends on."""
        c, state = self.config, self.state
        sets = {row["set"]: row for row in state.evaluations}  # the last row of each
        first = {row["set"]: row for row in reversed(state.evaluations)}
        before, after = first["iid"], sets["iid"]
        made, total = state.synthesis, sum(state.seconds.values())
        summary = {
            "held_out_success_before": before["success"],
            "held_out_success_after": after["success"],
            "held_out_tasks": len(before["by_task"]),
            "held_out": {"before": before, "after": after},
            "held_out_split": c.environment.eval_split,
            "balanced": {"before": first["balanced"], "after": sets["balanced"]}
            if "balanced" in sets
            else None,
            "signals": state.signals,
            "tasks": {
                "initial": state.initial.added,
                "final": len(state.tasks),
                "never_trained": sum(r.trained == 0 for r in state.tasks.records.values()),
                "proposed": made.proposed,
                "accepted": made.accepted,
                "retained": made.retained,
                "refused": dict(sorted(made.refused.items())),
            },
            "seconds": dict(sorted(state.seconds.items())),
            "evolution_share": state.seconds.get("evolution", 0.0) / total,
            "steps": state.step,
            "seed": c.seed,
            "strategy": c.strategy.name,
            "config_digest": configs.digest(c),
            "versions": versions,
            "notes": config_idle.notes(c, fresh=not state.tasks.rows["evolved"].any()),
        }
        if served := recorded_model(self.workdir):
            summary["explorer_model"] = served["model"]
        counts = {n.removeprefix(SERVING): v for n, v in state.ledger.items() if n.startswith(SERVING)}
        if counts:
            summary["serving"] = serving(counts)
        if costs := explorer_costs(state.ledger):
            summary["explorer"] = dict(sorted(costs.items()))
        ledger = {
            "initial": state.initial.to_json(),
            "evolution": made.to_json(),
            "llm_tokens": state.ledger["explorer/llm_tokens"],
            "money": state.ledger["explorer/money"],
            "seconds": state.seconds.get("evolution", 0.0),
            "costs": dict(sorted(state.ledger.items())),
        }
        self._forget_failure()
        # The summary comes last: where it is, the run is finished.
        for name, content in (("ledger.json", ledger), ("summary.json", summary)):
            write_text(self.workdir / name, json.dumps(content, indent=1))
        report.write_report(self.workdir)
        print(summary_table(summary, self.workdir))
        return summary


def checkpoints(config: ConfigDict, workdir: Path) -> epath.Path:
    """Where a run's checkpoints lie."""
    return epath.Path(config.checkpoint.get("folder") or workdir / "checkpoints")


def claim(workdir: Path, config: ConfigDict) -> None:
    """Makes the workdir, or recognises it as this config's. Raises what `claimed` raises."""
    with claimed(workdir, config):
        pass


@contextmanager
def claimed(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """`claim`; within it no other process goes on with this run. A process that ends lets go.

    A start that failed before it made anything, as by a mistyped value, leaves the workdir to the next one.
    Raises ValueError where the workdir is another run's, another process goes on with it, or it or config.checkpoint.folder
    cannot be made.
    """
    try:
        _begun(workdir, config)  # before anything is made
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / LOCK, "a")
    except OSError as error:
        raise ValueError(
            f"{workdir} cannot be a workdir ({error.strerror}: {error.filename}): choose another --workdir."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process goes on with the run in {workdir}: wait for its end, or choose another --workdir."
            ) from None
        except OSError as error:
            print(
                f"{workdir} lies on a file system without locks ({error.strerror}): start no second process that writes there.",
                file=sys.stderr,
            )
        if not _begun(workdir, config):
            (workdir / MODEL).unlink(missing_ok=True)  # of a start that failed
            write_text(workdir / "config.json", configs.to_json(config))
        if (folder := config.checkpoint.get("folder")) and "://" not in folder:  # before hours are spent
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"config.checkpoint.folder is {folder!r}, which cannot be made ({error.strerror}): choose another."
                ) from None
        yield


def recorded_model(workdir: Path) -> dict | None:
    """Who answers the run's explorer (Roles.served), as it is recorded; None where it is not yet, or nobody is asked."""
    path = workdir / MODEL
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it, or choose another --workdir."
        ) from None


def record_model(workdir: Path, served: Mapping | None) -> None:
    """served: Roles.served of the explorer; None where nobody is asked."""
    if served is not None:
        write_text(workdir / MODEL, json.dumps(served, indent=1))


def _begun(workdir: Path, config: ConfigDict) -> bool:
    """Whether the workdir is this config's already. Raises ValueError where it is neither that nor free."""
    there = [path for path in workdir.iterdir() if path.name != LOCK] if workdir.exists() else []
    if not (workdir / "config.json").exists():
        if there:
            raise ValueError(
                f"{workdir} is not empty and holds no run of ours (no config.json): choose another --workdir."
            )
        return False
    theirs = configs.numbers(configs.read(workdir))
    ours = configs.numbers(json.loads(configs.to_json(config)))
    if theirs == ours:
        return True
    if {"environment", "rollout", "learner"} <= theirs.keys() and all(
        any(map(p.match, STARTED)) for p in there
    ):
        return False
    raise ValueError(
        f"{workdir} holds a run of another config ({configs.difference(theirs, ours)}): "
        "choose another --workdir, or delete this one to start again."
    )


def fork(
    run: str | os.PathLike, step: int, workdir: str | os.PathLike, overrides: Mapping[str, Any] | None = None
) -> ConfigDict:
    """A new run that goes on from another one's checkpoint; `train(fork(...), workdir)` runs it.

    Args:
      run: workdir of the other run, which is only read.
      step: of the checkpoint, in GRPO steps done.
      workdir: of the new run; it must be empty or not exist.
      overrides: config values that differ, by dotted key, e.g. {"strategy.name": "random"}. Another strategy
        starts with an empty state of its own; D_t, policy and optimiser are those of the checkpoint.

    Returns the new run's config. Raises ValueError for a run, step or key that is not there.
    """
    run, workdir = Path(run), Path(workdir).absolute()
    if workdir.exists() and any(workdir.iterdir()):
        raise ValueError(
            f"{workdir} is not empty: name a folder for the fork that is, or that does not exist."
        )
    if not (run / "config.json").is_file():
        raise ValueError(f"{run} holds no run (no config.json): name the workdir of a run.")
    config = theirs = configs.of_run(run)
    folder = checkpoints(theirs, run)
    if step not in (there := checkpoint.steps(folder)):
        steps = ", ".join(map(str, there)) or "none"
        raise ValueError(
            f"{run} has no checkpoint of step {step} (it has {steps}): name one of these, or keep more with "
            "config.checkpoint.keep."
        )
    config = configs.override(config, {"checkpoint.folder": "", **(overrides or {})})
    configs.check(config)
    # What the run has grown by is the fork's, if it goes on with the same strategy.
    configs.check_evolution(config, 0 if config.strategy.name == theirs.strategy.name else step)
    # Made beside it and renamed: a fork that is there is whole, and none would begin again at step 0.
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{workdir.name}-", dir=workdir.parent) as beside:
        half = Path(beside) / workdir.name
        claim(half, config)
        checkpoint.copy(folder, step, checkpoints(config, half))
        for path in run.glob("*.jsonl"):
            shutil.copyfile(path, half / path.name)
        if (served := recorded_model(run)) and not ANSWERING & set(overrides or {}):
            record_model(half, served)
        if (run / "trajectories").is_dir():
            shutil.copytree(run / "trajectories", half / "trajectories")
        os.replace(half, workdir)
    return config


def read_lines(path: Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def write_lines(path: Path, rows: Sequence[dict]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a reader or a kill sees the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
