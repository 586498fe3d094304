"""Checkpoints of the trainer: on every grid, at every kill, on bad storage, beside training."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from disk_calls import recorded
from megatron_reference import narrow
from trainers import contents, equal, opened, trajectories

from relax_hpc.errors import CheckpointError, ConfigError, PeerTimeoutError
from relax_hpc.trainer.megatron import checkpoint_files
from relax_hpc.trainer.megatron import checkpoint_files as files
from relax_hpc.trainer.megatron.checkpoint_part import cut

ROWS, ADVANTAGES = trajectories(8)
BATCH = {"rows": ROWS, "advantages": ADVANTAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tied Qwen3 of four layers: with a pipeline, two stages have the embedding."""
    return narrow(tmp_path_factory.mktemp("tied"))


def open_grid(ranks, folder, grid, **more):
    return opened(ranks, folder, grid, budget=200, **more)


def test_torch_and_megatron_read_it(ranks, folder, tmp_path):
    import torch.distributed.checkpoint as dcp

    pool = open_grid(ranks, folder, "dp2")
    pool.train(**BATCH)
    pool.save(folder=tmp_path / "dp2")
    expected = contents(tmp_path / "dp2")
    found = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dp2"), no_dist=True)
    assert equal(found, expected)
    (found,) = ranks[1].read_by_megatron(folder=tmp_path / "dp2")
    assert equal(found, {key: tensor.float().numpy() for key, tensor in expected.items()})


def test_a_rank_may_have_no_share_of_what_is_not_decayed(ranks, tmp_path):
    """Of two ranks one updates a part of the embedding alone: none of its parameters is a norm."""
    pool = open_grid(ranks, narrow(tmp_path / "large", vocab=4096), "dp2")
    assert [] in pool.undecayed()
    pool.train(**BATCH, num_steps=2)
    pool.save(folder=tmp_path / "second")
    before = pool.digest()
    pool.train(**BATCH)
    third = pool.digest()
    assert pool.load(folder=tmp_path / "second") == [2, 2]
    assert pool.digest() == before
    pool.train(**BATCH)
    assert pool.digest() == third


