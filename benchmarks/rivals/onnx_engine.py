"""The engine onnxruntime: a graph of its fused operators, which writes keys and values in place."""

# pyright: reportMissingImports=false
# Its packages are in the environment of the rivals.
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from .weights import Weights, read_weights

_FUSED = "com.microsoft"  # the domain of onnxruntime's own operators
_HEAD = 16  # its attention takes heads of a multiple of this size; smaller ones are padded with zeros


class OnnxRuntime:
    """One session."""

    def __init__(self, folder: Path, *, threads: int, weights: str) -> None:
        checkpoint = read_weights(folder)
        self._config = checkpoint.config
        settings = ort.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        self._session = ort.InferenceSession(
            graph(checkpoint).SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        size = self._config["d_model"] // self._config["n_head"]
        shape = (1, self._config["n_kv_head"], self._config["context"], padded(size))
        names = [f"{part}.{layer}" for layer in range(self._config["n_layer"]) for part in ("key", "value")]
        self._cache = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for name in names}
        self.facts = {"release": f"onnxruntime {version('onnxruntime')}"}
        if padded(size) != size:
            self.facts["heads"] = f"padded from {size} to {padded(size)}"

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        drawn = [int(self._step(prompt, 0)[-1].argmax())]
        began = time.perf_counter()
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            drawn.append(int(self._step(drawn[-1:], position)[-1].argmax()))
        return drawn, time.perf_counter() - began

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        losses = []
        for window in windows:
            logits = np.concatenate([self._step([token], i) for i, token in enumerate(window[:-1])]).astype(np.float64)
            log_total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
            losses.append(log_total - logits[np.arange(len(logits)), window[1:]])
        return float(np.mean(losses))

    def _step(self, tokens: Sequence[int], position: int) -> np.ndarray:
        """Return the logits (1, V) after the tokens, whose first stands at `position` of the cache."""
        binding = self._session.io_binding()
        total = position + len(tokens)
        binding.bind_cpu_input("tokens", np.array([tokens], np.int64))
        binding.bind_cpu_input("last", np.array([total - 1], np.int32))
        binding.bind_cpu_input("total", np.array(total, np.int32))
        for name, value in self._cache.items():
            binding.bind_ortvalue_input(f"past.{name}", value)
            binding.bind_ortvalue_output(f"present.{name}", value)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()


def graph(checkpoint: Weights) -> onnx.ModelProto:
    """Build the graph: tokens (1, T), last (1,), total () and the caches -> logits (1, V) of the last token, caches."""
    config, made = checkpoint.config, _Graph()
    heads, groups, size = config["n_head"], config["n_kv_head"], config["d_model"] // config["n_head"]
    for name, table in zip(("cos", "sin"), _angles(size, config["context"], config["rope_theta"]), strict=True):
        made.constant(name, table)
    made.constant("embed", checkpoint.tensors["model.embed_tokens.weight"])
    h = made.node("Gather", "embed", "tokens")

    def norm(x: str, name: str) -> str:
        made.constant(name, checkpoint.tensors[f"{name}.weight"])
        return made.node("SimplifiedLayerNormalization", x, name, axis=-1, epsilon=config["norm_eps"], stash_type=1)

    def linear(x: str, name: str, *weights: np.ndarray) -> str:
        made.constant(name, np.ascontiguousarray(np.concatenate(weights or [checkpoint.tensors[f"{name}.weight"]]).T))
        return made.node("MatMul", x, name)

    caches = []
    for layer in range(config["n_layer"]):
        block = f"model.layers.{layer}"
        x = norm(h, f"{block}.input_layernorm")
        past, present = ([f"{when}.{part}.{layer}" for part in ("key", "value")] for when in ("past", "present"))
        q, k, v, out = (checkpoint.tensors[f"{block}.self_attn.{name}_proj.weight"] for name in "qkvo")
        qkv = linear(x, f"{block}.qkv", _padded_rows(q, heads), _padded_rows(k, groups), _padded_rows(v, groups))
        y = made.node(
            "GroupQueryAttention",
            *(qkv, "", "", *past, "last", "total", "cos", "sin"),
            outputs=present,
            domain=_FUSED,
            num_heads=heads,
            kv_num_heads=groups,
            do_rotary=1,
            scale=size**-0.5,
        )
        caches += zip(past, present, strict=True)
        h = made.node("Add", h, linear(y, f"{block}.out", _padded_rows(out.T, heads).T))
        x = norm(h, f"{block}.post_attention_layernorm")
        gate, up = linear(x, f"{block}.mlp.gate_proj"), linear(x, f"{block}.mlp.up_proj")
        x = made.node("Mul", made.node("Mul", gate, made.node("Sigmoid", gate)), up)
        h = made.node("Add", h, linear(x, f"{block}.mlp.down_proj"))
    made.constant("end", np.array(-1, np.int64))
    h = made.node("Gather", norm(h, "model.norm"), "end", axis=1)
    head = checkpoint.tensors.get("lm_head.weight", checkpoint.tensors["model.embed_tokens.weight"])
    made.constant("head", np.ascontiguousarray(head.T))
    made.nodes.append(helper.make_node("MatMul", [h, "head"], ["logits"]))
    cache = (1, groups, config["context"], padded(size))
    ints = [
        ("tokens", TensorProto.INT64, (1, "T")),
        ("last", TensorProto.INT32, (1,)),
        ("total", TensorProto.INT32, ()),
    ]
    inputs = [helper.make_tensor_value_info(*value) for value in ints]
    inputs += [helper.make_tensor_value_info(past, TensorProto.FLOAT, cache) for past, _ in caches]
    outputs = [helper.make_tensor_value_info(present, TensorProto.FLOAT, cache) for _, present in caches]
    outputs.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, (1, config["vocab_size"])))
    whole = helper.make_graph(made.nodes, "decoder", inputs, outputs, made.constants)
    return helper.make_model(
        whole, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(_FUSED, 1)], ir_version=10
    )


class _Graph:
    """The nodes and constants of a graph, in the order in which they were added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: np.ndarray) -> None:
        self.constants.append(numpy_helper.from_array(value, name))

    def node(self, kind: str, *inputs: str, outputs: Sequence[str] = (), domain: str = "", **attributes: object) -> str:
        """Add a node and return the name of its first output. `outputs` are the names of the others."""
        name = f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name, *outputs], domain=domain, **attributes))
        return name


def padded(size: int) -> int:
    """Return the size to which the attention operator needs a head padded."""
    return -(-size // _HEAD) * _HEAD


def _padded_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Pad each half of each head of `weight` (H E, D) with zeros, so that rotation pairs the same channels."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    more = (padded(2 * halves.shape[2]) - 2 * halves.shape[2]) // 2
    return np.pad(halves, ((0, 0), (0, 0), (0, more), (0, 0))).reshape(-1, weight.shape[1])


def _angles(size: int, context: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin (S, padded size / 2). The padded channels are zero, so their angles do not matter."""
    rates = theta ** (-np.arange(0, size, 2) / size)
    angles = np.arange(context)[:, None] * np.pad(rates, (0, (padded(size) - size) // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
