# Every tapered model -> unfused and fused exports, scored again. Needs no retraining and no GPU.
FOLDED = f"{RESULTS}/fold/{{variant}}/d{{width}}/seed{{seed}}"


rule fold:
    input:
        model=rules.pretrain.output.model,
        trained=rules.pretrain.output.result,
        tokens=DATA_TOKENS[-1],
    output:
        multiext(f"{FOLDED}/unfused/", "model.safetensors", "config.json"),
        multiext(f"{FOLDED}/fused/", "model.safetensors", "config.json"),
        result=f"{FOLDED}/result.json",
    log:
        f"{LOGS}/fold/{{variant}}/d{{width}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **ON_DEVICE,
    params:
        model=subpath(input.model, parent=True),
        tokens=subpath(input.tokens, parent=True),
        out=subpath(output.result, parent=True),
    shell:
        "tapernorm fold --model {params.model:q} --tokens {params.tokens:q} --out {params.out:q}"
        f" {DEVICE_OPTIONS} --threads {{threads}} &> {{log:q}}"


# All of the run's models, folded where tapered, with int8 weights: on a CPU, for which these are.
rule int8_rows:
    input:
        TRAINED,
        tokens=DATA_TOKENS[-1],
    output:
        files_of_source("int8"),
    log:
        f"{LOGS}/rows/int8.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    params:
        run=RUN.run,
        trained=TRAINED,
        tokens=subpath(input.tokens, parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm rows int8 {params.trained:q} --run {params.run:q} --tokens {params.tokens:q} --threads {threads}"
        " --out {params.out:q} &> {log:q}"
