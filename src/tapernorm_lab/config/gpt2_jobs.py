"""Derive the jobs of a run's GPT-2 track from its config."""

from typing import TYPE_CHECKING

from tapernorm.util.errors import UserError

from .gpt2 import MADE_HERE, ORIGINAL, TAPERED, EvalCorpus, Gpt2Config, Gpt2Size, Method
from .jobs import (
    BaseJob,
    BlocksJob,
    BpeJob,
    CorpusJob,
    EvaluateJob,
    FilterJob,
    FinetuneJob,
    HubRowsJob,
    ModelUnderTest,
    TokenizerJob,
)
from .sections import HardwareConfig


class Gpt2Jobs:
    """Methods of `Config` that derive jobs from its sections `gpt2` and `hardware`.

    A method that is asked for one job raises UserError if `gpt2` is null or lacks the named size, text or corpus.
    """

    if TYPE_CHECKING:  # `Config` declares these fields
        gpt2: Gpt2Config | None
        hardware: HardwareConfig

    def finetune_cells(self) -> list[tuple[Method, str, int]]:
        """List every (method, size, seed) of the GPT-2 track, largest size first; empty if `gpt2` is null."""
        if self.gpt2 is None:
            return []
        sizes = [size.name for size in reversed(self.gpt2.sizes)]
        return [(method, size, seed) for size in sizes for method in self.gpt2.methods for seed in self.gpt2.seeds]

    def base_job(self, size: str) -> BaseJob:
        """Return the job that downloads or trains the base model of a size."""
        gpt2, chosen = self._gpt2(), self._size(size)
        return BaseJob(size=size, source=chosen.source, fresh=chosen.fresh, context=gpt2.context, seed=gpt2.seeds[0])

    def finetune_job(self, method: Method, size: str, seed: int) -> FinetuneJob:
        """Return the job of one (method, size, seed), with only the settings that the method reads."""
        gpt2, chosen = self._gpt2(), self._size(size)
        fakeln, tapered = method == "fakeln", method in TAPERED
        shared = ("steps", "lr", "min_lr", "warmup_steps", "decay_steps", "batch")
        return FinetuneJob(
            method=method,
            size=size,
            seed=seed,
            context=gpt2.context,
            train=gpt2.train,
            aux_weight=chosen.fakeln_weight if fakeln else chosen.anchor_weight if tapered else 0.0,
            taper=chosen.taper if tapered else None,
            fakeln=chosen.fakeln if fakeln else None,
            micro_batch=chosen.micro_batch if fakeln else None,
            **{name: getattr(chosen, name) for name in shared},
        )

    def finetune_hardware(self, size: str) -> HardwareConfig:
        """Return the hardware section with the settings that this size overrides."""
        own = ("micro_batch", "devices_per_job", "activation_checkpointing", "checkpoint_every")
        return self.hardware.model_copy(update={name: getattr(self._size(size), name) for name in own})

    def blocks_job(self, corpus: str) -> BlocksJob:
        """Return the job that cuts a text into blocks: base, train, or an evaluation corpus of kind text."""
        gpt2 = self._gpt2()
        self.gpt2_corpus_job(corpus)  # raises UserError if there is no such text
        scored = [c for c in gpt2.corpora if c.name == corpus or (corpus == "train" and c.kind == "held_out")]
        return BlocksJob(
            context=gpt2.context,
            block_documents=gpt2.block_documents,
            max_rows=scored[0].max_rows if scored else None,
        )

    def gpt2_corpus_job(self, text: str) -> CorpusJob:
        """Return the job that reads a text: base, train, or an evaluation corpus of kind text."""
        gpt2 = self._gpt2()
        texts = {"base": gpt2.base_text, "train": gpt2.text, **{c.name: c.text for c in gpt2.corpora}}
        if not texts.get(text):
            raise UserError(f"no text {text!r} in gpt2; there are {', '.join(t for t in texts if texts[t])}")
        return CorpusJob(data=texts[text])

    def gpt2_tokenizer_job(self) -> TokenizerJob:
        """Return the job that trains the GPT-2 track's tokenizer."""
        gpt2 = self._gpt2()
        if gpt2.tokenizer is None:
            raise UserError(
                f"gpt2.tokenizer is null: this config uses the tokenizer {gpt2.bpe!r} as published and trains none"
            )
        return TokenizerJob(tokenizer=gpt2.tokenizer)

    def bpe_job(self) -> BpeJob:
        """Return the job that downloads the GPT-2 track's published tokenizer."""
        gpt2 = self._gpt2()
        if gpt2.bpe is None:
            raise UserError("gpt2.bpe is null: this config trains its tokenizer, with `tapernorm tokenizer --gpt2`")
        return BpeJob(source=gpt2.bpe)

    def hub_rows_job(self, corpus: str) -> HubRowsJob:
        """Return the job that downloads the tokenized rows of an evaluation corpus of kind rows."""
        found = self._corpus(corpus, "rows")
        assert found.rows is not None
        return HubRowsJob(rows=found.rows, context=self._gpt2().context, max_rows=found.max_rows)

    def filter_job(self, corpus: str) -> FilterJob:
        """Return the job that makes an evaluation corpus of kind filtered."""
        return FilterJob(seen_rows=self._corpus(corpus, "filtered").seen_rows)

    def models_under_test(self) -> list[ModelUnderTest]:
        """List every model that Table 3 scores: the originals, our fine-tunes, and the published fine-tunes."""
        if self.gpt2 is None:
            return []
        bases = {size.name: size.source or MADE_HERE for size in self.gpt2.sizes}
        found = []
        for size in self.gpt2.sizes:
            of_size = {"size": size.name, "seed": None, "base": bases[size.name]}
            found.append(ModelUnderTest(kind="original", method=ORIGINAL, **of_size))
            found += [
                ModelUnderTest(kind="published", method=f"published_{p.method}", **of_size) for p in size.published
            ]
        finetuned = [
            ModelUnderTest(kind="finetuned", size=size, method=method, seed=seed, base=bases[size])
            for method, size, seed in self.finetune_cells()
        ]
        return [*found, *finetuned]

    def evaluate_job(self, method: str, size: str, seed: int | None) -> EvaluateJob:
        """Return the job that scores one of `models_under_test` on every corpus."""
        corpora = self._gpt2().corpora
        model = next(m for m in self.models_under_test() if (m.method, m.size, m.seed) == (method, size, seed))
        return EvaluateJob(
            model=model,
            labels={c.name: c.label for c in corpora},
            columns={c.name: c.column for c in corpora},
        )

    def published_job(self, method: str, size: str) -> BaseJob:
        """Return the job that downloads a checkpoint published by others."""
        source = {p.method: p.source for p in self._size(size).published}[method]
        gpt2 = self._gpt2()
        return BaseJob(size=size, source=source, fresh=None, context=gpt2.context, seed=gpt2.seeds[0])

    def _gpt2(self) -> Gpt2Config:
        if self.gpt2 is None:
            raise UserError("this config has no GPT-2 track: its `gpt2` is null; use a config with a `gpt2` section")
        return self.gpt2

    def _corpus(self, name: str, kind: str) -> EvalCorpus:
        found = {corpus.name: corpus for corpus in self._gpt2().corpora if corpus.kind == kind}
        if name not in found:
            raise UserError(f"no corpus {name!r} of kind {kind} in gpt2; there are {', '.join(found) or 'none'}")
        return found[name]

    def _size(self, name: str) -> Gpt2Size:
        sizes = {size.name: size for size in self._gpt2().sizes}
        if name not in sizes:
            raise UserError(f"no GPT-2 size {name!r} in this config; it has {', '.join(sizes)}")
        return sizes[name]
