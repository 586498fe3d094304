"""Everything that must be true of a run, whatever died in it."""

import shutil
from contextlib import closing

import crash_roles
from bus_fixtures import SIBLINGS

from relax_hpc.bus.audit import audit
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader


class _Nobody:
    """A role's view of itself, where nothing is counted."""

    stage = ""

    @property
    def points(self):
        return self

    def turn(self):
        pass

    def wait(self):
        raise AssertionError("a replay waits for something")


def missing_files(world):
    """Lists missing files that a run needs that resumes from the oldest checkpoint that is kept."""
    chain = read_chain(world.bus)
    step = min((state["step"] for state in crash_roles.valid_states(world, chain)), default=0)
    files = set()
    for record in chain.steps:
        if record.step > step:
            files.update(world.bus.shard(*part[:3]) for part in record.parts)
            for roles in record.sidecars.values():
                files.update(world.bus.shard(*sidecar[:3]) for sidecar in roles.values())
    return sorted(str(file) for file in files if not file.exists())


def problems(world):
    """Lists what is wrong with a run that has ended and been tidied up."""
    state = crash_roles.newest_state(world)
    found = []
    if state["step"] != crash_roles.STEPS:
        found.append(f"the last checkpoint is of step {state['step']}")
    guids = [guid for step in state["guids"] for guid in step]
    expected = [guid for batch in world.batches for guid in batch]
    if sorted(guids) != expected or {len(g) for g in state["guids"]} != {crash_roles.P}:
        found.append(f"trained on prompts {state['guids']}")
    setup = world.setup
    if setup.over_age == "wait" and setup.portion_tokens == float("inf"):
        if state["chain"] != crash_roles.expected_chain(world):
            found.append("the trainer's state is not that of an undisturbed run")
    elif setup.over_age == "wait":
        wrong = [s for s, g in enumerate(state["guids"]) if sorted(g) != world.batches[s]]
        found += [f"step {s + 1} was trained on {state['guids'][s]}" for s in wrong]
    if state["chain"] != replayed(world):
        found.append("the trainer's state is not that of a replay of the plan")
    return found + accounts(world) + left_over(world)


def accounts(world):
    """Every trajectory that was committed is accounted for, once."""
    counts = audit(world.bus)
    explained = counts.planned + counts.duplicates + counts.over_age + counts.damaged
    explained += counts.skipped
    wanted, skipped = (
        crash_roles.P * crash_roles.STEPS * SIBLINGS,
        sum(map(world.is_flat, range(world.num_groups))),
    )
    found = (counts.planned, counts.skipped, counts.planned_twice, counts.dropped)
    if found != (wanted, skipped * SIBLINGS, 0, 0):
        return [f"lost or doubled: {counts}"]
    return [] if counts.committed == explained else [f"does not add up: {counts}"]


def left_over(world):
    """Files that nobody needs any more."""
    shards = world.bus.root.glob("p/*/f*/*")
    drafts = world.bus.root.rglob(".*.tmp")
    return [f"left over: {file.relative_to(world.root)}" for file in sorted({*shards, *drafts})]


def replayed(world):
    """The state of a trainer that reads the whole plan undisturbed, from shards that were kept."""
    copy = crash_roles.World(world.root / "replay", world.setup)
    shutil.copytree(world.root / "bus", copy.root / "bus")
    if (world.root / "archive").exists():
        shutil.copytree(world.root / "archive", copy.root, dirs_exist_ok=True)
    for snapshot in copy.bus.plan.glob("snap.*"):
        snapshot.unlink()
    state = {"step": 0, "chain": [], "guids": []}
    with crash_roles.open_sequencer(copy, None) as sequencer, closing(Reader(copy.bus)) as reader:
        for step in range(1, crash_roles.STEPS + 1):
            crash_roles.train_step(copy, _Nobody(), sequencer, reader, state, step)
    return state["chain"]
