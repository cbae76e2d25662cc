"""Text decoding against transformers' generate and against a NumPy sampler."""

import numpy as np
import pytest
import torch
import transformers
from builders import decoder, shape, tokens
from hugging_face import hugging_face

from tapernorm.models.decode import Sampling, generate, pad_left
from tapernorm.models.decoder import Decoder
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.util.compiler import has_compiler
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

PROMPTS = ([3, 17, 8, 8, 21], [11, 2], [5, 9, 26, 1])  # of different lengths


def packed(model):
    return PackedDecoder(model.requires_grad_(False))


def written(model, ids, **options):
    """All that `generate` yields, as (B, T)."""
    return torch.stack(list(generate(packed(model), ids, **options)), dim=1)


# --- greedy, against transformers ---


def twins(**options):
    """transformers' model and ours with the same random weights."""
    config = shape(context=40, d_model=24, n_head=4, n_kv_head=2, **options)
    theirs, ours = hugging_face(config), Decoder(config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def their_continuation(theirs, ids, pads, new_tokens, eod=None):
    theirs.generation_config.eos_token_id = eod  # LLaMA's own, 2, would step in for None
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=eod or 0)
    mask = (torch.arange(ids.shape[1]) >= pads[:, None]).long()
    return theirs.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :]


@torch.no_grad()
def smallest_gap(model, prompt, continuation):
    """Between the likeliest and the second likeliest token of any step; rounding must not decide."""
    logits = model(torch.tensor([[*prompt, *continuation]]))[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2, dim=-1).values.T
    return (first - second).min().item()


@pytest.mark.parametrize("tie_head", [False, True])
def test_greedy_text_of_one_prompt_is_that_of_transformers(tie_head):
    theirs, ours = twins(tie_head=tie_head)
    ids, pads = pad_left(PROMPTS[:1], pad=0)
    found = written(ours, ids, new_tokens=30)
    assert torch.equal(found, their_continuation(theirs, ids, pads, 30))
    assert smallest_gap(ours, PROMPTS[0], found[0].tolist()) > 1e-3
    assert len(found.unique()) > 3
    with torch.no_grad():
        ours.model.layers[0].input_layernorm.weight.mul_(1.5)
    assert not torch.equal(written(ours, ids, new_tokens=30), found)


def test_greedy_text_of_a_padded_batch_is_that_of_transformers():
    theirs, ours = twins()
    ids, pads = pad_left(PROMPTS, pad=0)
    found = written(ours, ids, new_tokens=20, pads=pads)
    assert torch.equal(found, their_continuation(theirs, ids, pads, 20))
    assert min(map(smallest_gap, [ours] * 3, PROMPTS, found.tolist())) > 1e-3
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert torch.equal(written(ours, torch.tensor([prompt]), new_tokens=20)[0], row)
    assert not torch.equal(written(ours, ids, new_tokens=20), found)  # the pads were needed


def test_each_row_stops_at_its_end_of_document_as_in_transformers():
    theirs, ours = twins()
    ids, pads = pad_left(PROMPTS, pad=0)
    free = written(ours, ids, new_tokens=20, pads=pads)
    eod = next(t for t in free[0].tolist() if all(t in row for row in free.tolist()))
    ends = [row.tolist().index(eod) for row in free]
    assert len(set(ends)) > 1
    found = written(ours, ids, new_tokens=20, pads=pads, eod=eod)
    assert torch.equal(found, their_continuation(theirs, ids, pads, 20, eod=eod))
    assert found.shape[1] == max(ends) + 1 < 20  # no step after the last row's end
    for row, before, end in zip(found, free, ends, strict=True):
        assert torch.equal(row[: end + 1], before[: end + 1])
        assert (row[end:] == eod).all()


# --- sampling ---

LOGITS = np.array([1.2, -0.7, 2.0, 0.4, -2.5, 1.9, 0.1])
DRAWS = 200_000


def truncated(logits, temperature, top_k=None, top_p=None):
    """The distribution to draw from, by the definitions."""
    weights = np.exp(logits / temperature)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order if top_k is None else order[:top_k]
    if top_p is not None:
        mass, enough = 0.0, []
        for i in kept:
            enough.append(i)
            mass += weights[i] / weights[kept].sum()
            if mass >= top_p:
                break
        kept = enough
    found = np.zeros(len(logits))
    found[kept] = weights[kept] / weights[kept].sum()
    return found


