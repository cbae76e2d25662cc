"""Small random GPT-2s of transformers for FakeLN's tests, and what FakeLN's reference makes of them."""

import hugging_face
import numpy as np
import reference
import torch
from builders import array

from tapernorm_lab.config.fakeln_schedule import FakeSchedule
from tapernorm_lab.models.fakeln_norms import FakeLayerNorm

EOT = 0
DEPTH, HEADS, WIDTH, CONTEXT, EPS = 3, 3, 12, 17, 1e-3
SCHEDULE = FakeSchedule(mlp_start=2, mlp_gap=1, qk_start=5, qk_gap=2, v_start=9, v_gap=3, final=17)
LAST = 17  # the step of the last removal
STAGES = (0, 3, 6, 9, 13, LAST)  # nothing removed, then somewhere in each stage, then everything


def gpt2(*, dtype=torch.float64, seed=3, **overrides):
    """A GPT-2 in training mode with random weights, gains and biases, none of them small, all sizes different."""
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": DEPTH, "n_positions": CONTEXT, "layer_norm_epsilon": EPS}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hugging_face.gpt2(dtype=dtype, seed=seed, **{**sizes, **dropout, **overrides}).train()


def fake_norms(model):
    """Name -> norm of every fake norm."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FakeLayerNorm)}


def reference_norm(model, swap=False):
    """The `norm` of reference.gpt2: each norm of `model` as its flags and sigma_bars say; swap: v's for q,k's."""

    def part(norm, h, index):
        affine = {"gamma": array(norm.weight), "beta": array(norm.bias)}
        sigma = norm.sigma_bars[index].item() if norm.removed[index] else reference.sigma(h, EPS)
        return reference.fake_layer_norm(h, sigma_bar=sigma, **affine)

    def apply(name, h):
        norm = model.get_submodule(name)
        if len(norm.parts) == 1:
            return part(norm, h, 0)
        return part(norm, h, int(swap)), part(norm, h, int(not swap))

    return apply


def reference_logits(model, tokens, **options):
    """What reference.gpt2 makes of `model` on ids (B, T)."""
    state = {name: array(value) for name, value in model.state_dict().items()}
    norm = reference_norm(model, **options)
    return np.stack([reference.gpt2(ids, state, norm, n_layer=DEPTH, n_head=HEADS) for ids in tokens.numpy()])
