"""Compute the jobs, tokens, FLOPs and disk of a whole config per rule, before anything runs and without torch.

Tokens and FLOPs are those of training, and exact (`job_cost.Load`). Disk is an estimate. Hours are printed only for a
speed that finished runs had, or that the user gives.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Self

from pydantic import Field

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.errors import UserError

from .job_cost import Load, gpt2_shape, gpt2_vocabulary
from .jobs import horizon_warning
from .published import PRETRAIN_HOURS_H100
from .run import Config
from .sections import DataConfig, PositiveInt, Strict
from .study_runs import trained_arms

_TEXT_BYTES = {"tinystories": 1.9e9, "openwebtext": 3.9e10, "web": 4.2e6, "python_stdlib": 1e7}  # source -> bytes
_OPENWEBTEXT_DOCUMENT = 4.9e3  # mean bytes of one of its eight million documents
_TOKENISED = 1.6  # bytes of a text and its token ids, over bytes of the text: an id of 2 bytes covers 3 to 4 bytes
_FLOAT = 4  # bytes of a weight
_CHECKPOINTS = 3  # checkpoints of a running job: two kept, one being written
_LEAST_ROWS = 64
_PRODUCTS = 1 << 27  # of one map: larger ones are timed on fewer rows, which a kernel's rate hardly depends on

Shape = tuple[int, int]  # (d_in, d_out)


@dataclass(frozen=True)
class RuleCost:
    """The cost of all jobs of one rule, or of one width or size of a rule.

    Attributes:
        rule: name of the rule, with its width, stage or size.
        jobs: number of jobs.
        tokens: training tokens.
        flops: training FLOPs.
        disk_bytes: bytes that remain at the end.
        checkpoint_bytes: bytes of one job's checkpoints while it runs.
        d_model: width of the models that the rule pre-trains; None for other rules.
        published_h: hours that the paper's authors report for the same number of runs.
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
    """The speed of one job, measured or given."""

    flops_per_s: float | None = None
    tokens_per_s: Mapping[int, float] = field(default_factory=dict)  # d_model -> tokens/s of finished pre-training runs

    def hours(self, cost: RuleCost) -> float | None:
        """Return the hours of all jobs, one after another; None if no speed is known."""
        if cost.d_model is not None and cost.d_model in self.tokens_per_s:
            return cost.tokens / self.tokens_per_s[cost.d_model] / 3600
        return cost.flops / self.flops_per_s / 3600 if self.flops_per_s and cost.flops else None


def run_costs(config: Config) -> list[RuleCost]:
    """List the cost of every rule of `config`, except the rules that gather rows and make tables and figures."""
    made = [RuleCost("corpus", 1, disk_bytes=_TOKENISED * _text_bytes(config.data))]
    made += [RuleCost("tokenizer", 1), RuleCost("tokens", 1), *_pretraining(config), *_study(config)]
    made += [RuleCost("bench", 2)] if config.benched else []
    made += [RuleCost("kernels", 1)] if is_probed(config) else []
    return [*made, *_gpt2(config)]


def _pretraining(config: Config) -> Iterator[RuleCost]:
    """Yield the cost of each width's runs, all variants and seeds, and of their unfused and fused exports."""
    for d_model in sorted(width.d_model for width in config.widths):
        cells = [cell for cell in config.pretrain_cells() if cell[1] == d_model]
        loads = [Load.of_pretraining(config.pretrain_job(*cell), config.hardware) for cell in cells]
        hours = PRETRAIN_HOURS_H100.get(d_model) if config.data.source == "tinystories" else None
        cost = _training(f"pretrain d{d_model}", loads)
        yield replace(cost, d_model=d_model, published_h=None if hours is None else hours * len(cells))
        tapered = [load for (variant, *_), load in zip(cells, loads, strict=True) if variant.tapers]
        weights = 2 * sum(load.parameters for load in tapered)
        yield RuleCost(f"fold d{d_model}", len(tapered), disk_bytes=_FLOAT * weights)


def _study(config: Config) -> Iterator[RuleCost]:
    """Yield the cost of each stage's own runs, which no pre-training and no earlier stage shares."""
    trained = trained_arms(config)
    for stage in config.study or ():
        jobs = [config.arm_job(stage, stage.arm(arm), seed) for of, arm, seed in trained if of.name == stage.name]
        if jobs:
            loads = [Load.of_pretraining(job.pretrain, config.hardware) for job in jobs]
            yield replace(_training(f"arm {stage.name}", loads), d_model=stage.d_model)


