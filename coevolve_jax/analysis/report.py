"""Builds report.html from the files of a run, a comparison or a campaign, also while they are written.

python -m coevolve_jax.analysis.report FOLDER          one page, to open from disk
python -m coevolve_jax.analysis.report FOLDER --live   serves it on this machine and keeps it up to date
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys

from coevolve_jax.analysis import live
from coevolve_jax.analysis.campaign_view import campaign_view
from coevolve_jax.analysis.comparison_view import comparison_view
from coevolve_jax.analysis.loading import is_campaign, is_comparison, is_run, load_comparison, load_run
from coevolve_jax.analysis.origins import origins, packed
from coevolve_jax.analysis.page import write_page
from coevolve_jax.analysis.run_view import run_view
from coevolve_jax.harness.campaign import Campaign


def write_report(workdir: str | os.PathLike, live: bool = False) -> pathlib.Path:
    """Writes workdir/report.html and returns its path. Raises what `load_run` raises.

    workdir: a run's, or the folder of a comparison or a campaign. live: the page is served and follows it.
    """
    path = pathlib.Path(workdir) / "report.html"
    if is_campaign(workdir):
        write_page(path, *campaign_view(Campaign(path.parent)), live)
    elif is_comparison(workdir):
        write_page(path, comparison_view(load_comparison(workdir)), [], live)
    else:
        run = load_run(workdir)
        behind = origins(run)
        rows = (row for _, rows in run.trajectories for row in rows)
        write_page(path, run_view(run, behind), itertools.chain(rows, packed(run, behind)), live)
    return path


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m coevolve_jax.analysis.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="workdir of a run, or folder of a comparison or a campaign")
    parser.add_argument("--live", action="store_true", help="serve the page and follow a run under way")
    parser.add_argument("--port", type=int, default=8765, help="for --live (default: %(default)s; 0: any)")
    parser.error = lambda message: sys.exit(f"Error: {message}.")
    given = parser.parse_args(arguments)
    try:
        known = any(holds(given.folder) for holds in (is_campaign, is_comparison, is_run))
        if pathlib.Path(given.folder).is_dir() and not known:
            raise ValueError(
                f"{given.folder} holds neither a run nor a comparison nor a campaign: give the workdir of a "
                "run that has begun."
            )
        path = write_report(given.folder, given.live)
        sys.stdout.write(f"{path}\n")
        if given.live:
            live.serve(pathlib.Path(given.folder), lambda: write_report(given.folder, live=True), given.port)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
