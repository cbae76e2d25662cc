"""Parameters and FLOPs against the models themselves and torch's own counter; limits that grow and are large enough."""

import pytest
import torch
from places import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training import HARDWARE, make_job

from tapernorm.models.decoder import Decoder, parameter_count
from tapernorm_lab.config.job_cost import (
    PUBLISHED_GPT2,
    Load,
    limit_min,
    memory_mb,
    training_time_s,
)
from tapernorm_lab.config.load import load_config
from tapernorm_lab.experiments.pretrain import attach_variant

CONFIGS = ROOT / "config"


def load_of(**changes):
    return Load.of_pretraining(make_job(**changes), HARDWARE)


@pytest.mark.parametrize("variant", ["baseline", "internal", "all_aux"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(variant, norm, tied):
    job = make_job(variant, norm=norm, tie_head=tied)
    model = Decoder(job.model)
    attach_variant(model, job)
    assert Load.of_pretraining(job, HARDWARE).parameters == parameter_count(model)


def test_the_papers_models_have_the_sizes_of_its_labels():
    config = load_config(CONFIGS / "paper.yaml")
    sizes = [
        Load.of_pretraining(config.pretrain_job("baseline", w.d_model, 1), config.hardware).parameters
        for w in config.widths
    ]
    assert [f"{size / 1e6:.1f}" for size in sizes] == ["1.0", "2.9", "8.8", "30.3"]


def forward_flops(model, tokens) -> int:
    """Of one forward pass, by torch's counter."""
    plain = sdpa_kernel(SDPBackend.MATH)  # whose products it counts; a CPU's fused attention it does not know
    with plain, FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_three_times_those_that_torch_counts_forward(tied):
    job = make_job("baseline", tie_head=tied, context=16)
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    counted = forward_flops(Decoder(job.model), tokens)
    load = Load.of_pretraining(job, HARDWARE)
    assert load.flops_per_token * tokens.numel() == 3 * counted
    assert load.flops == job.steps * job.train.batch * 16 * load.flops_per_token


def test_the_published_gpt2_sizes_are_exact():
    config = load_config(CONFIGS / "paper.yaml")
    known = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    loads = {}
    for size in config.gpt2.sizes:
        job, hardware = config.finetune_job("vanilla", size.name, 1), config.finetune_hardware(size.name)
        loads[size.source] = Load.of_finetune(job, config.base_job(size.name), None, hardware)
    assert {source: load.parameters for source, load in loads.items()} == known
    assert set(known) == set(PUBLISHED_GPT2)


@pytest.mark.parametrize(("method", "kind"), [("vanilla", None), ("internal_aux", False), ("all_aux", True)])
def test_a_gpt2_of_our_own_counts_as_the_model_does(method, kind):
    from transformers import GPT2Config, GPT2LMHeadModel

    from tapernorm.taper import attach

    config = load_config(CONFIGS / "test.yaml")
    size = config.gpt2.sizes[1]
    shape, vocabulary = size.fresh.shape, config.gpt2.tokenizer.vocab_size
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=config.gpt2.context,
            n_embd=shape.d_model,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
        )
    ).eval()
    base = config.base_job(size.name)
    load = Load.of_finetune(config.finetune_job(method, size.name, 1), base, vocabulary, config.hardware)
    counted = forward_flops(model, torch.zeros(2, config.gpt2.context, dtype=torch.int64))
    assert load.flops_per_token * 2 * config.gpt2.context == 3 * counted
    if kind is not None:
        attach(model, final=kind)
    assert load.parameters == parameter_count(model)
    made_here = Load.of_base(base, vocabulary, config.hardware)
    assert made_here.steps == size.fresh.steps
    assert Load.of_base(base.model_copy(update={"source": "gpt2", "fresh": None}), None, config.hardware).flops == 0


def test_memory_grows_with_what_is_held_at_once():
    whole, half = (
        Load.of_pretraining(make_job(), HARDWARE.model_copy(update={"micro_batch": rows})) for rows in (None, 2)
    )
    held = {rows.pass_tokens: rows.training_bytes for rows in (whole, half)}
    assert held[32] - held[16] == 4 * whole.kept * 16
    checkpointed = HARDWARE.model_copy(update={"activation_checkpointing": True})
    deep = make_job(n_layer=6)
    assert Load.of_pretraining(deep, checkpointed).kept < Load.of_pretraining(deep, HARDWARE).kept
    assert whole.checkpoint_bytes == 12 * whole.parameters


def test_limits_double_with_every_attempt():
    load = load_of(steps=100_000)
    first = limit_min(load, HARDWARE)
    assert first > training_time_s(load, HARDWARE) / 60
    assert [limit_min(load, HARDWARE, attempt) for attempt in (2, 3)] == pytest.approx([2 * first, 4 * first], abs=4)


def test_an_eager_run_of_the_paper_fits_its_first_limit():
    """4.3, 4.8, 8.2 and 15.4 hours on one H100 (method.md section 9)."""
    config = load_config(CONFIGS / "paper.yaml")
    for width, hours in zip(config.widths, (4.3, 4.8, 8.2, 15.4), strict=True):
        load = Load.of_pretraining(config.pretrain_job("all_aux", width.d_model, 1), config.hardware)
        assert 60 * hours < limit_min(load, config.hardware) < 3 * 60 * hours


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_process_of_a_job_has_memory_of_its_own_and_one_writes_the_checkpoint(device):
    load = load_of(d_model=512, d_ff=1368, n_layer=8)
    one, two, four = (
        memory_mb(load, HARDWARE.model_copy(update={"device": device, "devices_per_job": n})) for n in (1, 2, 4)
    )
    assert four - two == pytest.approx(2 * (two - one), abs=3)
    assert 1e6 * (2 * one - two) == pytest.approx(2 * load.checkpoint_bytes, abs=3e6)


def test_more_threads_or_a_gpu_take_less_time_and_a_gpu_less_host_memory():
    load = load_of(d_model=512, d_ff=1368, n_layer=8, context=512, batch=32)
    times = [
        training_time_s(load, HARDWARE.model_copy(update=update)) for update in ({}, {"threads": 4}, {"device": "cuda"})
    ]
    assert times == sorted(times, reverse=True)
    assert memory_mb(load, HARDWARE.model_copy(update={"device": "cuda"})) < memory_mb(load, HARDWARE)
