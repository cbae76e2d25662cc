"""From result folders to tidy frames and back from CSV."""

import json

import pandas as pd
import pytest
import synthetic

from tapernorm.util.errors import UserError
from tapernorm_lab.report.frames import pretraining as rows


@pytest.fixture
def run(tmp_path):
    return tmp_path, synthetic.write_run(tmp_path, ("internal_aux", "baseline"), (128, 64), (10, 2))


def test_one_row_per_job_in_order(run):
    _, paths = run
    results, _ = rows.collect(paths, run="demo")
    assert results[rows.JOB].to_numpy().tolist() == [
        [v, d, s] for v in ("baseline", "internal_aux") for d in (64, 128) for s in (2, 10)
    ]
    row = results.set_index(rows.JOB).loc[("internal_aux", 128, 10)]
    document = json.loads((paths[0].parents[2] / "d128" / "seed10" / "result.json").read_text())
    for name, entry in document["values"].items():
        assert row[name] == entry["value"]
    assert (row["run"], row["steps"], row["lr"], row["context"]) == ("demo", 40, 0.003, 256)
    assert row["scale_target"] == 1.25
    assert pd.isna(results.set_index(rows.JOB).loc[("baseline", 128, 10), "scale_target"])


def test_settings_that_a_config_shares_have_one_digest_over_jobs_and_another_where_one_differs(run):
    _, paths = run
    results, _ = rows.collect(paths, run="r")
    assert results["settings_hash"].nunique() == 1  # over widths, seeds and variants
    assert results["taper_hash"].isna().all()
    job = json.loads(paths[0].read_text())["job"]
    edited(
        paths[0], job=job | {"train": job["train"] | {"lr": 0.004}, "taper": {"ema_rate": 0.1, "anchor_weight": 0.1}}
    )
    job = json.loads(paths[1].read_text())["job"]
    edited(paths[1], job=job | {"taper": {"ema_rate": 0.1, "anchor_weight": 0.0}})
    results, _ = rows.collect(paths, run="r")
    assert results["settings_hash"].nunique() == 2
    assert results["taper_hash"].dropna().nunique() == 1  # the weight is what tells (+aux) from without


def test_training_and_evaluation_lines_of_a_step_become_one_row(run):
    _, paths = run
    _, curves = rows.collect(paths, run="demo")
    lines = synthetic.metrics("baseline", 64, 2)
    cell = curves[(curves["variant"] == "baseline") & (curves["d_model"] == 64) & (curves["seed"] == 2)]
    assert cell["step"].tolist() == list(range(40))
    for key in ("ce", "gate", "grad_norm", "logit_rms", "logit_max", "elapsed_s"):
        assert cell[key].tolist() == [line[key] for line in lines if "ce" in line]
    evaluated = cell.dropna(subset=["valid_ce"])
    assert dict(zip(evaluated["step"], evaluated["valid_ce"], strict=True)) == {
        line["step"]: line["valid_ce"] for line in lines if "valid_ce" in line
    }


def test_rows_survive_csv_bit_for_bit(run):
    folder, paths = run
    fold = synthetic.write_fold(folder, "internal_aux", 64, 2, {"fused": 0.1 + 0.2, "unfused": 1e-15})
    results, curves = rows.collect([*paths, fold], run="007")
    results.loc[0, ["lr", "valid_ce"]] = [0.1 + 0.2, 1e-310]
    results.loc[1, "commit"] = None
    rows.write(results, curves, folder / "rows")
    results_back, curves_back = rows.read(folder / "rows")
    pd.testing.assert_frame_equal(results_back, results, check_exact=True)
    pd.testing.assert_frame_equal(curves_back, curves, check_exact=True)
    assert set(results_back["run"]) == {"007"}
    assert set(results_back["config_hash"]) == {"0123456789012345"}


def test_the_order_of_the_paths_does_not_matter(run):
    _, paths = run
    for one, other in zip(rows.collect(paths, run="r"), rows.collect(reversed(paths), run="r"), strict=True):
        pd.testing.assert_frame_equal(one, other)


