"""What is left to run, counted apart; and what odd rows do, against NumPy on the logits and a model made to blow up."""

import builders
import numpy as np
import pytest
import reference
import torch
from builders import NORMS, array, calibrated, decoder, randomise, tokens

from tapernorm.architectures import architecture_of
from tapernorm.folding import fold
from tapernorm.models.decoder import lengthen
from tapernorm_lab.experiments.odd_inputs.rows import few_odd_rows
from tapernorm_lab.experiments.odd_inputs.scores import outcome
from tapernorm_lab.experiments.speed.inference_graph import inspect_inference, operations
from tapernorm_lab.models.dyt_derf import REPLACEMENTS, replace_norms, scale_embedding
from tapernorm_lab.models.logit_temperature import temper

NONE = {"norm": 0, "tanh": 0, "erf": 0, "exp": 0}
TEXT = torch.arange(300) % builders.VOCABULARY


def left(model):
    found = operations(model)
    return {name: found[name] for name in NONE}


def replaced(kind, **options):
    model = decoder(dtype=torch.float32, **options)
    replace_norms(model, kind, alpha=0.5, attention_alpha=0.8)
    scale_embedding(model)
    randomise(model, 4)
    return model


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_left_is_counted(norm):
    plain = decoder(dtype=torch.float32, norm=norm)
    assert left(plain) == NONE | {"norm": 5}
    deeper = decoder(dtype=torch.float32, norm=norm, n_layer=3)
    assert left(deeper) == NONE | {"norm": 7}
    temper(plain.model.norm)
    assert left(plain) == NONE | {"norm": 5, "exp": 1}
    for final, norms in ((False, 1), (True, 0)):
        model, taper = calibrated(dtype=torch.float32, model_options={"norm": norm}, final=final)
        folded, unfused = (fold(model, fused=fused)[0] for fused in (True, False))
        assert left(folded) == NONE | {"norm": norms}
        assert operations(folded)["all"] < operations(unfused)["all"]
        taper.set_gate(1.0)
        assert left(model) == NONE | {"norm": 5}


def test_replacements_keep_a_function_per_norm():
    assert left(replaced("dyt")) == NONE | {"tanh": 5}
    assert left(replaced("derf")) == NONE | {"erf": 5}
    bare, _ = calibrated(dtype=torch.float32, final=True)
    plain = operations(fold(bare)[0])["all"]
    assert operations(replaced("dyt"))["all"] == plain + 3 * 5 + 1  # and the embedding's scale


def test_a_norm_free_model_has_a_kernel_for_each_thing_it_does():
    folded, _ = fold(calibrated(dtype=torch.float32, final=True)[0])
    # Per block: 4 products, rotary (product, cat, addcmul), attention, SiLU and its product, two sums.
    assert operations(folded)["all"] == 1 + 2 * (4 + 3 + 1 + 2 + 2) + 1


def test_the_outcome_is_that_of_the_logits():
    model, rows = decoder(), tokens(time=8)
    found = outcome(model, rows, first=2)
    logits = array(model(rows[:, :-1]))
    losses = reference.cross_entropies(logits[:, 2:], rows[:, 3:].numpy())
    assert found["finite"] is True
    assert found["ce"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert found["ce_max"] == pytest.approx(np.max(losses), rel=1e-12)
    assert found["logit_max"] == pytest.approx(np.abs(logits).max(), rel=1e-12)
    whole = outcome(model, rows)
    assert whole["ce"] != pytest.approx(found["ce"], rel=1e-3)


@pytest.mark.parametrize("kind", ["plain", "folded", *REPLACEMENTS])
def test_the_largest_activation_is_that_of_the_stream_before_any_place_of_a_norm(kind):
    model = {
        "plain": lambda: decoder(dtype=torch.float32),
        "folded": lambda: fold(calibrated(dtype=torch.float32)[0])[0],
    }
    made = model[kind]() if kind in model else replaced(kind)
    with torch.no_grad():
        made.model.layers[1].self_attn.o_proj.weight[3] *= 50  # one feature, from the middle of the last block on
    seen: list[float] = []
    handles = [
        block.register_forward_hook(lambda _, __, output: seen.append(output.abs().max().item()))
        for block in made.model.layers
    ]
    found = outcome(made, tokens(time=8))
    for handle in handles:
        handle.remove()
    assert found["activation_max"] >= max(seen)
    assert found["activation_max"] > 5 * seen[0]
    hooks = [module._forward_pre_hooks for module in made.modules()]
    assert not any(hooks)


def test_a_model_that_blows_up_is_told_and_has_no_numbers():
    model, rows = decoder(dtype=torch.float32), tokens(time=8)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    found = outcome(model, rows)
    assert found["finite"] is False
    assert [value for name, value in found.items() if name != "finite"] == [None] * 4


def test_longer_rows_are_read_with_rotary_positions_that_go_on():
    model, rows = decoder(), tokens(time=24)
    longer = decoder()
    lengthen(longer, 23)
    losses = reference.cross_entropies(array(longer(rows[:, :-1])), rows[:, 1:].numpy())
    assert outcome(model, rows, first=11)["ce"] == pytest.approx(np.mean(losses[:, 11:]), rel=1e-12)
    assert model.config.context == 11  # as it was


def test_the_rows_are_what_they_are_called():
    rows = few_odd_rows(TEXT, vocabulary=29, context=11)
    assert {name: tuple(some.shape) for name, some in rows.items()} == {
        "text": (16, 12),
        "longer": (6, 45),
        "same": (16, 12),
        "random": (16, 12),
    }
    for name in ("text", "longer"):  # TEXT counts up
        assert all(torch.equal(row, (row[0] + torch.arange(len(row))) % 29) for row in rows[name])
    assert torch.equal(rows["longer"][1], TEXT[44:89])
    assert all(len(row.unique()) == 1 for row in rows["same"])
    assert len(rows["same"].unique()) > 5
    assert len(rows["random"].unique()) == 29
    again = few_odd_rows(TEXT, vocabulary=29, context=11)
    assert all(torch.equal(again[name], some) for name, some in rows.items())
    assert "longer" not in few_odd_rows(TEXT[:40], vocabulary=29, context=11)


def test_a_tapered_model_is_measured_in_its_folded_form_and_left_as_it_was():
    model, taper = calibrated(dtype=torch.float32, final=True)
    before = builders.snapshot(model.state_dict())
    found = inspect_inference(model, TEXT)
    assert found["operations_norm"] == 0
    folded, _ = fold(model)
    rows = few_odd_rows(TEXT, vocabulary=29, context=11)
    for kind, first in {"text": 0, "same": 0, "random": 0, "longer": 11}.items():
        expected = {f"{kind}_{name}": value for name, value in outcome(folded, rows[kind], first=first).items()}
        assert {name: found[name] for name in expected} == expected
    assert builders.snapshot(model.state_dict()) == before
    assert taper.gate.item() == 0.0
    assert architecture_of(model).final in taper.swapped
