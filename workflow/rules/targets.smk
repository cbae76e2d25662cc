# The targets: every table and figure by its own name, and these groups.
def files_of(products):
    roots = {"results": RESULTS, "figures": FIGURES}
    return [f"{roots[root]}/{file}" for product in products for root, file in product.files]


def of_job(*classes):
    """Tables and figures that are told of by jobs of these classes."""
    return [product for product in PRODUCTS.values() if product.job_class in classes]


PAPER = of_job(catalogue.ReportJob, catalogue.SettingsJob)
GROUPS = {
    **{name: [PRODUCTS[name]] for name in TABLES + FIGURES_OF_RUN},
    "table2": [PRODUCTS[name] for name in ("table2", "table2x", "table2v1") if name in PRODUCTS],
    "table3": [PRODUCTS[name] for name in ("table3", "table3x") if name in PRODUCTS],
    "figure1": [PRODUCTS[name] for name in ("figure1a", "figure1b")],
    "tables": [product for product in PAPER if not product.is_figure],
    "figures": [product for product in PAPER if product.is_figure],
    "study": of_job(catalogue.StageJob),
    "study_S3": of_job(catalogue.OddInputsReportJob),
    "study_oddities": [product for product in PRODUCTS.values() if product.source == "oddities"],
}
for stage in RUN.study or ():
    GROUPS[f"study_{stage.name}"] = [product for product in GROUPS["study"] if product.stage == stage.name]
if RUN.study:  # the run that the study builds on
    GROUPS["study_S0"] = [*PAPER, PRODUCTS["claims"]]
TARGETS = {group: files_of(products) for group, products in GROUPS.items() if products}
TARGETS["report"] = [*files_of(PAPER), *rules.claims.output, *rules.provenance.output]

for target, files in TARGETS.items():

    rule:
        name:
            target
        input:
            files,
        localrule: True
