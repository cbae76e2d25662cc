"""What a whole config costs before anything runs: jobs, tokens, FLOPs and disk, rule by rule.

Arithmetic on the config alone; no torch. FLOPs of training are exact (`job_cost.Load`), sizes of texts are estimates.
Hours are told only from a speed that finished runs had, or that is given.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from tapernorm.util.errors import UserError

from .job_cost import GPT2_VOCABULARY, Load
from .published import PRETRAIN_HOURS_H100
from .run import Config
from .sections import DataConfig
from .study_runs import trained_arms

_TEXT_BYTES = {  # source -> bytes of its training and validation text
    "tinystories": (1.9e9, 1.9e7),
    "openwebtext": (3.9e10, 2e7),
    "web": (4.2e6, 0.0),
    "python_stdlib": (1e7, 0.0),
}
_OPENWEBTEXT_DOCUMENT = 4.9e3  # bytes; one of the eight million
_FLOAT, _TOKEN, _LOGGED_STEP = 4, 2, 700  # bytes of a weight, of a token id on disk, of a logged step
_UNTIED = 1.3  # a fused GPT-2 has a head of its own: 31 % more of the smallest, 5 % of the largest
_FORWARD = 3  # forward and backward passes cost so many forward passes
_CHECKPOINTS = 3  # of a running job: two kept, one being written
_HEADER = ("rule", "jobs", "tokens", "FLOPs", "disk", "hours", "published")


@dataclass(frozen=True)
class RuleCost:
    """All jobs of one rule, or of one width or size of it.

    Attributes:
        disk_bytes: kept at the end.
        checkpoint_bytes: of one job, while it runs.
        d_model: width of the models that are pre-trained; None: of other rules.
        published_h: hours that the paper's authors report for as many runs.
    """

    rule: str
    jobs: int
    tokens: float = 0.0
    flops: float = 0.0
    disk_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    d_model: int | None = None
    published_h: float | None = None


@dataclass(frozen=True)
class Speed:
    """How fast one job is, as measured or given."""

    flops_per_s: float | None = None
    tokens_per_s: Mapping[int, float] = field(default_factory=dict)  # by d_model, of finished pre-training runs

    def hours(self, cost: RuleCost) -> float | None:
        """Hours of all jobs, one after another; None where no speed is known."""
        if cost.d_model is not None and cost.d_model in self.tokens_per_s:
            return cost.tokens / self.tokens_per_s[cost.d_model] / 3600
        return cost.flops / self.flops_per_s / 3600 if self.flops_per_s and cost.flops else None


def run_costs(config: Config) -> list[RuleCost]:
    """The cost of every rule of `config` but those that gather rows and draw tables and figures."""
    return list(_costs(config))


def _costs(config: Config) -> Iterator[RuleCost]:
    train, valid = _text_bytes(config.data)
    per_token = bytes_per_token(config.tokenizer.vocab_size)
    tokens = (train + valid) / per_token
    yield RuleCost("corpus", 1, disk_bytes=train + valid)
    yield RuleCost("tokenizer", 1, disk_bytes=3e5)
    yield RuleCost("tokens", 1, tokens=tokens, disk_bytes=_TOKEN * tokens)
    widths = sorted(width.d_model for width in config.widths)
    yield from (_pretrain(config, d_model) for d_model in widths)
    yield from (_fold(config, d_model, valid / per_token) for d_model in widths)
    yield from _study(config)
    if config.benched:
        yield RuleCost("bench", 2, tokens=_bench_tokens(config))
    if config.gpt2:
        yield from _gpt2(config)


def _pretrain(config: Config, d_model: int) -> RuleCost:
    """All variants and seeds of one width."""
    cells = [cell for cell in config.pretrain_cells() if cell[1] == d_model]
    loads = [Load.of_pretraining(config.pretrain_job(*cell), config.hardware) for cell in cells]
    logged = sum(load.steps for load in loads) / config.train.log_every
    hours = PRETRAIN_HOURS_H100.get(d_model) if config.data.source == "tinystories" else None
    cost = _training(f"pretrain d{d_model}", loads)
    return replace(
        cost,
        d_model=d_model,
        disk_bytes=cost.disk_bytes + _LOGGED_STEP * logged,
        published_h=None if hours is None else hours * len(cells),
    )


def _study(config: Config) -> Iterator[RuleCost]:
    """What each stage trains that no pre-training and no earlier stage has trained."""
    trained = trained_arms(config)
    for stage in config.study or ():
        cells = [(arm, seed) for of, arm, seed in trained if of.name == stage.name]
        jobs = [config.arm_job(stage, stage.arm(arm), seed).pretrain for arm, seed in cells]
        if jobs:
            loads = [Load.of_pretraining(job, config.hardware) for job in jobs]
            yield replace(_training(f"arm {stage.name}", loads), d_model=stage.d_model)


def _training(rule: str, loads: Sequence[Load]) -> RuleCost:
    return RuleCost(
        rule,
        len(loads),
        tokens=sum(load.steps * load.step_tokens for load in loads),
        flops=sum(load.flops for load in loads),
        disk_bytes=sum(_FLOAT * load.parameters for load in loads),
        checkpoint_bytes=_CHECKPOINTS * max(load.checkpoint_bytes for load in loads),
    )


def _fold(config: Config, d_model: int, valid_tokens: float) -> RuleCost:
    """Unfused and fused exports, with the three scores of each model."""
    cells = [cell for cell in config.pretrain_cells() if cell[1] == d_model and cell[0].tapers]
    loads = [Load.of_pretraining(config.pretrain_job(*cell), config.hardware) for cell in cells]
    head = config.tokenizer.vocab_size * d_model  # a fused All-Taper has a head of its own
    return RuleCost(
        f"fold d{d_model}",
        len(cells),
        tokens=3 * valid_tokens * len(cells),
        flops=sum(3 * valid_tokens * load.flops_per_token / _FORWARD for load in loads),
        disk_bytes=sum(_FLOAT * (2 * load.parameters + head) for load in loads),
    )


def _bench_tokens(config: Config) -> float:
    """Decoded by the five models of Table 2 in every mode, untimed rounds included."""
    bench = config.bench
    steps = 5 * len(bench.modes) * len(bench.prompts) * (bench.rounds + bench.warmup) * bench.block
    return steps * sum(bench.batches)


def _gpt2(config: Config) -> Iterator[RuleCost]:
    gpt2 = config.gpt2
    assert gpt2 is not None
    vocabulary = gpt2.tokenizer.vocab_size if gpt2.tokenizer else None
    per_token = bytes_per_token(vocabulary or GPT2_VOCABULARY)
    texts = [gpt2.text, *([gpt2.base_text] if gpt2.base_text else [])]
    texts += [corpus.text for corpus in gpt2.corpora if corpus.text]
    held = sum(sum(_text_bytes(data)) for text in texts for data in text)
    rows = [corpus for corpus in gpt2.corpora if corpus.kind in ("rows", "filtered")]
    yield RuleCost("gpt2_corpus", len(texts), disk_bytes=held)
    yield RuleCost("gpt2_tokenizer", 1, disk_bytes=2e6)
    read = held / per_token
    yield RuleCost("blocks", len(texts) + len(rows), tokens=read, disk_bytes=_TOKEN * read)
    scored = _scored_tokens(config, per_token)
    for size in gpt2.sizes:
        base_job = config.base_job(size.name)
        hardware = config.finetune_hardware(size.name)
        base = Load.of_base(base_job, vocabulary, hardware)
        yield replace(_training(f"base {size.name}", [base]), checkpoint_bytes=0.0)
        published = len(size.published)
        if published:
            yield RuleCost(f"published {size.name}", published, disk_bytes=published * _FLOAT * base.parameters)
        jobs = [config.finetune_job(method, size.name, seed) for method in gpt2.methods for seed in gpt2.seeds]
        yield _training(
            f"finetune {size.name}", [Load.of_finetune(job, base_job, vocabulary, hardware) for job in jobs]
        )
        folded = sum(job.method != "vanilla" for job in jobs)
        yield RuleCost(f"finetune_fold {size.name}", folded, disk_bytes=_UNTIED * folded * _FLOAT * base.parameters)
        alone = len(jobs) + 1 + published
        models = alone + folded
        flops = models * scored * base.flops_per_token / _FORWARD
        yield RuleCost(f"evaluate {size.name}", alone, tokens=models * scored, flops=flops, disk_bytes=2e5 * models)


def _scored_tokens(config: Config, per_token: float) -> float:
    """Tokens of all evaluation corpora; one that says no number of rows counts as its text, or as 10,000 rows."""
    gpt2 = config.gpt2
    assert gpt2 is not None
    valid, total = sum(_text_bytes(data)[1] for data in gpt2.text) / per_token, 0.0
    for corpus in gpt2.corpora:
        whole = {"held_out": valid, "text": sum(sum(_text_bytes(data)) for data in corpus.text) / per_token}
        most = (corpus.max_rows or 10_000) * gpt2.context
        total += min(most, whole.get(corpus.kind, most))
    return total


def bytes_per_token(vocabulary: int) -> float:
    """Bytes of English text per token: 2.9 measured with 1,024 pieces, about 4.4 with GPT-2's 50,257."""
    return min(4.4, 2.9 + 0.27 * (math.log2(vocabulary) - 10))


