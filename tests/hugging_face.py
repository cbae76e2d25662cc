"""transformers' LLaMA of the same shape as ours."""

import builders
import torch
import transformers


def hugging_face(config, dtype=torch.float32):
    """A LlamaForCausalLM of the same shape with random weights, none of them small."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_head,
        )
    )
    builders.randomise(model, seed=6)
    return model.to(dtype).eval()
