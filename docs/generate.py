"""The tables in README.md and docs/ that are made from published rows, config/paper.yaml and bench.json.

python docs/generate.py      writes each of them anew, between its two marks: <!-- made: NAME --> and <!-- end -->
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "results/published"
MADE = re.compile(r"<!-- made: (\w+) -->\n.*?<!-- end -->", flags=re.DOTALL)


def markdown(header: list[str], rows: list[list[str]], align: str = "") -> str:
    """A table; `align` has a letter for each column: l, r."""
    marks = [{"l": ":--", "r": "--:"}[letter] for letter in align or "l" * len(header)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, marks, *rows))


def span(values: pd.Series, digits: int = 2, unit: str = "") -> str:
    """Smallest to largest of `values`, with a minus sign that is one."""
    low, high = (f"{value:.{digits}f}{unit}".replace("-", "−") for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def results_table(published: Path = PUBLISHED, run: str = "demo") -> str:
    """The eight rows of README.md: claim, paper, here with n, verdict, command."""
    claims = pd.read_csv(published / run / "claims.csv").set_index("name")
    table1, table2, table2x, table3 = (
        pd.read_csv(published / run / f"tables/{name}.csv") for name in ("table1", "table2", "table2x", "table3")
    )
    eager, compiled = (
        table2x.query("phase == 'decode' and mode == @mode and arm == 'fused'") for mode in ("eager", "compile")
    )
    rows = [
        _identity(claims, "Folding changes nothing", "validation loss moves by", " nats/token", "models", "tables"),
        _identity(
            claims, "No radial gradient", "radial share of the gradient before a final norm", "", "seeds", "tables"
        ),
        *(_speed(claims, table2, arm) for arm in ("unfused", "fused")),
        [
            "Decoding, norms folded, against PyTorch's own `F.rms_norm`",
            "—",
            f"eager {span(eager['ratio_baseline'])} times; compiled {span(compiled['ratio_baseline'])} times",
            f"{compiled['n'].iloc[0]} rounds",
            "not a claim of the paper",
            "`snakemake --cores all table2`",
        ],
        *(_gap(claims, table1, variant) for variant in ("internal_aux", "all_aux")),
        _gpt2(claims, table3),
    ]
    header = ["claim", "paper", "here", "n", "verdict", "command"]
    return markdown(header, rows)


def _identity(claims: pd.DataFrame, name: str, what: str, unit: str, of: str, target: str) -> list[str]:
    row = claims.loc[name]
    here = f"{row['value']:.1e}{unit} where it is largest".replace("-", "−")
    return [f"{name}: {what}", "0", here, f"{row['n']} {of}", row["verdict"], f"`make {target}`"]


def _speed(claims: pd.DataFrame, table2: pd.DataFrame, arm: str) -> list[str]:
    row, found = claims.loc[f"Decoding speed, {arm}"], table2.query("arm == @arm")
    norms = "norms folded" if arm == "fused" else "norms as fixed scales"
    return [
        f"Decoding, {norms}, eager, against the several-op norm",
        f"{row['least']:.2f} to {row['most']:.2f} times",
        f"{span(found['ratio_baseline_naive'])} times",
        f"{row['n']} rounds",
        row["verdict"],
        "`snakemake --cores all table2`",
    ]


def _gap(claims: pd.DataFrame, table1: pd.DataFrame, variant: str) -> list[str]:
    label = {"internal_aux": "Internal-Taper (+aux)", "all_aux": "All-Taper (+aux)"}[variant]
    row, found = claims.loc[f"Loss of {label}"], table1.query("variant == @variant")
    assert ((found["gap_low"] < 0) & (found["gap_high"] > 0)).all(), "an interval leaves zero out: reword the row"
    return [
        f"Validation loss of {label} above Baseline's",
        f"{row['least']} to {row['most']} %",
        f"{span(found['gap_percent'])} %; every 95 % interval holds zero",
        f"{row['n']} seeds",
        row["verdict"],
        "`snakemake --cores all table1`",
    ]


def _gpt2(claims: pd.DataFrame, table3: pd.DataFrame) -> list[str]:
    row, found = (
        claims.loc["GPT-2 loss of All-TaperLN (+aux)"],
        table3.query("column == 'owt' and size in ['tiny', 'mini']"),
    )
    ours, fake = (span(found.query("method == @method")["gap_percent"]) for method in ("all_aux", "fakeln"))
    return [
        "Fine-tuned GPT-2, held-out loss of All-TaperLN (+aux) above Vanilla's",
        f"at most {row['most']:.2f} %, FakeLN's",
        f"{ours} %; FakeLN has {fake} %",
        f"{row['n']} seed",
        row["verdict"],
        "`snakemake --cores all table3`",
    ]


def bench() -> str:
    """Every bounded figure of the published benchmark."""
    from benchmarks.report import short

    found = json.loads((PUBLISHED / "bench/bench.json").read_text(encoding="utf-8"))
    rows = []
    for figure in (figure for figure in found if figure["bound"]):
        interval = f"{short(figure['low'])}–{short(figure['high'])}" if figure["low"] is not None else ""
        bound = figure["bound"] + ("" if figure["passes"] else ", missed")
        measured = f"{short(figure['value'])} {figure['unit']}"
        rows.append([f"`{figure['name']}`", measured, interval, str(figure["n"]), bound])
    return markdown(["figure", "measured", "95 % interval", "n", "bound"], rows, "lrrrl")


def rivals() -> str:
    """A table for each published comparison of `make bench-rivals`, and the releases that it ran."""
    from benchmarks.rivals.table import ALIGN, HEADER, cells

    found = json.loads((PUBLISHED / "bench/rivals.json").read_text(encoding="utf-8"))["comparisons"]
    tables = []
    for comparison in found:
        job = comparison["job"]
        load = " to ".join(f"{comparison['provenance'][f'load_{when}']:.1f}" for when in ("before", "after"))
        threads = f"{job['threads']} thread{'s' if job['threads'] > 1 else ''}"
        rounds = max(len(row["seconds"]) for row in comparison["rows"])
        title = f"**d {job['d_model']}, {threads}**, {job['new_tokens']} tokens, {rounds} rounds, load {load}:"
        tables.append(f"{title}\n\n{markdown(HEADER, [cells(row) for row in comparison['rows']], ALIGN)}")
    facts = {row["engine"]: row["facts"] for row in reversed(found[0]["rows"])}
    releases = [[engine, told.get("release", "")] for engine, told in reversed(facts.items())]
    return "\n".join([*tables, markdown(["engine", "release"], releases)])


def assumptions() -> str:
    """What config/paper.yaml marks as an assumption, with its reason."""
    config = yaml.safe_load((ROOT / "config/paper.yaml").read_text(encoding="utf-8"))
    found = [(item["setting"] or "in the code", item["reason"]) for item in config["assumptions"]]
    return markdown(["setting", "why it is an assumption"], [[f"`{setting}`", reason] for setting, reason in found])


FILES = {"Table 1": "table1.csv", "Table 2 of": "table2v1.csv", "Table 2,": "table2.csv", "Table 3": "table3.csv"}


def artifact(run: str = "demo") -> str:
    """For each claim of the demo its target, the file with the answer, the expected value and its tolerance."""
    rows = []
    for claim in pd.read_csv(PUBLISHED / run / "claims.csv").to_dict("records"):
        table = next((file for place, file in FILES.items() if claim["place"].startswith(place)), None)
        target, output = (table.removesuffix(".csv"), f"tables/{table}") if table else ("claims", "claims.csv")
        target = "table2" if target == "table2v1" else target
        value, low, high = (f"{claim[key]:.3g}".replace("-", "−") for key in ("value", "low", "high"))
        identity = claim["verdict"] == "reproduced"
        interval = "one seed: no interval" if pd.isna(claim["low"]) else f"[{low}, {high}]"
        rows.append(
            [
                f"{claim['name']} ({claim['place']})",
                f"`snakemake --cores all {target}`",
                f"`results/{run}/{output}`",
                f"{value} ({claim['decisive_at']})",
                f"at most {claim['most']:g}" if identity else interval,
            ]
        )
    return markdown(["claim", "command", "output", "expected", "tolerance"], rows)


def costs() -> str:
    """Time, memory and disk: of the demo as measured, of the paper's scale as planned."""
    from tapernorm_lab.config.load import load_config
    from tapernorm_lab.config.run_cost import run_costs

    figures = {item["name"]: item for item in json.loads((PUBLISHED / "bench/bench.json").read_text(encoding="utf-8"))}
    seconds, memory = (figures[f"demo.{name}"]["value"] for name in ("wall_time", "largest_job_memory"))
    demo, paper = (run_costs(load_config(ROOT / f"config/{name}.yaml")) for name in ("demo", "paper"))
    disk, paper_disk = (sum(cost.disk_bytes for cost in found) for found in (demo, paper))
    hours = sum(cost.published_h or 0 for cost in paper)
    rows = [
        ["`make tables`", f"{seconds / 60:.0f} minutes on two cores", f"{memory:.2f} GB", f"{disk / 1e6:.0f} MB"],
        [
            "the paper's scale",
            f"{hours:.0f} hours of an H100, as published",
            "not measured",
            f"{paper_disk / 1e9:.0f} GB",
        ],
    ]
    environment = ["`make setup`", "minutes", "", "2 GB of packages"]
    return markdown(["command", "time", "memory of the largest job", "disk"], [environment, *rows])


MAKERS = {
    "results": results_table,
    "bench": bench,
    "rivals": rivals,
    "assumptions": assumptions,
    "artifact": artifact,
    "costs": costs,
}


def made(text: str) -> str:
    """`text` with what stands between its marks made anew."""
    return MADE.sub(lambda mark: f"<!-- made: {mark[1]} -->\n\n{MAKERS[mark[1]]()}\n<!-- end -->", text)


def main() -> None:
    sys.path.insert(0, str(ROOT))  # for benchmarks/
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (new := made(text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
