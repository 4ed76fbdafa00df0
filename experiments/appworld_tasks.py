"""Makes six tasks of our own in AppWorld's layout, with AppWorld's engine and interpreter.

    .appworld/bin/python -P experiments/appworld_tasks.py     (make setup-appworld runs this)

They form the splits own_train and own_development, for tests and for runs without the benchmark's data. A
score on them is no AppWorld score. If they exist already, the script does nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

NOW = datetime.datetime(2023, 5, 18, 12)
PEOPLE = (("Ada", "Moore", "5550101"), ("Ben", "Reed", "5550102"))
ACCOUNTS = {
    "simple_note": "email",
    "spotify": "email",
    "phone": "phone_number",
}  # app -> the name that a user logs in with
SONGS = ("Quiet Harbor", "Paper Lanterns", "Seven Bridges", "Copper Sky")
NOTES = ("Groceries", "Gift ideas", "Reading list", "Trip to the coast", "Recipes")
ALARMS = (("06:45", "Run"), ("07:30", "Work"), ("21:00", "Call home"))


class Own(NamedTuple):
    """A task.

    evaluation: requirement -> the line of AppWorld's `evaluate` that tests it. solution: code that passes the
    tests.
    """

    split: str
    instruction: str
    answer: Any
    evaluation: dict[str, str]
    solution: str


def tasks(person: int) -> dict[str, Own]:
    """A person's tasks, by scenario."""
    songs, note, (time, label) = SONGS[: 2 + person], NOTES[person], ALARMS[person]
    untouched = {
        "assert no database changed.": 'test.case(models.changed_model_names(), "==", set())',
        "assert the answer is right.": "test.answer(json.loads(models.end.supervisor.Task.first().answer), "
        "ground_truth_answer)",
    }
    return {
        "own1": Own(
            "own_train",
            "How many songs are in my Spotify song library?",
            len(songs),
            untouched,
            _login("spotify") + "songs = apis.spotify.show_song_library(access_token=token)\n"
            "apis.supervisor.complete_task(answer=len(songs))",
        ),
        "own2": Own(
            "own_train",
            f"Delete the note titled {note!r} from my Simple Note.",
            None,
            {
                "assert only notes changed.": "test.case(models.changed_model_names(), "
                '"==", {"simple_note.Note"})',
                "assert the note is gone.": "test.case([n.title for n in models.end.simple_note.Note.all() "
                f'if n.title == {note!r}], "==", [])',
            },
            _login("simple_note") + "(note,) = [n for n in apis.simple_note.search_notes(access_token=token) "
            f"if n['title'] == {note!r}]\n"
            + "apis.simple_note.delete_note(access_token=token, note_id=note['note_id'])\n"
            "apis.supervisor.complete_task()",
        ),
        "own3": Own(
            "own_development",
            f"What is the label of my phone's alarm at {time}?",
            label,
            untouched,
            _login("phone")
            + "alarms = apis.phone.show_alarms(access_token=token)\n"
            + "apis.supervisor.complete_task("
            f"answer=[a['label'] for a in alarms if a['time'] == {time!r}][0])",
        ),
    }


def _login(app: str) -> str:
    """Code that logs in to the app and leaves the access token in `token`."""
    return (
        "profile = apis.supervisor.show_profile()\n"
        "words = {a['account_name']: a['password'] for a in apis.supervisor.show_account_passwords()}\n"
        f"token = apis.{app}.login(username=profile[{ACCOUNTS[app]!r}], "
        f"password=words[{app!r}])['access_token']\n"
    )


def solution(task_id: str) -> str:
    """Code that solves one of these tasks."""
    scenario, _, number = task_id.partition("_")
    return tasks(int(number) - 1)[scenario].solution


def make_missing(folder: Path) -> None:
    """Makes data/ in a folder, atomically, if it does not exist. Takes 5 s."""
    if not (folder / "data").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            make(Path(made))
            os.rename(Path(made) / "data", folder / "data")


