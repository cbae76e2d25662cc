"""The kernel of a run's linear maps, chosen once for all of its trainings."""

from typing import Any

from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.provenance import provenance

from ..config.run_cost import LinearJob
from ..training.device import choose, device_name, take_device
from ..training.run_folder import SCHEMA_VERSION


def choose_for_run(job: LinearJob, *, device: str, threads: int) -> dict[str, Any]:
    """The faster kernel for all linear maps of a run, as they add up, with what was measured; aten for a GPU.

    Raises:
        UserError: as `take_device`.
    """
    chosen = take_device(device, threads)
    found = choose(job.maps) if chosen.type == "cpu" and job.maps else {"linear": "aten", "speedup": None}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "kernels",
        "job": job.model_dump(mode="json"),
        "linear": found["linear"],
        "values": {"onednn_speedup": {"value": found["speedup"], "unit": "x"}},
        "provenance": provenance(config_hash=digest(canonical_json(job)), device=device_name(chosen), threads=threads),
    }
