"""Environment variables that CUDA and torch read when a trainer starts."""

TRAINER_ENVIRONMENT = {
    # With several queues to the GPU a sum over ranks that is to overlap with a product may start
    # after it: Megatron insists on one.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Segments that grow keep packed micro-batches, each of another size, from cutting memory into
    # pieces.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
