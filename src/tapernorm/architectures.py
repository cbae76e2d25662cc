"""The table of known architectures: where each keeps its norms, and which linear maps each norm feeds.

A new architecture is a row of `ARCHITECTURES` under the name of its class. If its norms have a class of their own, it
also needs a row of `norms.KINDS`. Folding verifies a row in one forward pass, and refuses a model that does not fit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from .norms import is_norm
from .util.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """Module names of the norms of a pre-norm Transformer and of their consumers."""

    blocks: str  # the list of blocks
    internal: Mapping[str, tuple[str, ...]]  # norm of a block -> the linear maps that it feeds, in running order
    final: str  # the norm before the output head
    head: str  # the output head
    hugging_face: bool = False  # a class of transformers; False: config and outputs are those of `Decoder`
    refused: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)  # feature -> whether a config uses it

    @property
    def context(self) -> str:
        """Name of the config field that holds the longest sequence length, in tokens."""
        return "max_position_embeddings" if self.hugging_face else "context"

    @property
    def tied(self) -> str:
        """Name of the config field that ties the head to the embedding's weight."""
        return "tie_word_embeddings" if self.hugging_face else "tie_head"

    @property
    def trunk(self) -> str:
        """Full name of the module that runs the blocks. An empty name is the model itself."""
        return self.blocks.rpartition(".")[0]

    def depth(self, model: nn.Module) -> int:
        """Return the number of blocks. A block used at two places counts twice."""
        return len(model.get_submodule(self.blocks)._modules)

    def internal_norms(self, model: nn.Module) -> list[str]:
        """Return the full names of all internal norms, from block 0 on."""
        return [f"{self.blocks}.{i}.{norm}" for i in range(self.depth(model)) for norm in self.internal]

    def norms(self, model: nn.Module) -> list[str]:
        """Return the full names of all norms, in the order in which they run."""
        return [*self.internal_norms(model), self.final]

    def consumers(self, norm: str) -> list[str]:
        """Return the full names of the linear maps that the norm of full name `norm` feeds."""
        if norm == self.final:
            return [self.head]
        block, _, name = norm.removeprefix(f"{self.blocks}.").partition(".")
        return [f"{self.blocks}.{block}.{consumer}" for consumer in self.internal[name]]


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = Architecture(
    blocks="model.layers",
    internal={
        "input_layernorm": _ATTENTION,
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    final="model.norm",
    head="lm_head",
    hugging_face=True,
)
ARCHITECTURES = {
    "Decoder": replace(_LLAMA, hugging_face=False),
    "GPT2LMHeadModel": Architecture(
        blocks="transformer.h",
        internal={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
        final="transformer.ln_f",
        head="lm_head",
        hugging_face=True,
        refused={"add_cross_attention (norms of its own)": lambda config: config.add_cross_attention},
    ),
    "GPTNeoXForCausalLM": Architecture(
        blocks="gpt_neox.layers",
        internal={
            "input_layernorm": ("attention.query_key_value",),
            "post_attention_layernorm": ("mlp.dense_h_to_4h",),  # reads the block's input if the residual is parallel
        },
        final="gpt_neox.final_layer_norm",
        head="lm_head",
        hugging_face=True,
    ),
    "GemmaForCausalLM": _LLAMA,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "OPTForCausalLM": Architecture(
        blocks="model.decoder.layers",
        internal={"self_attn_layer_norm": _ATTENTION, "final_layer_norm": ("fc1",)},
        final="model.decoder.final_layer_norm",
        head="lm_head",
        hugging_face=True,
        refused={
            "do_layer_norm_before = False (post-norm)": lambda config: not config.do_layer_norm_before,
            "_remove_final_layer_norm": lambda config: config._remove_final_layer_norm,
            "word_embed_proj_dim (a map between final norm and head)": (
                lambda config: config.word_embed_proj_dim != config.hidden_size
            ),
        },
    ),
    "PhiForCausalLM": Architecture(
        blocks="model.layers",
        internal={"input_layernorm": (*_ATTENTION, "mlp.fc1")},  # attention and MLP in parallel
        final="model.final_layernorm",
        head="lm_head",
        hugging_face=True,
    ),
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "StableLmForCausalLM": replace(
        _LLAMA,
        refused={"use_parallel_residual (one norm for both halves)": lambda config: config.use_parallel_residual},
    ),
}


def architecture_of(model: nn.Module) -> Architecture:
    """Return the row of `ARCHITECTURES` for the class of `model`.

    Raises:
        UserError: the class is not in the table, `model` wraps a model that is, or its config uses a refused feature.
    """
    name = type(model).__name__
    if name not in ARCHITECTURES:
        _refuse_wrapped(model)
        raise UserError(
            f"no architecture {name!r} in tapernorm.architectures; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    arch = ARCHITECTURES[name]
    for what, asks_for in arch.refused.items():
        if asks_for(model.config):
            raise UserError(f"a {name} with {what} is not supported: tapernorm.architectures cannot describe it")
    return arch


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise UserError if `model` wraps a known model, as a PeftModel, DistributedDataParallel or torch.compile does."""
    for name, inner in model.named_modules() if isinstance(model, nn.Module) else ():
        kind = type(inner).__name__.removeprefix("FSDP")
        if kind in ARCHITECTURES:
            place = f"its .{name}" if name else "which fully_shard has changed"
            raise UserError(
                f"a {type(model).__name__} wraps the {kind} ({place}): pass the model itself, and wrap it after "
                "attach(model)"
            )


def select_norms(model: nn.Module, *, final: bool, sites: Sequence[str] | None) -> list[str]:
    """Return the full names of the norms to taper: internal norms first, then the final norm if `final`.

    An internal norm is chosen if it matches a pattern of `sites`, or if `sites` is None.

    Raises:
        UserError: `sites` is not a list of strings, or a pattern matches no internal norm.
    """
    arch = architecture_of(model)
    internal = arch.internal_norms(model)
    if isinstance(sites, str):
        raise UserError(f"sites must be a list of patterns, got the string {sites!r}: write sites=[{sites!r}]")
    sites = None if sites is None else list(sites)
    for pattern in sites or ():
        if not isinstance(pattern, str):
            raise UserError(
                f"sites must be a list of patterns for names of norms, and {pattern!r} in it is not a string"
            )
        if not any(fnmatchcase(name, pattern) for name in internal):
            raise UserError(f"sites: {pattern!r} matches no internal norm; internal norms: {', '.join(internal)}")
    chosen = [n for n in internal if sites is None or any(fnmatchcase(n, p) for p in sites)]
    return [*chosen, arch.final] if final else chosen


def kept_norms(model: nn.Module, tapered: Collection[str]) -> list[str]:
    """Return the full names of all norms of `model` except `tapered`, including those inside attention."""
    return [name for name, module in model.named_modules() if is_norm(module) and name not in tapered]


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (B, T, V) of token ids (B, T), without a cache."""
    if architecture_of(model).hugging_face:
        return model(input_ids=tokens, use_cache=False).logits
    return model(tokens)


def hidden_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the input (B, T, D) of the output head for ids (B, T), without a cache."""
    arch = architecture_of(model)
    trunk = model.get_submodule(arch.trunk)
    return trunk(input_ids=tokens, use_cache=False).last_hidden_state if arch.hugging_face else trunk(tokens)


def output_head(model: nn.Module) -> nn.Linear:
    """Return the linear map from the final norm's output to the logits."""
    head = model.get_submodule(architecture_of(model).head)
    assert isinstance(head, nn.Linear)
    return head


def context_of(model: nn.Module) -> int:
    """Return the longest sequence that `model` accepts, in tokens."""
    return getattr(model.config, architecture_of(model).context)


def vocabulary_of(model: nn.Module) -> int:
    """Return the vocabulary size of `model`."""
    config: Any = model.config
    return config.vocab_size


def has_tied_head(model: nn.Module) -> bool:
    """Return whether the output head shares its weight with another module."""
    head = model.get_submodule(architecture_of(model).head)
    return any(m is not head and getattr(m, "weight", None) is head.weight for m in model.modules())


def untie(model: nn.Module) -> None:
    """Record in the config of `model` that its head has a weight of its own, so that nothing ties it again."""
    arch = architecture_of(model)
    library: Any = model
    if arch.hugging_face:
        setattr(library.config, arch.tied, False)
        library.all_tied_weights_keys = {}  # transformers ties these again when weights are replaced
    else:
        library.config = replace(library.config, **{arch.tied: False})
