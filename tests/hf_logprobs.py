"""Logprobs by Hugging Face."""

import numpy as np
import torch


def hf_logprobs(model, token_ids, temperature=1.0):
    """[tokens] nats, 0 for the first."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0] / temperature
    values = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), values])
