"""Our own decoding and `generate` of transformers, on PyTorch."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.models import stock_llama
from tapernorm.checkpoints import store
from tapernorm.models.decode import compiled_step, decode_step, prefill
from tapernorm.models.decoder import Decoder
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder


class Ours:
    """A packed decoder that keeps its cache and, compiled, its graph from one request to the next."""

    def __init__(self, folder: Path, *, threads: int, weights: str, compile: bool = False) -> None:
        torch.set_num_threads(threads)
        model = _load(folder)
        self.facts = {"release": f"torch {torch.__version__}"}
        self._model, self._compile = PackedDecoder(model, weights="int8" if weights == "int8" else "stored"), compile
        self._context = model.config.context
        self._cache: KVCache | None = None

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        tokens = torch.tensor([prompt])
        step = self._prepare(len(prompt) + new_tokens)
        assert self._cache is not None
        with torch.inference_mode():
            drawn = [prefill(self._model, tokens, self._cache).argmax(-1)]
            began = time.perf_counter()
            for position in range(len(prompt), len(prompt) + new_tokens - 1):
                drawn.append(step(drawn[-1], position).argmax(-1))
            found = torch.cat(drawn).tolist()
        return found, time.perf_counter() - began

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        losses = []
        for window in torch.tensor(windows):
            cache = self._empty(len(window))
            logits = [prefill(self._model, window[None, :1], cache)]
            logits += [decode_step(self._model, window[i : i + 1], cache, i) for i in range(1, len(window) - 1)]
            losses.append(F.cross_entropy(torch.cat(logits), window[1:]))
        return torch.stack(losses).mean().item()

    def _prepare(self, capacity: int) -> Any:
        if self._cache is None or self._cache.capacity != capacity:
            self._cache = self._empty(capacity)
            if self._compile:
                graph = compiled_step(self._model, self._cache)
                self._step = lambda tokens, position: graph(tokens, torch.tensor(position))
            else:
                cache = self._cache
                self._step = lambda tokens, position: decode_step(self._model, tokens, cache, position)
        return self._step

    def _empty(self, capacity: int) -> KVCache:
        weight = self._model.embed.weight
        return KVCache.allocate(
            self._model.config, batch=1, capacity=capacity, dtype=weight.dtype, device=weight.device
        )


class Transformers:
    """`LlamaForCausalLM.generate` on a cache of one kind."""

    def __init__(self, folder: Path, *, threads: int, weights: str, cache: str, compile: bool = False) -> None:
        torch.set_num_threads(threads)
        self._model = stock_llama(_load(folder)).eval()
        self._cache, self._compile = cache, compile
        self.facts = {"release": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        tokens = torch.tensor([prompt])
        settings = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static" if self._cache == "static" else None,
            disable_compile=not self._compile,
        )
        if self._compile:
            settings.compile_config = CompileConfig()
            vars(settings.compile_config)["_compile_all_devices"] = True  # without it a CPU stays eager
        clock = _Clock()
        with torch.inference_mode():
            found = self._model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=settings, streamer=clock
            )
        return found[0, len(prompt) :].tolist(), clock.times[-1] - clock.times[1]

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        tokens = torch.tensor(windows)
        with torch.inference_mode():
            logits: Tensor = self._model(tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


class _Clock(BaseStreamer):
    """When the prompt and each new token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Iterable[int]) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _load(folder: Path) -> Decoder:
    return store.load(folder, Decoder).requires_grad_(False).eval()
