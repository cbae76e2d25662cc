"""The figures of a stage: what they draw is the table's, or a run against the Baseline of its own seed."""

import pytest
from synthetic_study import SEEDS, stage_job

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import study_stages
from tapernorm_lab.report.frames.study_stages import DIVERGED
from tapernorm_lab.report.tables.study_stages import stage_records


def of_kind(kind, **changes):
    job = stage_job()
    return job.model_copy(update={"stage": job.stage.model_copy(update={"figure": kind, **changes})})


def test_gaps_of_untreated_tapers_have_the_tables_intervals(sources):
    drawing = study_stages.draw_stage(sources.windows, of_kind("window"))
    frame = drawing.frame.set_index("arm")
    assert frame.index.tolist() == ["papers", "later", "wild"]  # no Baseline, no treatment
    records = {record["arm"]: record for record in stage_records(sources.windows, stage_job())}
    for arm, row in frame.iterrows():
        for name in ("gap_percent", "start_fraction", "end_fraction"):
            assert row[name] == records[arm][name]
    later = frame.loc["later"]
    assert (later["gap_low"], later["gap_high"]) == (records["later"]["gap_low"], records["later"]["gap_high"])
    internal, tapered = drawing.figure.axes
    assert [axes.get_title() for axes in (internal, tapered)] == ["Internal-Taper (+aux)", "All-Taper (+aux)"]
    line, _, (bars,) = tapered.containers[1].lines  # the second start
    assert line.get_ydata().tolist() == [later["gap_percent"]]
    assert line.get_xdata()[0] == pytest.approx(later["end_fraction"], abs=0.01)
    (segment,) = bars.get_segments()
    assert segment[:, 1].tolist() == pytest.approx([later["gap_low"], later["gap_high"]])
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == ["from 0.05", "from 0.3"]


def test_a_point_is_a_run_against_the_baseline_of_its_own_seed(sources):
    drawing = study_stages.draw_stage(sources.targets, of_kind("scale_target"))
    frame = drawing.frame
    assert frame.groupby("arm", sort=False)["seed"].apply(list).to_dict() == {
        "papers": [*SEEDS],
        "later": [*SEEDS],
        "wild": [2],  # its other seeds diverged
        "relative": [*SEEDS],
    }
    assert frame[frame["arm"] == "later"]["gap_percent"].tolist() == pytest.approx([-1, 0, -2])
    assert frame[frame["arm"] == "wild"]["gap_percent"].tolist() == pytest.approx([5])
    (axes,) = drawing.figure.axes
    *lines, zero = axes.get_lines()
    assert set(zero.get_ydata()) == {0}
    for line, arm in zip(lines, ("papers", "later", "wild", "relative"), strict=True):
        here = frame[frame["arm"] == arm]
        assert line.get_xdata().tolist() == pytest.approx(here["scale_target"].tolist(), rel=0.03)  # set apart a little
        assert line.get_ydata().tolist() == here["gap_percent"].tolist()
    labels = [line.get_label() for line in lines]
    assert labels[:2] == ["All-Taper (+aux),\ntaper from 0.05 to 1", "All-Taper (+aux),\ntaper from 0.3 to 0.7"]


def test_a_seed_without_a_baseline_has_no_point(sources):
    lost = sources.targets.copy()
    lost.loc[(lost["arm"] == "baseline") & (lost["seed"] == 1), "outcome"] = DIVERGED
    assert set(study_stages.targets(lost, stage_job())["seed"]) == {2, 3}
    assert set(study_stages.targets(sources.targets, stage_job())["seed"]) == {1, 2, 3}  # the negative control


def test_a_stage_with_nothing_to_draw_has_no_figure(sources):
    bare = sources.targets.assign(scale_target=float("nan"))
    untapered = of_kind("window", arms=stage_job().stage.arms[:2])
    for rows, job in ((bare, of_kind("scale_target")), (sources.windows, untapered), (sources.windows, of_kind(None))):
        with pytest.raises(UserError, match="stage S1 has no"):
            study_stages.draw_stage(rows, job)
