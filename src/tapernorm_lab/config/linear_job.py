"""The linear maps that a run trains: what is timed where `hardware.linear` is auto."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Self

from pydantic import Field

from tapernorm.models.decoder_config import DecoderConfig

from .job_cost import gpt2_shape, gpt2_vocabulary
from .run import Config
from .sections import PositiveInt, Strict
from .study_runs import trained_arms

_LEAST_ROWS = 64
_PRODUCTS = 1 << 27  # of one map: larger ones are timed on fewer rows, which a kernel's rate hardly depends on

Shape = tuple[int, int]  # (d_in, d_out)


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
