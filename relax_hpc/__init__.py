"""Slurm-native asynchronous RL post-training.

One trajectory, in reading order:

    prompts.source            a prompt group is drawn from the data; its ordinal names it for ever
    bus.staleness             may its batch start, given the policy the engine holds?
    roles.rollout             an engine samples G siblings, a reward scores them
    bus.producer              groups become an immutable shard; the log record makes it exist
    bus.sequencer             the batch of step b is decided, once, and written down
    bus.reader                the rows of the batch are read where they are needed
    algorithms.advantages     rewards become advantages
    roles.actor               one optimizer step, one new policy
    weights.publish           engines pause in place, receive version b, go on
    bus.sequencer (credits)   the checkpoint covers the batch; its owner deletes the shard

`schema.COLUMNS` says which role writes which array. `docs/tour.md` shows what each stop leaves on
disk, and `tests/unit/test_tour.py` runs the circle.
"""
