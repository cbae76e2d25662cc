# The names by which tables and figures are asked for: each by its own, and these groups of them.
def names_of(*kinds, stage=None):
    """Tables and figures whose jobs are of these kinds, of one stage if one is named."""
    return [name for name, made in PRODUCTS.items() if made.kind in kinds and stage in (None, made.stage)]


def files_named(names):
    """Files of these tables and figures."""
    return [
        f"{place}/{name}.{kind}"
        for made, place, kinds in (
            (TABLES, f"{RESULTS}/tables", ("csv", "md", "tex")),
            (FIGURES_OF_RUN, FIGURES, ("pdf", "png", "csv")),
        )
        for name in names
        if name in made
        for kind in kinds
    ]


PAPER = names_of(products.ReportJob, products.SettingsJob)
GROUPS = {name: [name] for name in PRODUCTS} | {
    "table2": ["table2", "table2x", "table2v1"],
    "table3": ["table3", "table3x"],
    "figure1": ["figure1a", "figure1b"],
    "study": names_of(products.StageJob),
    "study_S3": names_of(products.TrialsJob),
    "study_oddities": [name for name in TABLES if name.endswith("_oddities")],
    **{f"study_{stage.name}": names_of(products.StageJob, stage=stage.name) for stage in RUN.study or ()},
}
TARGETS = {group: files_named(names) for group, names in GROUPS.items() if PRODUCTS.keys() >= set(names) > set()}
TARGETS["tables"] = files_named([name for name in PAPER if name in TABLES])
TARGETS["figures"] = files_named([name for name in PAPER if name in FIGURES_OF_RUN])
TARGETS["report"] = [*TARGETS["tables"], *TARGETS["figures"], *rules.claims.output, *rules.provenance.output]
if RUN.study:  # the run that the study builds on: the paper's own tables, figures and claims
    TARGETS["study_S0"] = [*TARGETS["tables"], *TARGETS["figures"], *rules.claims.output]

for target, files in TARGETS.items():

    rule:
        name:
            target
        input:
            files,
        localrule: True
