"""Our decoder's weights under transformers' names: an oracle for the small random decoder and for the trained one."""

import torch

OUTSIDE = {"words": "model.embed_tokens", "norm": "model.norm"}
INSIDE = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm",
}  # fmt: skip


def to_halves(weight, heads):
    """Rows whose neighbours turn together, put in the order in which row t turns with row t + d_head/2."""
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in weight.chunk(heads)])


def llama_weights(model, heads, kv_heads):
    """The state dict of a LlamaForCausalLM; the counts of heads are the caller's, not the model's own word."""
    weights = {"lm_head.weight": model.words.weight.detach()}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in OUTSIDE:
            weights[f"{OUTSIDE[module]}.{kind}"] = tensor
            continue
        _, number, inner = module.split(".")
        rows = {"query": heads, "key": kv_heads}.get(inner)
        weights[f"model.layers.{number}.{INSIDE[inner]}.{kind}"] = to_halves(tensor, rows) if rows else tensor
    return weights
