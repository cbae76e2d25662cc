"""Where a folded model goes on living: tools of interpretability and of evaluation.

Each of them is an extra, and is imported when its function is called.
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
    """The language model that `lm_eval.simple_evaluate(model=...)` of lm-evaluation-harness takes.

    It holds `model` itself, which is put into eval mode and stays where it is: move it, or give it another dtype,
    before. Log-probabilities are taken in float32.

    Args:
        model: folded, tapered or plain, of a class of transformers.
        tokenizer: of transformers; a copy of it is kept. Where it has no `eos_token`, its `bos_token` ends a text.
        batch_size: texts per forward pass.
        max_length: tokens of a text, at most; None: the model's context.
        add_bos_token: whether texts begin with the mark; None: as the tokenizer does by itself.

    Raises:
        UserError: the harness is not installed, or has no place for this model or tokenizer.
    """
    made = _module("_harness", package="lm_eval", extra="lm_eval").harness
    return made(model, tokenizer, batch_size=batch_size, max_length=max_length, add_bos_token=add_bos_token)


def transformer_lens(model: nn.Module, tokenizer: Any = None) -> "TransformerBridge":
    """A TransformerLens bridge of a copy of `model`, in eval mode; where a norm is gone, there is none in it.

    All hooks of TransformerLens are there. Those of a norm that is gone see what passes: its `hook_scale` is 1.
    Text becomes the tokens that `tokenizer` itself makes of it (`prepend_bos=True` puts a mark before them), and
    nothing is fetched. The bridge is made only if its logits are the model's own.

    Args:
        model: folded, wholly or in part, or plain; of a class that TransformerLens knows, or our Decoder.
        tokenizer: of transformers, for text instead of token ids; a copy of it is kept.

    Raises:
        UserError: TransformerLens is not installed or has no place for this model, a norm is tapered and not folded,
            or the logits differ.
    """
    return _module("_lens", package="transformer_lens", extra="interp").bridge(model, tokenizer)


def _module(name: str, *, package: str, extra: str) -> Any:
    """A module of this package that needs `package`."""
    try:
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UserError(f"{package} is not installed: pip install '.[{extra}]' in the checkout") from None
