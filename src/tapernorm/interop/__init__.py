"""Adapters of a folded model to tools for interpretability and evaluation.

Each tool is an optional extra, imported when its function is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from ..util.errors import UserError

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformer_lens.model_bridge import TransformerBridge

__all__ = ["lm_eval", "transformer_lens"]


def lm_eval(
    model: nn.Module,
    tokenizer: Any,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
) -> "HFLM":
    """Wrap `model` for lm-evaluation-harness: the result is an argument of `lm_eval.simple_evaluate(model=...)`.

    The wrapper puts `model` itself into eval mode and keeps its device and dtype, so set these first. It computes
    log-probabilities in float32.

    Args:
        model: a folded, tapered or plain model of a class of transformers.
        tokenizer: a tokenizer of transformers, which is copied. Without an `eos_token`, its `bos_token` ends a text.
        batch_size: texts per forward pass.
        max_length: longest text, in tokens. None takes the model's context.
        add_bos_token: whether to put the `bos_token` before each text. None takes the tokenizer's default.

    Raises:
        UserError: the harness is not installed, or it does not support this model or tokenizer.
    """
    made = _module("_harness", package="lm_eval", extra="lm_eval").harness
    return made(model, tokenizer, batch_size=batch_size, max_length=max_length, add_bos_token=add_bos_token)


def transformer_lens(model: nn.Module, tokenizer: Any = None) -> "TransformerBridge":
    """Build a TransformerLens bridge of a copy of `model`, in eval mode, without the norms that were folded away.

    The bridge has all hooks of TransformerLens. At a folded norm they see the unchanged residual stream, and
    `hook_scale` is 1. Text is encoded by `tokenizer` alone, and nothing is downloaded. `prepend_bos=True` puts the
    `bos_token` first. The logits of the bridge are compared with the model's before it is returned.

    Args:
        model: a folded, partly folded or plain model: a `Decoder`, or of a class that TransformerLens supports.
        tokenizer: a tokenizer of transformers, which is copied. Without one, the bridge takes token ids alone.

    Raises:
        UserError: TransformerLens is not installed or does not support this model. A norm is tapered but not folded.
            The logits of the bridge differ from the model's.
    """
    return _module("_lens", package="transformer_lens", extra="interp").bridge(model, tokenizer)


def _module(name: str, *, package: str, extra: str) -> Any:
    """Import module `name` of this package, which needs `package`."""
    try:
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UserError(f"{package} is not installed: pip install '.[{extra}]' in the checkout") from None
