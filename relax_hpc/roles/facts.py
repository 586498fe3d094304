"""Reads what the checks of a job look at: each thing once, when a check needs it first."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.runtime.files import records
from relax_hpc.trainer.models import fields, registry
from relax_hpc.trainer.models.architecture import Architecture

log = logging.getLogger(__name__)


class Facts:
    """The models that a job names, by their folders."""

    def __init__(self, policy: Path) -> None:
        self._policy = policy
        self.config = cache(ConfigJson)
        self.architecture = cache(lambda folder: registry.architecture_of(self.config(folder)))
        self.tell_doubts = cache(self._tell_doubts)
        self.check_weights = cache(self._check_weights)
        self.tokens = cache(_read_tokens)

    @property
    def shape(self) -> Architecture:
        """The policy's architecture."""
        return self.architecture(self._policy)

    def _tell_doubts(self, folder: Path) -> None:
        for doubt in fields.doubts(self.config(folder)):
            log.warning("%s", doubt)

    def _check_weights(self, folder: Path) -> None:
        """Checks that a folder holds all of the model's tensors, as its config.json describes."""
        # With safetensors, which commands that look at no weights do without.
        from relax_hpc.trainer.models.hf_files import HfFiles, check_names, check_shapes

        shape = self.architecture(folder)
        with HfFiles(folder, framework="np") as files:
            check_names(files, shape, registry.parameters(shape))
            check_shapes(files, registry.parameters(shape))


def _read_tokens(folder: Path) -> dict[str, int]:
    """Returns token -> number of a tokenizer.json, with added ones; empty if there is none."""
    found: dict[str, Any] = records.read_json(folder / "tokenizer.json") or {}
    known = found.get("model", {}).get("vocab", {})
    added = {each["content"]: each["id"] for each in found.get("added_tokens", [])}
    return {**(known if isinstance(known, dict) else {}), **added}
