# Texts -> tokenizers -> token streams to pre-train on, and blocks of one length for GPT-2 and for odd inputs.
rule corpus:
    input:
        own_files,
    output:
        multiext(
            f"{RESULTS}/{{corpus}}/",
            train="train.jsonl",
            valid="valid.jsonl",
            manifest="manifest.json",
        ),
    log:
        f"{LOGS}/{{corpus}}.log",
    wildcard_constraints:
        corpus=one_of(CORPORA),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(CORPORA[w.corpus]),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm corpus --job {params.job:q} --out {params.out:q} &> {log:q}"


rule tokenizer:
    input:
        unpack(lambda w: TOKENIZERS[w.home][1]),
    output:
        manifest=f"{RESULTS}/{{home}}/tokenizer/manifest.json",
    log:
        f"{LOGS}/{{home}}/tokenizer.log",
    wildcard_constraints:
        home=one_of(TOKENIZERS),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(TOKENIZERS[w.home][0]),
        made_from=lambda w, input: folders_of(input),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokenizer --job {params.job:q} {params.made_from:q} --out {params.out:q} &> {log:q}"


rule tokens:
    input:
        unpack(lambda w: TOKENS[w.tokens][1]),
    output:
        multiext(f"{RESULTS}/{{tokens}}/", train="train.bin", valid="valid.bin", manifest="manifest.json"),
    log:
        f"{LOGS}/{{tokens}}.log",
    wildcard_constraints:
        tokens=one_of(TOKENS),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(TOKENS[w.tokens][0]),
        made_from=lambda w, input: folders_of(input),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokens --job {params.job:q} {params.made_from:q} --out {params.out:q} &> {log:q}"


use rule tokens as scored_tokens with:
    input:
        unpack(lambda w: SCORED_TOKENS[w.tokens][1]),
    output:
        multiext(f"{RESULTS}/{{tokens}}/", valid="valid.bin", manifest="manifest.json"),
    wildcard_constraints:
        tokens=one_of(SCORED_TOKENS),
    params:
        job=lambda w: canonical_json(SCORED_TOKENS[w.tokens][0]),
