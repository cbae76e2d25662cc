"""The shape of a `Decoder`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from ..util.errors import UserError

NormKind = Literal["rmsnorm", "layernorm"]
_LEAST = {  # smallest value of every size
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
    """Shape of a `Decoder`, saved as config.json beside its weights.

    Attributes:
        vocab_size: number of token ids, V.
        d_model: width of the residual stream, D.
        n_layer: number of blocks.
        n_head: number of query heads, a divisor of `d_model`.
        n_kv_head: number of key and value heads, a divisor of `n_head`.
        d_ff: hidden size of the SwiGLU network, F.
        context: longest sequence, in tokens.
        norm: "rmsnorm" or "layernorm".
        norm_eps: eps inside the square root of every norm.
        rope_theta: base of the rotary angles.
        tie_head: whether the output head shares the embedding's weight.

    Raises:
        ValueError: a value has the wrong type or is out of range, or the heads do not divide the width.
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

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # for pydantic models that contain this class

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        if self.norm not in get_args(NormKind):
            raise ValueError(f"norm must be {' or '.join(get_args(NormKind))}, got {self.norm!r}")
        if not isinstance(self.tie_head, bool):
            raise ValueError(f"tie_head must be true or false, got {self.tie_head!r}")
        self._require_heads_that_fit()

    def _require_heads_that_fit(self) -> None:
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_head {self.n_head}: "
                f"set d_model to a multiple of {self.n_head}, or n_head to a divisor of {self.d_model}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head size {self.head_dim} (d_model {self.d_model} / n_head {self.n_head}) is odd, "
                "and rotary positions rotate pairs of channels: choose an even head size"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}: "
                f"set n_kv_head to a divisor of {self.n_head}"
            )

    @property
    def head_dim(self) -> int:
        """Number of channels of one head, E."""
        return self.d_model // self.n_head

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: str) -> "DecoderConfig":
        """Return the shape that the JSON object `raw` describes. `source` is the file that messages name.

        Raises:
            UserError: a key is unknown or missing, or a value is invalid.
        """
        if different := sorted(raw.keys() ^ {field.name for field in fields(cls)}):
            raise UserError(f"{source} is not a valid {cls.__name__}: unknown or missing {', '.join(different)}")
        try:
            return cls(**raw)
        except ValueError as error:
            raise UserError(f"{source} is not a valid {cls.__name__}: {error}") from None