def _gpt2(config: Config) -> Iterator[RuleCost]:
    if (gpt2 := config.gpt2) is None:
        return
    scored = [corpus for corpus in gpt2.corpora if corpus.kind != "held_out"]
    texts = [text for text in (gpt2.base_text, gpt2.text, *(corpus.text for corpus in scored)) if text]
    read = sum(_text_bytes(data) for text in texts for data in text)
    yield RuleCost("gpt2_corpus", len(texts), disk_bytes=_TOKENISED * read)
    yield RuleCost("gpt2_tokenizer", 1)
    yield RuleCost("blocks", len(texts) + sum(not corpus.text for corpus in scored))
    vocabulary = gpt2.tokenizer.vocab_size if gpt2.tokenizer else None
    for size in gpt2.sizes:
        hardware, base_job = config.finetune_hardware(size.name), config.base_job(size.name)
        base, published = Load.of_base(base_job, vocabulary, hardware), len(size.published)
        yield replace(_training(f"base {size.name}", [base]), checkpoint_bytes=0.0)
        weights = _FLOAT * base.parameters
        if published:
            yield RuleCost(f"published {size.name}", published, disk_bytes=published * weights)
        jobs = [config.finetune_job(method, size.name, seed) for method in gpt2.methods for seed in gpt2.seeds]
        loads = [Load.of_finetune(job, base_job, vocabulary, hardware) for job in jobs]
        yield _training(f"finetune {size.name}", loads)
        folded = sum(job.method != "vanilla" for job in jobs)
        yield RuleCost(f"finetune_fold {size.name}", folded, disk_bytes=folded * weights)
        yield RuleCost(f"evaluate {size.name}", len(jobs) + 1 + published)


def _training(rule: str, loads: Sequence[Load]) -> RuleCost:
    return RuleCost(
        rule,
        len(loads),
        tokens=sum(load.steps * load.step_tokens for load in loads),
        flops=sum(load.flops for load in loads),
        disk_bytes=sum(_FLOAT * load.parameters for load in loads),
        checkpoint_bytes=_CHECKPOINTS * max(load.checkpoint_bytes for load in loads),
    )


def _text_bytes(data: DataConfig) -> float:
    """Estimate the bytes of a text; the user's own files count as 0, because their size is unknown."""
    size = _TEXT_BYTES.get(data.source, 0.0) / (2 if data.part else 1)
    if data.max_train_documents and data.source == "openwebtext":
        size = min(size, data.max_train_documents * _OPENWEBTEXT_DOCUMENT)
    return size


