"""A `Decoder` as a LLaMA of transformers, with the same modules under the same names, for tools that know LLaMA.

B batch, T time, E head size.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..models.decoder import Decoder, RotaryTable


class _Angles(nn.Module):
    """The rotary table of a `Decoder` in LLaMA's form, where sin is not negated in the first half."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (B, T, E) at positions (B, T), in the dtype of x."""
        cos, sin = self.table.cos[position_ids], self.table.sin[position_ids]
        negated, plain = sin.chunk(2, dim=-1)
        return cos.to(x.dtype), torch.cat((-negated, plain), dim=-1).to(x.dtype)


def as_llama(decoder: Decoder) -> LlamaForCausalLM:
    """Return a LLaMA that shares the modules of `decoder`, including those in place of a norm."""
    config = decoder.config
    with torch.device("meta"):  # every weight is replaced below
        llama = LlamaForCausalLM(
            LlamaConfig(
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
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    for name, module in list(llama.named_modules()):
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            llama.set_submodule(name, decoder.get_submodule(name))
    (table, *_) = (module for module in decoder.modules() if isinstance(module, RotaryTable))  # all blocks share it
    llama.set_submodule("model.rotary_emb", _Angles(table))
    return llama.eval()
