"""A fixed batch by Hugging Face and torch: the truth that every grid must reach."""

from functools import partial

import numpy as np
import torch
from hf_logprobs import hf_logprobs
from trainers import VOCAB, batch_of, num_tokens, trajectories
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def dense(folder, *, tied=False, layers=2, seed=0):
    """A Qwen3 with random weights, norms too, so that a swapped norm is noticed; saved."""
    config = Qwen3Config(
        **SHAPE, intermediate_size=128, num_hidden_layers=layers, tie_word_embeddings=tied
    )
    return _save(Qwen3ForCausalLM, config, folder, seed)


def narrow(folder, *, tied=True, vocab=VOCAB):
    """A narrower one of four layers, quick to save."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=256,
        tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def mixture(folder, *, layers=2, experts=4, per_token=2, dense_layers=(), seed=0):
    """Makes a tiny Qwen3-MoE in `folder`."""
    config = Qwen3MoeConfig(
        **SHAPE, intermediate_size=128, moe_intermediate_size=32, num_experts=experts,
        num_experts_per_tok=per_token, norm_topk_prob=True, num_hidden_layers=layers,
        tie_word_embeddings=False, mlp_only_layers=list(dense_layers),
    )  # fmt: skip
    return _save(Qwen3MoeForCausalLM, config, folder, seed)


def _save(cls, config, folder, seed):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = cls(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def reference(folder, model, num_steps=2, num_rows=12):
    """What becomes of a batch of text; see `updated`."""

    def logprobs_of(row):
        return hf_logprobs(model, row.token_ids)

    batch = trajectories(num_rows)
    return updated(model, *batch, logprobs_of, hub_layout, num_steps, folder=folder)


def updated(model, rows, advantages, logprobs_of, layout, num_steps, **known):
    """Logprobs, gradients and weights of updates by torch's AdamW; `model` stays."""
    logprobs, gradients, steps = [], [], []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for step in range(num_steps):
        model.zero_grad()
        loss = torch.zeros(())
        for row, advantage in zip(rows, advantages, strict=True):
            values = logprobs_of(row)
            if step == 0:
                logprobs.append(values.detach().numpy().copy())
            loss = loss - float(advantage) * values[torch.from_numpy(row.loss_mask) > 0].sum()
        (loss / num_tokens(rows)).backward()
        gradients.append(layout({n: p.grad for n, p in model.named_parameters()}))
        adamw.step()
        steps.append(layout(dict(model.named_parameters())))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    mean_advantage = -sum(
        float(a) * int(row.loss_mask.sum()) for a, row in zip(advantages, rows, strict=True)
    ) / num_tokens(rows)
    norms = [np.sqrt(sum((g**2).sum() for g in step.values())) for step in gradients]
    return batch_of(
        rows, advantages, logprobs=logprobs, gradients=gradients, norms=norms, steps=steps,
        losses=[mean_advantage] * num_steps,  # the ratio to the policy itself is 1
        **known,
    )  # fmt: skip


def force_routes(model, rows):
    """Sends tokens of `rows` through a mixture's experts as their records say; see `replayed`.

    Returns:
        {(layer, row): [tokens] bool}, where the router would have chosen otherwise; it fills up.
    """
    layers = [(n, layer.mlp) for n, layer in enumerate(model.model.layers)]
    gates = [(n, mlp.gate) for n, mlp in layers if hasattr(mlp, "gate")]
    per_token, now, differs = gates[0][1].top_k, {}, {}
    by_tokens = {row.token_ids.tobytes(): place for place, row in enumerate(rows)}

    def begin(_module, _args, kwargs):
        tokens = kwargs["input_ids"][0].numpy().astype(np.int32)
        now["row"] = by_tokens[tokens.tobytes()]

    def forward(number, gate, hidden):
        logits = torch.nn.functional.linear(hidden, gate.weight)
        own = logits.topk(per_token).indices
        chosen = own.clone()
        known = replayed(rows[now["row"]], number, per_token, gate.num_experts)
        for token, experts in known.items():
            chosen[token] = torch.from_numpy(experts.astype(np.int64))
        other = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        differs[number, now["row"]] = other.numpy()
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for number, gate in gates:
        gate.forward = partial(forward, number, gate)
    return differs


def replayed(row, layer, per_token, num_experts):
    """{token: experts} of a layer; not of the last token, nor where the record is none."""
    if row.routed_experts is None:
        return {}
    records = row.routed_experts.reshape(len(row.token_ids), -1, per_token)[:-1, layer]
    return {
        token: experts
        for token, experts in enumerate(records)
        if len(set(experts.tolist()) & set(range(num_experts))) == per_token
    }


def hub_layout(tensors):
    """Numpy copies under the names of the files on the hub: a tensor per expert."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                prefix = name.replace("gate_up_proj", str(expert))
                gate, up = both.chunk(2)
                out[f"{prefix}.gate_proj.weight"], out[f"{prefix}.up_proj.weight"] = gate, up
        elif name.endswith("mlp.experts.down_proj"):
            for expert, down in enumerate(tensor):
                out[f"{name.replace('down_proj', str(expert))}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return {name: tensor.detach().numpy().copy() for name, tensor in out.items()}
