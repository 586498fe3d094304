"""The times at which a trainer is saved, and how much of it is kept."""

from pydantic import BaseModel

from relax_hpc.sections import SETTINGS, NonNegative, Positive


class SavingConfig(BaseModel):
    model_config = SETTINGS

    save_every: Positive = 10
    """Steps between checkpoints; shards are kept until the next one. Training goes on while one is
    written, out of a copy in host memory that is taken at the start: about 14 bytes per parameter
    of the model, divided by the number of ranks."""
    keep_checkpoints: Positive = 2
    """The newest ones, which a run can be resumed from."""
    keep_every: NonNegative = 0
    """A checkpoint whose step is a multiple of it is kept for good; 0 keeps none."""
    save_hf_every: NonNegative = 0
    """Steps between exports of the model as a Hugging Face folder, hf/step_<step>; 0 makes none."""
