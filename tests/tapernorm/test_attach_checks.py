"""What cannot be tapered, or not be folded later, is refused at once, and a refusal changes nothing."""

import copy
import warnings

import builders
import numpy as np
import pytest
import torch
from builders import close, snapshot, tokens
from hugging_face import gpt2
from tiny_models import tiny
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tapernorm import norms, taper
from tapernorm.architectures import logits_of
from tapernorm.folding import fold
from tapernorm.schedule import GateSchedule
from tapernorm.taper import attach
from tapernorm.util import norm_driver as driver
from tapernorm.util.errors import UserError
from tapernorm_lab.config.fakeln_schedule import FakeSchedule
from tapernorm_lab.models import fakeln_norms as fakenorms
from tapernorm_lab.models.fakeln import attach_fakeln

NAN, INF = float("nan"), float("inf")
FAKE_SCHEDULE = FakeSchedule(mlp_start=2, mlp_gap=1, qk_start=5, qk_gap=2, v_start=9, v_gap=3, final=17)


def structure(model):
    """Every module by all of its names, its class and its members, containers by what they hold."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        members = {
            key: {k: id(v) for k, v in value.items()} if isinstance(value, dict) else copy.copy(value)
            for key, value in module.__dict__.items()
        }
        found[name] = id(module), type(module), members
    return found


def refused(model, match, **options):
    """Attaching is refused by a message that matches, and has changed nothing."""
    before, state = structure(model), snapshot(model.state_dict())
    with pytest.raises(UserError, match=match):
        attach(model, **options)
    assert structure(model) == before
    assert snapshot(model.state_dict()) == state


# Arguments


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *[({"anchor_weight": value}, "anchor_weight must be") for value in (-1, NAN, INF, "0.1", None)],
        *[({"level_weight": value}, "level_weight must be") for value in (-1e-9, NAN, -INF)],
        *[({"ema_rate": value}, r"ema_rate must lie in \(0, 1\]") for value in (0, -0.1, 1.1, NAN, INF, True)],
        ({"sites": []}, "tapers nothing"),
        ({"sites": ()}, "tapers nothing"),
        ({"sites": "*.ln_1"}, r"sites=\['\*.ln_1'\]"),
        ({"sites": [1]}, "1 in it is not a string"),
        ({"sites": ["*.ln_3"]}, "matches no internal norm"),
        ({"schedule": (3, 8)}, "must be a GateSchedule"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_its_name(options, match):
    refused(gpt2(), match, **options)


def test_arguments_of_other_number_types_and_generators_are_taken():
    model = gpt2()
    sites = (pattern for pattern in ["*.0.ln_1"])
    made = attach(model, sites=sites, ema_rate=np.float32(0.5), anchor_weight=1, level_weight=np.float64(0))
    assert made.swapped == ("transformer.h.0.ln_1",)
    assert attach(gpt2(), sites=[], final=True).swapped == ("transformer.ln_f",)


@pytest.mark.parametrize("step", [-5, -1, 1.5, 3.0, NAN, "3", None, True, torch.tensor(1.5)])
def test_a_step_that_is_no_whole_number_from_zero_on_is_refused(step):
    _, made = builders.attached()
    with pytest.raises(UserError, match="whole number >= 0"):
        made.set_step(step)
    for known in (0, np.int64(1), torch.tensor(2)):
        made.set_step(known)


@pytest.mark.parametrize("value", [NAN, -0.1, 1.1, INF])
def test_a_gate_outside_0_to_1_is_refused_and_the_gate_stays(value):
    _, made = builders.calibrated(0.25)
    with pytest.raises(UserError, match=r"the gate must lie in \[0, 1\]"):
        made.set_gate(value)
    assert made.gate.item() == 0.25


@pytest.mark.parametrize(
    ("start", "end"), [(0, 5), (-1, 5), (5, 5), (6, 5), (1.5, 5), (1, 5.5), (NAN, 5), ("1", 5), (1, None), (True, 5)]
)
def test_a_schedule_of_other_than_rising_whole_steps_is_refused(start, end):
    with pytest.raises(ValueError, match="gate schedule"):
        GateSchedule(start, end)


def test_a_schedule_takes_whole_numbers_of_any_library_and_finite_fractions():
    assert GateSchedule(np.int32(3), torch.tensor(8)) == GateSchedule(3, 8)
    assert type(GateSchedule(np.int32(3), 8).start) is int
    for fractions in ((NAN, 1.0), (0.1, INF)):
        with pytest.raises(ValueError, match="finite fractions"):
            GateSchedule.from_fractions(100, *fractions)


# Wrappers


class PeftModelForCausalLM(nn.Module):
    """As PEFT wraps a model: two modules deep."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


