"""The engine CTranslate2, for which the checkpoint is converted in memory."""

# pyright: reportMissingImports=false
# Its packages are in the environment of the rivals.
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters.utils import fuse_linear
from ctranslate2.specs import TransformerDecoderModelSpec, common_spec

from .weights import Weights, read_weights


class CTranslate2:
    """One generator of CTranslate2."""

    def __init__(self, folder: Path, *, threads: int, weights: str) -> None:
        checkpoint = read_weights(folder)
        with tempfile.TemporaryDirectory() as made:
            _spec(checkpoint).save(made)
            self._generator = ctranslate2.Generator(made, compute_type=weights, intra_threads=threads)
        if not self._generator.compute_type.startswith(weights):  # int8_float32 is int8 weights
            raise RuntimeError(f"it computes in {self._generator.compute_type} where {weights} was asked for")
        self.facts = {"release": f"ctranslate2 {version('ctranslate2')}"}

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        times: list[float] = []
        (found,) = self._generator.generate_batch(
            [_words(prompt)],
            max_length=new_tokens,
            min_length=new_tokens,
            beam_size=1,
            include_prompt_in_result=False,
            callback=lambda step: times.append(time.perf_counter()),  # None: go on
        )
        return list(found.sequences_ids[0]), times[-1] - times[0]

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        found = self._generator.score_batch([_words(window) for window in windows])
        losses = [-logprob for scored in found for logprob in scored.log_probs]
        assert len(losses) == sum(len(window) - 1 for window in windows)
        return sum(losses) / len(losses)


def _words(tokens: Sequence[int]) -> list[str]:
    return [f"<{token}>" for token in tokens]


def _spec(checkpoint: Weights) -> Any:
    config, tensors = checkpoint.config, checkpoint.tensors
    grouped = config["n_kv_head"] != config["n_head"]
    made = TransformerDecoderModelSpec.from_config(
        config["n_layer"],
        config["n_head"],
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_theta"],
        num_heads_kv=config["n_kv_head"] if grouped else None,
    )
    made.config.layer_norm_epsilon = config["norm_eps"]
    decoder = made.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = tensors["model.norm.weight"]
    decoder.projection.weight = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for index, layer in enumerate(decoder.layer):
        block = f"model.layers.{index}"
        layer.self_attention.layer_norm.gamma = tensors[f"{block}.input_layernorm.weight"]
        layer.ffn.layer_norm.gamma = tensors[f"{block}.post_attention_layernorm.weight"]
        fuse_linear(
            layer.self_attention.linear[0],
            [_linear(tensors[f"{block}.self_attn.{name}_proj.weight"]) for name in "qkv"],
        )
        layer.self_attention.linear[1].weight = tensors[f"{block}.self_attn.o_proj.weight"]
        layer.ffn.linear_0.weight = tensors[f"{block}.mlp.gate_proj.weight"]
        layer.ffn.linear_0_noact.weight = tensors[f"{block}.mlp.up_proj.weight"]
        layer.ffn.linear_1.weight = tensors[f"{block}.mlp.down_proj.weight"]
    # Prompts and answers are ids, and yet it wants words; those of begin and end must be among them.
    words = _words(range(config["vocab_size"]))
    made.config.bos_token, made.config.eos_token, made.config.unk_token = words[0], words[1], words[0]
    made.register_vocabulary(words)
    made.validate()
    made.optimize()
    return made


def _linear(weight: Any) -> Any:
    spec = common_spec.LinearSpec()
    spec.weight = weight
    return spec
