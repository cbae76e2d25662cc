"""llama.cpp, as the wheel xllamacpp builds it: one slot of its server, greedy; the time is the server's own."""

# pyright: reportMissingImports=false
# Its packages are in the environment of the rivals.
import json
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import gguf
import numpy as np
import xllamacpp as xl

from .weights import Weights, read_weights

# A checkpoint's name -> llama.cpp's.
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_Q8_0_BLOCK = (
    32  # weights of a row that share a scale; a matrix with other rows is float16, as llama.cpp's own tool has it
)


class LlamaCpp:
    """llama.cpp's server in this process."""

    def __init__(self, folder: Path, *, threads: int, weights: str) -> None:
        checkpoint = read_weights(folder)
        self._vocabulary = checkpoint.config["vocab_size"]
        with tempfile.TemporaryDirectory() as made:
            path = Path(made, "model.gguf")
            kept = write_gguf(checkpoint, path, weights)
            self._server = xl.Server(_parameters(path, threads, checkpoint.config["context"]))
        features = [
            name for name in ("AVX2", "AVX512", "AVX512_BF16", "AVX_VNNI") if f"{name} = 1" in xl.get_system_info()
        ]
        self.facts = {"release": f"xllamacpp {version('xllamacpp')}", "built for": ", ".join(features), **kept}

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        found = self._complete(prompt, new_tokens, return_tokens=True)
        return found["tokens"], found["timings"]["predicted_ms"] / 1000

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        """The server gives the probabilities of one next token, so each prefix is a request of its own."""
        losses = []
        for window in windows:
            for end in range(1, len(window)):
                found = self._complete(window[:end], 1, n_probs=self._vocabulary, cache_prompt=True)
                (position,) = found["completion_probabilities"]
                (logprob,) = (t["logprob"] for t in position["top_logprobs"] if t["id"] == window[end])
                losses.append(-logprob)
        return math.fsum(losses) / len(losses)

    def _complete(self, prompt: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        request = {"prompt": list(prompt), "n_predict": new_tokens, **greedy}
        body = json.dumps({"cache_prompt": False, "id_slot": 0, **request, **more}).encode()
        post = Request(f"{self._server.listening_address}/completion", body, {"Content-Type": "application/json"})
        with urlopen(post, timeout=300) as answer:
            return json.load(answer)


def _parameters(path: Path, threads: int, context: int) -> Any:
    parameters = xl.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel = context, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cache_type_k = parameters.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    # With a float32 cache its flash attention is the slower way: 0.9 against 2.2 thousand tokens/s at d 64.
    parameters.flash_attn_type = xl.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup, parameters.fit_params, parameters.cache_ram_mib = False, False, 0
    return parameters


def write_gguf(checkpoint: Weights, path: Path, weights: str) -> dict[str, str]:
    """Write the checkpoint as a LLaMA of llama.cpp."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["context"])
    writer.add_embedding_length(config["d_model"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_kv_head"])
    writer.add_rope_dimension_count(config["d_model"] // config["n_head"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # Prompts and answers are ids, and yet the server wants a vocabulary: names that mean nothing.
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in ids])
    writer.add_token_scores([0.0 for _ in ids])
    writer.add_token_types([gguf.TokenType.NORMAL for _ in ids])
    writer.add_add_bos_token(False)
    kept = []
    for name, tensor in checkpoint.tensors.items():
        if name == "lm_head.weight" and config["tie_head"]:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _pairs(tensor, config["n_head" if "q_proj" in name else "n_kv_head"])
        if weights == "Q8_0" and tensor.ndim == 2:
            if tensor.shape[1] % _Q8_0_BLOCK:
                kept.append(_name(name))
                tensor = tensor.astype(np.float16)
            else:
                quantized = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(_name(name), quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
                continue
        writer.add_tensor(_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kinds = sorted({name.split(".")[2] for name in kept})
    return {"float16": ", ".join(kinds)} if kinds else {}


def _name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in fixed:
        return f"{fixed[name]}.weight"
    _, _, block, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{block}.{_BLOCK[part]}.weight"


def _pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: it rotates neighbours where checkpoints rotate halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
