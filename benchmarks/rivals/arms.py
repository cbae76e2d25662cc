"""Which engines are compared, in which form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ENGINES = {  # name -> module of this folder and class of it
    "llama.cpp": "llama_cpp:LlamaCpp",
    "CTranslate2": "ctranslate2_engine:CTranslate2",
    "onnxruntime": "onnx_engine:OnnxRuntime",
    "transformers": "torch_engines:Transformers",
    "ours": "torch_engines:Ours",
}


@dataclass(frozen=True)
class Arm:
    """One row of the comparison.

    Attributes:
        weights: their number format as the engine calls it.
        options: further arguments of the engine's class.
    """

    engine: str
    weights: str
    mode: str = ""
    options: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.engine, self.weights, self.mode)))

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must be those of the reference."""
        return self.weights == "float32"

    @property
    def place(self) -> Literal["own", "rivals"]:
        """The environment that has its packages: the project's own, or that of the rivals."""
        return "own" if self.engine in {"transformers", "ours"} else "rivals"


RIVAL = "llama.cpp float32"  # whose speed is 1
REFERENCE = "transformers float32 eager, dynamic cache"  # whose tokens are right
ARMS = (
    Arm("llama.cpp", "float32"),
    Arm("llama.cpp", "Q8_0"),
    Arm("CTranslate2", "float32"),
    Arm("CTranslate2", "int8"),
    Arm("onnxruntime", "float32"),
    Arm("transformers", "float32", "eager, dynamic cache", {"cache": "dynamic"}),
    Arm("transformers", "float32", "eager, static cache", {"cache": "static"}),
    Arm("transformers", "float32", "compiled, static cache", {"cache": "static", "compile": True}),
    Arm("ours", "float32", "eager"),
    Arm("ours", "float32", "compiled", {"compile": True}),
    Arm("ours", "int8", "eager"),
    Arm("ours", "int8", "compiled", {"compile": True}),
)
