"""Downloads the benchmark's data where it is missing.

`make appworld` runs `python -m coevolve_jax.envs.appworld.fetch` under AppWorld's interpreter. AppWorld's own
command deletes existing data before it knows that it can download.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from coevolve_jax.envs.appworld import data


def fetch() -> str:
    """Downloads the data where it is missing. Returns one sentence on what there is now."""
    folder = data.root("train")
    if (folder / "data").exists():
        return f"AppWorld's data is in {folder / 'data'} already: it was left as it is."
    from appworld.common.path_store import path_store
    from appworld.download import download_data

    with tempfile.TemporaryDirectory(dir=folder) as made:
        path_store.update_root(made)
        try:
            download_data()
        except OSError as error:  # the base class of requests' exceptions
            why = type(error).__name__
        else:
            why = "the server did not give it"
        if not (Path(made) / "data" / "datasets" / "train.txt").exists():
            return (
                f"AppWorld's data could not be downloaded ({why}), so the splits train, dev, test_normal and "
                "test_challenge are missing: run this again where there is internet, or put data/ into "
                f"{folder}. The tasks of our own (own_train, own_development) need nothing."
            )
        os.rename(Path(made) / "data", folder / "data")
    return f"AppWorld's data is in {folder / 'data'} now."


if __name__ == "__main__":
    print(fetch())
