"""Load GPT-2 models of transformers, published or saved here, and initialise fresh ones of any size.

Only weights and numbers are read. Code that comes with a model is never run.
"""

import math
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tapernorm.architectures import architecture_of
from tapernorm.checkpoints.pretrained import config_of, find, load_pretrained
from tapernorm.checkpoints.stock_form import DISARMED_EPS
from tapernorm.checkpoints.store import blank, is_ours, load
from tapernorm.util.errors import UserError

from ..config.gpt2 import Gpt2Shape


def load_base(source: str | Path) -> GPT2LMHeadModel:
    """Load the GPT-2 of a hub name or a folder, in float32 and eval mode; in transformers' format or saved here.

    Raises:
        UserError: as `pretrained.find` and `pretrained.load_pretrained`; or it is not a GPT-2 with plain norms.
    """
    folder = find(source)
    if is_ours(folder):
        return _require_plain(load(folder, GPT2LMHeadModel), source)
    kind, _ = config_of(folder)
    if kind is not GPT2LMHeadModel:
        raise UserError(f"{source} holds a {kind.__name__}, and a GPT2LMHeadModel is needed here")
    model = load_pretrained(folder)
    assert isinstance(model, GPT2LMHeadModel)
    return model


@torch.no_grad()
def fresh(shape: Gpt2Shape, *, vocab_size: int, context: int, generator: torch.Generator) -> GPT2LMHeadModel:
    """Return a GPT-2 with the initialisation of its paper, drawn from `generator` alone.

    Matrices and embeddings are drawn from normal(0, 0.02), and residual projections are scaled by 1/sqrt(2 n_layer).
    Gains are 1 and biases 0.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=context,
        n_embd=shape.d_model,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        layer_norm_epsilon=shape.norm_eps,
        bos_token_id=None,  # GPT-2's own default would not fit the tokenizer
        eos_token_id=None,
    )
    return _initialize(blank(GPT2LMHeadModel, config), generator)


def _initialize(model: GPT2LMHeadModel, generator: torch.Generator) -> GPT2LMHeadModel:
    spread = model.config.initializer_range
    residual = spread / math.sqrt(2 * model.config.n_layer)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, residual if name.endswith("c_proj.weight") else spread, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


def is_disarmed(config: GPT2Config) -> bool:
    """Whether the norms of this model no longer normalise.

    Published FakeLN checkpoints keep the stock form. Their eps is 1e12, so that sigma is 1e6 for every token, and gamma
    contains 1e6 / sigma_bar.
    """
    return config.layer_norm_epsilon >= DISARMED_EPS


def _require_plain(model: GPT2LMHeadModel, source: str | Path) -> GPT2LMHeadModel:
    for name in architecture_of(model).norms(model):
        if type(norm := model.get_submodule(name)) is not nn.LayerNorm:
            raise UserError(f"{source} holds a model whose {name} is a {type(norm).__name__}: give an untouched GPT-2")
    return model
