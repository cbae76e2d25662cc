"""A small run to publish: rows, tables and a checkout of its own."""

import csv
import json
import shutil
from pathlib import Path

import synthetic
import yaml
from places import ROOT

from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.load import load_config
from tapernorm_lab.report.frames import int8

STAGE = {
    "name": "S1",
    "title": "A question",
    "search": False,
    "figure": None,
    "d_model": 24,
    "seeds": [1, 2],
    "baseline": "baseline",
    "arms": [
        {"name": "baseline", "label": "Baseline", "taper": "none", "anchor": "none"},
        {"name": "tapered", "label": "Tapered", "taper": "all", "anchor": "absolute"},
    ],
}


TABLES = {"tables/table1.md", "tables/table4.tex", "claims.csv", "tables/table_S1.csv"}


class Desk:
    """A folder with a config, what a run of it computed, and what is published of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "mine.yaml"
        self.computed, self.published = folder / "results/mine", folder / "results/published/mine"
        self.drawn = folder / "figures/published/mine"
        self.where = ["--results", f"{folder}/results", "--figures", f"{folder}/figures"]

    def write_config(self, **changes: object) -> None:
        raw = yaml.safe_load((ROOT / "config/test.yaml").read_text(encoding="utf-8"))
        widths = [{**width, "variants": ["baseline", "all_aux"]} for width in raw["widths"]]
        raw |= {"run": "mine", "widths": widths, "gpt2": None, "study": [STAGE], "robustness": None, **changes}
        self.config.write_text(yaml.safe_dump(raw), encoding="utf-8")

    def compute(self, commit: str = "a" * 40) -> None:
        """Results of all jobs of the config, and their rows."""
        config = load_config(self.config)
        shutil.rmtree(self.computed, ignore_errors=True)
        written = []
        for made, width, seed in config.pretrain_cells():
            variant, job = made.name, config.pretrain_job(made, width, seed)
            facts = {"job": job.model_dump(mode="json"), "host": "0123456789ab"}
            told = {"config_hash": digest(canonical_json(job)), "commit": commit, "packages": {"torch": "2.13.0"}}
            told |= {"written_at": "2026-01-01T00:00:00+00:00", "device": "cpu", "seed": seed}
            paths = [synthetic.write_job(self.computed, variant, width, seed)]
            if made.tapers:
                paths.append(synthetic.write_fold(self.computed, variant, width, seed))
            for path in paths:
                document = json.loads(path.read_text(encoding="utf-8"))
                path.write_text(json.dumps({**document, "job": facts["job"], "provenance": told}), encoding="utf-8")
            written += map(str, paths)
        self.gather(written)

    def gather(self, results: list[str]) -> None:
        assert main(["rows", "training", *results, "--run", "mine", "--out", f"{self.computed}/rows"]) == 0
        rows = ["--results", str(self.computed), "--out", f"{self.computed}/tables"]
        assert main(["rows", "study_S1", "--config", str(self.config), *rows]) == 0

    def score_int8(self) -> None:
        """Rows of int8 weights, of made-up losses."""
        losses = {"tokens": 100, "weights_sha256": "0" * 64, **{f"ce_{name}": 3.0 for name in int8.LOSSES}}
        results = [self.computed / kind for kind in ("pretrain", "fold")]
        found = [path for folder in results for path in sorted(folder.rglob("result.json"))]
        int8.write(int8.collect(found, lambda _: losses, run="mine"), self.computed / "rows")

    def publish(self, *more: str) -> int:
        return main(["compare", "--publish", "--run", "mine", "--config", str(self.config), *self.where, *more])

    def files(self) -> dict[str, bytes]:
        """What is published: the file's place -> its content."""
        found = {}
        for folder in (self.published, self.drawn):
            found |= {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return found

    def provenance(self) -> list[dict[str, str]]:
        with open(self.published / "provenance.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
