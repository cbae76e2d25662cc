"""Several processes that train one small model together over gloo, and the same training in one process."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import torch
import torch.distributed as dist
from builders import VOCABULARY, decoder
from crashing import FORK
from torch import Tensor
from training import HARDWARE

from tapernorm.schedule import GateSchedule
from tapernorm.taper import attach
from tapernorm.util.rng import generator
from tapernorm_lab.models.fakeln import attach_fakeln
from tapernorm_lab.training.plan import Optimisation, Plan
from tapernorm_lab.training.trainer import Trainer
from tapernorm_lab.training.training_loss import next_tokens
from tapernorm_lab.training.validation_loss import evaluate_blocks

STEPS, BATCH, TIME = 20, 8, 7
SCHEDULE = GateSchedule(start=5, end=15)  # standard norms, a mix of both, linear maps
OPTIMISATION = Optimisation(
    lr=1e-2,
    min_lr=1e-3,
    warmup=3,
    decay=STEPS,
    betas=(0.9, 0.95),
    adam_eps=1e-8,
    weight_decay=0.1,
    clip_norm=1.0,
    precision="float32",
    log_every=1,
    eval_every=7,
)
Options = dict[str, Any]


def blocks(stream: str, rows: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, TIME), generator=generator(0, stream))


def make_trainer(
    kind: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    aux_weight: float = 0.1,
    dropout: float = 0.0,
    batch: int = BATCH,
    **hardware: Any,
) -> Trainer:
    """A trainer of a small model, on as many ranks as there are; kind: decoder, gpt2 (both all_aux) or fakeln."""
    if kind == "decoder":
        model = decoder(dtype=dtype).train()
    else:
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        model = fakes.gpt2(dtype=dtype, vocab_size=VOCABULARY, **rates)
    if kind == "fakeln":
        driver = attach_fakeln(model, schedule=fakes.SCHEDULE, ema_rate=0.3, aux_weight=aux_weight, eot=fakes.EOT)
    else:
        driver = attach(model, final=True, schedule=SCHEDULE, ema_rate=0.1, anchor_weight=aux_weight)
    rows = blocks("valid", 11)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    plan = Plan(
        label=kind,
        seed=3,
        steps=STEPS,
        optimisation=OPTIMISATION,
        hardware=HARDWARE.model_copy(update={"devices_per_job": ranks, **hardware}),
        batch_at=lambda step: next_tokens(blocks(f"batch {step}", batch)),
        validate=lambda: evaluate_blocks(model, rows, batch=2, device=torch.device("cpu")),
        tokens_per_step=batch * TIME,
        fingerprint="f" * 16,
        folder=folder,
    )
    return Trainer(model, driver, plan)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything a step changes, by name."""
    state = dict(trainer.model.state_dict())
    for index, entry in trainer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer {index} {key}": value for key, value in entry.items()}
    driver = {} if trainer.driver is None else trainer.driver.state_dict()
    state |= {f"driver {key}": torch.as_tensor(value) for key, value in driver.items()}
    return {name: value.clone() for name, value in state.items()}


def largest(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Name -> largest difference, NaN and None alike on both sides counting as none."""
    assert one.keys() == other.keys()
    found = {}
    for name, a in one.items():
        b = other[name]
        if a is None or b is None:
            assert a is b, name
            continue
        a, b = (torch.as_tensor(value).double() for value in (a, b))
        assert torch.equal(a.isnan(), b.isnan()), name
        found[name] = (a - b).nan_to_num().abs().max().item()
    return found


def train(kind: str, folder: Path, **options: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]], float]:
    """(state, the rows of all steps, validation score) after the whole run."""
    trainer = make_trainer(kind, folder, **options)
    rows = []
    step = trainer.step
    trainer.step = lambda k: rows.append(step(k)) or rows[-1]
    score = trainer.run()
    return state_of(trainer), rows, score.ce


def together(folder: Path, work: Callable[..., Any], *arguments: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """What `work(*arguments)` returns on each of so many processes, or the exit code of one that returned nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / f"rank{rank}.pt" for rank in range(ranks)]
    processes = [
        FORK.Process(target=_rank, args=(rank, ranks, folder, places[rank], work, arguments, options))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = zip(places, processes, strict=True)
    return [torch.load(p, weights_only=False) if p.exists() else process.exitcode for p, process in found]


def _rank(
    rank: int, ranks: int, folder: Path, place: Path, work: Callable[..., Any], arguments: Any, options: Options
) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    try:
        torch.save(work(*arguments, **options), place)
    finally:
        dist.destroy_process_group()
        sys.stderr.flush()


def die_at(step: int, rank: int) -> None:
    """Kill (SIGKILL) this rank before that optimizer step."""
    original = Trainer.step

    def dying(self: Trainer, k: int) -> dict[str, Any]:
        if k == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, k)

    Trainer.step = dying
