"""CoEvolve in JAX: a policy and its training set evolve together (arXiv 2604.15840).

These attributes of `coevolve_jax` cover most uses in a notebook:

    config.load_file(path, arg)           the config of a config file
    train.train(config, workdir, until)   starts or resumes a run
    fork(run, step, workdir, overrides)   makes a new run from another run's checkpoint
    evaluate.evaluate(agent, tasks, ...)  success rates; build.agent makes the agent of a config
    load_run(workdir)                     reads the files of a run; write_report, summary_table present them
    hf_io.load, hf_io.save, Decoder       Hugging Face folders as parameters, and the model that applies them
    peft_io.load, peft_io.save            LoRA adapters as folders of the package peft
    tfds_tasks.write, tfds_tasks.read     a run's training set as a TFDS data set (the extra "tfds")
    plan.table(config, ...)               memory per device, before you rent a machine
    Task, Trajectory, TaskPool, ...       the data types that the packages exchange (types.py)

Each is imported on first access: the package alone imports neither jax nor numpy. __init__.pyi declares the
same names for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Module -> the names that it offers here. An empty tuple offers the module itself.
_OFFERED: dict[str, tuple[str, ...]] = {
    "coevolve_jax.build": (),
    "coevolve_jax.records.checkpoint": (),
    "coevolve_jax.config": (),
    "coevolve_jax.loop.evaluate": (),
    "coevolve_jax.models.hf_io": (),
    "coevolve_jax.models.peft_io": (),
    "coevolve_jax.planning.plan": (),
    "coevolve_jax.tfds_tasks": (),
    "coevolve_jax.train": (),
    "coevolve_jax.records.workdir": ("fork",),
    "coevolve_jax.analysis.loading": ("load_run",),
    "coevolve_jax.analysis.report": ("write_report",),
    "coevolve_jax.analysis.summary": ("summary_table",),
    "coevolve_jax.models.decoder": ("Decoder", "ModelConfig"),
    "coevolve_jax.synthesis.task_pool": ("TaskPool",),
    "coevolve_jax.types": (
        *("Call", "Evidence", "Group", "Hint", "Lineage", "Outcome"),
        *("Signal", "Step", "Task", "TrainingSample", "Trajectory", "Turn"),
    ),
}
_HOME = {name: module for module, names in _OFFERED.items() for name in names or (module.rpartition(".")[2],)}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'coevolve_jax' has no attribute {name!r}: it offers {', '.join(__all__)}."
        )
    module = importlib.import_module(_HOME[name])
    return getattr(module, name) if name in _OFFERED[_HOME[name]] else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
