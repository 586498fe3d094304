"""Brings each new policy version to every engine, by broadcast, shared GPU memory or files.

One version over NCCL, in reading order:

    trainer.megatron.adam     `update` writes the weights
    roles.actor.loop          `publish`, on every rank; `roles.actor.rank0` decides what is sent
    publish                   `Publisher` lists engines, has the first buckets gathered, writes the
                              roster as SYNCING
    trainer.megatron.hf_stream  `HfGather` fills flat buckets under Hugging Face names; the other
                              ranks give what rank 0 lacks (`TrainerRanks`)
    staging                   `Outgoing`: one bucket is sent while the next is filled
    broadcast                 `CollectiveTransport` forms the group where engines came or went,
                              pauses them, orders a version from each, and sends all buckets
    inference.client          `receive_weights`: the order travels as the name of an empty tensor
    inference.sglang.receive  `Receiver` takes bucket after bucket off the group
    inference.sglang.copies   `Copies` puts each tensor in its place
    publish                   engines resume as version b; the roster says ACTIVE

How engines join the group (`meeting`): rank 0 opens its store and invites each engine by MPI, by
records or by HTTP; the engine's task (`meeting.attendant`) has it join by SGLang's endpoint.

If rank 0 dies in between, the roster still says SYNCING. Its next start fences these engines
(`inference.members.EngineRegistry`), and their owners start them again (`roles.engine.host`).
"""
