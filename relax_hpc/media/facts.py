"""The header of a medium: how large it is, without its content being decoded."""

from typing import NamedTuple

from relax_hpc.media.kinds import Modality
from relax_hpc.schema import MediaKind


class Facts(NamedTuple):
    """The header of a medium; zeros where its modality has no such thing."""

    modality: Modality
    kind: MediaKind
    height: int = 0
    """Pixels, as it is shown: turned where it says so."""
    width: int = 0
    num_frames: int = 0
    """Frames of a video."""
    fps: float = 0.0
    """Frames per second of a video, on average."""
    num_samples: int = 0
    """Samples of a sound, of each channel."""
    sampling_rate: int = 0
    """Samples per second of a sound."""
