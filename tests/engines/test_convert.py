"""`relax-hpc convert`: bitwise there and back, and what it refuses."""

import shutil
import sys

import pytest
from megatron_reference import mixture, narrow
from safetensors.torch import load_file, save_file
from trainers import equal, job, trajectories

from relax_hpc.cli import main as cli
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.checkpoints.convert import convert

ROWS, ADVANTAGES = trajectories(6)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {kind: tmp_path_factory.mktemp(kind) for kind in ("dense", "experts")}
    narrow(made["dense"])
    mixture(made["experts"])
    return made


def weights_in(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_hugging_face_to_megatron_and_back_is_bitwise_and_loads_with_transformers(
    models, tmp_path, kind
):
    from transformers import AutoModelForCausalLM

    conversion.to_megatron(models[kind], tmp_path / "megatron")
    conversion.to_hf(tmp_path / "megatron", models[kind], tmp_path / "hf")
    first = AutoModelForCausalLM.from_pretrained(models[kind]).state_dict()
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert equal(second, first)


@pytest.mark.parametrize(
    ("kind", "grid"),
    [("dense", "tp2"), ("dense", "pp2"), ("experts", "tp2_etp2"), ("experts", "dp2_ep2")],
)
def test_a_run_starts_from_a_converted_folder_and_its_checkpoint_converts_to_what_it_gives_away(
    ranks, models, tmp_path, kind, grid
):
    conversion.to_megatron(models[kind], tmp_path / "weights")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((models[kind] / "config.json").read_text())
    config = job(other, grid, budget=200)
    model = config.model.model_copy(update={"weights": tmp_path / "weights"})
    ranks[2].open_trainer(config=config.model_copy(update={"model": model}))
    ranks[2].train(rows=ROWS, advantages=ADVANTAGES)
    given = ranks[2].weights()[0]
    ranks[2].save(folder=tmp_path / "step")
    out = convert(tmp_path / "step", "hf", out=tmp_path / "hf", step=None, model=models[kind])
    assert equal(weights_in(out), given)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command line that must be refused; the one line that it said."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["relax-hpc", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        output, said = capsys.readouterr()
        assert (end.value.code, output) == (2, "")
        assert sorted(tmp_path.rglob("*")) == before
        (line,) = said.splitlines()
        return line

    return run


def test_what_convert_refuses_it_refuses_in_one_line_and_leaves_nothing(models, tmp_path, refused):
    assert "nowhere: no such run" in refused("nowhere", "--to", "hf")
    (tmp_path / "empty").mkdir()
    assert "empty: is there already" in refused(
        models["dense"], "--to", "megatron", "--out", "empty"
    )
    conversion.to_megatron(models["dense"], tmp_path / "step")
    said = refused("step", "--to", "hf", "--out", "x", "--model", models["experts"])
    assert "of another model" in said
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = job(models["dense"]).model_dump_json()
    (run / "run.json").write_text(config)
    (tmp_path / "step").rename(run / "checkpoints/step_00000003")
    assert "no checkpoint of step 4; there are 3" in refused("run", "--to", "hf", "--step", "4")


def test_two_conversions_into_one_folder_do_not_mix_and_the_later_is_told(
    models, tmp_path, monkeypatch
):
    """The other one begins and ends when the first tensor of a checkpoint goes out."""
    other, unpacked = tmp_path / "other", conversion.hf_stream.unpack
    shutil.copytree(models["dense"], other)
    weights = load_file(other / "model.safetensors")
    shifted = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(shifted, other / "model.safetensors", {"format": "pt"})
    conversion.to_megatron(models["dense"], tmp_path / "step")
    conversion.to_megatron(other, tmp_path / "other_step")
    out = tmp_path / "out"

    def unpack(parameter, tensor):
        monkeypatch.setattr(conversion.hf_stream, "unpack", unpacked)
        conversion.to_hf(tmp_path / "other_step", other, out)
        return unpacked(parameter, tensor)

    monkeypatch.setattr(conversion.hf_stream, "unpack", unpack)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"out: cannot be made: Directory not empty; name anoth"):
        conversion.to_hf(tmp_path / "step", models["dense"], out)
    assert equal(weights_in(out), weights_in(other))
    assert sorted(tmp_path.iterdir()) == sorted([*before, out])  # nobody leaves a draft
