"""Compute a training job's parameters, FLOPs, bytes and scheduler limits from its settings alone, without torch.

Parameters and FLOPs are exact. Times and memory are upper estimates, which serve as limits and not as predictions.
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
    """The speed that is assumed of one device.

    Attributes:
        step_s: overhead of an optimizer step in seconds: kernel launches, data, logging.
        flops_per_s: arithmetic throughput apart from that overhead.
    """

    step_s: float
    flops_per_s: float


# An eager H100 run of the paper takes 4.3 to 15.4 h (method.md section 9) for 100k to 300k steps (assumed). That is
# 0.15 to 0.19 s per step at every width, so overhead dominates. 50 TFLOP/s are a twentieth of the H100's dense bf16
# peak, 990 TFLOP/s.
GPU = Throughput(step_s=0.2, flops_per_s=5e13)
CPU_THREAD = Throughput(step_s=0.02, flops_per_s=4e9)  # one server core, at the widths of config/demo.yaml

PUBLISHED_GPT2 = {  # hub name -> (d_model, n_layer)
    "gpt2": (768, 12),
    "gpt2-medium": (1024, 24),
    "gpt2-large": (1280, 36),
    "gpt2-xl": (1600, 48),
}
_GPT2_VOCABULARY, _GPT2_POSITIONS = 50257, 1024
_UNTAPERED = Variant("none", "none")

_SPARE = 1.5  # ratio of a job's time limit to its estimated time
_START_MIN = 20  # minutes for imports, compilation and the final evaluation
_PROCESS_BYTES = 2e9  # host memory of Python, torch and a compiler
_CUDA_BYTES = 4e9  # host memory of CUDA's context and of its compile processes
_FLOAT = 4  # bytes of a float32: weights, gradients, moments and checkpoints stay float32 under autocast
_MOMENTS = 2  # moments of AdamW per parameter
_RECOMPUTED = 4 / 3  # FLOPs with activation checkpointing, which repeats the forward pass, over FLOPs without


@dataclass(frozen=True)
class Load:
    """The size of a training job, in the quantities that its time and memory follow from.

    Attributes:
        steps: optimizer steps.
        step_tokens: tokens per optimizer step.
        pass_tokens: tokens per forward pass, whose activations are held at the same time.
        parameters: number of parameters; a tied head counts once, and each tapered norm has a second gain.
        matrix: entries of all matrices that multiply a token, including the output head, tied or not.
        attention: n_layer x (n_head x head_dim) x context.
        kept: floats per token that are kept for the backward pass; an upper estimate.
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
        """Return the load of a pre-training run."""
        m = job.model
        heads = m.n_head * m.head_dim
        block = 2 * m.d_model * (heads + m.n_kv_head * m.head_dim) + 3 * m.d_model * m.d_ff
        matrix = m.n_layer * block + m.vocab_size * m.d_model
        norms = 2 * m.n_layer + 1
        tapered = (norms - 1) * job.variant.internal + job.variant.final
        vectors = norms * (1 if m.norm == "rmsnorm" else 2) + tapered
        embedding = 0 if m.tie_head else m.vocab_size * m.d_model
        # A block keeps the inputs and outputs of its norms and linear maps; validation keeps four copies of logits.
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
        """Return the load of a fine-tune; `vocab_size` is that of a trained tokenizer, or None for GPT-2's own."""
        variant = TAPERED.get(job.method, _UNTAPERED)
        return cls._of_gpt2(base, vocab_size, hardware, job.steps, job.batch, variant)

    @classmethod
    def of_base(cls, job: BaseJob, vocab_size: int | None, hardware: HardwareConfig) -> Self:
        """Return the load of a base model's job; a published base is only downloaded and has 0 steps."""
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
            kept=_kept(hardware, layers, width, 50 * width) + 4 * vocabulary,  # GELU keeps 8 tensors of width 4 D
        )

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass per token.

        A matrix entry costs 6. Attention costs 12 L D T over the whole context: the causal mask is not deducted.
        """
        return 6 * self.matrix + 12 * self.attention

    @property
    def flops(self) -> int:
        """FLOPs of the whole training, without those that activation checkpointing repeats."""
        return self.steps * self.step_tokens * self.flops_per_token

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a resume checkpoint: weights and AdamW's two moments."""
        return _FLOAT * (1 + _MOMENTS) * self.parameters

    @property
    def training_bytes(self) -> int:
        """Peak bytes on the device: weights, gradients, moments, and the float32 activations of one forward pass."""
        return _FLOAT * ((2 + _MOMENTS) * self.parameters + self.kept * self.pass_tokens)


def training_time_s(load: Load, hardware: HardwareConfig) -> float:
    """Estimate an upper bound on the seconds of all steps, on a device that no other job shares."""
    if hardware.device == "cpu":
        step_s, flops_per_s = CPU_THREAD.step_s, CPU_THREAD.flops_per_s * hardware.threads
    else:
        step_s, flops_per_s = GPU.step_s, GPU.flops_per_s
    repeated = _RECOMPUTED if hardware.activation_checkpointing else 1
    return load.steps * step_s + repeated * load.flops / flops_per_s


def limit_min(load: Load, hardware: HardwareConfig, attempt: int = 1) -> int:
    """Return the job's time limit in minutes. Each new attempt resumes from the last checkpoint and doubles it."""
    minutes = _START_MIN + _SPARE * training_time_s(load, hardware) / 60
    return math.ceil(minutes * 2 ** (attempt - 1))


def memory_mb(load: Load, hardware: HardwareConfig) -> int:
    """Return the megabytes of host memory that the job needs.

    They hold a checkpoint being written and one process per device. A process holds the initial weights, or on a CPU
    the whole training.
    """
    held = load.training_bytes if hardware.device == "cpu" else _CUDA_BYTES + _FLOAT * load.parameters
    processes = hardware.devices_per_job * (_PROCESS_BYTES + held)
    return math.ceil((processes + 2 * load.checkpoint_bytes) / 1e6)


def _kept(hardware: HardwareConfig, layers: int, width: int, block: int) -> int:
    """Floats kept per token in all blocks; with activation checkpointing, all block inputs and one block's floats."""
    return layers * width + block if hardware.activation_checkpointing else layers * block


def gpt2_vocabulary(vocab_size: int | None) -> int:
    """Return the vocabulary size of a GPT-2: that of a tokenizer trained here, or GPT-2's own."""
    return vocab_size or _GPT2_VOCABULARY


def gpt2_shape(source: str | None, shape: Gpt2Shape | None) -> tuple[int, int]:
    """Return (d_model, n_layer); a model of unknown size counts as the largest GPT-2."""
    if shape is not None:
        return shape.d_model, shape.n_layer
    return PUBLISHED_GPT2.get(str(source).removeprefix("openai-community/"), PUBLISHED_GPT2["gpt2-xl"])
