# Finished models on odd inputs. One job scores all variants of a width and seed, or all arms of a stage and seed, so
# that each row's losses are compared with those of its Baseline.
ODD_TEXTS = {text.name: f"robustness/texts/{text.name}/rows" for text in RUN.robustness.texts}


rule robustness:
    input:
        odd_input_models,
        tokens=f"{RESULTS}/data/tokens/manifest.json",
        tokenizer=f"{RESULTS}/data/tokenizer/manifest.json",
        texts=[f"{RESULTS}/{rows}/manifest.json" for rows in ODD_TEXTS.values()],
    output:
        f"{RESULTS}/robustness/{{place}}/seed{{seed}}.json",
    log:
        f"{LOGS}/robustness/{{place}}/seed{{seed}}.log",
    wildcard_constraints:
        place=one_of(dict.fromkeys(place for place, _ in ODD_INPUTS)),
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **ON_DEVICE,
    params:
        job=lambda w: canonical_json(odd_inputs(w)[0]),
        models=lambda w: [f"{name}={RESULTS}/{folder}" for name, folder in odd_inputs(w)[1].items()],
        tokens=subpath(input.tokens, parent=True),
        tokenizer=subpath(input.tokenizer, parent=True),
        texts=[f"{text}={RESULTS}/{rows}" for text, rows in ODD_TEXTS.items()],
    shell:
        "tapernorm evaluate --job {params.job:q} --models {params.models:q} --tokens {params.tokens:q}"
        " --tokenizer {params.tokenizer:q} --texts {params.texts:q}"
        f" {DEVICE_OPTIONS} --threads {{threads}} --out {{output:q}} &> {{log:q}}"
