"""What a whole config costs before anything runs: jobs, tokens, FLOPs, disk and hours, rule by rule.

Arithmetic on the config alone; no torch. FLOPs of training are exact (`estimates.Load`), times and texts are estimates,
each from a constant that says where it comes from (those of machines in `speeds`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .device_speeds import (
    COMPILED,
    CPU,
    CPU_DECODE_STEP_S,
    CPU_OVERHEAD_S,
    EAGER,
    ENGINE_S,
    FLOAT32,
    Speeds,
)
from .job_cost import Load, Throughput
from .published import PRETRAIN_HOURS_H100
from .run import Config
from .sections import DataConfig, HardwareConfig
from .study_runs import trained_arms

_TEXT_BYTES = {
    "tinystories": (1.9e9, 1.9e7),
    "openwebtext": (3.9e10, 2e7),
    "web": (4.2e6, 0.0),
    "python_stdlib": (1e7, 0.0),
}
_GPT2_VOCABULARY = 50_257
_OPENWEBTEXT_DOCUMENT = 4.9e3  # bytes; one of the eight million
_FLOAT, _TOKEN, _ROW = 4, 2, 700  # bytes of a weight, of a token id on disk, of a logged step
_UNTIED = 1.3  # a fused GPT-2 has a head of its own: 31 % more of the smallest, 5 % of the largest
_FORWARD = 3  # forward and backward passes cost so many forward passes
_CHECKPOINTS = 3  # of a running job: two kept, one being written


@dataclass(frozen=True)
class Item:
    """All jobs of one rule, or of one width or size of it.

    Attributes:
        seconds: of one job that has its device for itself, eager, all of them together.
        arithmetic_s: the part of those that no overhead explains.
        published_h: what its authors report for as many runs.
        shares: whether its jobs share a GPU; fine-tunes have theirs for themselves.
        devices: GPUs of one job.
        measured: whether `seconds` is how long such jobs really took, in the company that they had.
    """

    rule: str
    jobs: int
    tokens: float = 0.0
    flops: float = 0.0
    disk_bytes: float = 0.0
    checkpoint_bytes: float = 0.0  # of one job, while it runs
    seconds: float = 0.0
    arithmetic_s: float = 0.0
    published_h: float | None = None
    measured: bool = False
    shares: bool = False
    devices: int = 1


@dataclass(frozen=True)
class Plan:
    """The whole run."""

    items: Sequence[Item]
    hardware: HardwareConfig
    on_gpu: bool
    precision: str
    gpus: int
    speeds: Speeds
    measured: Mapping[int, float] = field(default_factory=dict)  # d_model -> tokens/s, where runs have finished

    @property
    def kept_bytes(self) -> float:
        """What is left at the end."""
        return sum(item.disk_bytes for item in self.items)

    @property
    def largest(self) -> Item:
        """Whose jobs take the most GPUs."""
        return max(self.items, key=lambda item: item.devices)

    @property
    def peak_bytes(self) -> float:
        """Everything kept at the end, and the checkpoints of as many jobs as run at once."""
        return self.kept_bytes + max(self.running_bytes(item) for item in self.items)

    def running_bytes(self, item: Item) -> float:
        """Checkpoints of as many jobs as run at once; of one, where there are fewer GPUs than it takes."""
        at_once = max(1, self.gpus // item.devices) * self._together(item, None)
        return min(item.jobs, at_once) * item.checkpoint_bytes

    def device_hours(self, *, compiled: bool | None = None, shared: int | None = None, slowed: float = 1) -> float:
        """GPU-hours of all items, by default with what the config's hardware section says."""
        return sum(self.item_hours(item, compiled=compiled, shared=shared, slowed=slowed) for item in self.items)

    def item_hours(
        self, item: Item, *, compiled: bool | None = None, shared: int | None = None, slowed: float = 1
    ) -> float:
        """Hours of a device: overheads of jobs that share it overlap, their arithmetic, `slowed` so often, does not."""
        together = self._together(item, shared)
        if item.measured:
            return item.seconds / together / 3600
        overhead = item.seconds - item.arithmetic_s
        overhead *= COMPILED if (self.hardware.compile if compiled is None else compiled) else 1
        arithmetic = item.arithmetic_s * (slowed if self.precision == "bf16" else 1 / FLOAT32)
        return max((overhead + arithmetic) / together, arithmetic) / 3600

    def _together(self, item: Item, shared: int | None) -> int:
        """How many of an item's jobs share a GPU."""
        slots = self.hardware.jobs_per_gpu if shared is None else shared
        return max(1, min(item.jobs, slots)) if self.on_gpu and item.shares else 1


