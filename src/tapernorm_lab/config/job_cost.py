"""What a training job costs, from its settings alone: parameters, FLOPs, bytes, and the limits that a scheduler gets.

Plain arithmetic on jobs; no torch. Parameters and FLOPs are exact. Times and memory are upper estimates: what a job is
allowed, not what it is expected to take.
"""

import math
from dataclasses import dataclass
from typing import Self

from .gpt2 import TAPERED, Gpt2Shape
from .jobs import BaseJob, FinetuneJob, PretrainJob
from .sections import HardwareConfig
from .variants import Variant


@dataclass(frozen=True)
class Throughput:
    """What one device is counted on for.

    Attributes:
        step_s: seconds of an optimizer step that no arithmetic explains: launches, data, logging.
        flops_per_s: achieved arithmetic beyond that.
    """

    step_s: float
    flops_per_s: float


# An eager H100 run of the paper takes 4.3 to 15.4 h (method.md section 9) for 100k to 300k steps (assumed): 0.15 to
# 0.19 s a step at every width, so what it waits for is not arithmetic. 50 TFLOP/s are a twentieth of the H100's bf16
# peak of dense matrix products, 990 TFLOP/s.
GPU = Throughput(step_s=0.2, flops_per_s=5e13)
CPU_THREAD = Throughput(step_s=0.02, flops_per_s=4e9)  # models of the demo's widths, one core of a server

PUBLISHED_GPT2 = {  # hub name -> (d_model, n_layer)
    "gpt2": (768, 12),
    "gpt2-medium": (1024, 24),
    "gpt2-large": (1280, 36),
    "gpt2-xl": (1600, 48),
}
_GPT2_VOCABULARY, _GPT2_POSITIONS = 50257, 1024
_UNTAPERED = Variant("none", "none")

_SPARE = 1.5  # of a job's time limit, over the estimate
_START_MIN = 20  # imports, compilation and the final evaluation
_PROCESS_BYTES = 2e9  # Python, torch, a compiler
_CUDA_BYTES = 4e9  # what CUDA's context and the processes that compile for it take on the host
_FLOAT = 4  # bytes of a float32: weights, gradients, moments and checkpoints keep it under autocast too
_MOMENTS = 2  # of AdamW
_RECOMPUTED = 4 / 3  # activation checkpointing runs the forward pass of each block again


