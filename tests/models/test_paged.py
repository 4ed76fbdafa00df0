"""A cache of pages: kernels attend as over whole arrays, and conversations never see foreign pages."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from coevolve_jax.models import paged
from coevolve_jax.models.paged import PAGE, PagedCache
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.conversation import Conversation
from coevolve_jax.rollout.native.page_store import PageStore

pytestmark = pytest.mark.slow


def pages(rng, rows=3, heads=2, groups=4, size=128, width=2 * paged.BLOCK, count=40, dtype=jnp.bfloat16):
    """Queries, keys and values of one new token per row, and a cache whose rows have pages anywhere."""
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    table = jnp.asarray(rng.permutation(count)[: rows * width].reshape(rows, width), jnp.int32)
    kept = draw(heads, count, PAGE, size), draw(heads, count, PAGE, size)
    new = draw(rows, 1, heads * groups, size), draw(rows, 1, heads, size), draw(rows, 1, heads, size)
    return new, kept, table


@pytest.mark.parametrize("groups", [4, 7, 8])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_a_kernel_attends_as_whole_arrays_do(name, groups, monkeypatch):
    new, kept, table = pages(np.random.default_rng(groups), groups=groups)
    columns = table.shape[1] * PAGE
    positions = jnp.asarray([[0], [columns - 1], [PAGE * 3 + 5]], jnp.int32)
    cache = PagedCache((), (), table)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (new, kept))
    want, _ = cache.attend(*exact[0], exact[1], positions, None, "cpu")
    _, written = cache.attend(*new, kept, positions, None, "cpu")
    if name == "gpu":
        monkeypatch.setitem(paged.KERNELS, "gpu", lambda *args: paged.gpu_kernel(*args, interpret=True))
        got, written_too = cache.attend(*new, kept, positions, None, name)
    else:
        with pltpu.force_tpu_interpret_mode():
            got, written_too = cache.attend(*new, kept, positions, None, name)
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
    assert np.abs(np.roll(got, 1, axis=2) - want).max() > 0.5  # the output of another head
    for mine, theirs, before in zip(written, written_too, kept, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert (np.asarray(mine) != np.asarray(before)).any(axis=(0, 3)).sum() == len(positions)


def test_what_lies_beyond_the_columns_is_not_written():
    new, kept, table = pages(np.random.default_rng(0))
    positions = jnp.full((3, 1), table.shape[1] * PAGE, jnp.int32)
    _, written = PagedCache((), (), table).attend(*new, kept, positions, None, "cpu")
    jax.tree.map(np.testing.assert_array_equal, written, kept)


# ---- Ownership of pages ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Table:
    """A cache that records the token at each place of each page."""

    places: dict
    table: np.ndarray | None = None

    def with_table(self, table):
        return dataclasses.replace(self, table=table)


class Programs:
    """Stands in for the model: it records the fed tokens, and so what a conversation would attend to."""

    records = False

    def empty_pages(self, count):
        return Table({})

    def feed_pages(self, params, cache, tokens, positions):
        columns = cache.table.shape[1] * PAGE
        for row, (ids, where) in enumerate(zip(tokens, positions, strict=True)):
            part = row * PARTS // len(tokens)
            for token, position in zip(ids, where, strict=True):
                if position < columns:
                    cache.places[part, int(cache.table[row, position // PAGE]), position % PAGE] = int(token)
        return cache


PARTS, SLOTS, FED, LONGEST = 2, 4, 4, 5 * PAGE


def fed(store, conversations):
    """Feeds conversations like the engine, a chunk at a time."""
    while behind := [c for c in conversations if c.cached < len(c.ids) - 1]:
        for group in store.groups(behind):
            assert len(group) == FED
            tokens, positions = np.zeros((FED, 32), np.int32), np.full((FED, 32), store.columns, np.int32)
            for i, c in enumerate(group):
                if c is not None:
                    new = np.arange(c.cached, min(c.cached + 32, len(c.ids) - 1))
                    tokens[i, : len(new)], positions[i, : len(new)] = c.ids[new], new
                    c.cached += len(new)
            store.feed(None, group, tokens, positions)


def check(store, conversations, admitted):
    """Each admitted conversation finds its own tokens; each page is counted as often as it is used."""
    for c in admitted:
        for position, token in enumerate(c.ids[:-1]):
            place = c.part, c.pages[position // PAGE], position % PAGE
            assert store.cache.places[place] == token
        assert len(c.pages) * PAGE >= min(len(c.ids) + 16, len(c.request.ids) + 16)
        assert c.row // (store.rows // PARTS) == c.part
    assert len({c.row for c in admitted}) == len(admitted)
    for part in range(PARTS):
        uses = Counter(page for c in conversations if c.part == part for page in c.pages)
        free = store._free[part]
        assert uses == +store._users[part] and not uses.keys() & set(free) and len(set(free)) == len(free)
        assert len(uses) + len(free) == store._count


asked = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.sampled_from(["go on", "other", "another prompt", "release"]),
        st.integers(1, 90)),
    min_size=1,
    max_size=SLOTS,
    unique_by=lambda turn: turn[0],
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(asked, min_size=1, max_size=8), st.integers(1, 4 * PAGE), st.integers(0, 10**6))
def test_every_conversation_finds_its_own_tokens(turns, prompt, seed):
    """Conversations with one of two prompts continue, restart with other tokens, wait, and are released.

    Each part has pages for little more than one of them.
    """
    rng = np.random.default_rng(seed)
    store = PageStore(
        Programs(), slots=SLOTS, max_length=LONGEST, fed=FED, parts=PARTS, tokens=PARTS * (LONGEST + 2 * PAGE)
    )
    prompts = [rng.integers(0, 10**6, prompt).astype(np.int32) for _ in range(2)]
    held: dict[int, Conversation] = {}
    for turn in turns:
        serving = []
        for conversation_id, what, n in turn:
            c = held.get(conversation_id)
            if what == "release" and c:
                store.free(held.pop(conversation_id))
                continue
            if c is None or what == "another prompt":
                ids = np.concatenate(
                    [prompts[(conversation_id > 0) ^ (what == "another prompt")], [conversation_id]]
                )
            elif what == "other":
                cut = int(rng.integers(1, len(c.ids) + 1))
                ids = np.concatenate([c.ids[:cut], [-1 - n]])
            else:
                ids = np.concatenate([c.ids, rng.integers(0, 10**6, n)])
            ids = ids[: LONGEST - 16].astype(np.int32)
            request = Request(conversation_id, ids, Sampling(max_new_tokens=16))
            if c is None:
                c = held[conversation_id] = Conversation.new(request)
            else:
                c.begin(request)
            serving.append(c)
        if not serving:
            continue
        admitted, sharing = store.admit(serving, list(held.values()))
        assert admitted and admitted[0] is serving[0]
        fed(store, [c for c in admitted if not any(c is other for other in sharing)])
        store.share()
        fed(store, admitted)
        check(store, held.values(), admitted)


def test_a_group_shares_the_whole_pages_of_its_prompt():
    programs = Programs()
    store = PageStore(programs, slots=8, max_length=LONGEST, fed=FED, parts=PARTS, tokens=PARTS * 16 * PAGE)
    prompt = np.arange(2 * PAGE + 10, dtype=np.int32)
    group = [Conversation.new(Request(i, prompt, Sampling(max_new_tokens=16))) for i in range(4)]
    admitted, sharing = store.admit(group, group)
    assert [c.request.conversation_id for c in sharing] == [1, 2, 3] and len({c.part for c in admitted}) == 1
    assert {tuple(c.pages[:2]) for c in group} == {tuple(group[0].pages[:2])}
    assert len({c.pages[2] for c in group}) == 4 and [c.cached for c in sharing] == [2 * PAGE] * 3
    for c in group:
        store.free(c)
    assert [len(free) for free in store._free] == [16, 16]


def test_who_has_no_room_where_its_prompt_is_goes_to_another_part():
    """Two parts of six pages. In one, five are taken, two of them by a prompt; its next user takes the sixth.

    A later one starts in the other part, and the last one shares with it.
    """
    store = PageStore(Programs(), slots=8, max_length=LONGEST, fed=FED, parts=PARTS, tokens=PARTS * 6 * PAGE)
    prompt = np.arange(2 * PAGE + 10, dtype=np.int32)
    held = [Conversation.new(Request(i, prompt, Sampling(max_new_tokens=16))) for i in range(4)]
    store.admit(held[:1], held[:1])
    held[0].cached = len(prompt) - 1
    held[0].begin(Request(0, np.pad(prompt, (0, 2 * PAGE)), Sampling(max_new_tokens=16)))
    got, sharing = store.admit(held, held)
    assert [len(c.pages) for c in held] == [5, 3, 3, 3] and got == held
    assert [c.part for c in held] == [0, 0, 1, 1] and [c.request.conversation_id for c in sharing] == [1, 3]
    for c in held:
        c.cached = len(c.ids) - 1
    filler = Conversation.new(Request(9, np.full(2 * PAGE - 20, 9, np.int32), Sampling(max_new_tokens=16)))
    late = Conversation.new(Request(8, prompt, Sampling(max_new_tokens=16)))
    everyone = [
        *held,
        filler,
        late,
    ]  # the filler takes the last two: the late one finds no room, and waits with its prompt
    got, _ = store.admit(everyone, everyone)
    assert got == [*held, filler] and late.part == 0 and len(late.pages) == 2


@pytest.mark.parametrize(
    "asked, grown, admitted, left",
    [
        ([2, 4], 4, [2, 4], [0, 4, 2]),  # idle conversations lose theirs first
        ([4, 2], 5, [4], [0, 0, 5]),  # then those with a request
        ([0, 2, 4], 4, [0, 2], [4, 2, 0]),  # the last of these first
        ([4, 3, 5], 6, [4, 3, 5], [0, 0, 6]),  # then the oldest of these; those of the other part keep theirs
        ([4], 4, [4], [0, 2, 4]),
    ],
)
def test_who_loses_pages_when_there_are_none_left(asked, grown, admitted, left):
    """Six conversations of two pages, three in each part of six; then the first request needs more."""
    store = PageStore(Programs(), slots=6, max_length=LONGEST, fed=FED, parts=PARTS, tokens=PARTS * 6 * PAGE)

    def request(conversation_id, pages):
        ids = np.full(pages * PAGE - 20, conversation_id, np.int32)
        return Request(conversation_id, ids, Sampling(max_new_tokens=16))

    held = [Conversation.new(request(i, 2)) for i in range(6)]
    store.admit(held, held)
    assert [c.part for c in held] == [0, 1, 0, 1, 0, 1]
    for c in held:
        c.cached = len(c.ids) - 1
    held[asked[0]].begin(request(asked[0], grown))
    got, _ = store.admit([held[i] for i in asked], held)
    assert [c.request.conversation_id for c in got] == admitted
    assert [len(held[i].pages) for i in (0, 2, 4)] == left
    assert [len(held[i].pages) for i in (1, 3, 5)] == [2, 2, 2]
    assert all((c.cached > 0) == (len(c.pages) > 0) for c in held)


def test_who_waits_takes_nothing_from_those_who_go_on():
    """Nine pages: the second conversation, of six, waits for the first one's; the third continues."""
    store = PageStore(Programs(), slots=8, max_length=9 * PAGE, fed=FED, parts=1, tokens=9 * PAGE)
    ids = [np.full(n * PAGE - 20, i, np.int32) for i, n in enumerate((4, 6, 3))]
    held = [Conversation.new(Request(i, x, Sampling(max_new_tokens=16))) for i, x in enumerate(ids)]
    store.admit(held, held)
    for c in (held[0], held[2]):
        c.cached = len(c.ids) - 1
    got, _ = store.admit(held, held)
    assert [c.request.conversation_id for c in got] == [0, 2] and held[2].cached == len(ids[2]) - 1
    store.free(held.pop(0))
    got, _ = store.admit(held, held)
    assert [c.request.conversation_id for c in got] == [1, 2] and len(held[0].pages) == 6


