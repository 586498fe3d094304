"""The tower of Qwen3-Omni that hears gives the features and the gradients of Hugging Face's."""

import pytest
import torch

from relax_hpc.data.media.extent import audio_tokens
from relax_hpc.trainer.models.architecture import AudioArchitecture, SoundWindow, windows_of
from relax_hpc.trainer.models.towers import SoundTower

SHAPE = AudioArchitecture(
    num_layers=2, hidden_size=48, ffn_hidden_size=80, num_heads=2, bins=20, channels=6, chunks=2,
    out_size=40,
)  # fmt: skip
LENGTHS = [3, 30, 99, 100, 101, 130, 200, 201, 407, 650]
"""Mel frames: less than a chunk, whole ones, and parts of a chunk and of a window of two."""


def theirs(shape):
    from transformers import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    torch.manual_seed(0)
    config = Qwen3OmniMoeAudioEncoderConfig(
        encoder_layers=shape.num_layers, d_model=shape.hidden_size, num_mel_bins=shape.bins,
        encoder_ffn_dim=shape.ffn_hidden_size, encoder_attention_heads=shape.num_heads,
        downsample_hidden_size=shape.channels, output_dim=shape.out_size,
        n_window_infer=100 * shape.chunks,
    )  # fmt: skip
    model = Qwen3OmniMoeAudioEncoder(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


@pytest.fixture(scope="module")
def towers():
    other, own = theirs(SHAPE), SoundTower(SHAPE)
    own.load_state_dict(other.state_dict())
    return other, own


def sound(frames):
    return torch.randn(SHAPE.bins, frames, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("recompute", [False, True])
def test_features_and_gradients_of_several_sounds_are_hugging_faces(towers, recompute):
    """Ours of all sounds at once, theirs of one after the other: a batch would pad short ones."""
    other, own = towers
    above = {frames: sound(audio_tokens(frames, 100) * 2).T for frames in LENGTHS}
    other.zero_grad(), own.zero_grad()
    features = []
    for frames in LENGTHS:
        features += [other(sound(frames), feature_lens=torch.tensor([frames])).last_hidden_state]
        features[-1].backward(above[frames].reshape(-1, SHAPE.out_size))
    windows = [each for frames in LENGTHS for each in windows_of(frames, SHAPE.chunks)]
    found = own(torch.cat([sound(n) for n in LENGTHS], 1), windows, recompute=recompute)
    assert (found - torch.cat(features)).abs().max() < 2e-6 * found.abs().max()
    found.backward(torch.cat([above[n].reshape(-1, SHAPE.out_size) for n in LENGTHS]))
    expected, gradients = (
        {name: parameter.grad for name, parameter in model.named_parameters()}
        for model in (other, own)
    )
    assert gradients.keys() == expected.keys()
    for name, theirs_ in expected.items():
        # What is added to all keys alike changes no attention: its gradient is rounding.
        of = name.replace("k_proj.bias", "k_proj.weight")
        scale = expected[of].abs().max()
        assert (gradients[name] - theirs_).abs().max() < 6e-6 * scale, name


def test_windows_by_hand():
    assert windows_of(30, 2) == [SoundWindow(30, 30)]
    assert windows_of(430, 2) == [
        SoundWindow(200, 100),
        SoundWindow(200, 100),
        SoundWindow(30, 100),
    ]
    # 30 frames are 15, 8, then 4 tokens; a chunk of 100 is 50, 25, 13.
    assert [window.tokens for window in windows_of(430, 2)] == [26, 26, 4]
    for frames in range(1, 400):
        tokens = sum(window.tokens for window in windows_of(frames, 2))
        assert tokens == audio_tokens(frames, 100), frames
