"""The figure of a stage: what it draws is the table's, and it is readable on the page."""

import pytest
from printed_page import assert_printable
from synthetic_study import stage_job, write_stage

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import figure1_2_curves as figures
from tapernorm_lab.report.figures import study_stages as study_figure
from tapernorm_lab.report.frames import study_stages as study_rows
from tapernorm_lab.report.tables import study_stages as study_tables


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return study_rows.collect(write_stage(folder), folder)


def test_it_draws_the_gaps_of_untreated_tapers_with_the_tables_intervals(rows):
    _, frame = study_figure.stage_figure(rows, stage_job())
    assert frame["arm"].tolist() == ["papers", "later", "wild"]  # no Baseline, no treatment
    records = {record["arm"]: record for record in study_tables.stage_records(rows, stage_job())}
    for row in frame.to_dict("records"):
        for name in ("gap_percent", "start_fraction", "end_fraction"):
            assert row[name] == records[row["arm"]][name]
    later = frame[frame["arm"] == "later"].iloc[0]
    assert (later["gap_low"], later["gap_high"]) == (records["later"]["gap_low"], records["later"]["gap_high"])


def test_points_and_whiskers_stand_where_the_frame_says(rows):
    figure, frame = study_figure.stage_figure(rows, stage_job())
    internal, tapered = figure.axes
    assert [axes.get_title() for axes in (internal, tapered)] == ["Internal-Taper (+aux)", "All-Taper (+aux)"]
    later = frame[frame["arm"] == "later"].iloc[0]
    container = tapered.containers[1]  # the second start
    line, _, (bars,) = container.lines
    assert line.get_ydata().tolist() == [later["gap_percent"]]
    assert line.get_xdata()[0] == pytest.approx(later["end_fraction"], abs=0.01)
    (segment,) = bars.get_segments()
    assert segment[:, 1].tolist() == pytest.approx([later["gap_low"], later["gap_high"]])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["from 0.05", "from 0.3"]


def test_what_is_printed_is_readable_and_inside_the_page(rows):
    figure, _ = study_figure.stage_figure(rows, stage_job())
    note = figure.get_supxlabel().replace("\n", " ")
    assert note.startswith("Run demo, stage S1, d 64, 1–3 seeds.")
    assert note.endswith("Embedded demo.")
    assert_printable(figure)


def test_the_same_rows_give_the_same_files(rows, tmp_path):
    for name in ("one", "two"):
        figures.save(*study_figure.stage_figure(rows, stage_job()), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.csv").read_text() == (tmp_path / "two.csv").read_text()


def test_a_stage_without_tapers_has_no_figure(rows):
    job = stage_job()
    stage = job.stage.model_copy(update={"arms": job.stage.arms[:2]})
    with pytest.raises(UserError, match="stage S1 has no tapered arm with a gap to draw"):
        study_figure.stage_figure(rows, job.model_copy(update={"stage": stage}))
