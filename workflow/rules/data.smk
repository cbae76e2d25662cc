# Texts -> tokenizers -> token streams to pre-train on, and blocks of one length for GPT-2 and for odd inputs.
wildcard_constraints:
    corpus=one_of(CORPORA),
    home=one_of(TOKENIZERS),


rule corpus:
    input:
        lambda w: own_files(CORPORA[w.corpus]),
    output:
        multiext(
            f"{RESULTS}/{{corpus}}/",
            train="train.jsonl",
            valid="valid.jsonl",
            manifest="manifest.json",
        ),
    log:
        f"{LOGS}/{{corpus}}.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(CORPORA[w.corpus]),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm corpus --job {params.job:q} --out {params.out:q} &> {log:q}"


rule tokenizer:
    input:
        unpack(tokenizer_inputs),
    output:
        manifest=f"{RESULTS}/{{home}}/tokenizer/manifest.json",
    log:
        f"{LOGS}/{{home}}/tokenizer.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(TOKENIZERS[w.home]),
        made_from=lambda w, input: folders_of(input),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokenizer --job {params.job:q} {params.made_from:q} --out {params.out:q} &> {log:q}"


rule tokens:
    input:
        unpack(tokens_inputs),
    output:
        multiext(
            f"{RESULTS}/{{tokens}}/",
            train="train.bin",
            valid="valid.bin",
            manifest="manifest.json",
        ),
    log:
        f"{LOGS}/{{tokens}}.log",
    wildcard_constraints:
        tokens=one_of(TOKENS),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json({**TOKENS, **SCORED_TOKENS}[w.tokens]),
        made_from=lambda w, input: folders_of(input),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokens --job {params.job:q} {params.made_from:q} --out {params.out:q} &> {log:q}"


use rule tokens as scored_tokens with:
    output:
        multiext(f"{RESULTS}/{{tokens}}/", valid="valid.bin", manifest="manifest.json"),
    wildcard_constraints:
        tokens=one_of(SCORED_TOKENS),
