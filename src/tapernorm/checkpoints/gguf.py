"""Models in one GGUF file, the format of llama.cpp, which holds config, tokenizer and weights.

Quantised weights are dequantised. A file with metadata that this module does not implement is refused. A model
without its rotary scaling, for instance, would load and compute another function.

transformers reads the header and dequantises. Its `from_pretrained(gguf_file=...)` is not used: in version 5.24 it
needs gguf and accelerate, and it ignores rotary scaling. It initialises weights that the file lacks at random. It
splits text by GPT-2's rule, whatever the file says. It marks the model as quantised.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..architectures import has_tied_head
from ..util.errors import UserError, one_line
from .base_config import UnusableWeights, build
from .store import blank

SUFFIX = ".gguf"
_UNK = "unk_token"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FIELDS = {  # a key of the file, after the name of its architecture -> the config's field
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
_ELSEWHERE = {"attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size"}  # read or implied below
_NAMES = {  # a tensor of the file -> the model's parameter
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MARKS = {  # a key of the tokenizer in a file, which holds an id -> the special token
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": _UNK,
    "padding_token_id": "pad_token",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_CUTS = ("gpt-2", "smollm", "qwen2")  # known pre-tokenizers
_AS_FOLDER = "give the model as a folder of transformers"
_TENSOR = re.compile(r"(?:blk\.(?P<block>\d+)\.)?(?P<name>\w+)\.(?P<kind>weight|bias)")
_DAMAGES = (ValueError, KeyError, IndexError, OverflowError, struct.error)  # raised by the reader of a damaged header


def is_gguf(source: Path) -> bool:
    """Return whether the name of `source` is that of a GGUF file."""
    return source.suffix == SUFFIX


@dataclass(frozen=True)
class _File:
    """The header of a file, without its tensors."""

    path: Path
    metadata: Mapping[str, Any]  # the length of a list of strings instead of the list
    header: Any  # transformers' GgufHeader: the place of each tensor

    @classmethod
    def open(cls, path: Path, *, strings: tuple[str, ...] = ()) -> Self:
        from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

        try:
            metadata, _ = read_gguf_metadata(str(path), tuple(f"tokenizer.ggml.{name}" for name in strings))
            header = GgufHeader.from_file(str(path))
        except _DAMAGES as error:
            raise UserError(f"cannot read {path} as a GGUF file ({error}): fetch it again, or {_AS_FOLDER}") from None
        ends = [header.data_start + info.offset + info.nbytes for info in header.tensors]
        if (needed := max(ends, default=0)) > (size := path.stat().st_size):
            raise UserError(f"{path} has {size:,} bytes, and its tensors end at {needed:,}: fetch it again")
        return cls(path, metadata, header)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.metadata["general.architecture"]

    def own(self) -> dict[str, Any]:
        """Return the metadata of the architecture, by keys without its name."""
        return self._below(f"{self.architecture}.")

    def tokenizer(self) -> dict[str, Any]:
        """Return the metadata of the tokenizer, by keys without prefix."""
        return self._below("tokenizer.ggml.") | self._below("tokenizer.")

    def _below(self, prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.header.tensors}


def config_of_gguf(path: Path) -> tuple[type, Any]:
    """Return class and config of the model in a file, without reading weights."""
    return _config(_File.open(path))


def load_gguf(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the model in a file with dequantised weights, in eval mode."""
    file = _File.open(path)
    made, config = _config(file)
    model = blank(made, config)
    _fill(model, file)
    return model.to(dtype).eval()


def licence_of_gguf(path: Path) -> str | None:
    """Return the licence that a file states, or None."""
    return _File.open(path).metadata.get("general.license") or None


def tokenizer_of_gguf(path: Path) -> Any:
    """Return the byte-level BPE in a file as a tokenizer of transformers.

    Raises:
        UserError: the file lacks a tokenizer, or holds one of another kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    said = _File.open(path, strings=("tokens", "merges")).tokenizer()
    if missing := sorted({"model", "tokens", "token_type", "merges"} - said.keys()):
        raise UserError(f"{path} has an incomplete tokenizer, which lacks {', '.join(missing)}: {_AS_FOLDER}")
    if said["model"] != "gpt2" or said.get("pre") not in _CUTS:
        raise UserError(
            f"the tokenizer in {path} has the model {said['model']!r} and the pre-tokenizer {said.get('pre')!r}; "
            f"known: 'gpt2' with {', '.join(map(repr, _CUTS))}. Another pre-tokenizer would give tokens that the model "
            f"was not trained on: {_AS_FOLDER}"
        )
    tokens = said["tokens"]
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.normalizer, backend.pre_tokenizer = _cut_by(said["pre"])
    backend.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, said["token_type"], strict=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])
    marks = {mark: tokens[said[key]] for key, mark in _MARKS.items() if key in said}
    options = {name: said[name] for name in ("add_bos_token", "add_eos_token") if name in said}
    template = {} if "chat_template" not in said else {"chat_template": said["chat_template"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **marks, **options, **template)


def _cut_by(rule: str) -> tuple[Any, Any]:
    """Return normalizer and pre-tokenizer of one of `_CUTS`.

    They are GPT-2's, GPT-2's with each digit apart (smollm), and Qwen2's.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule != "qwen2")
    if rule == "gpt-2":
        return None, spell
    if rule == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), spell])
    cut = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    return normalizers.NFC(), pre_tokenizers.Sequence([cut, spell])