@dataclass(frozen=True)
class Load:
    """A training job as its device sees it.

    Attributes:
        steps: optimizer steps.
        step_tokens: tokens of one.
        pass_tokens: tokens of one forward pass, whose activations are held together.
        parameters: all, a tied head counted once; each tapered norm has a gain more.
        matrix: entries of the matrices that a token is multiplied by, the output head included, tied or not.
        attention: layers x width of all heads x context.
        kept: floats per token that the backward pass needs, upper estimate.
    """

    steps: int
    step_tokens: int
    pass_tokens: int
    parameters: int
    matrix: int
    attention: int
    kept: int

    @classmethod
    def of_pretraining(cls, job: PretrainJob, hardware: HardwareConfig) -> Self:
        m = job.model
        heads = m.n_head * m.head_dim
        block = 2 * m.d_model * (heads + m.n_kv_head * m.head_dim) + 3 * m.d_model * m.d_ff
        matrix = m.n_layer * block + m.vocab_size * m.d_model
        norms = 2 * m.n_layer + 1
        tapered = (norms - 1) * job.variant.internal + job.variant.final
        vectors = norms * (1 if m.norm == "rmsnorm" else 2) + tapered
        embedding = 0 if m.tie_head else m.vocab_size * m.d_model
        # Inputs and outputs of its norms and linear maps; the loss holds four copies of the logits.
        kept = _kept(hardware, m.n_layer, m.d_model, 16 * m.d_model + 5 * m.d_ff) + 4 * m.vocab_size
        return cls(
            steps=job.steps,
            step_tokens=job.train.batch * m.context,
            pass_tokens=(hardware.micro_batch or job.train.batch) * m.context,
            parameters=matrix + embedding + vectors * m.d_model,
            matrix=matrix,
            attention=m.n_layer * heads * m.context,
            kept=kept,
        )

    @classmethod
    def of_finetune(cls, job: FinetuneJob, base: BaseJob, vocab_size: int | None, hardware: HardwareConfig) -> Self:
        """`vocab_size`: of a tokenizer trained here; None: GPT-2's own."""
        variant = TAPERED.get(job.method, _UNTAPERED)
        return cls._of_gpt2(base, vocab_size, hardware, job.steps, job.batch, variant)

    @classmethod
    def of_base(cls, job: BaseJob, vocab_size: int | None, hardware: HardwareConfig) -> Self:
        """A published base model is only brought here: no steps."""
        steps, batch = (0, 1) if job.fresh is None else (job.fresh.steps, job.fresh.train.batch)
        return cls._of_gpt2(job, vocab_size, hardware, steps, batch, _UNTAPERED)

    @classmethod
    def _of_gpt2(
        cls, base: BaseJob, vocab_size: int | None, hardware: HardwareConfig, steps: int, batch: int, variant: Variant
    ) -> Self:
        width, layers = gpt2_shape(base.source, None if base.fresh is None else base.fresh.shape)
        vocabulary = gpt2_vocabulary(vocab_size)
        positions = _GPT2_POSITIONS if base.fresh is None else base.context
        matrix = 12 * layers * width**2 + vocabulary * width
        vectors = layers * (13 + 2 * variant.internal) + 2 + variant.final  # per block: biases 9, two norms 4
        return cls(
            steps=steps,
            step_tokens=batch * base.context,
            pass_tokens=(hardware.micro_batch or batch) * base.context,
            parameters=matrix + (vectors + positions) * width,
            matrix=matrix,
            attention=layers * width * base.context,
            kept=_kept(hardware, layers, width, 50 * width) + 4 * vocabulary,  # GELU keeps eight of its width 4 D
        )

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 per matrix entry, and attention's 12 L D T over the whole context, causal or not."""
        return 6 * self.matrix + 12 * self.attention

    @property
    def flops(self) -> int:
        """Of the whole training; what activation checkpointing repeats does not count."""
        return self.steps * self.step_tokens * self.flops_per_token

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and AdamW's two moments."""
        return _FLOAT * (1 + _MOMENTS) * self.parameters

    @property
    def training_bytes(self) -> int:
        """Peak on the device: weights, gradients, moments, and the activations of one forward pass in float32."""
        return _FLOAT * ((2 + _MOMENTS) * self.parameters + self.kept * self.pass_tokens)


def training_time_s(load: Load, hardware: HardwareConfig) -> float:
    """Upper estimate of the time of all steps, on a device that no other job shares."""
    if hardware.device == "cpu":
        step_s, flops_per_s = CPU_THREAD.step_s, CPU_THREAD.flops_per_s * hardware.threads
    else:
        step_s, flops_per_s = GPU.step_s, GPU.flops_per_s
    repeated = _RECOMPUTED if hardware.activation_checkpointing else 1
    return load.steps * step_s + repeated * load.flops / flops_per_s


def limit_min(load: Load, hardware: HardwareConfig, attempt: int = 1) -> int:
    """Minutes that a scheduler gives the job: doubled with each attempt, which goes on from the last checkpoint."""
    minutes = _START_MIN + _SPARE * training_time_s(load, hardware) / 60
    return math.ceil(minutes * 2 ** (attempt - 1))


def memory_mb(load: Load, hardware: HardwareConfig) -> int:
    """Megabytes of host memory: a checkpoint in the making, and of each device's process what it takes by itself.

    That is the weights that it starts from, and on a CPU the training.
    """
    held = load.training_bytes if hardware.device == "cpu" else _CUDA_BYTES + _FLOAT * load.parameters
    processes = hardware.devices_per_job * (_PROCESS_BYTES + held)
    return math.ceil((processes + 2 * load.checkpoint_bytes) / 1e6)


def _kept(hardware: HardwareConfig, layers: int, width: int, block: int) -> int:
    """Floats per token of all blocks; with activation checkpointing, their inputs and what one of them keeps."""
    return layers * width + block if hardware.activation_checkpointing else layers * block


def gpt2_vocabulary(vocab_size: int | None) -> int:
    """Tokens of a GPT-2: those of a tokenizer trained here, or its own."""
    return vocab_size or _GPT2_VOCABULARY


def gpt2_shape(source: str | None, shape: Gpt2Shape | None) -> tuple[int, int]:
    """(d_model, n_layer); a model of unknown size counts as the largest."""
    if shape is not None:
        return shape.d_model, shape.n_layer
    return PUBLISHED_GPT2.get(str(source).removeprefix("openai-community/"), PUBLISHED_GPT2["gpt2-xl"])
