"""Runs inside SGLang: compares the weights with those of a snapshot."""

from pathlib import Path

import torch
from torch import Tensor, nn

from relax_hpc.comm.orders import Receipt
from relax_hpc.engines.sglang.copies import LoadWeights, NotPureError, record, uncovered
from relax_hpc.models.weight_files import FileReader, Manifest

_BUCKET_BYTES = 1 << 28


def compare(model: nn.Module, folder: Path) -> Receipt:
    """Reads all files, and looks for their contents where the model's loader would put them.

    Returns:
        Checksums of the files as they were read; how many slices of parameters differ from them;
        as `fallback`, what could not be compared.

    Raises:
        ValueError: the folder has no manifest.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ValueError(f"{folder} is not complete")
    load_weights: LoadWeights = getattr(model, "load_weights")  # noqa: B009
    device = next(model.parameters()).device
    receipt, targets = Receipt(), list[Tensor]()
    for name in sorted(manifest.files):
        file = FileReader(folder / name)
        for bucket, content in file.buckets(_BUCKET_BYTES):
            flat = torch.from_numpy(content).to(device)
            try:
                copies = record(load_weights, flat, bucket)
            except NotPureError as error:
                receipt.fallback.append(f"{bucket[0].name} and on: {error}")
                continue
            receipt.differing += copies.differing()
            targets += copies.targets
        receipt.fingerprints.append(file.checksum)
    if missing := uncovered(model, targets) if not receipt.fallback else []:
        receipt.fallback.append(f"nothing is known to be copied to {', '.join(missing[:3])}")
    return receipt
