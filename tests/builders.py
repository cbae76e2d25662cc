"""Small random norms and decoders, never at the identity point, all sizes different; and what tests ask of them."""

import numpy as np
import reference
import torch

from tapernorm.architectures import select_norms
from tapernorm.models.decoder import Decoder
from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.norms import Gate, LayerNorm, RMSNorm, TaperNorm, taper
from tapernorm.schedule import GateSchedule
from tapernorm.taper import Taper, attach, attach_norms
from tapernorm.util.rng import generator

torch.set_num_threads(1)

KINDS = ("rmsnorm", "layernorm", "layernorm without bias")
NORMS = ("rmsnorm", "layernorm")
GATES = (0.0, 0.37, 1.0)
SCHEDULE = GateSchedule(start=3, end=8)
VOCABULARY = 29


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed, "tests"), dtype=torch.float64).to(dtype)


def uniform(*shape, seed=0, dtype=torch.float64):
    """Between 0.5 and 1.5."""
    return (torch.rand(shape, generator=generator(seed, "tests"), dtype=torch.float64) + 0.5).to(dtype)


def plain_norm(kind, width, *, eps=1e-3, dtype=torch.float64, seed=1):
    """A standard norm with random gain (and bias)."""
    if kind == "rmsnorm":
        norm = RMSNorm(width, eps=eps, dtype=dtype)
    else:
        norm = LayerNorm(width, eps=eps, bias=kind == "layernorm", dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(uniform(width, seed=seed))
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(normal(width, seed=seed + 1))
    return norm


def tapered_norm(kind, width, g, **options):
    """A tapered norm with random gamma, gamma_t, beta and c, its gate at g."""
    norm = taper(plain_norm(kind, width, **options), Gate(), ema_rate=0.1)
    with torch.no_grad():
        norm.gamma_t.copy_(uniform(width, seed=11))
        norm.c.fill_(0.83)
    norm.gate.set(g)
    return norm


def array(tensor):
    return tensor.detach().double().numpy()


def reference_norm(norm, h, g=None):
    """What the reference makes of a plain or tapered norm, h a NumPy array; g: another gate than its own."""
    tapered = isinstance(norm, TaperNorm)
    if g is None:
        g = norm.gate.value.item() if tapered else 1.0
    settings = {
        "gamma": array(norm.weight),
        "gamma_t": array(norm.gamma_t) if tapered else 0.0,
        "c": norm.c.item() if tapered else 0.0,
        "eps": norm.eps,
    }
    if isinstance(norm, LayerNorm):
        beta = 0.0 if norm.bias is None else array(norm.bias)
        return reference.taper_layer_norm(h, g, beta=beta, **settings)
    return reference.taper_rms_norm(h, g, **settings)


def shape(**overrides):
    """Grouped-query, untied, all sizes different."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 12, "n_layer": 2, "n_head": 3, "n_kv_head": 1, "d_ff": 20}
    rest = {"context": 11, "norm": "rmsnorm", "norm_eps": 1e-5, "rope_theta": 100.0, "tie_head": False}
    return DecoderConfig(**{**sizes, **rest, **overrides})


def decoder(*, dtype=torch.float64, seed=3, **overrides):
    """A decoder with random weights, gains and biases, none of them small."""
    model = Decoder(shape(**overrides))
    randomise(model, seed)
    return model.to(dtype)


def randomise(model, seed):
    random = generator(seed, "tests")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.4, generator=random)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=random)
            else:
                parameter.uniform_(0.5, 1.5, generator=random)


def tokens(batch=4, time=7, seed=5):
    return torch.randint(VOCABULARY, (batch, time), generator=generator(seed, "tests"))


def attached(*, dtype=torch.float64, model_options=None, **options) -> tuple[Decoder, Taper]:
    """A decoder with a taper at g = 1, statistics empty."""
    model = decoder(dtype=dtype, **(model_options or {}))
    return model, attach(model, **{"schedule": SCHEDULE, "ema_rate": 0.1, **options})


def attached_as(kind, *, final=False):
    """As `attached`, with a taper of the class `kind`."""
    model = decoder()
    taper = attach_norms(
        model, select_norms(model, final=final, sites=None), kind=kind, schedule=SCHEDULE, ema_rate=0.1
    )
    return model, taper


def observe(model, taper, batch):
    """One optimizer step's worth of observation over `batch`, without an update of the weights."""
    with taper.observe(), torch.no_grad():
        model(batch)


def calibrated(g=0.0, **options) -> tuple[Decoder, Taper]:
    """A decoder with calibrated norms, gamma_t and c moved away from their start, the gate at g."""
    model, driver = attached(**options)
    observe(model, driver, tokens())
    driver.calibrate()
    with torch.no_grad():
        for i, name in enumerate(driver.swapped):
            norm = model.get_submodule(name)
            norm.gamma_t.copy_(uniform(len(norm.gamma_t), seed=20 + i))
            norm.c.mul_(1.1)
    driver.set_gate(g)
    return model, driver


def inputs_of(model, names, batch):
    """What the modules `names` read in one forward pass, NumPy arrays by name."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        for name in names
    ]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return {name: array(h) for name, h in seen.items()}


def reference_decoder(model, ids, *, norm=None, positions=None, dtype=np.float32):
    """Logits (T, V) that the reference makes of a decoder of ours on ids (T,).

    Args:
        norm: what applies the norm of a name; by default that of the model.
        positions: of the tokens; by default 0 ... T-1.
        dtype: of the rotary tables, float32 as the model's are.
    """
    config = model.config
    cos, sin = reference.rotary_tables(config.context, config.head_dim, config.rope_theta)
    cos, sin = (table.astype(dtype).astype(float) for table in (cos, sin))
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    state = {name: array(value) for name, value in model.state_dict().items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    norm = norm or (lambda name, h: reference_norm(model.get_submodule(name), h))
    heads = {"n_head": config.n_head, "n_kv_head": config.n_kv_head}
    return reference.decoder(ids.numpy(), state, norm, n_layer=config.n_layer, cos=cos, sin=sin, **heads)


def snapshot(state):
    """A copy of a state dict, tensors as NumPy bytes, so that equality is bitwise (NaN equals NaN)."""
    return {k: v.detach().numpy().tobytes() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def close(actual, expected, tolerance=1e-12):
    """Whether two arrays or tensors agree within `tolerance`, relative to the largest entry."""
    actual, expected = (array(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in (actual, expected))
    assert actual.shape == expected.shape
    return bool(np.max(np.abs(actual - expected)) <= tolerance * np.max(np.abs(expected)))
