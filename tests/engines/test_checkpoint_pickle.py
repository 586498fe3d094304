"""Checkpoints that somebody else made: what they hold is read, and nothing of it is run."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from relax_hpc.errors import CheckpointError, PeerTimeoutError
from relax_hpc.runtime.files.records import checksum
from relax_hpc.trainer.megatron import checkpoint_files
from relax_hpc.trainer.megatron.checkpoint_files import (
    Box,
    StoredCheckpoint,
    write_names,
    write_part,
)


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def write(folder, objects=None):
    folder.mkdir()
    write_part(folder, 0, [Box("w", (0,), (3,), torch.arange(3.0))], objects or {})
    write_names(folder, 1, {"step": 1}, timeout_s=0)
    return folder


def replace(folder, name, content):
    """Replaces a file as whoever made the folder would: the manifest fits."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "crc32c": checksum(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(("name", "dump"), [(".metadata", pickle.dumps), ("common.pt", saved)])
def test_a_checkpoint_that_would_run_something_is_refused_by_its_name_and_runs_nothing(
    tmp_path, name, dump
):
    folder = write(tmp_path / "theirs")
    content = dump(Bomb(tmp_path / "exploded"))
    replace(folder, name, content)
    with pytest.raises(CheckpointError) as refused:
        StoredCheckpoint(folder)
    assert str(refused.value).startswith(f"{folder / name}: holds {open.__module__}.open, which no")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded"))).close()  # it would have
    assert (tmp_path / "exploded").exists()


def test_a_random_state_that_would_run_something_is_not_run_either(tmp_path):
    from relax_hpc.trainer.megatron.checkpoint_part import _object

    folder = write(tmp_path / "theirs", {"rng": saved([Bomb(tmp_path / "exploded")])})
    with pytest.raises(CheckpointError, match=r"holds \S+\.open, which no checkpoint"):
        _object(StoredCheckpoint(folder), "rng")
    assert not (tmp_path / "exploded").exists()


class Attribute:
    """An attribute of something that is on the list, as some releases of Python name an enum's."""

    def __init__(self, owner, name):
        self.of = owner, name

    def __reduce__(self):
        return getattr, self.of


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (Attribute(TensorProperties, "__init__"), "builtins.getattr"),
        (torch.hub.load, "torch.hub.load"),
        (torch.load, "torch.serialization.load"),
        (Path("/etc"), r"pathlib\S*\.PosixPath"),
    ],
)
def test_nothing_is_taken_from_the_modules_of_what_is_known(tmp_path, held, named):
    folder = write(tmp_path / "theirs")
    replace(folder, ".metadata", pickle.dumps(held))
    with pytest.raises(CheckpointError, match=f"holds {named}, which no checkpoint"):
        StoredCheckpoint(folder)


@pytest.mark.parametrize("protocol", [4, 5])
def test_metadata_of_torch_is_read_with_all_its_fields(tmp_path, protocol):
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

    folder = write(tmp_path / "ours", {"object": b"abc"})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_meta = StorageMeta("x", "y", "z", ["m"])
    metadata.planner_data = {
        "w": ("w",),
        "f": Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"),
    }
    other = next(iter(metadata.state_dict_metadata.values()))
    other.properties = TensorProperties(torch.float32, memory_format=torch.channels_last)
    replace(folder, ".metadata", pickle.dumps(metadata, protocol))
    stored = StoredCheckpoint(folder)
    assert torch.equal(stored.tensor("w"), torch.arange(3.0))
    assert stored.object("object") == b"abc"


@pytest.mark.parametrize("content", [b"", b"abc", pickle.dumps([1]), pickle.dumps({})[:-1]])
def test_metadata_that_is_none_is_damage_in_one_line(tmp_path, content):
    folder = write(tmp_path / "torn")
    replace(folder, ".metadata", content)
    with pytest.raises(CheckpointError, match=r"\.metadata: is damaged: .+") as refused:
        StoredCheckpoint(folder)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_names_no_files_outside_of_itself(tmp_path):
    folder, other = write(tmp_path / "theirs"), write(tmp_path / "ours")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (where,) = metadata.storage_data.values()
    where.relative_path = f"../{other.name}/{where.relative_path}"
    replace(folder, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        StoredCheckpoint(folder).tensor("w")
    replace(folder, "../ours/common.pt", b"x")
    with pytest.raises(CheckpointError, match=r"names '\.\./ours/common\.pt'"):
        StoredCheckpoint(folder)


def test_parts_of_ranks_that_hold_for_a_full_disk_are_waited_for(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(checkpoint_files, "is_short", lambda: looks.append(None) or len(looks) < 4)
    with pytest.raises(PeerTimeoutError, match=r"no .* within 0 s"):
        write_names(tmp_path, 2, {"step": 1}, timeout_s=0.1)
    assert len(looks) == 4
