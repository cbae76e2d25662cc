"""nnsight on folded models: it runs their own code, and sees and edits what PyTorch's hooks see and edit."""

import builders
import pytest
import torch
from nnsight import NNsight, TransformersModel
from own_models import tokenizer
from tiny_models import gated

from tapernorm import fold
from tapernorm.architectures import logits_of

BLOCKS = {"gpt2": "transformer.h.1", "llama": "model.layers.1"}


def folded_model(name, **overrides):
    return fold(gated(name, options={"final": True}, **overrides)[1])[0]


def hooked(folded, tokens, place, edit=None):
    """Output of the module at `place`, edited, and the logits, by a forward hook of PyTorch."""
    seen = []

    def hook(_, __, output):
        seen.append(output)
        return None if edit is None else edit(output)

    handle = folded.get_submodule(place).register_forward_hook(hook)
    logits = logits_of(folded, tokens)
    handle.remove()
    return seen[0], logits


@pytest.mark.parametrize("name", BLOCKS)
def test_a_trace_sees_the_folded_model(name):
    folded, tokens = folded_model(name), builders.tokens()
    stream, logits = hooked(folded, tokens, BLOCKS[name])
    sight = NNsight(folded)
    block = sight.get(BLOCKS[name])
    with sight.trace(tokens):
        seen = block.output.save()
        answer = sight.output.logits.save()
    assert torch.equal(seen, stream)
    assert torch.equal(answer, logits)
    assert torch.equal(logits_of(folded, tokens), logits)  # and leaves no trace


@pytest.mark.parametrize("name", BLOCKS)
def test_an_edit_in_a_trace_is_the_one_of_a_hook(name):
    folded, tokens = folded_model(name), builders.tokens()
    place = f"{BLOCKS[name].removesuffix('1')}0.mlp"
    _, expected = hooked(folded, tokens, place, lambda output: 0.3 * output)
    sight = NNsight(folded)
    mlp = sight.get(place)
    with sight.trace(tokens):
        mlp.output[:] = 0.3 * mlp.output
        edited = sight.output.logits.save()
    assert builders.close(edited, expected)
    assert not builders.close(edited, logits_of(folded, tokens), 0.01)


def test_our_decoder_is_traced_as_it_is():
    model, _ = builders.calibrated(final=True)
    folded, tokens = fold(model)[0], builders.tokens()
    sight = NNsight(folded)
    with sight.trace(tokens):
        answer = sight.lm_head.output.save()
    assert torch.equal(answer, folded(tokens))


def test_text_becomes_the_tokens_of_the_tokenizer():
    known = tokenizer(bos=True)
    folded = folded_model("gpt2", vocab_size=len(known))
    sight = TransformersModel(folded, tokenizer=known, task="text-generation")
    ids = known("the cat sat", return_tensors="pt").input_ids
    with sight.trace("the cat sat"):
        answer = sight.lm_head.output.save()
    assert torch.equal(answer, logits_of(folded, ids))
