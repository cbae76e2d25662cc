"""The shape of a `Decoder`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from ..util.errors import UserError

NormKind = Literal["rmsnorm", "layernorm"]
_LEAST = {  # of every size
    "vocab_size": 1,
    "d_model": 1,
    "n_layer": 1,
    "n_head": 1,
    "n_kv_head": 1,
    "d_ff": 1,
    "context": 2,
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of one decoder; saved as config.json beside its weights.

    Attributes:
        n_kv_head: heads of keys and values, a divisor of `n_head`.
        d_ff: hidden size of the SwiGLU network.
        context: longest sequence, in tokens.
        norm_eps: inside the square root of every norm.
        tie_head: whether the head shares the embedding's weight.

    Raises:
        ValueError: a size that is not a whole number, or heads that do not fit.
    """

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    n_kv_head: int
    d_ff: int
    context: int
    norm: NormKind
    norm_eps: float
    rope_theta: float
    tie_head: bool

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # where it is part of a job of the lab

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is a whole number of {least} or more, got {value!r}")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name} is a finite number above 0, got {value!r}")
        if self.norm not in get_args(NormKind):
            raise ValueError(f"norm is {' or '.join(get_args(NormKind))}, got {self.norm!r}")
        if not isinstance(self.tie_head, bool):
            raise ValueError(f"tie_head is true or false, got {self.tie_head!r}")
        self._require_heads_that_fit()

    def _require_heads_that_fit(self) -> None:
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_head {self.n_head}: "
                f"choose a multiple of {self.n_head}, or fewer heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head size {self.head_dim} (d_model {self.d_model} / n_head {self.n_head}) is odd, "
                "and rotary positions turn pairs of channels: choose an even head size"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}")

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.d_model // self.n_head

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: str) -> "DecoderConfig":
        """The shape that `raw`, from `source`, says."""
        if different := sorted(raw.keys() ^ {field.name for field in fields(cls)}):
            raise UserError(f"{source} is not a valid {cls.__name__}: unknown or missing {', '.join(different)}")
        try:
            return cls(**raw)
        except ValueError as error:
            raise UserError(f"{source} is not a valid {cls.__name__}: {error}") from None