WRAPPERS = {
    "PEFT": PeftModelForCausalLM,
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "average": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("call", [attach, fold, logits_of], ids=lambda call: call.__name__)
def test_a_wrapped_model_is_told_to_attach_before_wrapping(wrap, call):
    model = gpt2()
    wrapped = wrap(model)
    before = structure(model)
    arguments = (wrapped, tokens()) if call is logits_of else (wrapped,)
    with pytest.raises(UserError, match=r"wraps the GPT2LMHeadModel .* wrap it after attach\(model\)"):
        call(*arguments)
    assert structure(model) == before
    attach(model)


def test_a_model_that_fully_shard_has_changed_is_told_to_attach_before():
    model = gpt2()
    model.__class__ = type("FSDPGPT2LMHeadModel", (type(model),), {})  # as it changes the class, in place
    with pytest.raises(UserError, match=r"fully_shard .* after attach\(model\)"):
        attach(model)


def test_a_replica_of_data_parallel_is_refused_in_its_first_training_pass():
    """The Trainer makes replicas where a process sees several GPUs; their statistics would be lost."""
    model = gpt2().train()
    made = attach(model)
    replica = model.transformer._replicate_for_data_parallel()
    replica.forward = lambda ids: ids
    with pytest.raises(UserError, match="use DistributedDataParallel"):
        replica(tokens())
    with torch.no_grad():
        replica(tokens())
    made.detach()
    model.transformer._replicate_for_data_parallel()


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = tiny("llama")
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is on the meta device .* load the weights"):
        attach(model)
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


# Shared modules


def shared_blocks(model):
    model.transformer.h[1] = model.transformer.h[0]
    return "transformer.h.0.ln_1 and transformer.h.1.ln_1"


def shared_norms(model):
    model.transformer.h[1].ln_2 = model.transformer.h[0].ln_2
    return "transformer.h.0.ln_2 and transformer.h.1.ln_2"


def shared_with_the_final(model):
    model.transformer.ln_f = model.transformer.h[1].ln_1
    return "transformer.h.1.ln_1 and transformer.ln_f"


@pytest.mark.parametrize("share", [shared_blocks, shared_norms, shared_with_the_final])
def test_a_norm_at_two_places_is_refused_by_both_names(share):
    model = gpt2()
    names = share(model)
    refused(model, f"{names} are one module")
    model.transformer.h[1] = copy.deepcopy(model.transformer.h[1])  # the remedy
    if share is not shared_with_the_final:
        attach(model)


@pytest.mark.parametrize("fused", [True, False])
def test_a_block_that_is_shared_since_is_refused_by_the_fold(fused):
    model, _ = builders.calibrated(0.0)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UserError, match="input_layernorm are one module"):
        fold(model, fused=fused)


def test_a_shared_norm_is_refused_where_but_one_of_its_places_was_asked_for():
    model = gpt2()
    shared_norms(model)
    refused(model, "are one module", sites=["*.0.ln_2"])
    attach(model, sites=["*.ln_1"])


# Weights that are made anew for each pass

_PRUNED = [("prune", lambda layer: prune.random_unstructured(layer, "weight", 0.5), "pre-hook")]
_OLD = [
    ("old weight_norm", lambda layer: nn.utils.weight_norm(layer), "pre-hook"),
    ("old spectral_norm", lambda layer: nn.utils.spectral_norm(layer), "pre-hook"),
]
_NEW = [
    ("weight_norm", parametrizations.weight_norm, "parametrization"),
    ("spectral_norm", parametrizations.spectral_norm, "parametrization"),
    ("own", lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()), "parametrization"),
]
MADE = {name: (change, how) for name, change, how in [*_PRUNED, *_OLD, *_NEW]}


