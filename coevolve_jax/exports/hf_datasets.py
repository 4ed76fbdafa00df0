"""The training set of a run as a folder of Hugging Face's package datasets.

datasets.load_from_disk(FOLDER)    a Dataset with the columns of tables.TASKS
"""

from __future__ import annotations

import os

from coevolve_jax.analysis.loading import load_run
from coevolve_jax.exports import tables

try:
    import datasets
except ImportError as error:
    raise ImportError(
        f"A folder of datasets needs the package datasets ({error}): pip install coevolve_jax[datasets]."
    ) from error

KINDS = {"text": "string", "int": "int64", "float": "float64", "bool": "bool"}


def write(workdir: str | os.PathLike, folder: str | os.PathLike) -> int:
    """Writes D_t of a run, which may still be running. Returns the number of tasks.

    Raises FileNotFoundError if workdir is no folder, and ValueError if it holds no training set.
    """
    run = load_run(workdir)
    features = datasets.Features({name: _feature(c.kind) for name, c in tables.TASKS.items()})
    about = datasets.DatasetInfo(
        description=f"The training set of the run {run.name} (CoEvolve, arXiv 2604.15840).\n"
        + "\n".join(f"{name}: {c.about}" for name, c in tables.TASKS.items()),
        features=features,
    )
    made = datasets.Dataset.from_list(list(tables.task_rows(run)), features, about)
    made.save_to_disk(folder)
    return len(made)


def _feature(kind: str) -> datasets.Value | datasets.List:
    value = datasets.Value(KINDS[kind.removesuffix("[]")])
    return datasets.List(value) if kind.endswith("[]") else value
