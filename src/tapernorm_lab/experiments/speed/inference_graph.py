"""What is left of a finished decoder to run, and what odd inputs do to it: the further columns of Table S2.

n rows, T time, D width, V vocabulary. A decoder that was tapered is folded first: that is the form it is used in.
"""

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import TaperNorm

from ..odd_inputs.odd_inputs import outcome
from ..odd_inputs.rows import odd_rows

_NORMS = {"rsqrt", "native_layer_norm", "_fused_rms_norm"}  # one of them in each norm, whatever the device makes of it


def inspect_inference(model: Decoder, tokens: Tensor) -> dict[str, Any]:
    """Operations, largest activations and outcomes of `model`, as plain numbers.

    Args:
        tokens: held-out text, a stream of ids (m,) of at least one context and a token.
    """
    folded = fold(model)[0] if any(isinstance(m, TaperNorm) for m in model.modules()) else copy.deepcopy(model)
    folded.eval()
    rows = odd_rows(tokens, vocabulary=model.config.vocab_size, context=model.config.context)
    return {
        "operations": operations(folded),
        "outcomes": {name: outcome(folded, some, first=_first(name, model)) for name, some in rows.items()},
    }


def _first(name: str, model: Decoder) -> int:
    """The first position whose prediction counts: of longer rows, what lies past the training context."""
    return model.config.context if name == "longer" else 0


@torch.no_grad()
def operations(model: Decoder) -> dict[str, int]:
    """How often one forward pass, packed for decoding, runs a norm, a tanh, an erf, an exp; and any kernel at all.

    Views of a tensor are no kernels. Attention and SiLU are one each, so their exponentials do not count as `exp`.
    """
    packed = PackedDecoder(model)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=packed.embed.weight.device)
    with _Counted() as seen:
        packed(tokens)
    names = seen.kernels
    return {
        "norm": sum(names[name] for name in _NORMS),
        **{name: names[name] for name in ("tanh", "erf", "exp")},
        "all": names.total(),
    }


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.kernels[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
