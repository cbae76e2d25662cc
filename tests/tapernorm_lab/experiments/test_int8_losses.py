"""What rounding adds to a loss, against float64 arithmetic; and the way from trained runs to the table."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import HARDWARE, make_job, write_stream

from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import Decoder
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.data.token_stream import TokenStream
from tapernorm_lab.experiments import int8_losses as losses
from tapernorm_lab.experiments.fold_run import fold_run
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.report.frames import int8 as int8_rows
from tapernorm_lab.report.tables.int8 import int8_table

VARIANTS, SEEDS = ("baseline", "all_aux"), (1, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Results of trained and folded models, the files that tell of them, and their tokens."""
    folder = tmp_path_factory.mktemp("run")
    streams, told = write_stream(folder / "tokens"), []
    for variant in VARIANTS:
        for seed in SEEDS:
            trained = folder / f"pretrain/{variant}/d12/seed{seed}"
            pretrain(make_job(variant, seed=seed), streams, trained, HARDWARE)
            told.append(trained / "result.json")
            if variant != "baseline":
                out = folder / f"fold/{variant}/d12/seed{seed}"
                fold_run(trained, None, out, device="cpu", threads=1)
                told.append(out / "result.json")
    return folder, told, streams


@pytest.fixture(scope="module")
def rows(run, tmp_path_factory) -> pd.DataFrame:
    _, told, streams = run
    out = tmp_path_factory.mktemp("rows")
    made = ["rows", "int8", *map(str, told), "--run", "test", "--tokens", str(streams), "--out", str(out)]
    assert main(made) == 0
    return int8_rows.read(out / "int8.csv", run="test")


def rounded_to_int8(weight, *, channels=True):
    """Of a float64 array, in plain NumPy."""
    largest = np.abs(weight).max(axis=1, keepdims=True) if channels else np.abs(weight).max()
    scale = torch.from_numpy(np.asarray(largest / 127)).to(torch.bfloat16).double().numpy()
    return np.clip(np.rint(weight / scale), -127, 127) * scale


def float64_loss(folder, streams, *, channels=True):
    """Loss of the model in float64, with its linear maps rounded to int8."""
    model = load(folder, Decoder).double()
    head = nn.Linear(*model.lm_head.weight.shape[::-1], bias=False, dtype=torch.float64)
    head.weight.data.copy_(model.lm_head.weight.data)
    model.lm_head = head  # apart from the embedding, which stays as it is
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(torch.from_numpy(rounded_to_int8(layer.weight.numpy(), channels=channels)))
        tokens = TokenStream.open(streams, "valid").tokens.long()
        context, total = model.config.context, 0.0
        for first in range(0, len(tokens) - 1, context):
            ids = tokens[first : first + context + 1]
            total += F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("place", ["pretrain/baseline", "fold/all_aux"])
def test_int8_weights_cost_what_they_do_in_float64(run, rows, place):
    folder, _, streams = run
    where = folder / place / "d12/seed1"
    model = where / "fused" if place.startswith("fold") else where
    row = rows.set_index(["variant", "seed"]).loc[(place.split("/")[1], 1)]
    assert row["ce_int8"] == pytest.approx(float64_loss(model, streams), abs=2e-6)
    assert row["ce_int8"] != pytest.approx(row["ce_float32"], abs=2e-5)
    assert row["ce_int8"] != pytest.approx(float64_loss(model, streams, channels=False), abs=2e-5)


@torch.no_grad()
def test_the_cells_differ_in_weights_or_activations_alone():
    layer = nn.Linear(40, 24)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    exact, weight = x.double().numpy(), layer.weight.double().numpy()
    bias = layer.bias.double().numpy()
    inputs = x.bfloat16().double().numpy()
    int8 = rounded_to_int8(weight)

    def outputs(array):
        return torch.from_numpy(array).float().bfloat16().double().numpy() + bias

    expected = {
        "float32": exact @ weight.T + bias,
        "int8": exact @ int8.T + bias,
        "bfloat16": outputs(inputs @ weight.T),
        "both": outputs(inputs @ int8.T),
    }
    made = {name: make(copy.deepcopy(layer))(x).double().numpy() for name, make in losses.CELLS.items()}
    for name, found in made.items():
        ulp = 2.0**-7 if name in ("bfloat16", "both") else 0  # a sum may round to the neighbour
        assert np.allclose(found, expected[name], rtol=0, atol=1e-5 + ulp * np.abs(expected[name] - bias).max())
        assert all(np.abs(found - other).mean() > 1e-4 for key, other in expected.items() if key != name)


def test_copies_are_scored_and_the_model_stays(run):
    folder, *_ = run
    model = load(folder / "pretrain/baseline/d12/seed1", Decoder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changed = losses.with_linear(model, losses.CELLS["both"])
    assert not any(isinstance(module, nn.Linear) for module in changed.modules())
    assert torch.equal(changed.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rows_are_of_the_run_and_of_folded_models(run, rows):
    folder, told, streams = run
    assert rows[["variant", "seed"]].to_numpy().tolist() == [
        ["all_aux", 1],
        ["all_aux", 2],
        ["baseline", 1],
        ["baseline", 2],
    ]
    assert set(rows["tokens"]) == {100}
    direct = losses.int8_losses(folder / "fold/all_aux/d12/seed2/fused", streams, threads=1)
    assert rows["weights_sha256"][1] == direct["weights_sha256"]
    assert rows["ce_both"][1] == pytest.approx(direct["ce_both"], abs=1e-6)
    unfolded = [path for path in told if "fold" not in path.parts]
    with pytest.raises(UserError, match="fold is not given"):
        int8_rows.collect(unfolded, lambda _: {}, run="test")


def test_the_table_gives_what_is_added_and_how_much_more_than_to_the_baseline(rows):
    table = int8_table(rows, ReportJob(run="test", caption="A test.", labels={12: "12"}))
    records = {record["variant"]: record for record in table.records}
    at = rows.set_index(["variant", "seed"])
    for variant, record in records.items():
        for name in ("int8", "bfloat16", "both"):
            added = [1000 * (at.loc[(variant, s), f"ce_{name}"] - at.loc[(variant, s), "ce_float32"]) for s in SEEDS]
            theirs = [
                1000 * (at.loc[("baseline", s), f"ce_{name}"] - at.loc[("baseline", s), "ce_float32"]) for s in SEEDS
            ]
            assert record[f"added_{name}_millinats_mean"] == pytest.approx(np.mean(added))
            assert record[f"added_{name}_millinats_std"] == pytest.approx(np.std(added, ddof=1))
            if variant != "baseline":
                assert record[f"beside_{name}_millinats"] == pytest.approx(np.mean(added) - np.mean(theirs))
        assert record["n"] == 2
    assert pd.isna(records["baseline"]["beside_both_millinats"])
    assert records["all_aux"]["n_pairs"] == 2
    assert [row[1] for row in table.rows] == ["Baseline", "All-Taper (+aux)"]
    with pytest.raises(UserError, match="tokens"):
        int8_table(rows.assign(tokens=[1, 1, 1, 2]), ReportJob(run="test", caption="A test.", labels={}))
