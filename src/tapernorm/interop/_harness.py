"""A folded model as the language model of lm-evaluation-harness: its own class for models of transformers.

That class takes a model as it stands and calls it as anybody would; what is settled here is what it would otherwise
settle silently: the precision of its log-probabilities, the mark that ends a text, and that the model stays as it is.
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
    """What `interop.lm_eval` says."""
    if not architecture_of(model).hugging_face:
        raise UserError(
            f"the harness needs a model of transformers, which a {type(model).__name__} is not: "
            "`tapernorm evaluate` scores it"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"the harness needs a tokenizer of transformers, which a {type(tokenizer).__name__} is not: "
            "AutoTokenizer.from_pretrained(folder) gives the one of an export"
        )
    own = copy.deepcopy(tokenizer)  # the harness gives it a padding token
    if own.eos_token is None:
        if own.bos_token is None:
            raise UserError("the tokenizer has no mark that ends a text: set its eos_token")
        own.eos_token = own.bos_token  # what separates texts, then
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
    assert has_tied_head(model) == tied  # it ties what the config says is tied, and a fold has untied that
    return made
