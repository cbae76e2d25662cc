"""A folded model as a language model of lm-evaluation-harness, by the harness's class for models of transformers.

This module sets what the class would otherwise choose silently: the dtype of log-probabilities, and the token that ends
a text. It also checks that the class does not tie an untied head.
"""

import copy
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..architectures import architecture_of, has_tied_head
from ..util.errors import UserError


def harness(
    model: nn.Module,
    tokenizer: Any,
    *,
    batch_size: int,
    max_length: int | None,
    add_bos_token: bool | None,
) -> HFLM:
    """Wrap `model` as `interop.lm_eval` documents."""
    if not architecture_of(model).hugging_face:
        raise UserError(
            f"model must be of a class of transformers, got a {type(model).__name__}: `tapernorm evaluate` scores it "
            "without the harness"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"tokenizer must be one of transformers, got a {type(tokenizer).__name__}: load that of an export by "
            "AutoTokenizer.from_pretrained(folder)"
        )
    own = copy.deepcopy(tokenizer)  # the harness adds a padding token
    if own.eos_token is None:
        if own.bos_token is None:
            raise UserError("tokenizer has neither an eos_token nor a bos_token to end a text: set its eos_token")
        own.eos_token = own.bos_token
    tied = has_tied_head(model)
    maker: Any = HFLM
    made = maker(
        pretrained=model,
        tokenizer=own,
        backend="causal",
        batch_size=batch_size,
        max_length=max_length,
        add_bos_token=add_bos_token,
        softmax_dtype=torch.float32,
    )
    assert has_tied_head(model) == tied  # the harness ties what the config declares tied; fold has changed that
    return made
