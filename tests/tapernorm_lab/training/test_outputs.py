"""Who may write where: nothing that tapernorm did not write, and no other job's output, is ever replaced."""

import json
import shutil
from pathlib import Path

import pytest
from places import ROOT

from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.training.outputs import MARK, Work, output_files, output_folder, require_kind, require_writable

MINE = Work("fold", {"job": {"seed": 1, "data": {"source": "web"}}})
OTHER = Work("fold", {"job": {"seed": 2, "data": {"source": "web"}}})
OTHER_KIND = Work("tokens", MINE.identity)


def content(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, by its name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(folder: Path, work: Work = MINE, *, overwrite: bool = False, text: str = "made") -> None:
    with output_folder(folder, work, overwrite=overwrite):
        for name in ("result.json", "fused/config.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)


def test_an_absent_or_empty_folder_is_taken_and_marked(tmp_path: Path) -> None:
    (tmp_path / "empty" / "below").mkdir(parents=True)  # as a workflow engine makes folders beforehand
    for name in ("absent/below", "empty"):
        write(tmp_path / name)
        mark = json.loads((tmp_path / name / MARK).read_text())
        assert mark["job"] == {"kind": "fold", "identity": MINE.identity}
        assert set(mark["files"]) == {"unfused", "fused", "result.json"}


def test_the_same_job_writes_again_and_keeps_what_others_put_there(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, text="again")
    assert (tmp_path / "result.json").read_text() == "again"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("names", [["notes.txt"], ["model.safetensors", "config.json"], ["below/deep/notes.txt"]])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_elses_files_is_refused_whatever_is_asked(tmp_path: Path, names, overwrite) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    with pytest.raises(UserError, match=min(names).split("/")[0]):
        write(tmp_path, overwrite=overwrite)
    assert content(tmp_path) == before


@pytest.mark.parametrize(("work", "told"), [(OTHER, "seed 1 there, 2 here"), (OTHER_KIND, "`tapernorm fold`")])
def test_another_jobs_folder_is_refused_with_what_differs_and_kept(tmp_path: Path, work: Work, told: str) -> None:
    write(tmp_path)
    before = content(tmp_path)
    for attempt in (lambda: write(tmp_path, work), lambda: require_writable(tmp_path, work)):
        with pytest.raises(UserError, match=told):
            attempt()
    assert content(tmp_path) == before


def test_overwrite_deletes_what_the_mark_lists_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with output_folder(tmp_path, OTHER, overwrite=True):
        assert set(content(tmp_path)) == {"lock", MARK, "notes.txt"}
    for work in (OTHER, MINE):
        require_writable(tmp_path, work)  # nothing is there to lose


def test_a_mark_cannot_make_overwrite_delete_outside_its_folder(tmp_path: Path) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    write(folder)
    victim.write_text("mine")
    mark = json.loads((folder / MARK).read_text())
    mark["files"] |= {"../victim": "fold", str(victim): "fold"}
    (folder / MARK).write_text(json.dumps(mark))
    write(folder, OTHER, overwrite=True)
    assert victim.read_text() == "mine"


def test_a_folder_whose_files_a_workflow_engine_deleted_is_free(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "fused")
    write(tmp_path, OTHER)
    assert json.loads((tmp_path / MARK).read_text())["job"]["identity"] == OTHER.identity


def test_checkpoints_of_another_job_are_kept_unless_that_job_diverged(tmp_path: Path) -> None:
    train, other = (Work("pretrain", {"job": {"seed": seed}}) for seed in (1, 2))
    with output_folder(tmp_path, train):
        (tmp_path / "resume" / "one").mkdir(parents=True)
        (tmp_path / "resume" / "one" / "step.pt").write_text("state")
    with pytest.raises(UserError, match="resume would be lost"):
        require_writable(tmp_path, other)
    (tmp_path / "resume" / "one" / "diverged.json").write_text("{}")
    require_writable(tmp_path, other)


def test_a_damaged_mark_lets_nobody_in(tmp_path: Path) -> None:
    write(tmp_path)
    for damage in ("", "{", "[]", '{"schema_version": 99}'):
        (tmp_path / MARK).write_text(damage)
        with pytest.raises(UserError, match=f"{MARK} is damaged"):
            require_kind(tmp_path, "fold", overwrite=True)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "out")


def test_files_are_replaced_only_where_tapernorm_wrote_them(tmp_path: Path) -> None:
    table, mine = tmp_path / "table1.csv", tmp_path / "table1.md"
    mine.write_text("my own table")
    with (
        pytest.raises(UserError, match=r"table1\.md was not written by tapernorm"),
        output_files([table, mine], "table"),
    ):
        raise AssertionError("claimed somebody's file")
    assert not table.exists()
    for text in ("first", "second"):
        with output_files([table], "table"):
            table.write_text(text)
    assert table.read_text() == "second"


def test_a_result_that_names_itself_is_replaced_without_a_mark(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text(json.dumps({"schema_version": 1, "kind": "evaluate", "provenance": {}}))
    theirs.write_text(json.dumps({"kind": "evaluate"}))
    with output_files([ours], "evaluate"):
        pass
    with pytest.raises(UserError, match=r"theirs\.json"), output_files([theirs], "evaluate"):
        pass


def test_files_beside_a_job_stay_when_the_job_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    with output_files([tmp_path / "score.json"], "evaluate"):
        (tmp_path / "score.json").write_text("{}")
    write(tmp_path, OTHER, overwrite=True)
    assert (tmp_path / "score.json").exists()
    with output_files([tmp_path / "score.json"], "evaluate"):  # and is still known
        pass


# The verbs


def words(verb: str, made: Path, out: Path) -> list[str]:
    """A call of `verb` on the small things in `made`, which would succeed on an absent folder."""
    config = ["--config", str(ROOT / "config/test.yaml")]
    corpus, tokenizer = (str(made / name) for name in ("corpus", "tokenizer"))
    more = {
        "corpus": config,
        "tokenizer": [*config, "--corpus", corpus],
        "tokens": [*config, "--corpus", corpus, "--tokenizer", tokenizer],
        "tokens --text": [*config, "--text", "train", "--corpus", corpus, "--tokenizer", tokenizer],
    }[verb]
    return [verb.split()[0], *more, "--out", str(out)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a tokenizer and token streams of the test config."""
    folder = tmp_path_factory.mktemp("made")
    for verb in ("corpus", "tokenizer", "tokens"):
        assert main(words(verb, folder, folder / verb)) == 0
    return folder


@pytest.mark.parametrize("verb", ["corpus", "tokenizer", "tokens", "tokens --text"])
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_verb_of_text_leaves_somebody_elses_folder_alone(made: Path, tmp_path: Path, capsys, verb: str, more) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    assert main([*words(verb, made, tmp_path), *more]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "thesis.txt" in said
    assert content(tmp_path) == {"thesis.txt": b"all of it"}


def test_a_verb_of_text_replaces_its_own_output_of_the_same_job_alone(made: Path, tmp_path: Path, capsys) -> None:
    out = Path(shutil.copytree(made / "tokens", tmp_path / "tokens"))
    before = content(out)
    assert main(words("tokens", made, out)) == 0  # the same job again
    other = [*words("tokens", made, out), "--set", "model.context=12"]
    assert main(other) == 2
    assert "12 here" in capsys.readouterr().err
    assert main(words("corpus", made, out)) == 2
    assert "`tapernorm tokens`" in capsys.readouterr().err
    assert {name: content(out)[name] for name in ("train.bin", "valid.bin")} == {
        name: before[name] for name in ("train.bin", "valid.bin")
    }
    assert main([*other, "--overwrite"]) == 0


PUBLISHED = ROOT / "results/published/demo"
REPORTS = {  # a call that writes files into a folder of its own choice, and one of these files
    "table": (["table", "table1", "--results", str(PUBLISHED)], "table1.md"),
    "figure": (["figure", "figure2", "--results", str(PUBLISHED)], "figure2.csv"),
}


@pytest.mark.parametrize("verb", REPORTS)
def test_a_report_replaces_only_files_that_tapernorm_wrote(tmp_path: Path, capsys, verb: str) -> None:
    call, name = REPORTS[verb]
    call = [*call, "--config", str(ROOT / "config/demo.yaml"), "--out", str(tmp_path)]
    (tmp_path / name).write_text("mine")
    assert main(call) == 2
    assert name in capsys.readouterr().err
    assert content(tmp_path) == {name: b"mine"}

    (tmp_path / name).rename(tmp_path / "kept.txt")
    assert main(call) == 0
    made = content(tmp_path)
    assert main(call) == 0  # its own files, again
    assert content(tmp_path).keys() == made.keys()
    assert (tmp_path / "kept.txt").read_text() == "mine"


@pytest.mark.parametrize("call", [["evaluate", "--model", "m", "--tokens", "t"]])
def test_a_single_file_of_somebody_else_stays(tmp_path: Path, capsys, call: list[str]) -> None:
    (tmp_path / "mine.json").write_text('{"mine": true}')
    assert main([*call, "--out", str(tmp_path / "mine.json")]) == 2
    assert "not written by tapernorm" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == '{"mine": true}'


@pytest.mark.parametrize("option", ["", " "])
def test_an_empty_name_is_not_the_current_folder(made: Path, tmp_path: Path, monkeypatch, capsys, option: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([*words("tokens", made, tmp_path)[:-1], option])
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_mark_whose_job_is_damaged_is_told_and_replaced_by_nobody(tmp_path):
    mark = {"schema_version": 1, "files": {"result.json": "fold"}, "job": {"kind": "fold"}}
    (tmp_path / MARK).write_text(json.dumps(mark))
    with pytest.raises(UserError, match=MARK), output_folder(tmp_path, Work("fold", {"of": 1}), overwrite=True):
        pass
    assert json.loads((tmp_path / MARK).read_text()) == mark


def test_a_job_knows_its_folder_whatever_json_makes_of_its_identity(tmp_path):
    with output_folder(tmp_path, Work("fold", {"of": (1, 2)})):
        (tmp_path / "result.json").write_text("{}")
    with output_folder(tmp_path, Work("fold", {"of": (1, 2)}), overwrite=True):
        assert (tmp_path / "result.json").exists()
    with pytest.raises(UserError), output_folder(tmp_path, Work("fold", {"of": (1, 3)})):
        pass
