"""The stock form of a tapered model: an unchanged class of transformers whose norms divide by a constant.

If eps is far above any mean square, sqrt(mean(h^2) + eps) is sqrt(eps) for every token. A stock norm of gain w is then
the linear map h w / sqrt(eps). With w = sqrt(eps) c gamma_t it is the tapered norm's g = 0 map. eps is a power of four,
so that the sum rounds to eps and the division by its root, a power of two, is exact.

All norms of a model read one eps in its config. The form therefore exists only if every norm is tapered.
"""

import copy
import math
from typing import Any

import torch
from torch import nn

from ..architectures import architecture_of, kept_norms
from ..norms import Form, TaperNorm, kind_of
from ..util.errors import UserError
from .self_check import FormFailed
from .store import blank

EPS = 2.0**80
DISARMED_EPS = 1e6  # far above the mean square of any residual stream: a norm with such an eps divides by a constant
_FIELDS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")  # names of eps in configs of transformers
_REMEDY = "use form `normfree`, which has no norms"


def refuse_dtype(dtype: torch.dtype) -> None:
    """Raise UserError if the gains of the stock form overflow in `dtype`."""
    if dtype == torch.float16:
        gain, largest = math.sqrt(EPS), torch.finfo(torch.float16).max
        raise UserError(
            f"form stock has gains of about {gain:.1g}, and float16 ends at {largest:.0f}: set dtype to bfloat16 or "
            f"float32, or {_REMEDY}"
        )


def why_not_stock(model: nn.Module, tapered: set[str]) -> str | None:
    """Return why a model with the tapered norms `tapered` (full names) has no stock form. None: it has one."""
    arch = architecture_of(model)
    if not arch.hugging_face:
        return f"a {type(model).__name__} is not a class of transformers"
    if kept := kept_norms(model, tapered):
        shown = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
        return f"all norms read one eps in the config, and {shown} would stop normalising too"
    if eps_field(model.config) is None:
        return f"the config of a {type(model).__name__} has no eps, which its code fixes"
    return None


def eps_field(config: Any) -> str | None:
    """Return the name of the config field that holds the norms' eps, or None."""
    return next((name for name in _FIELDS if hasattr(config, name)), None)


@torch.no_grad()
def disarmed(model: nn.Module) -> nn.Module:
    """Return a stock model of the same class that computes what the tapered `model` computes at g = 0.

    Raises:
        UserError: no norm is tapered, or the gate is not 0.
        FormFailed: the model has no stock form.
    """
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, TaperNorm)}
    if not norms:
        raise UserError("form stock needs a tapered model, and no norm of this one is tapered: give the run's model")
    for norm in norms.values():
        if norm.gate.form is not Form.LINEAR:
            raise UserError(
                f"the gate is {norm.gate.value.item():g} and form stock needs 0: call Taper.set_gate(0), or train to "
                "the end of the schedule"
            )
    if (reason := why_not_stock(model, set(norms))) is not None:
        raise FormFailed(f"this model has no stock form: {reason}; {_REMEDY}")
    source: Any = model
    config = copy.deepcopy(source.config)
    setattr(config, str(eps_field(config)), EPS)
    stock: Any = blank(type(source), config)
    stock.generation_config = copy.deepcopy(source.generation_config)
    stock.to(source.dtype).load_state_dict({key: source.state_dict()[key] for key in stock.state_dict()})
    for name, norm in norms.items():
        plain = stock.get_submodule(name)
        if getattr(plain, kind_of(plain).eps) != EPS:
            raise FormFailed(f"this model has no stock form: {name} does not read the config's eps; {_REMEDY}")
        plain.weight.copy_(norm.linear_form().coefficient * math.sqrt(EPS) - kind_of(plain).gain_offset)
    return stock.eval()
