"""CoEvolve in JAX: a policy and its training set evolve together (arXiv 2604.15840).

What a notebook needs, as attributes of `coevolve_jax`, each imported when it is first asked for; importing the package
alone imports neither jax nor numpy:

    config.load(path, arg)                the config of a config file
    train.train(config, workdir)          runs, or goes on with, a run
    evaluate.evaluate(agent, tasks, ...)  success rates under a named protocol
    load_run(workdir)                     the files of a run; write_report, summary_table: what they say
    hf_io.load, hf_io.save, Qwen          Hugging Face folders as parameters, and the model that applies them
    plan.table(config, ...)               bytes per device, before a machine is rented
    Task, Trajectory, TaskPool, ...       the data that the rooms hand each other (types.py)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # "as" tells type checkers that the name is offered
    from coevolve_jax import build as build
    from coevolve_jax import checkpoint as checkpoint
    from coevolve_jax import config as config
    from coevolve_jax import evaluate as evaluate
    from coevolve_jax import plan as plan
    from coevolve_jax import train as train
    from coevolve_jax.analysis.loading import Run as Run
    from coevolve_jax.analysis.loading import load as load_run
    from coevolve_jax.analysis.report import write as write_report
    from coevolve_jax.analysis.summary import summary_table as summary_table
    from coevolve_jax.models import hf_io as hf_io
    from coevolve_jax.models.qwen import Qwen as Qwen
    from coevolve_jax.models.qwen import QwenConfig as QwenConfig
    from coevolve_jax.synthesis.task_pool import TaskPool as TaskPool
    from coevolve_jax.types import Call as Call
    from coevolve_jax.types import Evidence as Evidence
    from coevolve_jax.types import Group as Group
    from coevolve_jax.types import Hint as Hint
    from coevolve_jax.types import Lineage as Lineage
    from coevolve_jax.types import Outcome as Outcome
    from coevolve_jax.types import Sample as Sample
    from coevolve_jax.types import Signal as Signal
    from coevolve_jax.types import Step as Step
    from coevolve_jax.types import Task as Task
    from coevolve_jax.types import Trajectory as Trajectory
    from coevolve_jax.types import Turn as Turn

# Where each name is: a module, or a module and the name that it has there.
_MODULES = {
    name: f"coevolve_jax.{name}" for name in ("build", "checkpoint", "config", "evaluate", "plan", "train")
}
_MODULES["hf_io"] = "coevolve_jax.models.hf_io"
_NAMES = {
    "Run": ("coevolve_jax.analysis.loading", "Run"),
    "load_run": ("coevolve_jax.analysis.loading", "load"),
    "write_report": ("coevolve_jax.analysis.report", "write"),
    "summary_table": ("coevolve_jax.analysis.summary", "summary_table"),
    "Qwen": ("coevolve_jax.models.qwen", "Qwen"),
    "QwenConfig": ("coevolve_jax.models.qwen", "QwenConfig"),
    "TaskPool": ("coevolve_jax.synthesis.task_pool", "TaskPool"),
    "Call": ("coevolve_jax.types", "Call"),
    "Evidence": ("coevolve_jax.types", "Evidence"),
    "Group": ("coevolve_jax.types", "Group"),
    "Hint": ("coevolve_jax.types", "Hint"),
    "Lineage": ("coevolve_jax.types", "Lineage"),
    "Outcome": ("coevolve_jax.types", "Outcome"),
    "Sample": ("coevolve_jax.types", "Sample"),
    "Signal": ("coevolve_jax.types", "Signal"),
    "Step": ("coevolve_jax.types", "Step"),
    "Task": ("coevolve_jax.types", "Task"),
    "Trajectory": ("coevolve_jax.types", "Trajectory"),
    "Turn": ("coevolve_jax.types", "Turn"),
}
__all__ = ["__version__", *_MODULES, *_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        module, there = _NAMES[name]
        return getattr(importlib.import_module(module), there)
    raise AttributeError(f"module 'coevolve_jax' has no attribute {name!r}: it offers {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
