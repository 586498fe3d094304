"""From the bus to a tower: the pixels that the policy was shown, each medium read once."""

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from media_files import clip, photo, recipe_of, source
from roles.role_fakes import config, row

from relax_hpc.bus import layout
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.plan import PlanRecord, ShardRange
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.kinds import modality_of
from relax_hpc.data.media.stored import StoredMedium, make_stored_array, read_stored
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.dealing import sight as sights
from relax_hpc.roles.dealing.portions import Portion
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.scorer import loop as scorer
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PromptGroup

BOUNDS = {"image_tokens": [1, 64], "video_frames": [2, 4], "video_tokens_per_frame": [1, 64]}
"""Other than the model's own."""


class Bus:
    """Three groups of two rows, each in a shard; the first and the third show one image."""

    def __init__(self, root, *, as_arrays=False):
        self.recipe = recipe_of(root, "qwen3_vl", **BOUNDS)
        sources = [
            source(photo(64, 96)), source(photo(32, 64, "JPEG", seed=1)),
            source(clip(range(6)), "video"),
        ]  # fmt: skip
        found = [measure_medium(each, self.recipe) for each in sources]
        made = [canonical(each, self.recipe) for each in found]
        self.arrays = [each.array for each in made]
        if as_arrays:
            held = [make_stored_array(each, each.digest) for each in made]
        else:
            held = [read_stored(a, b.digest) for a, b in zip(found, made, strict=True)]
        self.paths = BusPaths(root / "bus")
        layout.create(self.paths, ["rollout-0"], {"run": "test"})
        with Producer(self.paths, "rollout-0", {"run": "test"}) as producer:
            for guid, shown in enumerate(([0], [1, 2], [0, 2])):
                of = tuple(held[number] for number in shown)
                spans = np.array([(n, n, 1) for n in range(len(of))], np.int32)
                rows = [row(guid, n)._replace(media=of, media_spans=spans) for n in range(2)]
                producer.put([PromptGroup(guid, rows)])
        log = read_log(self.paths.log("rollout-0"))
        self.commits = [each for each in log if each.kind is RecordKind.BASE]

    def portion(self, step, number, guids):
        """A portion of a step, of whole groups."""
        commits = [self.commits[guid] for guid in guids]
        parts = [ShardRange("rollout-0", each.fence, each.seq, each.uuid, 0, 2) for each in commits]
        return PlanRecord(step, list(guids), parts, 2 * len(parts), 0, 9, number, last=number == 1)

    def noted(self, sight, record):
        rows = Reader(self.paths).rows(record, range(record.num_trajectories), sight.columns)
        sight.note(record, range(record.num_trajectories), rows)
        return rows


class CountingReader(Reader):
    def __init__(self, paths):
        super().__init__(paths)
        self.read = []

    def media(self, record, wanted):
        wanted = list(wanted)
        self.read += wanted
        return super().media(record, wanted)


@pytest.fixture(params=["source", "canonical"])
def bus(request, tmp_path):
    return Bus(tmp_path, as_arrays=request.param == "canonical")


def everything(rows):
    return [(each, place) for each in rows for place in range(len(each.media))]


def shown(bus, rows):
    of = {0: [0], 1: [1, 2], 2: [0, 2]}
    return [bus.arrays[number] for each in rows for number in of[each.guid]]


