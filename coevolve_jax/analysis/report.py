"""Builds report.html from the files of a run, a comparison or a campaign, also while they are written.

python -m coevolve_jax.analysis.report FOLDER          one page, to open from disk
python -m coevolve_jax.analysis.report FOLDER --live   serves it on this machine and keeps it up to date
python -m coevolve_jax.analysis.report FOLDER --out=PAGE.html   writes it elsewhere, for a folder of others
"""

from __future__ import annotations

import argparse
import errno
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


def write_report(
    workdir: str | os.PathLike, live: bool = False, out: str | os.PathLike | None = None
) -> pathlib.Path:
    """Writes the page and returns its path. Raises what `load_run` raises, and ValueError for a warm start.

    workdir: a run's, or the folder of a comparison or a campaign. live: the page is served and follows it.
    out: the page, whose folder must exist; None: workdir/report.html.
    """
    path = pathlib.Path(workdir) / "report.html" if out is None else pathlib.Path(out)
    if (pathlib.Path(workdir) / "sft.jsonl").is_file():
        raise ValueError(
            f"{workdir} holds a warm start, which has no report: read its sft.jsonl and summary.json, or "
            f"begin a run with --config.model={pathlib.Path(workdir) / 'policy'}."
        )
    if is_campaign(workdir):
        write_page(path, *campaign_view(Campaign(pathlib.Path(workdir))), live)
    elif is_comparison(workdir):
        way = os.path.relpath(os.path.realpath(workdir), os.path.realpath(path.parent))
        folder = [] if way == os.curdir else list(pathlib.Path(way).parts)
        write_page(path, {**comparison_view(load_comparison(workdir)), "folder": folder}, [], live)
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
    parser.add_argument("--out", help="the page (default: report.html in the folder)")
    parser.error = lambda message: sys.exit(f"Error: {message}.")
    given = parser.parse_args(arguments)
    try:
        known = any(holds(given.folder) for holds in (is_campaign, is_comparison, is_run))
        if pathlib.Path(given.folder).is_dir() and not known:
            raise ValueError(
                f"{given.folder} holds neither a run nor a comparison nor a campaign: give the workdir of a "
                "run that has begun."
            )
        if given.live and given.out:
            raise ValueError(f"--out={given.out} is for a page on disk: leave it or --live out.")
        out = pathlib.Path(given.out or pathlib.Path(given.folder) / "report.html")
        if given.out:
            out.parent.mkdir(parents=True, exist_ok=True)
        if out.parent.is_dir() and not os.access(out.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{out}")
        path = write_report(given.folder, given.live, out)
        sys.stdout.write(f"{path}\n")
        if given.live:
            live.serve(pathlib.Path(given.folder), lambda: write_report(given.folder, live=True), given.port)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename} cannot be used ({error.strerror}): --out=FILE writes the page elsewhere.")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