def _config(file: _File) -> tuple[type, Any]:
    from huggingface_hub.errors import StrictDataclassError

    try:
        made, config = _described(file)
    except (KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        reason = one_line(error, named=True)
        raise UserError(f"cannot read a config in {file.path} ({reason}): fetch it again, or {_AS_FOLDER}") from None
    build(made, config, file.path)
    return made, config


def _described(file: _File) -> tuple[type, Any]:
    import transformers

    if file.architecture not in _CLASSES:
        raise UserError(
            f"{file.path} holds a {file.architecture}; known architectures in GGUF files: {', '.join(sorted(_CLASSES))}"
        )
    name, own, shapes = _CLASSES[file.architecture], file.own(), file.shapes()
    optional = {"attention.head_count_kv", "attention.key_length"}
    if missing := sorted((_FIELDS.keys() - optional - own.keys()) | ({"token_embd.weight"} - shapes.keys())):
        raise UserError(f"{file.path} lacks {', '.join(missing)}: fetch it again")
    if unknown := sorted(own.keys() - _FIELDS.keys() - _ELSEWHERE):
        said = ", ".join(f"{file.architecture}.{key} = {own[key]}" for key in unknown)
        raise UserError(f"{file.path} has metadata that tapernorm cannot apply, {said}: {_AS_FOLDER}")
    values = {field: own[key] for key, field in _FIELDS.items() if key in own}
    heads = values["num_attention_heads"]
    values.setdefault("num_key_value_heads", heads)
    width = values.setdefault("head_dim", values["hidden_size"] // heads)
    if (turned := own.get("rope.dimension_count", width)) != width:
        raise UserError(
            f"{file.path} rotates {turned} of the {width} channels of a head (rope.dimension_count), and all are "
            f"needed: {_AS_FOLDER}"
        )
    made: Any = getattr(transformers, name)
    if file.architecture == "llama":
        values |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return made, made.config_class(
        **values,
        **{f"{mark}_id": file.metadata.get(f"tokenizer.ggml.{key}") for key, mark in _MARKS.items() if mark != _UNK},
        architectures=[name],
        rope_parameters={"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10_000.0)},
        tie_word_embeddings="output.weight" not in shapes,
        vocab_size=shapes["token_embd.weight"][0],
    )


@torch.no_grad()
def _fill(model: nn.Module, file: _File) -> None:
    from transformers.integrations.gguf.reader import load_gguf_state_dict

    targets = dict(model.state_dict())
    if has_tied_head(model):
        del targets["lm_head.weight"]
    found = {_target(info.name): info for info in file.header.tensors}
    faults = {
        "missing": sorted(targets.keys() - found.keys()),
        "unexpected": sorted(info.name for name, info in found.items() if name not in targets),
        "of another shape": sorted(n for n in targets.keys() & found.keys() if targets[n].shape != found[n].shape),
    }
    if any(faults.values()):
        said = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise UnusableWeights(f"the tensors in {file.path} do not fit its config: {said}")
    stored = load_gguf_state_dict(file.header)
    for name, target in targets.items():
        values = _spread(stored[found[name].name], found[name])
        if file.architecture == "llama":
            values = _unturned(name, values, model.config)
        target.copy_(values)


def _target(name: str) -> str:
    """Return the model's name for a tensor of the file, or the file's name if there is none."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["name"] not in _NAMES:
        return name
    block = "" if match["block"] is None else f"model.layers.{match['block']}."
    return f"{block}{_NAMES[match['name']]}.{match['kind']}"


def _spread(stored: Any, info: Any) -> Tensor:
    """Return one tensor, dequantised."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    raw = stored[...]
    if info.ggml_type not in GGML_BLOCK:
        return raw
    return dequantize(raw.flatten(), info.ggml_type, torch.float32).reshape(info.shape)


def _unturned(name: str, values: Tensor, config: Any) -> Tensor:
    """Reorder the rows of q and k for transformers' rotary embedding.

    transformers pairs channel i of a head with i + E/2, and llama.cpp pairs 2i with 2i + 1.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)
