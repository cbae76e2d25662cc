"""Where each known architecture keeps its norms, and which linear maps each norm feeds: one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .errors import UserError


@dataclass(frozen=True)
class Architecture:
    """Module names of the norms of a pre-norm Transformer and of their consumers."""

    blocks: str  # the list of blocks
    internal: Mapping[str, tuple[str, ...]]  # norm of a block -> the linear maps it feeds, in the order they run
    final: str  # the norm before the output head
    head: str  # the output head

    def internal_norms(self, model: nn.Module) -> list[str]:
        """Full names of all internal norms, block 0 upward."""
        depth = len(list(model.get_submodule(self.blocks).children()))
        return [f"{self.blocks}.{i}.{norm}" for i in range(depth) for norm in self.internal]

    def consumers(self, norm: str) -> list[str]:
        """Full names of the linear maps that the norm of this full name feeds."""
        if norm == self.final:
            return [self.head]
        block, _, name = norm.removeprefix(f"{self.blocks}.").partition(".")
        return [f"{self.blocks}.{block}.{consumer}" for consumer in self.internal[name]]


ARCHITECTURES = {
    "Decoder": Architecture(
        blocks="model.layers",
        internal={
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        },
        final="model.norm",
        head="lm_head",
    ),
}


def architecture_of(model: nn.Module) -> Architecture:
    """The table's row for the class of `model`.

    Raises:
        UserError: the class is not in the table; the message lists those that are.
    """
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise UserError(f"no architecture {name!r} in tapernorm.arch; known: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def select_norms(model: nn.Module, *, final: bool, sites: Sequence[str] | None) -> list[str]:
    """Names of the norms to taper: the internal ones that match a pattern of `sites` (None: all), then the final one.

    Raises:
        UserError: a pattern matches no internal norm.
    """
    arch = architecture_of(model)
    internal = arch.internal_norms(model)
    for pattern in sites or ():
        if not any(fnmatchcase(name, pattern) for name in internal):
            raise UserError(f"sites: {pattern!r} matches no internal norm; they are {', '.join(internal)}")
    chosen = [n for n in internal if sites is None or any(fnmatchcase(n, p) for p in sites)]
    return [*chosen, arch.final] if final else chosen