def same(found, expected):
    found = list(found)
    return len(found) == len(expected) and all(
        a.dtype == np.uint8 and a.flags.writeable and np.array_equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


def test_a_tower_is_given_what_the_policy_saw_and_each_medium_is_read_once_a_step(bus):
    reader = CountingReader(bus.paths)
    sight = StepMedia(reader, bus.recipe)
    first = bus.noted(sight, bus.portion(1, 0, [0, 1]))
    assert not any(medium.data.size for each in first for medium in each.media), "no byte of it"
    assert same(sight.pixels(everything(first)), shown(bus, first))
    second = bus.noted(sight, bus.portion(1, 1, [2]))
    both = [*second, *first]
    assert same(sight.pixels(everything(both)), shown(bus, both)), "portions of a step are known"
    assert len(reader.read) == 3, "three media, however many rows and passes"
    later = bus.noted(sight, bus.portion(2, 0, [2]))
    assert same(sight.pixels(everything(later)), shown(bus, later))
    assert len(reader.read) == 5, "nothing is kept for another step"


def test_what_has_no_room_is_read_again(bus, monkeypatch):
    room = bus.arrays[0].nbytes + bus.arrays[1].nbytes
    monkeypatch.setattr(sights, "MOST_KEPT_BYTES", room)
    reader = CountingReader(bus.paths)
    sight = StepMedia(reader, bus.recipe)
    rows = bus.noted(sight, bus.portion(1, 0, [0, 1]))
    for _ in range(2):
        assert same(sight.pixels(everything(rows)), shown(bus, rows))
    film = (2, 1)  # the second medium of the second group's first row
    assert len(reader.read) == 4 and reader.read.count(film) == 2


def test_of_what_other_ranks_encode_no_byte_is_read(bus, monkeypatch):
    numbers, read = [], media.read
    monkeypatch.setattr(
        media, "read", lambda shard, of: numbers.append(list(of)) or read(shard, of)
    )
    sight = StepMedia(Reader(bus.paths), bus.recipe)
    rows = bus.noted(sight, bus.portion(1, 0, [0, 1]))
    assert same(sight.pixels([(rows[3], 1)]), [bus.arrays[2]])
    assert numbers == [[1]], "the second medium of its shard"


def test_the_first_is_made_use_of_while_the_others_are_decoded(bus, monkeypatch):
    may_end, real = threading.Event(), StoredMedium.canonical

    def slowly(self, recipe):
        if modality_of(self.medium) == "video":
            assert may_end.wait(30)
        return real(self, recipe)

    monkeypatch.setattr(StoredMedium, "canonical", slowly)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    sight = StepMedia(Reader(bus.paths), bus.recipe)
    rows = bus.noted(sight, bus.portion(1, 0, [0, 1]))
    found = sight.pixels(everything(rows))
    early = [next(found) for _ in range(3)]
    may_end.set()
    assert same([*early, *found], shown(bus, rows))


class Tower:
    """Trainer and scorer that look at all media of the rows they are given."""

    dp_rank, skip, step, costs = 0, None, 0, {}

    def __init__(self):
        self.seen = []

    def see_by(self, pixels):
        self.pixels = pixels

    def accumulate(self, rows, micro_batches, objective, *, last, mini_batches):
        self.seen.append((rows, list(self.pixels(everything(rows)))))

    def forward_logprobs(self, rows, micro_batches):
        self.seen.append((rows, list(self.pixels(everything(rows)))))
        return [np.zeros(len(each.token_ids), np.float32) for each in rows]

    def update(self):
        self.step += 1
        return {}

    def stream_weights(self):
        return iter(())


def test_the_actors_loop_shows_its_trainer_the_media_of_every_portion(bus, tmp_path):
    records = [bus.portion(1, 0, [0, 1]), bus.portion(1, 1, [2])]
    columns = {"advantages": np.ones(6, np.float32)}
    dealt = [Portion(records[0], columns, [[[3, 0], [1, 2]]], []),
             Portion(records[1], columns, [[[1, 0]]], [])]  # fmt: skip
    duties = SimpleNamespace(
        next_task=lambda step, timers: dealt.pop(0), publish=lambda *_: False,
        end_step=lambda *_: None, finish=lambda: None,
    )  # fmt: skip
    settings = config(
        model__path=str(tmp_path / "qwen3_vl"), prompts__media=BOUNDS, schedule__num_steps=1
    )
    trainer = Tower()
    actor.run(settings, SoloWorld(), trainer, Reader(bus.paths), duties, actor.Stages(lambda: None))
    assert [len(rows) for rows, _ in trainer.seen] == [4, 2]
    for rows, pixels in trainer.seen:
        assert same(pixels, shown(bus, rows)) and all(len(each.media_spans) for each in rows)


def test_a_model_that_scores_is_shown_them_too(bus):
    parts = bus.portion(1, 0, [0, 1, 2]).parts
    rounds = [scorer.Round(1, parts, [[[5, 0], [1, 2, 3, 4]]]), None]
    duties = SimpleNamespace(next_task=lambda *_: rounds.pop(0), put=lambda scored: None)
    engine, reader = Tower(), Reader(bus.paths)
    scorer.run(SoloWorld(), engine, reader, duties, StepMedia(reader, bus.recipe))
    [(rows, pixels)] = engine.seen
    assert len(rows) == 6 and same(pixels, shown(bus, rows))