def plan_of(
    config: Config, *, gpus: int = 1, speeds: Speeds = EAGER, measured: Mapping[int, float] | None = None
) -> Plan:
    """The plan of every rule of `config`.

    Args:
        gpus: that the run may use; 0: it runs on the CPU.
        measured: d_model -> tokens/s of finished pre-training runs, in place of `speeds` for that width.
    """
    return Plan(
        items=list(_items(config, speeds, measured or {})),
        hardware=config.hardware,
        on_gpu=gpus > 0 and config.hardware.device != "cpu",
        precision=config.train.precision,
        gpus=max(1, gpus),
        speeds=speeds,
        measured=measured or {},
    )


def _items(config: Config, speeds: Speeds, measured: Mapping[int, float]) -> Iterator[Item]:
    text = _bytes(config.data)
    tokens = sum(text) / bytes_per_token(config.tokenizer.vocab_size)
    yield Item("corpus", 1, disk_bytes=sum(text))
    yield Item("tokenizer", 1, disk_bytes=3e5)
    yield Item("tokens", 1, tokens=tokens, disk_bytes=_TOKEN * tokens)
    valid = text[1] / bytes_per_token(config.tokenizer.vocab_size)
    for width in sorted(config.widths, key=lambda w: w.d_model):
        yield _pretrain(config, width.d_model, speeds.decoder, measured)
    for width in sorted(config.widths, key=lambda w: w.d_model):
        yield _fold(config, width.d_model, valid, speeds.decoder)
    yield from _study(config, speeds.decoder, measured)
    if config.benched:
        yield Item("bench", 2, tokens=_bench_tokens(config))
    if config.gpt2:
        yield from _gpt2(config, speeds.gpt2)
    yield from _report(config)


def _pretrain(config: Config, d_model: int, throughput: Throughput, measured: Mapping[int, float]) -> Item:
    """All variants and seeds of one width."""
    cells = [cell for cell in config.pretrain_cells() if cell[1] == d_model]
    loads = [Load.of_pretraining(config.pretrain_job(*cell), config.hardware) for cell in cells]
    logged = loads[0].steps / config.train.log_every
    item = _training(f"pretrain d{d_model}", loads, throughput)
    hours = PRETRAIN_HOURS_H100.get(d_model) if config.data.source == "tinystories" else None
    item = replace(
        item,
        shares=config.hardware.devices_per_job == 1,
        devices=config.hardware.devices_per_job,
        disk_bytes=sum(_FLOAT * load.parameters + _ROW * logged for load in loads),
        published_h=None if hours is None else hours * len(cells),
    )
    if d_model not in measured:
        return item
    return replace(item, seconds=item.tokens / measured[d_model], measured=True)


def _study(config: Config, throughput: Throughput, measured: Mapping[int, float]) -> Iterator[Item]:
    """What each stage trains that no pre-training and no earlier stage has trained."""
    trained = trained_arms(config)
    for stage in config.study or ():
        cells = [(arm, seed) for of, arm, seed in trained if of.name == stage.name]
        jobs = [config.arm_job(stage, stage.arm(arm), seed).pretrain for arm, seed in cells]
        if not jobs:
            continue
        loads = [Load.of_pretraining(job, config.hardware) for job in jobs]
        item = _training(f"arm {stage.name}", loads, throughput)
        devices = config.hardware.devices_per_job
        item = replace(item, shares=devices == 1, devices=devices)
        if stage.d_model in measured:
            item = replace(item, seconds=item.tokens / measured[stage.d_model], measured=True)
        yield item


