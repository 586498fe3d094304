"""Token ids that end a sequence, as engines take them from a Hugging Face folder."""

from pathlib import Path

from relax_hpc import user_files


def ends_of(folder: Path) -> frozenset[int]:
    """Those of config.json and generation_config.json; none where a file is missing.

    Raises:
        ConfigError: one of them is not a JSON object.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            eos = user_files.read_object(folder / name, "download it again").get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
