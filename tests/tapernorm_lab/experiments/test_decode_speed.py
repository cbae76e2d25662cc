"""The decoding benchmark under a clock that its arms move, and its result file as the tables read it."""

import json
from pathlib import Path

import builders
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import BenchJob
from tapernorm_lab.config.sections import BenchConfig
from tapernorm_lab.experiments import machine
from tapernorm_lab.experiments.speed import decode_speed as decode_bench
from tapernorm_lab.experiments.speed.decode_speed import (
    Stepper,
    available_modes,
    check_arms,
    with_context,
)
from tapernorm_lab.experiments.speed.decode_speed_models import ARMS, make_arms
from tapernorm_lab.experiments.speed.interleaved_timing import interleave
from tapernorm_lab.models.dyt_derf import REPLACEMENTS
from tapernorm_lab.report.frames import decoding as decode_rows

CPU = torch.device("cpu")
SECONDS = {"baseline_naive": 6.0, "baseline": 5.0, "unfused": 4.0, "fused": 3.0, "identity": 2.0} | {
    "dyt": 4.5,
    "derf": 5.5,
}


def job(**changes) -> BenchConfig:
    settings = {"dtype": "float32", "batches": (1, 3), "prompts": (4, 6), "new_tokens": 6, "block": 2, "rounds": 5}
    rest = {"warmup": 1, "threads": 1, "modes": ("eager",)}
    return BenchConfig(**{**settings, **rest, **changes})


def gated(**options):
    model, _ = builders.calibrated(dtype=torch.float32, **options)
    return model.requires_grad_(False)


