"""A Transformer that the package has never heard of, with square maps, and its row of the table."""

import torch
import torch.nn.functional as F
from builders import normal, plain_norm, randomise, shape
from torch import nn

from tapernorm.architectures import Architecture
from tapernorm.norms import TaperNorm
from tapernorm.taper import Taper, attach

ROW = Architecture(
    blocks="blocks",
    internal={"ln_1": ("mix", "gate"), "ln_2": ("up",)},
    final="ln_f",
    head="head",
)


class Block(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.ln_1, self.ln_2 = plain_norm(kind, width), plain_norm(kind, width)
        self.mix, self.gate = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h):
        h = h + self.first(h, self.ln_1(h))
        return h + self.down(F.silu(self.up(self.ln_2(h))))

    def first(self, h, x):
        """What becomes of the first norm's input and output; the tests of the audit do something else."""
        return torch.tanh(self.mix(x)) * self.gate(x)


class Mixed(nn.Module):
    """Token ids (B, T) -> logits (B, T, V), every map of its two blocks square."""

    def __init__(self, kind="layernorm", block=Block, **overrides):
        super().__init__()
        self.config = shape(**{"d_model": 30, "vocab_size": 30, **overrides})
        width, vocabulary = self.config.d_model, self.config.vocab_size
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, kind) for _ in range(2))
        self.ln_f = plain_norm(kind, width)
        self.head = nn.Linear(width, vocabulary)
        if self.config.tie_head:
            self.head.weight = self.embed.weight
        randomise(self.double(), seed=3)

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln_f(h))


def close_gate(model, seed=20, **options) -> Taper:
    """Attach, then g = 0 with random c and gains; some gains zero, negative and tiny."""
    driver = attach(model, **options)
    with torch.no_grad():
        for i, name in enumerate(driver.swapped):
            norm = model.get_submodule(name)
            assert isinstance(norm, TaperNorm)
            norm.c.fill_(0.4 + 0.13 * i)
            norm.gamma_t.copy_(normal(len(norm.gamma_t), seed=seed + i))
            norm.gamma_t[:3] = torch.tensor([0.0, -1.3, 1e-9])
            if getattr(norm, "bias", None) is not None:
                norm.bias[1:3] = torch.tensor([0.0, 1e-9])
    driver.set_gate(0.0)
    return driver
