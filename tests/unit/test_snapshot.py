"""Snapshots: written by all ranks side by side, whole or not there, whoever dies meanwhile."""

import errno
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from snapshot_process import KILLED_AT, in_a_process, model, specs_of, write, write_and_die

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import SnapshotError
from relax_hpc.runtime.comm.bucket import Spec
from relax_hpc.runtime.comm.world import SoloWorld, connect
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.trainer.models import weight_files
from relax_hpc.trainer.models.weight_files import (
    MANIFEST,
    FileReader,
    FileRecord,
    Manifest,
    checksum,
    plan_files,
)
from relax_hpc.weights.quantize import Quantizer, quantize
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import TrainerRanks


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    (folder / "model.safetensors").write_text("old weights")
    return folder


def with_ranks(size, folder, call):
    """Runs `call(world)` as all ranks of a world; what it returned, by rank."""
    rendezvous, secret = folder / f"rendezvous-{os.urandom(4).hex()}", RunSecret.new()

    def run(rank):
        world = connect(
            "files", rank=rank, size=size, rendezvous=rendezvous, secret=secret, timeout_s=30
        )
        returned = call(world)
        world.barrier()
        return returned

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def loaded(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_every_tensor_goes_to_the_rank_that_has_the_least_so_far():
    sizes = {"a": 4, "b": 1, "c": 2, "d": 2, "e": 3}
    specs = [Spec(name, torch.float32, (size,)) for name, size in sizes.items()]
    plan = plan_files(specs, 2)
    # a -> 0 (16 bytes), b -> 1 (4), c -> 1 (12), d -> 1 (20), e -> 0 (28).
    assert [[s.name for s in file.specs] for file in plan] == [["a", "e"], ["b", "c", "d"]]
    assert [(file.writer, file.num_bytes) for file in plan] == [(0, 28), (1, 20)]
    small = plan_files(specs, 2, max_bytes=12)
    assert [[s.name for s in file.specs] for file in small] == [["a"], ["e"], ["b", "c"], ["d"]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("file_bytes", [40, 1 << 30])
def test_what_ranks_write_together_is_the_model(tmp_path, source, size, file_bytes):
    tensors = model()
    snapshot = with_ranks(
        size,
        tmp_path,
        lambda w: write(w, source, 7, tensors, tmp_path / "w", file_bytes=file_bytes),
    )[0]
    assert snapshot.folder.name.startswith("v000007-")
    assert_equal(loaded(snapshot.folder), tensors)
    index = json.loads((snapshot.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(snapshot.folder / file)
    manifest = Manifest.read(snapshot.folder)
    assert manifest == snapshot.manifest and manifest.version == 7
    assert manifest.find_damaged(snapshot.folder) == []
    assert (snapshot.folder / "config.json").exists()


def test_a_reader_finds_the_tensors_in_order_and_the_checksum_of_the_manifest(tmp_path, source):
    tensors = model()
    snapshot = write(SoloWorld(), source, 1, tensors, tmp_path / "w")
    found = {}
    for name, record in snapshot.manifest.files.items():
        reader = FileReader(snapshot.folder / name)
        for bucket, content in reader.buckets(30):
            start = 0
            for spec in bucket:
                found[spec.name] = content[start : start + spec.nbytes]
                start += spec.nbytes
        assert reader.checksum == record.crc32
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], tensor.contiguous().view(-1).view(torch.uint8).numpy())


def test_checksums_come_in_the_order_of_the_files_whoever_wrote_them_first():
    files = {"model-00002": FileRecord(8, 22), "model-00001": FileRecord(8, 11)}
    assert Manifest(3, files).checksums == [11, 22]


def test_a_file_that_was_changed_or_is_missing_is_damaged(tmp_path, source):
    snapshot = write(SoloWorld(), source, 1, model(), tmp_path / "w", file_bytes=60)
    first, second, *_ = sorted(snapshot.manifest.files)
    content = bytearray((snapshot.folder / first).read_bytes())
    content[-1] ^= 1
    (snapshot.folder / first).write_bytes(content)
    (snapshot.folder / second).unlink()
    assert snapshot.manifest.find_damaged(snapshot.folder) == [first, second]
    # By hand: the CRC-32 of "123456789", as every table of them has it.
    (tmp_path / "x").write_bytes(b"123456789")
    assert checksum(tmp_path / "x") == FileRecord(9, 0xCBF43926)


def test_a_quantised_snapshot_has_weights_and_scales_and_says_so(tmp_path, source):
    weight = torch.randn(130, 260, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {"0.q_proj.weight": weight, "0.norm.weight": weight[0], "1.q_proj.weight": weight}
    config = WeightsConfig(quantize="fp8", advanced={"modules_to_not_convert": ["1"]})
    quantizer = Quantizer(config)
    folder = with_ranks(
        3, tmp_path, lambda w: write(w, source, 1, tensors, tmp_path / "w", quantizer=quantizer)
    )[0].folder
    quantized, scales = quantize(weight)
    wanted = tensors | {"0.q_proj.weight": quantized, "0.q_proj.weight_scale_inv": scales}
    assert_equal(loaded(folder), wanted)
    said = json.loads((folder / "config.json").read_text())
    assert said == {"dtype": "bfloat16", "quantization_config": config.quantization_config}


def test_two_are_kept_and_one_that_is_being_loaded(tmp_path, source):
    root, tensors = tmp_path / "w", model()
    writer, folders = SnapshotWriter(root, specs_of(tensors), SoloWorld(), source), []
    ranks = TrainerRanks(SoloWorld(), writer, {})
    for version in range(5):
        in_use = folders[:1]
        snapshot = ranks.write_snapshot(version, iter(tensors.items()), in_use=in_use)
        folders.append(snapshot.folder)
        assert sorted(root.iterdir()) == sorted({*in_use, *folders[-2:]})
    # A trainer that resumed from an older checkpoint makes versions again, under other names.
    again = ranks.write_snapshot(2, iter(tensors.items()), in_use=())
    assert sorted(root.iterdir()) == sorted([folders[4], again.folder])
    # Then those that it left are older than its own, whatever they are called.
    next_one = ranks.write_snapshot(3, iter(tensors.items()), in_use=())
    assert sorted(root.iterdir()) == sorted([again.folder, next_one.folder])


def test_what_is_left_of_a_snapshot_that_was_half_deleted_is_deleted_by_the_next_trainer(
    tmp_path, source
):
    root = tmp_path / "w"
    halves = [write(SoloWorld(), source, version, model(), root).folder for version in (1, 2)]
    for folder in halves:
        (folder / MANIFEST).unlink()
    whole = write(SoloWorld(), source, 3, model(), root).folder
    again = write(SoloWorld(), source, 3, model(), root).folder
    assert sorted(root.iterdir()) == sorted([whole, again])


def test_a_disk_that_is_full_on_one_rank_is_named_and_leaves_nothing(tmp_path, source):
    root, tensors = tmp_path / "w", model()

    class FullDisk(weight_files.FileIO):
        def write(self, content):
            if "00002-of" in str(self.name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    def publish(world):
        taken = []
        stream = (taken.append(each[0]) or each for each in tensors.items())
        ranks = TrainerRanks(world, SnapshotWriter(root, specs_of(tensors), world, source), {})
        if world.rank:
            ranks.publish(stream)
        else:
            with pytest.raises(SnapshotError, match=rf"^{root}: v1 .* rank 0: .*No space left"):
                ranks.write_snapshot(1, stream, in_use=())
        return taken

    with mock.patch.object(weight_files, "FileIO", FullDisk):
        taken = with_ranks(3, tmp_path, publish)
    assert taken == [list(tensors)] * 3  # else the other ranks would wait in the gather
    assert list(root.iterdir()) == []
    assert with_ranks(3, tmp_path, lambda w: write(w, source, 1, tensors, root))[0].folder.is_dir()


@pytest.mark.parametrize("point", KILLED_AT)
def test_a_trainer_killed_while_it_writes_leaves_nothing_torn(tmp_path, source, point):
    root, old, new = tmp_path / "w", model(), model(2.0)
    first = write(SoloWorld(), source, 1, old, root).folder
    assert in_a_process(write_and_die, source, root, point) == -signal.SIGKILL
    seen = sorted(path for path in root.iterdir() if path.name.startswith("v"))
    assert len(seen) == (2 if point == "end" else 1)
    assert_equal(loaded(seen[0]), old)
    for folder in seen:
        assert Manifest.read(folder).find_damaged(folder) == []
    again = write(SoloWorld(), source, 2, new, root).folder
    assert_equal(loaded(again), new)
    left = sorted(root.iterdir())
    assert left == sorted([again, seen[-1]])
    assert (first in left) == (point != "end")