class Timer:
    """A clock that each arm moves by its SECONDS and a round by its number; it notes who ran and what was decoded."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[list[str]] = []  # per cell, all calls in turn
        self.blocks: list[tuple[Stepper, int, int, int]] = []  # stepper, prompt, first, steps

    def interleave(self, arms, *, rounds, warmup):
        calls: list[str] = []
        self.order.append(calls)

        def timed(name, run):
            def call():
                run()
                calls.append(name)
                self.now += SECONDS[name] * (1 + (len(calls) - 1) // len(arms))  # later rounds are slower

            return call

        timed_arms = {name: timed(name, run) for name, run in arms.items()}
        return interleave(timed_arms, rounds=rounds, warmup=warmup, clock=lambda: self.now)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    made = Timer()
    monkeypatch.setattr(decode_bench, "interleave", made.interleave)
    right = Stepper.run

    def run(self, first, steps):
        made.blocks.append((self, self.prompt, first, steps))
        right(self, first, steps)

    monkeypatch.setattr(Stepper, "run", run)
    return made


@pytest.fixture
def one_thread():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


# --- cells ---


def test_cells_hold_one_sample_of_every_arm_per_round(timer: Timer) -> None:
    made = decode_bench.bench_decode(gated(), job())
    cells = made["cells"]
    places = [(c["phase"], c["mode"], c["batch"], c["prompt"], c["arm"]) for c in cells]
    expected = {(f, "eager", b, p, a) for f in ("prefill", "decode") for b in (1, 3) for p in (4, 6) for a in ARMS}
    assert set(places) == expected
    assert len(places) == len(expected)
    for cell in cells:  # round 0 is the warm-up
        assert cell["seconds"] == [SECONDS[cell["arm"]] * n for n in (2, 3, 4, 5, 6)]
        new = {"decode": 2, "prefill": cell["prompt"]}[cell["phase"]]
        assert cell["tokens"] == cell["batch"] * new
    assert made["unavailable"] == []


def test_replacements_of_norms_are_timed_in_the_same_rounds_and_read_after_the_rest(timer: Timer) -> None:
    cells = decode_bench.bench_decode(gated(), job(), replacements=True)["cells"]
    for calls in timer.order:
        assert {len(calls) - 1 - calls[::-1].index(arm) for arm in (*ARMS, *REPLACEMENTS)} == set(range(35, 42))
    rows = decode_rows.bench_rows(cells)
    assert [row["arm"] for row in rows[:7]] == [*ARMS, *REPLACEMENTS]
    for row in rows:
        assert row["ratio_baseline"] == pytest.approx(5.0 / SECONDS[row["arm"]])
    left = [cell for cell in cells if cell["arm"] != "dyt"]
    assert [row["arm"] for row in decode_rows.bench_rows(left)[:6]] == [*ARMS, "derf"]


def test_the_tables_read_speed_and_ratio_off_the_cells(timer: Timer) -> None:
    rows = decode_rows.bench_rows(decode_bench.bench_decode(gated(), job())["cells"])
    for row in rows:
        new = {"decode": 2, "prefill": row["prompt"]}[row["phase"]]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * new / (4 * SECONDS[row["arm"]]))  # the third of 2..6
        for baseline in ("baseline", "baseline_naive"):
            assert row[f"ratio_{baseline}"] == pytest.approx(SECONDS[baseline] / SECONDS[row["arm"]])
        assert row["n"] == 5


def test_arms_are_interleaved_and_their_order_turns(timer: Timer) -> None:
    decode_bench.bench_decode(gated(), job(batches=(1,), prompts=(4,)))
    assert len(timer.order) == 2  # prefill and decode
    for calls in timer.order:
        rounds = [calls[i : i + 5] for i in range(0, len(calls), 5)]
        turned = [[*ARMS[k % 5 :], *ARMS[: k % 5]] for k in range(-1, 5)]
        assert rounds == turned


@pytest.mark.parametrize(("new_tokens", "block", "starts"), [(6, 2, [0, 2, 4]), (6, 3, [0, 3]), (3, 3, [0])])
def test_blocks_stay_inside_the_new_tokens_and_the_cache(timer: Timer, new_tokens, block, starts) -> None:
    decode_bench.bench_decode(gated(), job(batches=(1,), new_tokens=new_tokens, block=block))
    for prompt in (4, 6):
        blocks = [entry for entry in timer.blocks if entry[1] == prompt]
        assert len(blocks) == 5 * 6
        for stepper in {entry[0] for entry in blocks}:
            mine = [(first, steps) for owner, _, first, steps in blocks if owner is stepper]
            assert mine == [(starts[k % len(starts)], block) for k in range(6)]
            assert all(prompt + first + steps <= stepper.cache.capacity for first, steps in mine)


def test_the_last_token_benchmark_times_whole_prompts_without_a_cache(timer: Timer, monkeypatch) -> None:
    monkeypatch.setattr(decode_bench.KVCache, "allocate", None)
    made = decode_bench.bench_last_token(gated(), job())
    assert {(c["phase"], c["mode"]) for c in made["cells"]} == {("forward", "eager")}
    assert len(made["cells"]) == 2 * 2 * 5
    assert all(c["tokens"] == c["batch"] * c["prompt"] and c["bytes_per_token"] is None for c in made["cells"])


# --- bytes ---

WEIGHTS = 2 * (144 + 48 + 48 + 144 + 3 * 240) + 29 * 12  # q, k, v, out, gate, up and down of two layers, and the head
NORMS = {"baseline_naive": 60, "baseline": 60, "unfused": 60, "fused": 12, "identity": 0}  # gains of 12


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_per_token_are_the_weights_and_the_filled_cache(timer: Timer, tie_head, dtype, width) -> None:
    model = gated(model_options={"tie_head": tie_head})
    for cell in decode_bench.bench_decode(model, job(dtype=dtype))["cells"]:
        if cell["phase"] == "prefill":
            assert cell["bytes_per_token"] is None
            continue
        slot = 2 * 2 * 1 * 4  # k and v, layers, one key head, head size
        filled = cell["prompt"] + 6 / 2  # on average
        expected = width * ((WEIGHTS + NORMS[cell["arm"]]) / cell["batch"] + slot * filled)
        assert cell["bytes_per_token"] == pytest.approx(expected)


# --- modes ---


def test_modes_that_a_cpu_cannot_run_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    every = ("eager", "compile", "cudagraph")
    assert available_modes(every, CPU) == (
        ["eager", "compile"],
        [{"mode": "cudagraph", "reason": "CUDA graphs need a GPU"}],
    )
    assert compiled == [torch.add]
    assert available_modes(("eager",), CPU) == (["eager"], [])
    monkeypatch.setattr(torch, "compile", lambda function: lambda *_: torch.zeros(2) @ torch.zeros(3))
    usable, unavailable = available_modes(every, CPU)
    assert usable == ["eager"]
    assert unavailable[0]["reason"].startswith("torch.compile fails here: ")
    monkeypatch.setattr("shutil.which", lambda _: None)
    usable, unavailable = available_modes(every, CPU)
    assert usable == ["eager"]
    assert [entry["mode"] for entry in unavailable] == ["compile", "cudagraph"]
    assert "needs a C++ compiler" in unavailable[0]["reason"]
    monkeypatch.setattr(decode_bench, "_compile_failure", lambda device: None)
    assert available_modes(every, torch.device("cuda")) == (list(every), [])


def test_an_unavailable_mode_has_no_cells(timer: Timer) -> None:
    made = decode_bench.bench_decode(gated(), job(modes=("eager", "cudagraph")))
    assert {cell["mode"] for cell in made["cells"]} == {"eager"}
    assert [entry["mode"] for entry in made["unavailable"]] == ["cudagraph"]


def test_compiled_steppers_have_one_graph_each_and_write_what_eager_ones_write(timer: Timer, monkeypatch) -> None:
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile(step, backend=counter, **options))
    monkeypatch.setattr(decode_bench, "available_modes", lambda modes, device: (list(modes), []))
    made = decode_bench.bench_decode(gated(), job(batches=(2,), modes=("compile", "eager")))
    assert counter.frame_count == len(ARMS)
    decoding = [cell for cell in made["cells"] if cell["phase"] == "decode"]
    assert {cell["mode"] for cell in decoding} == {"compile", "eager"}
    for fixed in (cell for cell in decoding if cell["mode"] == "compile"):
        weights = 4 * (WEIGHTS + NORMS[fixed["arm"]]) / 2
        assert fixed["bytes_per_token"] == pytest.approx(weights + 4 * 16 * (6 + 6))  # the cache is read whole


@pytest.mark.parametrize("arm", ["baseline", "fused"])
def test_a_stepper_decodes_greedily_in_either_mode(monkeypatch, arm) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile(step, backend=CompileCounter(), **options))
    model = gated()
    packed, ids = make_arms(model, torch.float32)[arm], builders.tokens(2, 4)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, packed(expected).argmax(-1, keepdim=True)], dim=1)
    for mode in ("eager", "compile"):
        torch._dynamo.reset()
        stepper = Stepper(packed, batch=2, capacity=11, mode=mode)
        stepper.load(ids)
        found = [stepper.token.clone()]
        for first in range(5):
            stepper.run(first, 1)
            found.append(stepper.token.clone())
        assert torch.equal(torch.stack(found, dim=1), expected[:, 4:]), mode
        stepper.load(ids)
        stepper.run(0, 5)
        assert torch.equal(stepper.token, found[-1])


# --- checks ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("tie_head", [False, True])
def test_right_arms_pass(dtype, final, tie_head) -> None:
    model = gated(final=final, model_options={"tie_head": tie_head})
    checks = check_arms(model, make_arms(model, decode_bench.DTYPES[dtype]), job(dtype=dtype))
    assert set(checks) == {"unfused", "fused"}
    for check in checks.values():
        relative = check["largest_logit_difference"] / check["logit_scale"]
        assert 0 < relative < {"float32": 1e-4, "bfloat16": 0.5}[dtype]


def poison_consumer(arm):
    arm.blocks[1].gate_up.weight[20:] *= 1.5  # `up` alone was not scaled


def poison_constant(arm):
    for block in arm.blocks:
        block.qkv.weight /= 0.7  # c was forgotten


def poison_nan(arm):
    arm.blocks[0].qkv.weight[3, 4] = torch.nan


def poison_axis(arm):
    weight = arm.blocks[0].qkv.weight
    weight[:12] = weight[:12].T.clone()  # q is square


@pytest.mark.parametrize("poison", [poison_consumer, poison_constant, poison_nan, poison_axis])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_a_wrongly_folded_arm_is_refused(poison, dtype) -> None:
    model = gated()
    arms = make_arms(model, decode_bench.DTYPES[dtype])
    poison(arms["fused"])
    arms["fused"].to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)  # lays the changed weights out again
    with pytest.raises(UserError, match=r"the fused arm differs from the gated model by .* its folding is wrong"):
        check_arms(model, arms, job(dtype=dtype))


@torch.no_grad()
def test_nothing_is_timed_with_a_wrong_arm(timer: Timer, monkeypatch) -> None:
    def poisoned(*arguments, **options):
        arms = make_arms(*arguments, **options)
        arms["unfused"].blocks[0].mlp_norm.weight[0] += 1
        return arms

    monkeypatch.setattr(decode_bench, "make_arms", poisoned)
    for measure in (decode_bench.bench_decode, decode_bench.bench_last_token):
        with pytest.raises(UserError, match="the unfused arm differs"):
            measure(gated(), job())
    assert timer.order == []


def test_arms_are_compared_with_a_gated_model_that_computes_without_tf32(monkeypatch, one_thread) -> None:
    model, seen = gated(), []
    model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    arms = make_arms(model, torch.float32)
    seen.clear()
    torch.set_float32_matmul_precision("high")
    check_arms(model, arms, job())
    assert seen == ["highest", "high"]  # and its own rounding is measured as the arms compute
    assert torch.get_float32_matmul_precision() == "high"


# --- longer contexts ---


@torch.no_grad()
def test_a_longer_context_extends_the_rotary_tables_and_nothing_else() -> None:
    model = gated()
    before = builders.snapshot(model.state_dict())
    longer = with_context(model, 40)
    assert (model.config.context, longer.config.context) == (11, 40)
    assert builders.snapshot(longer.state_dict()) == builders.snapshot(model.state_dict()) == before
    assert torch.equal(longer(builders.tokens(2, 11)), model(builders.tokens(2, 11)))
    assert longer(builders.tokens(2, 40)).shape == (2, 40, builders.VOCABULARY)
    tables = {block.self_attn.rotary for block in longer.model.layers}
    assert [len(table.cos) for table in tables] == [40]
    assert len(model.model.layers[0].self_attn.rotary.cos) == 11
    native = builders.decoder(dtype=torch.float32, context=40)
    assert torch.equal(tables.pop().cos, native.model.layers[0].self_attn.rotary.cos)


def test_a_context_that_suffices_is_left_alone() -> None:
    model = gated()
    assert with_context(model, 11) is model
    assert with_context(model, 3) is model


# --- the result file ---


@pytest.mark.parametrize("kind", ["decode", "last_token"])
def test_the_result_file_is_what_the_tables_read(kind, tmp_path: Path, monkeypatch, one_thread) -> None:
    loads = iter([0.5, 2.5])
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setitem(machine._BUFFER_BYTES, "cpu", 1 << 20)
    bench = job(rounds=3, batches=(1,), prompts=(4,))
    made = decode_bench.run_benchmark(kind, gated(), BenchJob(run="tiny", bench=bench), variant="internal", device=CPU)
    (tmp_path / "bench.json").write_text(json.dumps(made))
    read = decode_rows.read(tmp_path / "bench.json", kind=f"bench_{kind}")
    phases = {"decode": {"decode", "prefill"}, "last_token": {"forward"}}[kind]
    assert {row["phase"] for row in read.rows} == phases
    assert len(read.rows) == 5 * len(phases)
    assert all(row["tokens_per_s"] > 0 and row["n"] == 3 for row in read.rows)
    assert (read.facts["load_before"], read.facts["load_after"]) == (0.5, 2.5)
    assert read.facts["variant"] == "internal"
    assert (read.facts["d_model"], read.facts["n_layer"], read.facts["threads"]) == (12, 2, 1)
    assert set(read.checks) == {"unfused", "fused"}
    assert read.read_bandwidth.value > 0
    assert made["job"]["context"] == 11
    assert made["provenance"]["packages"]["torch"] == torch.__version__
    assert made["provenance"]["config_hash"]
    assert made["machine"]["device"].endswith("CPU")
