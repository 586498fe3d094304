"""Engines that load snapshots: all of them, or one beside another that gets the broadcast."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sync_worker
from houses import at_that_moment, house_of, kill, publish, trainer, wait_until

from relax_hpc.trainer.models.weight_files import Manifest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def shared(request, checkpoints, tmp_path_factory):
    with house_of(request.param, checkpoints, tmp_path_factory.mktemp(request.param)) as house:
        yield house


@pytest.fixture
def house(shared):
    shared.reset()
    return shared


def listing(house):
    return sorted(path.name for path in house.paths.weights.iterdir())


def snapshots(house):
    return [name[:7] for name in listing(house)]


def test_all_ranks_write_and_every_engine_loads_what_was_written(house):
    house.announce("files", "files")
    with trainer(house) as ranks:
        for version in range(4):
            done = publish(ranks, house, version, check=version > 1)
            assert (done["members"], done["fenced"], done["again"]) == (house.ids, [], False)
            assert done["transport"] == "files"
            assert {"write", "pause", "load", "resume", "total"} <= done["seconds"].keys()
            assert version < 2 or done["verified"]["equal"], done["verified"]
            assert house.versions == [version] * 2
    assert snapshots(house) == ["v000002", "v000003"]
    for folder in house.paths.weights.iterdir():
        manifest = Manifest.read(folder)
        assert len(manifest.files) == 2  # of two ranks
        assert manifest.find_damaged(folder) == []
    held = house.engines[0].client().checksum()
    house.engines[0].client().update_weights_from_disk(str(house.checkpoints[3 % 3]), 3)
    assert house.engines[0].client().checksum() == held


def test_an_engine_that_holds_something_else_than_the_snapshot_is_found_out(house):
    house.announce("files", "files")
    with trainer(house) as ranks:
        assert publish(ranks, house, 4, check=True)["verified"]["equal"]
        [folder] = [path for path in house.paths.weights.iterdir() if path.name[:7] == "v000004"]
        house.announce("files", "files")
        file = min(folder.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        done = publish(ranks, house, 4, check=True)
    assert done["members"] == house.ids
    assert not done["verified"]["equal"]


def test_one_without_fabric_is_served_by_files_after_the_other_had_its_broadcast(house):
    start = house.announce("collective", "files")
    with trainer(house) as ranks:
        for version in (5, 6):
            done = publish(ranks, house, version, check=True)
            assert (done["members"], done["transport"]) == (house.ids[:1], "collective")
            assert (done["again"], done["verified"]["equal"]) == (True, True)
            assert not house.roster.serves(house.ids[1], start)
            done = publish(ranks, house, version, check=True)
            assert (done["members"], done["transport"]) == (house.ids[1:], "files")
            assert (done["again"], done["verified"]["equal"]) == (False, True)
            assert house.versions == [version] * 2
            assert house.roster.serves(house.ids[1], start)
        written = snapshots(house)
        house.announce("collective", "collective")
        assert publish(ranks, house, 7)["members"] == house.ids
        assert snapshots(house) == written  # nobody is there to load one


def test_a_late_joiner_that_loads_files_costs_the_others_nothing(house):
    start = house.announce("collective", "files")
    with trainer(house) as ranks:
        publish(ranks, house, 8)
        publish(ranks, house, 8)
        written = sorted(house.paths.weights.iterdir())
        house.announce("collective", "files", ids=house.ids[1:])
        done = publish(ranks, house, 8)
        assert (done["members"], done["transport"], done["again"]) == (
            house.ids[1:],
            "files",
            False,
        )
        assert "write" not in done["seconds"]
        assert sorted(house.paths.weights.iterdir()) == written
        assert house.roster.serves(house.ids[0], start)
        assert publish(ranks, house, 8)["members"] == []


def test_a_snapshot_that_cannot_be_written_leaves_engines_as_they_are(house):
    house.announce("collective", "files")
    with trainer(house) as ranks:
        publish(ranks, house, 9)
        publish(ranks, house, 9)
        ranks.call(sync_worker.limit_files, num_bytes=20_000)
        assert publish(ranks, house, 10)["members"] == house.ids[:1]
        done = publish(ranks, house, 10)
        assert (done["members"], done["fenced"], done["again"]) == ([], [], False)
        assert str(house.paths.weights) in done["error"]
        assert "rank 1" in done["error"]
        assert "File too large" in done["error"]
        assert house.versions == [10, 9]
        assert not any(path.name.startswith(".") for path in house.paths.weights.iterdir())
        ranks.call(sync_worker.limit_files, num_bytes=None)
        assert publish(ranks, house, 11)["transport"] == "collective"
    with trainer(house) as ranks:  # it would try again by itself, after a while
        publish(ranks, house, 11)
        assert publish(ranks, house, 11)["members"] == house.ids[1:]
        assert house.versions == [11, 11]


def test_a_trainer_killed_while_it_publishes_is_followed_by_one_that_can(house):
    house.announce("files", "files")
    with trainer(house) as ranks:
        publish(ranks, house, 12)
        pool = ThreadPoolExecutor(1)
        pool.submit(publish, ranks, house, 13)
        wait_until(lambda: any("v000013" in name for name in listing(house)))
        for process in ranks.processes:
            process.kill()
            process.join()
        pool.shutdown(wait=True)
    for folder in house.paths.weights.glob("v*"):
        assert Manifest.read(folder).find_damaged(folder) == []
    with trainer(house) as ranks:
        done = publish(ranks, house, 14, check=True)
        assert (done["members"], done["fenced"]) == (house.ids, [])
        assert done["verified"]["equal"]
    assert not list(house.paths.weights.glob(".*"))


def test_an_engine_killed_while_it_loads_is_fenced_and_the_other_goes_on(house):
    house.announce("files", "files")
    with trainer(house, timeout_s=30) as ranks:
        assert publish(ranks, house, 15)["members"] == house.ids
        with at_that_moment(ranks, house, "loading", kill):
            done = publish(ranks, house, 16)
        assert (done["members"], done["fenced"]) == (house.ids[:1], house.ids[1:])
        done = publish(ranks, house, 17, check=True)
        assert (done["members"], done["again"]) == (house.ids[:1], False)
        assert done["verified"]["equal"]


def test_one_that_loads_slowly_holds_up_neither_the_trainer_nor_the_other(house):
    start = house.announce("collective", "files")
    fast, slow = house.ids
    reached, released = (house.paths.root / name for name in ("reached", "released"))
    for file in (reached, released):
        file.unlink(missing_ok=True)
    with trainer(house, waits_for_loads=False) as ranks:
        ranks.call(
            sync_worker.hold, place="loading", reached=reached, released=released,
            url=house.engines[1].url,
        )  # fmt: skip
        assert publish(ranks, house, 1)["members"] == [fast]
        done = publish(ranks, house, 1)
        assert (done["members"], done["loading"], done["again"]) == ([], [slow], False)
        wait_until(reached.exists)
        for version in (2, 3):
            done = publish(ranks, house, version)
            assert (done["members"], done["loading"], done["again"]) == ([fast], [], False)
            assert house.roster.serves(fast, start)
            assert house.roster.members[slow].state == "SYNCING"
        assert snapshots(house) == ["v000001"]  # nobody is there to load another one
        released.touch()
        lacks, ended = ranks.call(sync_worker.wait_for_loads)[0]
        assert (lacks, ended) == (True, [(slow, 1, None)])
        assert house.versions == [3, 1]
        held = house.roster.members[slow]
        assert (held.state, held.version, house.roster.serves(slow, start)) == ("ACTIVE", 1, False)
        done = publish(ranks, house, 3, check=True)
        assert (done["members"], done["loading"]) == ([], [slow])
        assert ranks.call(sync_worker.wait_for_loads)[0] == (False, [(slow, 3, True)])
    assert house.versions == [3, 3]
    assert house.roster.serves(slow, start)
    checksums = {engine.client().checksum() for engine in house.engines}
    assert len(checksums) == 1