def _text_bytes(data: DataConfig) -> tuple[float, float]:
    """Training and validation text in bytes; of the user's own files nothing is known, and nothing is counted."""
    train, valid = _TEXT_BYTES.get(data.source, (0.0, 0.0))
    if data.part:
        train /= 2
    if data.valid_fraction is not None:
        train, valid = train * (1 - data.valid_fraction), train * data.valid_fraction
    if data.max_train_documents and data.source == "openwebtext":
        train = min(train, data.max_train_documents * _OPENWEBTEXT_DOCUMENT)
    return train, valid


def measured_tokens_per_s(results: Path) -> dict[int, float]:
    """d_model -> median tokens/s of the finished runs in a results.csv of `tapernorm rows`.

    Raises:
        UserError: there is no such file, or it is damaged or of another kind.
    """
    if not results.is_file():
        raise UserError(f"no file {results}: make it with `tapernorm rows`")
    found: dict[int, list[float]] = {}
    try:
        with open(results, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(int(row["d_model"]), []).append(float(row["tokens_per_s"]))
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{results} is no results.csv ({error!r}): make it with `tapernorm rows`") from None
    if not found:
        raise UserError(f"{results} is no results.csv (it has no row): make it with `tapernorm rows`")
    return {d_model: median(speeds) for d_model, speeds in found.items()}


def cost_text(config: Config, speed: Speed) -> str:
    """The costs of `config`, for a terminal: one line per rule, then the totals."""
    costs = run_costs(config)
    rows = [_HEADER, *(_cells(cost, speed.hours(cost)) for cost in costs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{config.run}: {config.caption}", ""]
    for rule, *numbers in rows:
        cells = [rule.ljust(widths[0]), *(c.rjust(w) for c, w in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", *_totals(costs, speed)])


def _cells(cost: RuleCost, hours: float | None) -> Sequence[str]:
    return (
        cost.rule,
        str(cost.jobs),
        _scaled(cost.tokens, ""),
        f"{cost.flops:.1e}" if cost.flops else "",
        _scaled(cost.disk_bytes, "B"),
        "" if hours is None else f"{hours:.3g}",
        "" if cost.published_h is None else f"{cost.published_h:.1f}",
    )


def _totals(costs: Sequence[RuleCost], speed: Speed) -> Iterator[str]:
    largest = max(costs, key=lambda cost: cost.checkpoint_bytes)
    yield f"{sum(cost.jobs for cost in costs):,} jobs, {sum(cost.flops for cost in costs):.1e} FLOPs."
    kept, more = sum(cost.disk_bytes for cost in costs), largest.checkpoint_bytes
    yield (
        f"Disk: {_scaled(kept, 'B')} at the end. While a job runs, its checkpoints take up to {_scaled(more, 'B')} more"
        f" ({largest.rule}); caches of downloads come on top."
    )
    published = sum(cost.published_h or 0 for cost in costs)
    if published:
        yield f"Published: {published:.0f} h for as many runs as those with a number beside them, one per H100."
    hours = [hours for cost in costs if (hours := speed.hours(cost)) is not None]
    if hours:
        yield f"Hours: {sum(hours):.3g}, all jobs one after another."
    else:
        yield "Hours need a speed: --rows of finished runs, or --flops-per-s of one job."


def _scaled(number: float, unit: str) -> str:
    """With three digits and a prefix for thousands, millions, ...; nothing for zero."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip() if number else ""
