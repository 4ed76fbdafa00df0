"""A run as a folder of Parquet files, with a card that documents their columns.

    tasks.parquet           D_t
    trajectories.parquet    the rollouts of trajectories/
    rollouts.parquet        all rollouts of the steps in rollouts/, token by token, if the run kept them
    README.md               the columns

pandas.read_parquet reads a file; datasets.load_dataset(FOLDER, "tasks") reads a table by its name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from coevolve_jax.analysis.loading import load_run
from coevolve_jax.exports import tables
from coevolve_jax.exports.tables import Column, Row
from coevolve_jax.records import rollouts
from coevolve_jax.records.files import write_text

try:
    import pyarrow as pa
    from pyarrow import parquet
except ImportError as error:
    raise ImportError(f"Parquet needs pyarrow ({error}): pip install coevolve_jax[parquet].") from error

KINDS = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
NAMES = ("tasks", "trajectories", "rollouts")
ROWS = 1000  # in memory at once
WRITTEN = "Written by coevolve_jax (CoEvolve, arXiv 2604.15840)."  # a card with this line is ours


def write(workdir: str | os.PathLike, folder: str | os.PathLike) -> dict[str, int]:
    """Writes the tables of a run, which may still be running. Returns table -> rows.

    Files of these names are replaced once all are written, and removed where the run has no such rows. Raises
    FileNotFoundError if workdir is no folder, and ValueError if it holds no training set or the folder holds
    another README.md.
    """
    run, folder = load_run(workdir), Path(folder)
    made: dict[str, tuple[Mapping[str, Column], Iterable[Row]]] = {
        "tasks": (tables.TASKS, tables.task_rows(run)),
        "trajectories": (tables.TRAJECTORIES, tables.trajectory_rows(run)),
    }
    if steps := rollouts.steps(os.fspath(workdir), rollouts.ROLLOUTS):
        each = (tables.rollout_rows(os.fspath(workdir), step) for step in steps)
        made["rollouts"] = tables.ROLLOUTS, itertools.chain.from_iterable(each)
    folder.mkdir(parents=True, exist_ok=True)
    card = folder / "README.md"
    if card.exists() and WRITTEN not in card.read_text(errors="replace").splitlines():
        raise ValueError(f"{card} is not of such an export, which would replace it: name another folder.")
    files = {name: folder / f"{name}.parquet" for name in NAMES}
    halves = {name: folder / f"{name}.parquet.tmp" for name in made}
    try:
        counts = {name: _write(halves[name], *table) for name, table in made.items()}
        for name, file in files.items():
            if name in made:
                os.replace(halves[name], file)
            else:  # of another run
                file.unlink(missing_ok=True)
    finally:
        for half in halves.values():
            half.unlink(missing_ok=True)
    write_text(card, _card(run.name, {name: made[name][0] for name in counts}))
    return counts


def _write(path: Path, columns: Mapping[str, Column], rows: Iterable[Row]) -> int:
    schema = pa.schema(
        [pa.field(name, _type(c.kind), metadata={"about": c.about}) for name, c in columns.items()]
    )
    count, rows = 0, iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while block := list(itertools.islice(rows, ROWS)):
            writer.write_table(pa.Table.from_pylist(block, schema))
            count += len(block)
    return count


def _type(kind: str) -> pa.DataType:
    return pa.list_(KINDS[kind[:-2]]) if kind.endswith("[]") else KINDS[kind]


def _card(name: str, columns: Mapping[str, Mapping[str, Column]]) -> str:
    """The folder's README.md: where the Hub's viewer and `datasets` find the tables, and their columns."""
    configs = [f"- config_name: {table}\n  data_files: {table}.parquet\n" for table in columns]
    parts = [f"---\nconfigs:\n{''.join(configs)}---\n\n# Tasks and rollouts of the run {name}\n\n{WRITTEN}"]
    for table, own in columns.items():
        rows = [f"| `{column}` | {c.kind} | {c.about} |" for column, c in own.items()]
        parts.append(
            "\n".join([f"## {table}.parquet\n", "| column | type | what it holds |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"
