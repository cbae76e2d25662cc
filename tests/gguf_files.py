"""Small models of transformers as GGUF files, written by llama.cpp's own Python package."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

SIZES = {  # all different; a multiple of 32 is what packed blocks need
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "rms_norm_eps": 2.0**-10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def made(architecture: str = "llama", *, vocab_size: int = 48, **overrides) -> transformers.PreTrainedModel:
    """A random model that such a file can hold; no gain is 1 and no bias 0."""
    kind = getattr(transformers, CLASSES[architecture])
    extra = {"head_dim": 24} if architecture == "qwen3" else {}
    model = kind(kind.config_class(**{**SIZES, **extra, "vocab_size": vocab_size, **overrides}))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + name.endswith("norm.weight"))
    return model.eval()


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """The two numbers that a rotary embedding turns, side by side, as llama.cpp's converter lays them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    architecture: str = "llama",
    *,
    packed: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
    pre: str = "gpt-2",
    pair: bool = True,
    more: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    say=lambda writer: None,
) -> Path:
    """Write `model`; matrices of the blocks `packed`, and with `say` anything else about itself."""
    config = model.config
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture == "qwen3":
        writer.add_key_length(width)
        writer.add_value_length(width)
    else:
        writer.add_rope_dimension_count(width)
    say(writer)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, pre)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name in without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        stem, _, kind = name.rpartition(".")
        values, last = tensor.numpy(), stem.split(".")[-1]
        if architecture == "llama" and pair and last in heads:
            values = paired(values, heads[last])
        into = packed if values.ndim == 2 and ".layers." in name else gguf.GGMLQuantizationType.F32
        packed_values = gguf.quants.quantize(np.ascontiguousarray(values), into)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", packed_values, raw_dtype=into)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: transformers.PreTrainedTokenizerFast, pre: str) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