def measured_tokens_per_s(results: Path) -> dict[int, float]:
    """Return a mapping from d_model to the median tokens/s of the finished runs in a results.csv of `tapernorm rows`.

    Raises:
        UserError: the file is missing, damaged or of another kind.
    """
    found: dict[int, list[float]] = {}
    try:
        with open(results, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(int(row["d_model"]), []).append(float(row["tokens_per_s"]))
        if not found:
            raise ValueError("it has no row")
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{results} is not a results.csv ({error!r}): make one with `tapernorm rows`") from None
    return {d_model: median(speeds) for d_model, speeds in found.items()}


def cost_text(config: Config, speed: Speed) -> str:
    """Format the costs of `config` for a terminal: one line per rule, then the totals."""
    costs = run_costs(config)
    rows = [("rule", "jobs", "tokens", "FLOPs", "disk", "hours", "published")]
    rows += [_cells(cost, speed.hours(cost)) for cost in costs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{config.run}: {config.caption}", ""]
    for rule, *numbers in rows:
        cells = [rule.ljust(widths[0]), *(c.rjust(w) for c, w in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += ["", *_totals(costs, speed)]
    jobs = [config.pretrain_job(*cell) for cell in config.pretrain_cells()]
    jobs += [config.arm_job(*cell).pretrain for cell in config.study_cells()]
    if warning := horizon_warning(jobs):
        lines += ["", warning]
    return "\n".join(lines)


def _cells(cost: RuleCost, hours: float | None) -> tuple[str, ...]:
    flops = f"{cost.flops:.1e}" if cost.flops else ""
    told = ("" if known is None else f"{known:.3g}" for known in (hours, cost.published_h))
    return cost.rule, str(cost.jobs), _scaled(cost.tokens, ""), flops, _scaled(cost.disk_bytes, "B"), *told


def _totals(costs: Sequence[RuleCost], speed: Speed) -> Iterator[str]:
    largest = max(costs, key=lambda cost: cost.checkpoint_bytes)
    yield f"{sum(cost.jobs for cost in costs):,} jobs, {sum(cost.flops for cost in costs):.1e} FLOPs of training."
    kept, more = sum(cost.disk_bytes for cost in costs), largest.checkpoint_bytes
    yield (
        f"Disk: {_scaled(kept, 'B')} at the end. While a job runs, its checkpoints take up to {_scaled(more, 'B')} more"
        f" ({largest.rule}); caches of downloads come on top."
    )
    if published := sum(cost.published_h or 0 for cost in costs):
        yield f"Published: {published:.0f} h for as many runs as those with a number beside them, one per H100."
    hours = [hours for cost in costs if (hours := speed.hours(cost)) is not None]
    yield (
        f"Hours: {sum(hours):.3g}, all training jobs one after another."
        if hours
        else "Hours need a speed: --rows of finished runs, or --flops-per-s of one job."
    )


def _scaled(number: float, unit: str) -> str:
    """Format a number with three digits and an SI prefix; return an empty text for zero."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip() if number else ""


class LinearMap(Strict):
    """x W of x (rows, d_in) and W (d_in, d_out), forward and backward."""

    rows: PositiveInt
    d_in: PositiveInt
    d_out: PositiveInt
    times: Annotated[float, Field(gt=0)]  # its share of the whole, in passes

    @classmethod
    def at_most(cls, rows: int, shape: Shape, times: float) -> Self:
        """So many passes of a map, told by passes over fewer rows where it is large."""
        d_in, d_out = shape
        timed = min(rows, max(_LEAST_ROWS, _PRODUCTS // (d_in * d_out)))
        return cls(rows=timed, d_in=d_in, d_out=d_out, times=times * rows / timed)


class LinearJob(Strict):
    """What a choice of the kernel rests on, its machine apart."""

    run: str
    maps: tuple[LinearMap, ...]


def is_probed(config: Config) -> bool:
    """Whether the run times the kernels before its first training."""
    return config.hardware.linear == "auto" and config.hardware.device != "cuda"


def linear_job(config: Config) -> LinearJob:
    """The linear maps of all trainings of a run, as often as their steps make them."""
    times: Counter[tuple[int, Shape]] = Counter()
    for rows, steps, shapes in _trainings(config):
        for shape, count in shapes.items():
            times[rows, shape] += steps * count
    total = sum(times.values())
    maps = [LinearMap.at_most(rows, shape, count / total) for (rows, shape), count in sorted(times.items())]
    return LinearJob(run=config.run, maps=tuple(maps))


def _trainings(config: Config) -> Iterator[tuple[int, int, Mapping[Shape, int]]]:
    """(tokens of a forward pass, steps, linear maps of the model) of every training."""
    jobs = [config.pretrain_job(*cell) for cell in config.pretrain_cells()]
    jobs += [config.arm_job(stage, stage.arm(arm), seed).pretrain for stage, arm, seed in trained_arms(config)]
    for job in jobs:
        passes, rows = _passes(job.train.batch, config.hardware.micro_batch)
        yield rows * job.model.context, passes * job.steps, _decoder(job.model)
    if (gpt2 := config.gpt2) is None:
        return
    vocabulary = gpt2_vocabulary(gpt2.tokenizer.vocab_size if gpt2.tokenizer else None)
    for size in gpt2.sizes:
        base = config.base_job(size.name)
        width, layers = gpt2_shape(base.source, None if base.fresh is None else base.fresh.shape)
        shapes = _sum([((width, 3 * width), layers), ((width, width), layers), ((width, 4 * width), layers)])
        shapes += _sum([((4 * width, width), layers), ((width, vocabulary), 1)])
        if base.fresh is not None:
            passes, rows = _passes(base.fresh.train.batch, config.hardware.micro_batch)
            yield rows * base.context, passes * base.fresh.steps, shapes
        for method in gpt2.methods:
            for seed in gpt2.seeds:
                job = config.finetune_job(method, size.name, seed)
                passes, rows = _passes(job.batch, job.micro_batch or size.micro_batch)
                yield rows * base.context, passes * job.steps, shapes


def _passes(batch: int, micro_batch: int | None) -> tuple[int, int]:
    """Forward passes of an optimizer step, and the rows of one."""
    rows = micro_batch or batch
    return -(-batch // rows), rows


def _decoder(m: DecoderConfig) -> Mapping[Shape, int]:
    heads, keys = m.n_head * m.head_dim, m.n_kv_head * m.head_dim
    attention = [((m.d_model, heads), m.n_layer), ((m.d_model, keys), 2 * m.n_layer), ((heads, m.d_model), m.n_layer)]
    mlp = [((m.d_model, m.d_ff), 2 * m.n_layer), ((m.d_ff, m.d_model), m.n_layer)]
    return _sum([*attention, *mlp, ((m.d_model, m.vocab_size), 1)])


def _sum(shapes: Iterable[tuple[Shape, int]]) -> Counter[Shape]:
    total: Counter[Shape] = Counter()
    for shape, count in shapes:
        total[shape] += count
    return total
