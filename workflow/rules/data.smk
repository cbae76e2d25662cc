# Corpus -> tokenizer -> token streams.


rule corpus:
    input:
        own_files(RUN.corpus_job()),
    output:
        train=f"{RESULTS}/data/corpus/train.jsonl",
        valid=f"{RESULTS}/data/corpus/valid.jsonl",
        manifest=f"{RESULTS}/data/corpus/manifest.json",
    log:
        f"{LOGS}/corpus.log",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.corpus_job()),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm corpus --job {params.job:q} --out {params.out:q} &> {log:q}"


rule tokenizer:
    input:
        rules.corpus.output,
    output:
        model=f"{RESULTS}/data/tokenizer/tokenizer.model",
        manifest=f"{RESULTS}/data/tokenizer/manifest.json",
    log:
        f"{LOGS}/tokenizer.log",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.tokenizer_job()),
        corpus=subpath(input[0], parent=True),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokenizer --job {params.job:q} --corpus {params.corpus:q} --out {params.out:q} &> {log:q}"


rule tokens:
    input:
        corpus=rules.corpus.output.manifest,
        tokenizer=rules.tokenizer.output.manifest,
    output:
        train=f"{RESULTS}/data/tokens/train.bin",
        valid=f"{RESULTS}/data/tokens/valid.bin",
        manifest=f"{RESULTS}/data/tokens/manifest.json",
    log:
        f"{LOGS}/tokens.log",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.tokens_job()),
        corpus=subpath(input.corpus, parent=True),
        tokenizer=subpath(input.tokenizer, parent=True),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokens --job {params.job:q} --corpus {params.corpus:q} --tokenizer {params.tokenizer:q}"
        " --out {params.out:q} &> {log:q}"
