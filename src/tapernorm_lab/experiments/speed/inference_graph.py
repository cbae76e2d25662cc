"""What is left of a finished decoder to run, and what odd inputs do to it: the further columns of Table S2.

n rows, T time, D width, V vocabulary. A decoder that was tapered is folded first: that is the form it is used in.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tapernorm.architectures import architecture_of
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder, lengthen
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import TaperNorm
from tapernorm.util.rng import generator

from ..odd_inputs.text_windows import text_rows

_NORMS = {"rsqrt", "native_layer_norm", "_fused_rms_norm"}  # one of them in each norm, whatever the device makes of it
_ROWS = 16
_LONGER = 4  # times the context


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


def odd_rows(tokens: Tensor, *, vocabulary: int, context: int) -> dict[str, Tensor]:
    """Rows of ids (n, T+1) by what they are: `text`, `longer` text, the `same` token all along, and `random` ids.

    16 rows of each; of text fewer where there are fewer, and no `longer` ones where it is shorter than one.
    """
    random = generator(0, "oddities")
    made = {
        "text": text_rows(tokens, context, seed=0, limit=_ROWS),
        "same": torch.randint(vocabulary, (_ROWS, 1), generator=random).expand(-1, context + 1),
        "random": torch.randint(vocabulary, (_ROWS, context + 1), generator=random),
    }
    if len(tokens) > _LONGER * context:
        made["longer"] = text_rows(tokens, _LONGER * context, seed=0, limit=_ROWS)
    return made


@torch.no_grad()
def outcome(model: Decoder, rows: Tensor, *, first: int = 0) -> dict[str, Any]:
    """What `model` makes of rows (n, T+1): its losses from position `first` on and how far its numbers go.

    Rows longer than the context are read with rotary positions that go on as they began.

    Returns:
        finite: whether every logit is a number; mean and largest cross-entropy of a token, in nats; largest absolute
        logit, and largest absolute value of the residual stream before any norm or what stands in its place. The last
        four are null where a logit is not finite.
    """
    device = model.lm_head.weight.device
    if rows.shape[1] - 1 > model.config.context:
        model = copy.deepcopy(model)
        lengthen(model, rows.shape[1] - 1)
    ids = rows.to(device)
    with _largest_inputs(model) as largest:
        logits = model(ids[:, :-1]).double()  # (n, T, V)
    losses = F.cross_entropy(logits[:, first:].flatten(0, 1), ids[:, 1 + first :].flatten(), reduction="none")
    numbers = {
        "ce": losses.mean().item(),
        "ce_max": losses.max().item(),
        "logit_max": logits.abs().max().item(),
        "activation_max": max(largest),
    }
    finite = all(map(math.isfinite, numbers.values()))
    return {"finite": finite, **(numbers if finite else dict.fromkeys(numbers))}


@contextmanager
def _largest_inputs(model: Decoder) -> Iterator[list[float]]:
    """The largest absolute input of every norm's place, filled as the model runs."""
    largest: list[float] = []

    def measure(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        largest.append(args[0].abs().max().item())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(measure) for name in architecture_of(model).norms(model)
    ]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()
