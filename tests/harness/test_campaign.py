"""The folder of a campaign: the name of the code, and the version that a campaign ends with."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.harness import campaign


def test_the_name_of_the_code_is_that_of_every_source_file_and_page(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "PACKAGE", tmp_path)
    (tmp_path / "inner").mkdir()
    named = {campaign.code()}
    written = ("a.py", "1"), ("a.py", "2"), ("inner/b.md", "1"), ("inner/b.md", "2"), ("inner/a.py", "1")
    for name, text in written:
        (tmp_path / name).write_text(text)
        named.add(campaign.code())
    assert len(named) == 1 + len(written)
    (tmp_path / "notes.txt").write_text("1")
    assert campaign.code() in named


class Judged(campaign.Campaign):
    """A campaign whose parts are in memory."""

    def __init__(self, parts):
        super().__init__(Path())
        self.parts = parts

    def versions(self):
        return sorted(self.parts)

    def read(self, version, part):
        return self.parts[version][part]


SCORES = st.sampled_from([0.2, 0.4, 0.6])
KINDS = st.sampled_from(["promoted", "promoted", "rejected"])


@given(st.lists(st.tuples(st.integers(0, 7), KINDS, SCORES), max_size=8))
def test_a_campaign_ends_with_the_best_of_the_promoted_versions_that_none_follows(later):
    parts = {"v000": {"proposal": None, "verdict": {"kind": "start", "success": 0.9}}}
    for number, (parent, kind, success) in enumerate(later, 1):
        proposal = {"parent": f"v{parent % number:03d}"}
        parts[f"v{number:03d}"] = {
            "proposal": proposal,
            "verdict": {"kind": kind, "success": success},
        }
    good = [v for v, own in parts.items() if own["verdict"]["kind"] == "promoted"]
    ends = [v for v in good if not any(parts[other]["proposal"]["parent"] == v for other in good)]
    chosen = Judged(parts).selected()
    if not good:
        assert chosen == "v000"
    else:
        assert chosen in ends
        assert all(parts[v]["verdict"]["success"] <= parts[chosen]["verdict"]["success"] for v in ends)