def make(folder: Path) -> None:
    """Writes data/ into a folder. Call it once per process: the engine keeps its first folder and time."""
    os.environ["APPWORLD_ROOT"] = str(folder)
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection

    apps = get_all_apps()
    home = folder / "data"
    for name in ("base_dbs", "datasets", "tasks"):
        (home / name).mkdir(parents=True)
    docs: Any = ApiDocCollection.build(tuple(get_all_apps(skip_admin=True)))
    for app, described in docs.items():
        _write(
            home / "api_docs" / "standard" / f"{app}.json",
            {k: {**d, "canary_string": ""} for k, d in described.items()},
        )
    set_local_date_and_time(NOW)
    base = str(home / "base_dbs")
    models: Any = ModelCollection.load(base, base, apps, create_db=True)
    _fill_base(models)
    models.close()
    for person in range(len(PEOPLE)):
        for scenario, own in tasks(person).items():
            _make_task(home, f"{scenario}_{person + 1}", person, own, apps)


def _fill_base(models: Any) -> None:
    """Fills the base databases with everybody's accounts, and with songs."""
    for n, (first, last, phone) in enumerate(PEOPLE):
        named = {"first_name": first, "last_name": last}
        email = f"{first.lower()}@example.com"
        models.admin.MainUser.create_save(
            **named, email=email, phone_number=phone, birthday="1990-04-0" + str(n + 1), sex="female"
        )
        for app, by in ACCOUNTS.items():
            more = {"verified": True} if app != "phone" else {}
            models[app].User.create_save(
                **named, **{by: email if by == "email" else phone}, password=_password(app, n), **more
            )
    artist = models.spotify.Artist.create_save(name="The Meridian Line", genre="folk")
    for n, title in enumerate(SONGS):
        models.spotify.Song.create_save(
            title=title, artist_ids=[artist.id], duration=180 + n, release_date=NOW, genre="folk"
        )


def _make_task(home: Path, task_id: str, person: int, own: Own, apps: list[str]) -> None:
    from appworld.collections.models import ModelCollection

    first, last, phone = PEOPLE[person]
    supervisor = {
        "first_name": first, "last_name": last, "email": f"{first.lower()}@example.com", "phone_number": phone
    }  # fmt: skip
    models: Any = ModelCollection.load(f":memory:task_input-{task_id}", str(home / "base_dbs"), apps)
    who = models.supervisor.Supervisor.create_save(**supervisor, birthday="1990-04-01", sex="female")
    models.supervisor.Task.create_save(supervisor_id=who.id, instruction=own.instruction)
    for app in ACCOUNTS:
        models.supervisor.AccountPassword.create_save(
            supervisor_id=who.id, account_name=app, password=_password(app, person)
        )
    user = person + 1
    for n in range(2 + person):
        models.spotify.UserLibrarySong.create_save(user_id=user, song_id=n + 1)
    for n, title in enumerate(NOTES[: 3 + person]):
        models.simple_note.Note.create_save(user_id=user, title=title, content=f"{task_id}: {n + 2} things.")
    for time, label in ALARMS:
        models.phone.Alarm.create_save(user_id=user, time=time, label=label, enabled=True)
    folder = home / "tasks" / task_id
    models.save(str(folder / "dbs"), "changes", apps)
    models.close()
    _write(
        folder / "specs.json",
        {
            "instruction": own.instruction,
            "supervisor": supervisor,
            "datetime": NOW.isoformat(),
            "db_version": "0.1.0",
        },
    )
    truth = folder / "ground_truth"
    _write(truth / "metadata.json", {"difficulty": 1, "mode": "minimal", "num_apps": 1, "num_apis": 4,
                                     "num_solution_code_lines": own.solution.count("\n") + 1})  # fmt: skip
    _write(truth / "answer.json", own.answer)
    _write(truth / "public_data.json", {})
    _write(truth / "private_data.json", {})
    _write(truth / "test_data.json", [{"requirement": r, "label": "no_op_fail"} for r in own.evaluation])
    tests = "".join(
        f"    with test({requirement!r}):\n        {line}\n" for requirement, line in own.evaluation.items()
    )
    (truth / "evaluation.py").write_text(
        "import json\n\n\n"
        "def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):\n" + tests
    )
    with (home / "datasets" / f"{own.split}.txt").open("a") as listed:
        listed.write(f"{task_id}\n")


def _password(app: str, person: int) -> str:
    return f"{app}-{PEOPLE[person][0].lower()}"


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    said = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=said).parse_args()
    if not importlib.util.find_spec("appworld"):
        sys.exit(f"{sys.executable} has no appworld: make setup-appworld, and use .appworld/bin/python.")
    make_missing(Path(sys.prefix) / "own")
