# Finished models on odd inputs. One job takes all variants of a width and seed, or all arms of a stage and seed, so that
# each row's losses stand beside its Baseline's.
wildcard_constraints:
    place=one_of(ODD_PLACES),


rule robustness:
    input:
        tried_files,
        tokens=f"{RESULTS}/data/tokens/manifest.json",
        tokenizer=f"{RESULTS}/data/tokenizer/manifest.json",
        texts=expand(
            f"{RESULTS}/robustness/texts/{{text}}/rows/manifest.json", text=ODD_TEXTS
        ),
    output:
        ODD_SCORES,
    log:
        f"{LOGS}/robustness/{{place}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
    params:
        job=lambda w: canonical_json(robustness_job(w)),
        models=lambda w: [
            f"{name}={folder}" for name, folder in tried_models(w).items()
        ],
        tokens=subpath(input.tokens, parent=True),
        tokenizer=subpath(input.tokenizer, parent=True),
        texts=[f"{text}={RESULTS}/robustness/texts/{text}/rows" for text in ODD_TEXTS],
    shell:
        "tapernorm evaluate --job {params.job:q} --models {params.models:q} --tokens {params.tokens:q}"
        " --tokenizer {params.tokenizer:q} --texts {params.texts:q} --device {resources.device}"
        " --jobs-per-gpu {resources.jobs_per_gpu} --threads {threads} --out {output:q} &> {log:q}"