def edited(path, **changes):
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def test_what_is_missing_damaged_or_given_twice_is_refused(run):
    folder, paths = run
    again = synthetic.write_job(folder / "copy", "internal_aux", 128, 10)
    with pytest.raises(UserError, match=r"copy.* and .*variant internal_aux, d_model 128, seed 10"):
        rows.collect([*paths, again], run="r")
    with pytest.raises(UserError, match="RESULT"):
        rows.collect([], run="r")
    with pytest.raises(UserError, match=r"absent/result\.json"):
        rows.collect([folder / "absent" / "result.json"], run="r")
    with pytest.raises(UserError, match=r"results\.csv.*`tapernorm rows training`"):
        rows.read(folder)
    for changes, message in [
        ({"schema_version": 2}, r"seed10/result\.json .*schema_version 2.* 1:"),
        ({"schema_version": 1, "kind": "finetune"}, "kind 'finetune'.* 'pretrain' or 'fold'"),
        ({"kind": "pretrain", "values": {}}, r"values\.valid_ce"),
    ]:
        edited(paths[0], **changes)
        with pytest.raises(UserError, match=message):
            rows.collect(paths, run="r")
    (paths[1].parent / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        rows.collect(paths[1:], run="r")


# Folds


FOLD_COLUMNS = ["valid_ce_gated", "valid_ce_unfused", "valid_ce_fused", "fold_logit_difference"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_fold_joins_the_row_of_its_training(run, reverse):
    folder, paths = run
    alone, curves = rows.collect(paths, run="r")
    assert alone[FOLD_COLUMNS].isna().all(axis=None)
    folds = [
        synthetic.write_fold(folder, "internal_aux", d, 10, {"unfused": d / 1024, "fused": -0.5}) for d in (64, 128)
    ]
    given = [*paths, *folds]
    results, curves_too = rows.collect(given[::-1] if reverse else given, run="r")
    pd.testing.assert_frame_equal(curves_too, curves)
    pd.testing.assert_frame_equal(results.drop(columns=FOLD_COLUMNS), alone.drop(columns=FOLD_COLUMNS))
    assert list(results.columns) == list(alone.columns)
    by_job = results.set_index(rows.JOB)[FOLD_COLUMNS]
    assert by_job.loc[("internal_aux", 64, 10)].tolist() == [3.0, 3.0625, 2.5, 1e-5]
    assert by_job.loc[("internal_aux", 128, 10)].tolist() == [3.0, 3.125, 2.5, 1e-5]
    assert by_job.drop([("internal_aux", 64, 10), ("internal_aux", 128, 10)]).isna().all(axis=None)


def test_a_fold_alone_twice_or_without_a_value_is_refused(run):
    folder, paths = run
    alone = synthetic.write_fold(folder, "all", 64, 2)
    with pytest.raises(UserError, match=r"fold/all/d64/seed2/result\.json .*RESULT"):
        rows.collect([*paths, alone], run="r")
    with pytest.raises(UserError, match=r"RESULT .*results/RUN/pretrain"):
        rows.collect([alone], run="r")
    folds = [synthetic.write_fold(place, "internal_aux", 64, 2) for place in (folder, folder / "copy")]
    with pytest.raises(UserError, match=r"copy.* and .*fold.*variant internal_aux, d_model 64, seed 2"):
        rows.collect([*paths, *folds], run="r")
    for changes, place in [
        ({"reports": {}}, r"reports\.fused\.largest_logit_difference"),
        ({"values": {}}, r"values\.valid_ce_gated"),
    ]:
        edited(folds[0], **changes)
        with pytest.raises(UserError, match=rf"fold/.*result\.json .*{place}"):
            rows.collect([*paths, folds[0]], run="r")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 0, "ce": 1.0}\n{"step": 1, "ce"', "line 2 "),
        ('{"step": 0, "ce": 1.0}\n{"step": 0, "ce": 1.5}\n', "line 2: step 0 logs ce "),
        ('{"ce": 1.0}\n', "line 1 "),
        ("", "is empty"),
    ],
)
def test_damaged_metrics_are_refused_by_line(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        rows.read_metrics(path)


DAMAGES = {
    "empty": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "no text": lambda raw: bytes(range(256)),
    "of another kind": lambda raw: b"a,b\n1,2\n",
    "a word for a number": lambda raw: raw.replace(b"\n", b"\nx,x,x,x,x,x\n", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["results.csv", "curves.csv"])
def test_damaged_rows_are_named(run, tmp_path, damage, name):
    _, paths = run
    rows.write(*rows.collect(paths, run="demo"), tmp_path)
    path = tmp_path / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(UserError) as raised:
        rows.read(tmp_path)
    assert str(path) in str(raised.value)
    assert "`tapernorm rows training`" in str(raised.value)
    assert "\n" not in str(raised.value)