def test_six_steps_are_three_a_save_killed_anywhere_a_resume_and_three_bitwise(
    ranks, folder, tmp_path
):
    """The save of step 4 is killed before each of its calls to the system, or half way through."""
    pool, root = open_grid(ranks, folder, "one"), tmp_path / "checkpoints"
    pool.train(**BATCH, num_steps=3)
    pool.save_in_run(root=root)
    third = pool.digest()[0]
    pool.train(**BATCH)
    fourth = pool.digest()[0]
    pool.save_in_run(root=tmp_path / "aside")
    pool.train(**BATCH, num_steps=2)
    sixth = pool.digest()

    shutil.copytree(root, tmp_path / "third")
    pool.resume_in_run(root=tmp_path / "aside")

    def kill(call, *, half=False):
        """Kills a save at `call`; returns what is resumed afterwards."""
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "third", root)
        where = {"root": root, "names": tmp_path / "names"}
        pool.kill_in_save(call=call, half=half, **where)
        (resumed,) = pool.resume_in_run(root=root)
        assert resumed in [(3, third), (4, fourth)], (call, half)
        pool.resume_in_run(root=tmp_path / "aside")
        return resumed[0]

    assert kill(call=0) == 4
    names = [line.split()[0] for line in (tmp_path / "names").read_text().splitlines()]
    writes = [call for call, name in enumerate(names, start=1) if name == "pwrite"]
    others = [call for call, name in enumerate(names, start=1) if name != "pwrite"]
    outcomes = [kill(call) for call in sorted({*others, writes[0], writes[-1]})]
    assert outcomes == sorted(outcomes)  # once it has its name, it counts
    assert {3, 4} == set(outcomes)
    assert [kill(call, half=True) for call in writes[:: len(writes) // 3]] == [3] * 4

    shutil.rmtree(root)
    shutil.copytree(tmp_path / "third", root)
    pool.resume_in_run(root=root)
    pool.train(**BATCH, num_steps=3)
    assert pool.digest() == sixth


def test_random_numbers_go_on_after_a_resume_where_the_save_was(ranks, folder, tmp_path):
    pool = open_grid(ranks, folder, "dp2")
    pool.draw()
    pool.save(folder=tmp_path / "saved")
    expected = pool.draw()
    assert pool.draw() != expected
    pool.load(folder=tmp_path / "saved")
    assert pool.draw() == expected


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_in_a_tensor(path):
    entry = next(e for e in checkpoint_files.read_table(path) if e.num_bytes > 4000)
    flip(path, entry.at + entry.num_bytes // 2)


HARMS = {
    "missing": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped in a tensor": flip_in_a_tensor,
    "flipped in the table": lambda path: flip(path, -checkpoint_files.FOOTER.size - 10),
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
}
TORN = {
    "__1_0.distcp": ["missing", "cut short", "flipped in a tensor", "flipped in the table"],
    "__0_0.distcp": ["emptied"],
    ".metadata": ["missing", "flipped"],
    "common.pt": ["flipped"],
    "manifest.json": ["cut short"],
}


@pytest.fixture(scope="module")
def whole(ranks, folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("whole") / "step"
    pool = open_grid(ranks, folder, "tp2")
    pool.train(**BATCH)
    pool.save(folder=made)
    return made


@pytest.mark.parametrize(("name", "harm"), [(n, h) for n, harms in TORN.items() for h in harms])
def test_a_torn_one_is_refused_by_every_rank_and_the_file_is_named(
    ranks, folder, whole, tmp_path, name, harm
):
    torn = tmp_path / "torn"
    shutil.copytree(whole, torn)
    HARMS[harm](torn / name)
    answers = open_grid(ranks, folder, "tp2").refusal(folder=torn)
    assert all(answer.startswith(f"CheckpointError: {torn / name}") for answer in answers), answers
    assert bool(files.damage(torn)) is (" in " not in harm)
    assert files.damage(whole) is None


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(whole):
    stored = files.StoredCheckpoint(whole)
    for key, shape, message in (
        ("decoder.layers.9.mlp.linear_fc2.weight", (32, 48), "has no decoder.layers.9"),
        ("decoder.final_layernorm.weight", (64,), r"is \[32\] there, \[64\] in this model"),
    ):
        with pytest.raises(ConfigError, match=message):
            stored.fill([files.Box(key, (0,) * len(shape), shape, torch.empty(shape))])


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_the_boxes_of_a_range_are_its_elements_once_and_few(shape):
    tensor = torch.arange(int(np.prod(shape))).view(shape)
    halves = [tensor] if tensor.ndim < 2 else [tensor, *tensor.chunk(2, dim=1)]
    for view in halves:
        for start, stop in itertools.combinations(range(tensor.numel() + 1), 2):
            boxes = list(cut(tuple(view.shape), view.stride(), view.storage_offset(), start, stop))
            found = []
            for place, size, first in boxes:
                part = view[tuple(slice(a, a + n) for a, n in zip(place, size, strict=True))]
                assert part.flatten().tolist() == list(range(first, first + part.numel()))
                found += part.flatten().tolist()
            wanted = [x for x in view.flatten().tolist() if start <= x < stop]
            assert sorted(found) == wanted
            assert view is not tensor or len(boxes) <= max(1, 2 * len(shape) - 1)


def test_gaps_overlaps_and_ranks_that_do_not_come_are_errors(tmp_path):
    half = [files.Box("w", (0, 0), (4, 2), torch.zeros(2, 2))]
    files.write_part(tmp_path, 0, half, {})
    with pytest.raises(CheckpointError, match="4 of the 8 elements of w"):
        files.write_names(tmp_path, 1, {}, timeout_s=0)
    with pytest.raises(PeerTimeoutError, match=r"no __1_0\.distcp within 0 s"):
        files.write_names(tmp_path, 2, {}, timeout_s=0)
    with pytest.raises(CheckpointError, match="given up"):
        files.write_names(tmp_path, 2, {}, timeout_s=60, cancelled=lambda: True)


def test_a_part_is_on_disk_before_it_has_its_name_and_all_files_before_the_manifest(tmp_path):
    box = files.Box("w", (0,), (4,), torch.arange(4.0))
    with recorded() as calls:
        files.write_part(tmp_path, 0, [box], {})
    assert calls == ["write draft", "flush draft", "rename draft -> __0_0.distcp"]
    with recorded() as calls:
        files.write_names(tmp_path, 1, {}, timeout_s=0)
    names = ("common.pt", "metadata.json", ".metadata", "manifest.json")
    assert [line for line in calls if line.startswith("flush")] == [
        f"flush {name}" for name in names
    ]
