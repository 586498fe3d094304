"""Jobs of which a test says only what it is about."""

from relax_hpc.config import job_file


def tree_of(**sections):
    """A job's tables; `schedule__num_steps=3` sets schedule.num_steps, None leaves a table out."""
    tree = {
        "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"},
        "schedule": {"num_steps": 9},
    }  # fmt: skip
    for key, value in sections.items():
        *path, name = key.split("__")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return {name: table for name, table in tree.items() if table is not None}


def job_of(**sections):
    return job_file.validate(tree_of(**sections), source="job")