def _training(rule: str, loads: Sequence[Load], throughput: Throughput) -> Item:
    arithmetic = sum(load.flops for load in loads) / throughput.flops_per_s
    return Item(
        rule,
        len(loads),
        tokens=sum(load.steps * load.step_tokens for load in loads),
        flops=sum(load.flops for load in loads),
        disk_bytes=sum(_FLOAT * load.parameters for load in loads),
        checkpoint_bytes=_CHECKPOINTS * max(load.checkpoint_bytes for load in loads),
        seconds=sum(load.steps * _passes(load) * throughput.step_s for load in loads) + arithmetic,
        arithmetic_s=arithmetic,
    )


def _passes(load: Load) -> int:
    return math.ceil(load.step_tokens / load.pass_tokens)


def _fold(config: Config, d_model: int, valid: float, throughput: Throughput) -> Item:
    """Unfused and fused exports, with the three scores of each model."""
    cells = [cell for cell in config.pretrain_cells() if cell[1] == d_model and cell[0] != "baseline"]
    loads = [Load.of_pretraining(config.pretrain_job(*cell), config.hardware) for cell in cells]
    scored = 3 * valid * len(cells)
    flops = sum(3 * valid * load.flops_per_token / _FORWARD for load in loads)
    head = config.tokenizer.vocab_size * d_model  # a fused All-Taper has a head of its own
    return Item(
        f"fold d{d_model}",
        len(cells),
        tokens=scored,
        flops=flops,
        disk_bytes=sum(_FLOAT * (2 * load.parameters + head) for load in loads),
        seconds=flops / throughput.flops_per_s,
        arithmetic_s=flops / throughput.flops_per_s,
    )


def _bench_tokens(config: Config) -> float:
    """Decoded by the five arms in every mode, untimed rounds included."""
    bench = config.bench
    steps = 5 * len(bench.modes) * len(bench.prompts) * (bench.rounds + bench.warmup) * bench.block
    return steps * sum(bench.batches)


def _gpt2(config: Config, throughput: Throughput) -> Iterator[Item]:
    gpt2 = config.gpt2
    assert gpt2 is not None
    vocabulary = gpt2.tokenizer.vocab_size if gpt2.tokenizer else None
    texts = {"train": gpt2.text, **({"base": gpt2.base_text} if gpt2.base_text else {})}
    texts |= {corpus.name: corpus.text for corpus in gpt2.corpora if corpus.text}
    held = {name: sum(sum(_bytes(data)) for data in text) for name, text in texts.items()}
    read = {name: size / bytes_per_token(vocabulary or _GPT2_VOCABULARY) for name, size in held.items()}
    yield Item("gpt2_corpus", len(held), disk_bytes=sum(held.values()))
    yield Item("gpt2_tokenizer", 1, disk_bytes=2e6)
    rows = len([corpus for corpus in gpt2.corpora if corpus.kind in ("rows", "filtered")])
    yield Item("blocks", len(held) + rows, tokens=sum(read.values()), disk_bytes=_TOKEN * sum(read.values()))
    valid = sum(_bytes(data)[1] for data in gpt2.text) / bytes_per_token(vocabulary or _GPT2_VOCABULARY)
    scored = _scored_tokens(config, valid)
    for size in gpt2.sizes:
        hardware = config.finetune_hardware(size.name)
        base_job = config.base_job(size.name)
        base = Load.of_base(base_job, vocabulary, hardware)
        yield replace(_training(f"base {size.name}", [base], throughput), checkpoint_bytes=0.0)
        if size.published:
            theirs = len(size.published)
            yield Item(f"published {size.name}", theirs, disk_bytes=theirs * _FLOAT * base.parameters)
        tuned = [
            Load.of_finetune(config.finetune_job(method, size.name, seed), base_job, vocabulary, hardware)
            for method in gpt2.methods
            for seed in gpt2.seeds
        ]
        yield replace(_training(f"finetune {size.name}", tuned, throughput), devices=size.devices_per_job)
        folded = len(tuned) - len(gpt2.seeds) * ("vanilla" in gpt2.methods)
        yield Item(f"finetune_fold {size.name}", folded, disk_bytes=_UNTIED * folded * _FLOAT * base.parameters)
        models = len(tuned) + folded + 1 + len(size.published)
        flops = models * scored * base.flops_per_token / _FORWARD
        yield Item(
            f"evaluate {size.name}",
            len(tuned) + 1 + len(size.published),
            tokens=models * scored,
            flops=flops,
            disk_bytes=2e5 * models,
            seconds=flops / throughput.flops_per_s,
            arithmetic_s=flops / throughput.flops_per_s,
        )


