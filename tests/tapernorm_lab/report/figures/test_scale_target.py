"""The figure of gaps by scale target: its points are the rows', and it is readable on the page."""

import pytest
from printed_page import assert_printable
from synthetic_study import SEEDS, stage_job, write_stage

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import scale_target as target_figure
from tapernorm_lab.report.frames import study_stages as study_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    collected = study_rows.collect(write_stage(folder), folder)
    scaled = ~collected["variant"].isin(["baseline"]) & (collected["outcome"] == "finished")
    collected["scale_target"] = collected["seed"].astype(float).where(scaled)  # 1, 2, 3
    return collected


def test_a_point_is_a_run_against_the_baseline_of_its_own_seed(rows):
    figure, frame = target_figure.target_figure(rows, stage_job())
    assert frame.groupby("arm", sort=False)["seed"].apply(list).to_dict() == {
        "papers": [*SEEDS],
        "later": [*SEEDS],
        "wild": [2],  # its other seeds diverged
        "relative": [*SEEDS],
    }
    assert frame[frame["arm"] == "later"]["gap_percent"].tolist() == pytest.approx([-1, 0, -2])
    assert frame[frame["arm"] == "wild"]["gap_percent"].tolist() == pytest.approx([5])
    (axes,) = figure.axes
    *lines, zero = axes.get_lines()
    assert set(zero.get_ydata()) == {0}
    for line, arm in zip(lines, ("papers", "later", "wild", "relative"), strict=True):
        here = frame[frame["arm"] == arm]
        assert line.get_xdata().tolist() == pytest.approx(here["scale_target"].tolist(), rel=0.03)  # set apart a little
        assert line.get_ydata().tolist() == here["gap_percent"].tolist()
    labels = [line.get_label() for line in lines]
    assert labels[:2] == ["All-Taper (+aux),\ntaper from 0.05 to 1", "All-Taper (+aux),\ntaper from 0.3 to 0.7"]


def test_a_seed_without_a_baseline_has_no_point(rows):
    lost = rows.copy()
    lost.loc[(lost["arm"] == "baseline") & (lost["seed"] == 1), "outcome"] = study_rows.DIVERGED
    _, frame = target_figure.target_figure(lost, stage_job())
    assert set(frame["seed"]) == {2, 3}
    _, whole = target_figure.target_figure(rows, stage_job())
    assert set(whole["seed"]) == {1, 2, 3}  # the negative control


def test_it_is_readable_and_inside_the_page(rows):
    figure, _ = target_figure.target_figure(rows, stage_job())
    note = figure.get_supxlabel().replace("\n", " ")
    assert note.startswith("Run demo, stage S1, d 64. Each point: one run, 1–3 of each arm, against")
    assert note.endswith("Embedded demo.")
    assert_printable(figure)


def test_a_stage_without_a_scale_loss_has_no_such_figure(rows):
    bare = rows.assign(scale_target=float("nan"))
    with pytest.raises(UserError, match="stage S1 has no run with a scale loss and a Baseline of its seed"):
        target_figure.target_figure(bare, stage_job())
