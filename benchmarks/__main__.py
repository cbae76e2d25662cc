"""Measure the speed and memory figures of the benchmarks page, each with its bound: `make bench`."""

import argparse
import os
from pathlib import Path

from tapernorm.util.atomic_files import write_json
from tapernorm.util.provenance import provenance

from . import decode, evaluation, finetune_step, linear_kernels, train_step, workflow
from .report import line


def main() -> None:
    """Measure and print each figure, write them all, and list the bounds that were missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    arguments = parser.parse_args()
    figures = []
    load_before = os.getloadavg()[0]
    for stage in (train_step, finetune_step, linear_kernels, decode, evaluation, workflow):
        for measured in stage.measure():
            print(line(measured), flush=True)
            figures.append(measured)
    write_json(arguments.out, [f.row() for f in figures])
    write_json(arguments.out.with_name("samples.json"), {f.name: f.samples for f in figures if f.samples})
    facts = provenance(cores=os.cpu_count(), load_before=load_before, load_after=os.getloadavg()[0])
    write_json(arguments.out.with_name("provenance.json"), facts)
    missed = [f.name for f in figures if f.passes is False]
    print(f"{len(figures)} figures, {len(missed)} bounds missed{': ' if missed else ''}{', '.join(missed)}")


if __name__ == "__main__":
    main()