def _scored_tokens(config: Config, valid: float) -> float:
    """Tokens of all evaluation corpora; one that says no number of rows counts as its text, or as 10,000 rows."""
    gpt2 = config.gpt2
    assert gpt2 is not None
    per_token, total = bytes_per_token(gpt2.tokenizer.vocab_size if gpt2.tokenizer else _GPT2_VOCABULARY), 0.0
    for corpus in gpt2.corpora:
        whole = {"held_out": valid, "text": sum(sum(_bytes(data)) for data in corpus.text) / per_token}
        most = (corpus.max_rows or 10_000) * gpt2.context
        total += min(most, whole.get(corpus.kind, most))
    return total


def _report(config: Config) -> Iterator[Item]:
    decoded, gpt2 = bool(config.benched), bool(config.gpt2)
    yield Item("rows", 1 + gpt2, disk_bytes=_ROW * sum(w.steps / config.train.log_every for w in config.widths))
    yield Item("table", 2 + 3 * decoded + 3 * gpt2, disk_bytes=5e5)
    yield Item("figure", 3 + decoded + gpt2, disk_bytes=5e6)


def expected_seconds(config: Config, cores: int) -> float:
    """Wall time of `snakemake tables figures`, and `study`, on so many CPU cores, from nothing, one thread a job.

    From constants of one kind of machine; jobs of a run this small fill the cores evenly.
    """
    parallel, alone = 0.0, 0.0
    for item in _items(config, CPU, {}):
        rule = item.rule.split()[0].removeprefix("gpt2_")
        overhead = item.jobs * CPU_OVERHEAD_S.get({"blocks": "tokens"}.get(rule, rule), 1.0)
        if rule == "bench":
            alone += overhead + _bench_tokens(config) / sum(config.bench.batches) * CPU_DECODE_STEP_S
        else:
            parallel += overhead + item.seconds
    return ENGINE_S + alone + parallel / cores


def bytes_per_token(vocabulary: int) -> float:
    """Bytes of English text per token: 2.9 measured with 1,024 pieces, about 4.4 with GPT-2's 50,257."""
    return min(4.4, 2.9 + 0.27 * (math.log2(vocabulary) - 10))


def _bytes(data: DataConfig) -> tuple[float, float]:
    """Training and validation text in bytes; of the user's own files nothing is known, and nothing is counted."""
    train, valid = _TEXT_BYTES.get(data.source, (0.0, 0.0))
    if data.part:
        train /= 2
    if data.valid_fraction is not None:
        train, valid = train * (1 - data.valid_fraction), train * data.valid_fraction
    if data.max_train_documents and data.source == "openwebtext":
        train = min(train, data.max_train_documents * _OPENWEBTEXT_DOCUMENT)
    return train, valid
