"""Run directories with trajectories that say what a test wants to see."""

import numpy as np
from bus_fixtures import PRODUCERS, trajectory
from job_trees import job_of

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.cli.demo import models
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import PromptGroup

SCRIPT = "<script>alert(1)</script>"
_TOKENS = models.tokenizer()


def empty_run(root, model, **sections):
    """A run directory whose bus is empty."""
    paths = RunPaths(root)
    paths.root.mkdir()
    job = job_of(model__path=str(model), schedule__num_steps=1, **sections)
    paths.config.write_text(job.model_dump_json())
    layout.create(paths.bus, PRODUCERS, {})
    return paths


def said(text, guid=0, sibling=0, *, prompt="1+1=", version=3, **fields):
    """A trajectory with this text as its response."""
    given, answer = (_TOKENS.encode(each, add_special_tokens=False) for each in (prompt, text))
    row = trajectory(guid, sibling, version=version, prompt=len(given), response=len(answer))
    return row._replace(token_ids=np.array(given + answer, np.int32), **fields)


def put(run, *groups, producer=PRODUCERS[0]):
    with Producer(run.bus, producer, {}) as opened:
        for rows in groups:
            opened.put([PromptGroup(rows[0].guid, list(rows))])