def test_who_comes_back_finds_a_place_in_a_part_that_has_one():
    """Two parts of two places: a conversation that lost its pages goes where a place is free."""
    store = PageStore(Programs(), slots=4, max_length=LONGEST, fed=FED, parts=PARTS, tokens=PARTS * 6 * PAGE)
    ids = [np.full(n * PAGE - 20, i, np.int32) for i, n in enumerate((3, 1, 3, 2))]
    held = [Conversation.new(Request(i, x, Sampling(max_new_tokens=16))) for i, x in enumerate(ids)]
    store.admit(held, held)
    assert [c.part for c in held] == [0, 1, 1, 0]
    for c in held:
        c.cached = len(c.ids) - 1
    held[0].begin(Request(0, np.full(5 * PAGE - 20, 0, np.int32), Sampling(max_new_tokens=16)))
    for _ in range(2):  # the last one waits: part 1 has two
        got, _ = store.admit(held, held)
        assert [c.request.conversation_id for c in got] == [0, 1, 2]
        held[0].cached = len(held[0].ids) - 1
    store.free(held.pop(1))
    got, _ = store.admit(held, held)
    assert [c.part for c in got] == [0, 1, 1] and len({c.row for c in got}) == 3


def test_pages_that_hold_no_conversation_are_refused():
    with pytest.raises(
        ValueError,
        match="cache_tokens is 512, of which each of .* 2 part.* has 256, .* have 320: set it to 640 or more",
    ):
        PageStore(Programs(), slots=4, max_length=LONGEST, fed=FED, parts=PARTS, tokens=512)