def frequencies(sampling, logits=LOGITS, seed=1):
    rows = torch.tensor(logits, dtype=torch.float32).expand(DRAWS, -1).clone()
    return np.bincount(sampling(rows, generator(seed, "tests")), minlength=len(logits)) / DRAWS


def agrees(found, expected):
    """Within five standard errors for each token, and never a token of probability 0."""
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    return bool(np.all(np.abs(found - expected) <= 5 * error))


SETTINGS = (
    (1.0, None, None),
    (0.6, None, None),
    (1.7, None, None),
    (1.0, 3, None),
    (1.0, 1, None),
    (1.0, 99, None),
    (1.0, None, 0.8),
    (1.0, None, 1.0),
    (1.0, None, 1e-9),
    (0.8, 4, 0.9),
    (2.5, 6, 0.85),
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_truncated_distribution(settings):
    found = frequencies(Sampling(*settings))
    assert agrees(found, truncated(LOGITS, *settings))
    others = [truncated(LOGITS, *other) for other in SETTINGS]
    same = [np.allclose(other, truncated(LOGITS, *settings), atol=1e-12) for other in others]
    assert [agrees(found, other) for other in others] == same  # the judge tells them apart


def test_top_p_is_taken_of_what_top_k_left():
    """0.7 of the three likeliest is two of them, of all tokens three."""
    both = Sampling(1.0, top_k=3, top_p=0.7)
    assert np.count_nonzero(frequencies(both)) == np.count_nonzero(truncated(LOGITS, 1.0, 3, 0.7)) == 2
    assert np.count_nonzero(frequencies(Sampling(1.0, top_p=0.7))) == 3


def test_rows_are_drawn_from_their_own_distributions():
    logits = torch.tensor(np.stack([LOGITS, LOGITS[::-1].copy()]), dtype=torch.float32)
    drawn = {tuple(Sampling(1.0, top_k=1)(logits, generator(seed, "tests")).tolist()) for seed in range(20)}
    assert drawn == {(2, 4)}


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.tensor(LOGITS, dtype=torch.float32)[None] * 1e4
    assert Sampling(temperature)(logits, generator(0, "tests")).item() == 2


@pytest.mark.parametrize("settings", [(1.0, None, None), (0.7, 3, 0.9)])
def test_drawing_leaves_the_logits_and_torchs_own_generator_alone(settings):
    logits, state = torch.tensor(LOGITS)[None], torch.get_rng_state()
    Sampling(*settings)(logits, generator(0, "tests"))
    assert np.array_equal(logits.numpy()[0], LOGITS)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_repeats_a_text_and_another_one_does_not():
    model, hot = decoder(context=30), Sampling(2.0)
    options = {"new_tokens": 25, "sampling": hot}
    texts = [written(model, tokens(2, 5), **options, generator=generator(seed, "tests")) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], written(model, tokens(2, 5), new_tokens=25))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"top_p": float("nan")}, "top_p must lie in"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**options)


# --- limits ---


def test_text_beyond_the_context_is_refused_before_the_first_token():
    model = packed(decoder(context=8))
    assert len(list(generate(model, tokens(1, 5), new_tokens=3))) == 3
    with pytest.raises(UserError, match="9 tokens exceeds the model's context of 8"):
        generate(model, tokens(1, 5), new_tokens=4)


def test_sampling_without_a_generator_is_refused():
    with pytest.raises(UserError, match=r"generator=.*temperature"):
        generate(packed(decoder()), tokens(1, 5), new_tokens=4, sampling=Sampling(1.0))


def test_no_step_is_taken_past_the_last_token(monkeypatch):
    fed = []
    right = PackedDecoder.forward
    monkeypatch.setattr(
        PackedDecoder, "forward", lambda self, t, *rest: fed.append(t.shape[1]) or right(self, t, *rest)
    )
    list(generate(packed(decoder()), tokens(1, 5), new_tokens=4))
    assert fed == [5, 1, 1, 1]


def test_prompts_are_aligned_at_their_ends():
    ids, pads = pad_left([[5, 6, 7], [8], [9, 4]], pad=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 4]]
    assert pads.tolist() == [0, 2, 1]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(UserError, match="each prompt needs at least one token"):
        pad_left(prompts, pad=0)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_decoding_writes_what_eager_decoding_writes():
    packed = PackedDecoder(decoder().float())
    ids = tokens(2, 4)
    eager, compiled = (
        torch.stack(list(generate(packed, ids, new_tokens=5, compile=flag)), dim=1) for flag in (False, True)
    )
    assert torch.equal(eager, compiled)