def change(layer, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old ones are deprecated, and still in use
        MADE[kind][0](layer)


@pytest.mark.parametrize("kind", MADE)
def test_a_projection_whose_weight_is_made_anew_is_refused_by_its_name(kind):
    model = tiny("llama")
    change(model.model.layers[1].self_attn.k_proj, kind)
    match = rf"model.layers.1.self_attn.k_proj.weight is not a parameter, .*{MADE[kind][1]}"
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(UserError, match=match):
        attach(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert not [name for name, _ in model.named_parameters() if name.endswith("gamma_t")]


@pytest.mark.parametrize("kind", ["prune", "own"])
def test_a_gain_or_bias_that_is_made_anew_is_refused_by_its_name(kind):
    model = gpt2()
    change(model.transformer.h[0].ln_2, kind)
    with pytest.raises(UserError, match=r"transformer.h.0.ln_2.weight is not a parameter"):
        attach(model)
    model = gpt2()
    prune.random_unstructured(model.transformer.h[0].mlp.c_fc, "bias", 0.5)
    with pytest.raises(UserError, match=r"transformer.h.0.mlp.c_fc.bias is not a parameter"):
        attach(model)


def test_a_made_weight_elsewhere_is_taken_where_the_model_can_still_be_copied():
    model = tiny("llama")
    prune.random_unstructured(model.model.layers[0].mlp.down_proj, "weight", 0.5)
    with pytest.raises(UserError, match=r"down_proj.weight is not a parameter"):
        attach(model)
    prune.remove(model.model.layers[0].mlp.down_proj, "weight")  # the remedy
    change(model.model.layers[0].mlp.down_proj, "weight_norm")
    made = attach(model.train())
    with made.observe():
        logits_of(model, tokens())
    made.calibrate()
    made.set_gate(0)
    folded, _ = fold(model.eval())
    assert close(logits_of(folded, tokens()), logits_of(model, tokens()), 1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["prune", "own"])
def test_a_weight_that_is_made_since_is_refused_by_the_fold_that_would_write_or_copy_it(kind, fused):
    model, _ = builders.calibrated(0.0)
    change(model.model.layers[0].mlp.up_proj, kind)
    if kind == "own" and not fused:
        assert fold(model, fused=False)
        return
    with pytest.raises(UserError, match=r"mlp.up_proj.weight is not a parameter"):
        fold(model, fused=fused)


class QuantisedLinear(nn.Linear):
    """Stands for what bitsandbytes and others put in the place of a linear map."""


def quantised(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = QuantisedLinear
    return "up_proj is a QuantisedLinear"


def shared_map(model):
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    return "up_proj is the same module as model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("spoil", [quantised, shared_map])
def test_a_map_that_only_the_unfused_fold_takes_is_told_at_once(spoil):
    model = builders.decoder()
    told = spoil(model)
    with pytest.warns(UserWarning, match=rf"{told}.*fold\(model, fused=False\)"):
        made = attach(model)
    builders.observe(model, made, tokens())
    made.calibrate()
    made.set_gate(0)
    with pytest.raises(UserError, match="cannot fold"):
        fold(model)
    folded, _ = fold(model, fused=False)
    assert close(folded(tokens()), model(tokens()))


# All or nothing


def at_call(number, stock):
    """`stock`, which fails at its call of that number."""
    calls = iter(range(1, 1000))

    def failing(*arguments, **options):
        if next(calls) == number:
            raise ZeroDivisionError
        return stock(*arguments, **options)

    return failing


POINTS = [
    (norms, "RunningMean", 1),
    (norms, "RunningMean", 4),
    (norms, "gain_of", 3),
    (taper, "TokenMask", 1),
    (taper, "ScaleTarget", 1),
    (taper, "Levels", 1),
    (driver, "guard_saving", 1),
    (driver, "keep_from_broadcast", 1),
]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("module", "function", "number"), POINTS)
def test_an_error_half_way_through_leaves_the_model_as_it_was(monkeypatch, module, function, number, name):
    model = tiny(name)
    kept = []
    model.get_submodule("transformer.ln_f" if name == "gpt2" else "model.norm").register_forward_pre_hook(
        lambda _, args: kept.append(args[0].shape)
    )
    before, state, logits = structure(model), snapshot(model.state_dict()), logits_of(model, tokens())
    with monkeypatch.context() as patched:
        patched.setattr(module, function, at_call(number, getattr(module, function)))
        with pytest.raises(ZeroDivisionError):
            attach(model, final=True, level_weight=0.1)
    assert structure(model) == before
    assert snapshot(model.state_dict()) == state
    assert torch.equal(logits_of(model, tokens()), logits)
    assert len(kept) == 2  # hooks of others still run
    attach(model, final=True, level_weight=0.1)


def test_fakeln_is_attached_whole_or_not_at_all(monkeypatch):
    options = {"schedule": FAKE_SCHEDULE, "aux_weight": 0.1, "eot": 0}
    model = gpt2(n_layer=3)
    before = structure(model)
    with monkeypatch.context() as patched:
        patched.setattr(fakenorms, "RunningMean", at_call(4, fakenorms.RunningMean))
        with pytest.raises(ZeroDivisionError):
            attach_fakeln(model, **options)
    for wrong in ({"aux_weight": -1.0}, {"ema_rate": 0.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            attach_fakeln(model, **{**options, **wrong})
    prune.random_unstructured(model.transformer.h[0].attn.c_attn, "weight", 0.5)
    with pytest.raises(UserError, match=r"c_attn.weight is not a parameter"):
        attach_fakeln(model, **options)
    prune.remove(model.transformer.h[0].attn.c_attn, "weight")
    assert {name: entry[1] for name, entry in structure(model).items()} == {n: entry[1] for n, entry in before.items()}
    attach_fakeln(model, **options)
