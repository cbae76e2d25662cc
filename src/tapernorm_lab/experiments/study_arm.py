"""One training run of a study's arm: the paper's run with a treatment, and a result even if it diverges."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapernorm.models.decoder import Decoder
from tapernorm.taper import Taper
from tapernorm.util.atomic_files import read_json, write_json
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.provenance import provenance

from ..config.sections import HardwareConfig
from ..config.study import ArmJob
from ..training.device import pick_device
from ..training.ranks import from_leader
from ..training.run_folder import RESULT_FILES, SCHEMA_VERSION
from ..training.run_lock import run_lock
from ..training.trainer import Diverged
from ..training.validation_loss import Evaluation
from .pretrain import train_decoder
from .treatments import attach_arm, prepare


def run_arm(
    job: ArmJob, tokens: Path, out: Path, hardware: HardwareConfig, *, overwrite: bool = False
) -> dict[str, Any]:
    """Run or resume `job` on the token streams in `tokens`, write its results to `out`, and return them.

    A run that diverges has a result without metrics and weights; `diverged` gives the step and the tensor. Tables list
    such a run, and it does not hold up other arms.

    Raises:
        UserError: the streams do not fit the job, `out` is another job's and not to be overwritten, or another process
            holds it.
    """

    def change(model: Decoder) -> None:
        prepare(model, job.treatment)

    def drive(model: Decoder, validate: Callable[[], Evaluation]) -> Taper | None:
        return attach_arm(model, job, validate)

    try:
        return train_decoder("arm", job, job.pretrain, change, drive, tokens, out, hardware, overwrite=overwrite)
    except Diverged as error:
        message = str(error)
    return from_leader(lambda: _publish_divergence(job, out, message, hardware))


def _publish_divergence(job: ArmJob, out: Path, message: str, hardware: HardwareConfig) -> dict[str, Any]:
    """Write the result.json of a run that diverged, and remove the files of an earlier job beside it.

    The marker stays, as after any divergence. To run the job again, delete the marker and the result.
    """
    print(message, file=sys.stderr)
    with run_lock(out):
        markers = map(read_json, out.glob("resume/*/diverged.json"))
        marker = next(found for found in markers if found["message"] == message)
        for name in RESULT_FILES:
            (out / name).unlink(missing_ok=True)
        result = {
            "schema_version": SCHEMA_VERSION,
            "kind": "arm",
            "job": job.model_dump(mode="json"),
            "values": {},
            "diverged": {"step": marker["step"], "what": marker["tensor"]},
            "provenance": provenance(
                config_hash=digest(canonical_json(job)),
                device=pick_device(hardware.device).type,
                hardware=hardware.model_dump(mode="json"),
                seed=job.pretrain.seed,
                fingerprint=marker["fingerprint"],
            ),
        }
        write_json(out / "result.json", result)
    return result
