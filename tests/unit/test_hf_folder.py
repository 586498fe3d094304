"""Folders with new weights: complete, or not there."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from relax_hpc import storage
from relax_hpc.checkpoints.export import save_hf
from relax_hpc.models import hf_folder


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text('{"vocab_size": 3, "torch_dtype": "bfloat16"}')
    for name in ("tokenizer.json", "model.safetensors", "model.safetensors.index.json", "x.gguf"):
        (folder / name).write_text("old")
    return folder


WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4), "c": torch.zeros(2)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_the_new_weights_and_the_small_files_of_its_source(tmp_path, source):
    save_hf(tmp_path / "new", iter(WEIGHTS.items()), source, write=True)
    assert names(tmp_path / "new") == ["config.json", "model.safetensors", "tokenizer.json"]
    loaded = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config == {"vocab_size": 3, "torch_dtype": "float32"}
    assert names(tmp_path) == ["new", "source"]


def test_many_weights_are_cut_into_files_with_an_index(tmp_path, source):
    save_hf(tmp_path / "new", iter(WEIGHTS.items()), source, write=True, shard_bytes=30)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {"b": first, "a": second, "c": second},
    }
    for file, part in ((first, {"b"}), (second, {"a", "c"})):
        loaded = load_file(tmp_path / "new" / file)
        assert loaded.keys() == part
        assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in part)


def test_views_of_one_tensor_are_stored_apart(tmp_path, source):
    both = torch.arange(12.0).view(6, 2)
    views = {"upper": both[:3], "lower": both[3:], "column": both[:, 1]}
    hf_folder.write(tmp_path / "new", views.items(), source)
    loaded = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(loaded[name], views[name]) for name in views)


def test_an_interrupted_export_leaves_what_was_there(tmp_path, source):
    def broken():
        yield "a", torch.zeros(4)
        raise RuntimeError("a rank died")

    new = tmp_path / "new"
    with pytest.raises(RuntimeError):
        save_hf(new, broken(), source, write=True)
    assert not new.exists()
    save_hf(new, iter(WEIGHTS.items()), source, write=True)
    with pytest.raises(RuntimeError):
        save_hf(new, broken(), source, write=True)
    assert load_file(new / "model.safetensors").keys() == WEIGHTS.keys()
    save_hf(new, iter({"d": torch.ones(1)}.items()), source, write=True)
    assert load_file(new / "model.safetensors").keys() == {"d"}
    assert names(tmp_path) == ["new", "source"]


def test_ranks_that_do_not_write_read_the_stream_to_its_end(tmp_path, source):
    stream = iter(WEIGHTS.items())
    save_hf(tmp_path / "new", stream, source, write=False)
    assert next(stream, None) is None
    assert not (tmp_path / "new").exists()


def test_an_export_of_a_run_waits_for_room(tmp_path, source, monkeypatch):
    left, save = [2], hf_folder.save_file

    def full(*args, **settings):
        if left[0]:
            left[0] -= 1
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(*args, **settings)

    monkeypatch.setattr(hf_folder, "save_file", full)
    with pytest.raises(OSError, match="No space left"):  # a command waits for nothing
        hf_folder.write(tmp_path / "new", WEIGHTS.items(), source)
    left[0] = 2
    storage.settle(60)
    try:
        hf_folder.write(tmp_path / "new", WEIGHTS.items(), source)
    finally:
        storage.settle(0)
    assert left == [0]
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == WEIGHTS.keys()


def test_another_error_of_safetensors_stays_one(tmp_path, source, monkeypatch):
    def broken(*_, **__):
        raise SafetensorError("no such type")

    monkeypatch.setattr(hf_folder, "save_file", broken)
    with pytest.raises(SafetensorError, match="no such type"):
        hf_folder.write(tmp_path / "new", WEIGHTS.items(), source)
