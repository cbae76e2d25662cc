"""A bridge of TransformerLens that does not normalise where a norm was folded away.

TransformerLens's own component for a norm normalises, with the gain and bias of the module at that place. Here a folded
norm gets a component that applies the module unchanged.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformer_lens.conversion_utils.conversion_steps import RearrangeTensorConversion
from transformer_lens.conversion_utils.param_processing_conversion import ParamProcessingConversion
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformer_lens.model_bridge import ArchitectureAdapter, TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module, detect_tokenizer_bos_eos

from ..architectures import architecture_of, logits_of
from ..checkpoints.self_check import typical_tokens
from ..models.decoder import Decoder
from ..norms import KINDS, FixedScale, kind_of
from ..util.errors import UserError
from ._llama import as_llama

_GONE = (nn.Identity, FixedScale)


class NormFreeBridge(GeneralizedComponent):
    """The module in a folded norm's place, with the hooks of a norm. `hook_scale`, the divisor of a norm, is 1."""

    def forward(self, h: Tensor) -> Tensor:
        """Apply the module to h (B, T, D)."""
        scale = self.hook_scale(torch.ones_like(h[..., :1]))
        normalized = self.hook_normalized(self.hook_in(h) / scale)
        return self.hook_out(cast(nn.Module, self.original_component)(normalized))


def bridge(model: nn.Module, tokenizer: Any = None) -> TransformerBridge:
    """Build the bridge that `interop.transformer_lens` documents."""
    arch = architecture_of(model)
    sites = {name: model.get_submodule(name) for name in arch.norms(model)}
    _require_known(model, sites)
    source: Any = copy.deepcopy(model).eval()  # TransformerLens changes the model from which it builds a bridge
    tokens = typical_tokens(source).to(next(source.parameters()).device)
    with torch.no_grad(), _widened(source):
        expected = logits_of(source, tokens)
    twin: Any = as_llama(source) if isinstance(source, Decoder) else source
    made = _build(twin, sites)
    for name, site in sites.items():
        if isinstance(site, _GONE):
            place: Any = twin.get_submodule(name)
            place.__class__ = NormFreeBridge  # after the build, because one template serves all blocks
    _require_same(made, tokens, expected)
    if tokenizer is not None:
        _give_tokenizer(made, tokenizer)
    return made


def _require_known(model: nn.Module, sites: Mapping[str, nn.Module]) -> None:
    name = type(model).__name__
    if not isinstance(model, Decoder) and name not in SUPPORTED_ARCHITECTURES:
        raise UserError(f"TransformerLens has no adapter for a {name}: use nnsight, which takes any model")
    for site, module in sites.items():
        kind = type(module)  # the exact class: a subclass of a norm may compute anything
        if not isinstance(module, _GONE) and f"{kind.__module__}.{kind.__qualname__}" not in KINDS:
            raise UserError(
                f"{site} is a {kind.__name__}, in whose place TransformerLens would compute a plain norm: pass a "
                "folded model, fold(model)[0]"
            )


def _build(twin: nn.Module, sites: Mapping[str, nn.Module]) -> TransformerBridge:
    library: Any = twin
    name = type(twin).__name__
    try:
        return build_bridge_from_module(
            twin, name, hf_config=library.config, post_adapter_hook=lambda adapter: _describe(adapter, sites)
        )
    except (AssertionError, RuntimeError) as error:
        reason = str(error) or "one of its assertions fails"
        raise UserError(f"TransformerLens cannot bridge this {name}: {reason}; use nnsight instead") from error


def _describe(adapter: ArchitectureAdapter, sites: Mapping[str, nn.Module]) -> None:
    """Describe the remaining norms to the adapter, which processes the weights accordingly."""
    library: Any = adapter
    cfg = library.cfg
    kept = [site for site in sites.values() if not isinstance(site, nn.Identity)]
    if not kept:
        cfg.normalization_type = None
    fixed = [site for site in kept if isinstance(site, FixedScale)]
    centred = any(site.centre if isinstance(site, FixedScale) else kind_of(site).centres for site in kept)
    if centred and cfg.normalization_type == "RMS":  # a Decoder with LayerNorm, which LLaMA does not have
        cfg.normalization_type, cfg.uses_rms_norm, cfg.final_rms = "LN", False, False
    if fixed and getattr(cfg, "rmsnorm_uses_offset", False):
        library.supports_fold_ln = False  # it would read the gain of a FixedScale as 1 + weight
    _split_biases(library)


def _split_biases(adapter: Any) -> None:
    """Split the biases that folding adds (b' = beta W) by heads, as the adapter splits the weights."""
    grouped = adapter.cfg.n_key_value_heads or adapter.cfg.n_heads
    conversions = adapter.weight_processing_conversions or {}
    for part, heads in {"q": adapter.cfg.n_heads, "k": grouped, "v": grouped}.items():
        weight, bias = (f"blocks.{{i}}.attn.{part}.{kind}" for kind in ("weight", "bias"))
        if weight in conversions and bias not in conversions:
            by_head = RearrangeTensorConversion("(n h) -> n h", n=heads)
            conversions[bias] = ParamProcessingConversion(tensor_conversion=by_head)


@torch.no_grad()
def _require_same(made: TransformerBridge, tokens: Tensor, expected: Tensor) -> None:
    """Raise UserError if the logits of the bridge are not `expected`, the model's own in at least float32.

    Half of the digits of float32 must agree. Rounding changes far fewer digits, and another function changes all.
    The dtype is float32 because transformers computes a softmax in it even in wider models.
    """
    with _widened(made):
        difference = (made(tokens) - expected).abs().max().item()
    allowed = math.sqrt(torch.finfo(torch.float32).eps) * expected.abs().max().item()
    if not difference <= allowed:
        raise UserError(
            f"the TransformerLens bridge does not compute what the model computes: its logits differ by "
            f"{difference:.3g}, and rounding explains {allowed:.3g}. Use nnsight, which runs the model's own code, and "
            "report the class and config of the model"
        )


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    """Convert narrower parameters and buffers of `module` to float32 inside: rounding in bfloat16 would hide faults."""
    # nn.Module's own methods: a bridge overrides `parameters`.
    tensors = chain(nn.Module.parameters(module), nn.Module.buffers(module))
    narrow = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point() and tensor.itemsize < 4]
    try:
        for tensor, data in narrow:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in narrow:
            tensor.data = data


def _give_tokenizer(made: TransformerBridge, tokenizer: Any) -> None:
    """Set the tokenizer as TransformerLens does, but without a download of one that prepends a `bos_token`."""
    own = copy.deepcopy(tokenizer)
    if own.pad_token is None:
        own.pad_token = own.eos_token or own.bos_token  # pads a batch of texts; the mask hides the padding
    made.cfg.tokenizer_prepends_bos, made.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(own)
    made.cfg.default_prepend_bos = made.cfg.tokenizer_prepends_bos
    made.tokenizer = own
