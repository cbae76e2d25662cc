"""The operations of a finished decoder and its behaviour on odd inputs: the further columns of Table S2.

n rows, T time, D width, V vocabulary. A tapered decoder is folded first, because that is the form in which it is used.
"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tapernorm.checkpoints.store import load
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import TaperNorm
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ...data.token_stream import TokenStream
from ...training.device import take_device
from ...training.run_folder import require_vocabulary
from ..odd_inputs.rows import few_odd_rows
from ..odd_inputs.scores import outcome

_NORMS = {"rsqrt", "native_layer_norm", "_fused_rms_norm"}  # one of them in each norm, whatever the device makes of it


def inspect_stage(job: StageJob, results: Path, tokens: Path, *, device: str, threads: int) -> list[dict[str, Any]]:
    """Return one row per finished run of the stage; a diverged run has no model, and a row that says so.

    Args:
        results: results folder of the study's run.
        tokens: token streams that the models were trained on; the validation split is read.

    Raises:
        UserError: a run is missing, is of another job than the stage's, or has another vocabulary.
    """
    chosen = take_device(device, threads)
    stream = TokenStream.open(tokens, "valid")
    rows = []
    for run in job.runs:
        folder = results / run.folder
        if not (folder / "result.json").is_file():
            raise UserError(f"{folder} holds no result.json: run arm {run.arm}, seed {run.seed}, first")
        result = read_json(folder / "result.json")
        if (found := result["provenance"]["config_hash"]) != run.config_hash:
            raise UserError(
                f"{folder} is of a job with the hash {found} and the config's arm {run.arm} has {run.config_hash}: "
                "run it again, or take the config that it was run with"
            )
        row = {"run": job.run, "stage": job.stage.name, "arm": run.arm, "seed": run.seed}
        row |= {"config_hash": run.config_hash, "outcome": "diverged" if "diverged" in result else "finished"}
        if row["outcome"] == "finished":
            model = load(folder, Decoder).to(chosen)
            require_vocabulary(model.config.vocab_size, stream.manifest, tokens)
            row |= inspect_inference(model, stream.tokens)
        rows.append(row)
    return rows


def inspect_inference(model: Decoder, tokens: Tensor) -> dict[str, Any]:
    """Return the operations of `model` and its scores on odd rows, as numbers: operations_norm, text_ce, ...

    Args:
        tokens: held-out text, a stream of ids (m,) of at least one context and a token.
    """
    folded = fold(model)[0] if any(isinstance(m, TaperNorm) for m in model.modules()) else copy.deepcopy(model)
    folded.eval()
    context = model.config.context
    found = {f"operations_{name}": count for name, count in operations(folded).items()}
    for kind, rows in few_odd_rows(tokens, vocabulary=model.config.vocab_size, context=context).items():
        # Of longer rows, what lies past the training context.
        numbers = outcome(folded, rows, first=context if kind == "longer" else 0)
        found |= {f"{kind}_{name}": number for name, number in numbers.items()}
    return found


@torch.no_grad()
def operations(model: Decoder) -> dict[str, int]:
    """Count the norms, tanh, erf, exp and all kernels of one forward pass, packed for decoding.

    Views of a tensor are not kernels. Attention and SiLU are one kernel each, so that their exponentials do not count
    as `exp`.
    """
    packed = PackedDecoder(model)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=packed.embed.weight.device)
    with _Counted() as seen:
        packed(tokens)
    names = seen.kernels
    return {
        "norm": sum(names[name] for name in _NORMS),
        **{name: names[name] for name in ("tanh", "erf", "exp")},
        "all": names.total(),
    }


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.kernels[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
