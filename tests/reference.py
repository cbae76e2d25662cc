"""A second, slow TaperNorm in float64 NumPy, written from the mathematics alone: the judge of the real one.

B batch, T time, D width, H heads, K key-value heads, E head size, F hidden width, V vocabulary.
"""

import numpy as np

# Norms


def rms(h, eps):
    return np.sqrt(np.sum(h * h, axis=-1, keepdims=True) / h.shape[-1] + eps)


def centre(h):
    return h - np.sum(h, axis=-1, keepdims=True) / h.shape[-1]


def sigma(h, eps):
    return rms(centre(h), eps)  # the biased variance is the mean square of the centred vector


def taper_rms_norm(h, g, *, gamma, gamma_t, c, eps):
    return g * h / rms(h, eps) * gamma + (1 - g) * c * h * gamma_t


def taper_layer_norm(h, g, *, gamma, gamma_t, c, beta, eps):
    return g * centre(h) / sigma(h, eps) * gamma + (1 - g) * c * centre(h) * gamma_t + beta


# Calibration


def residual(c, h, gamma, eps, *, layer_norm):
    """E || v / s - c v ||^2 with v = h gamma and s = r(h); for a LayerNorm h is centred first."""
    h = centre(h) if layer_norm else h
    return np.mean(np.sum((h / rms(h, eps) * gamma - c * h * gamma) ** 2, axis=-1))


def calibration_means(h, gamma, eps, *, layer_norm):
    """Numerator and denominator of c*: E[||v||^2 / s] and E[||v||^2]."""
    h = centre(h) if layer_norm else h
    energy = np.sum((h * gamma) ** 2, axis=-1, keepdims=True)
    return np.array([np.mean(energy / rms(h, eps)), np.mean(energy)])


def corrected_ema(batch_means, m):
    """sum_i m (1-m)^(n-i) x_i / (1 - (1-m)^n): the closed form of the bias-corrected EMA."""
    n = len(batch_means)
    weights = np.array([m * (1 - m) ** (n - 1 - i) for i in range(n)])
    return np.tensordot(weights, np.array(batch_means), axes=1) / (1 - (1 - m) ** n)


# Scale loss


def anchor_loss(h, target, weight, eps, *, layer_norm):
    scale = sigma(h, eps) if layer_norm else rms(h, eps)
    return weight * np.mean((scale - target) ** 2)


def anchor_gradient(h, target, weight, eps, *, layer_norm):
    """d anchor_loss / dh: 2 lambda (s - s_tgt) / (number of tokens) times v / (D s), v the (centred) h."""
    v = centre(h) if layer_norm else h
    scale = rms(v, eps)
    return 2 * weight * (scale - target) / scale.size * v / (h.shape[-1] * scale)


# Losses


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))


def cross_entropies(logits, targets):
    return -np.take_along_axis(log_softmax(logits), targets[..., None], axis=-1)[..., 0]


# Decoder


def rotary_tables(context, head_dim, theta):
    """cos and sin (context, E/2) of the angle t theta^(-2i/E)."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(context)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x, cos, sin):
    """Turn channels i and i + E/2 of x (T, E) by the table's angle."""
    half = x.shape[-1] // 2
    left, right = x[:, :half], x[:, half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(x, weights, *, n_head, n_kv_head, cos, sin):
    """Causal grouped-query attention of one sequence x (T, D); query head i reads key head i // (H/K)."""
    T, head_dim = len(x), weights["q_proj"].shape[0] // n_head
    q, k, v = (x @ weights[name].T for name in ("q_proj", "k_proj", "v_proj"))
    outputs = []
    for head in range(n_head):
        mine = slice(head * head_dim, (head + 1) * head_dim)
        shared = head // (n_head // n_kv_head)
        theirs = slice(shared * head_dim, (shared + 1) * head_dim)
        scores = rotate(q[:, mine], cos, sin) @ rotate(k[:, theirs], cos, sin).T / np.sqrt(head_dim)
        scores[np.triu_indices(T, 1)] = -np.inf
        outputs.append(np.exp(log_softmax(scores)) @ v[:, theirs])
    return np.concatenate(outputs, axis=-1) @ weights["o_proj"].T


def swiglu(x, weights):
    gate = x @ weights["gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up_proj"].T)) @ weights["down_proj"].T


def decoder(tokens, state, norm, *, n_layer, n_head, n_kv_head, cos, sin):
    """Logits (T, V) of one sequence of ids (T,).

    `state` maps LLaMA parameter names to arrays; `norm(name, h)` applies the norm of that name.
    """

    def weights(prefix):
        found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        return {k.removesuffix(".weight"): v for k, v in found.items()}

    h = state["model.embed_tokens.weight"][tokens]
    cos, sin = cos[: len(tokens)], sin[: len(tokens)]
    for i in range(n_layer):
        block = f"model.layers.{i}."
        x = norm(block + "input_layernorm", h)
        heads = {"n_head": n_head, "n_kv_head": n_kv_head, "cos": cos, "sin": sin}
        h = h + attention(x, weights(block + "self_attn."), **heads)
        h = h + swiglu(norm(block + "post_attention_layernorm", h), weights(block + "mlp."))
    return norm("model.norm", h) @ state["lm_head.weight"].T


# Folding; row vectors x -> x W + b, W (in, out)


def fold_rms_norm(W, *, c, gamma_t):
    return c * np.diag(gamma_t) @ W


def fold_layer_norm(W, b, *, c, gamma_t, beta):
    d = len(W)
    return c * (np.eye(d) - np.ones((d, d)) / d) @ np.diag(gamma_t) @ W, b + beta @ W


# FakeLN


def fake_layer_norm(h, *, sigma_bar, gamma, beta):
    return centre(h) / sigma_bar * gamma + beta


def moving_target_loss(scales, tokens, end_of_text, weight):
    """(weight times the mean over all tokens of (s - s_hat)^2, s_hat) of scales and ids (B, T).

    s_hat is the mean of the scales whose token is neither the first of its row nor `end_of_text`.
    """
    B, T = tokens.shape
    kept = [scales[b, t] for b in range(B) for t in range(1, T) if tokens[b, t] != end_of_text]
    target = sum(kept) / len(kept)
    return weight * np.mean((scales - target) ** 2), target


# GPT-2; its linear maps hold W (in, out)


def gelu_new(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gpt2(tokens, state, norm, *, n_layer, n_head):
    """Logits (T, V) of one sequence of ids (T,).

    `state` maps GPT-2's parameter names to arrays; `norm(name, h)` applies the norm of that name, and gives for an
    ln_1 two results: what q and k read, and what v reads.
    """

    def linear(name, x, columns=slice(None)):
        return x @ state[name + ".weight"][:, columns] + state[name + ".bias"][columns]

    T = len(tokens)
    h = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:T]
    d, size = h.shape[1], h.shape[1] // n_head
    for i in range(n_layer):
        block = f"transformer.h.{i}."
        x_qk, x_v = norm(block + "ln_1", h)
        q = linear(block + "attn.c_attn", x_qk, slice(0, d))
        k = linear(block + "attn.c_attn", x_qk, slice(d, 2 * d))
        v = linear(block + "attn.c_attn", x_v, slice(2 * d, 3 * d))
        outputs = []
        for head in range(n_head):
            mine = slice(head * size, (head + 1) * size)
            scores = q[:, mine] @ k[:, mine].T / np.sqrt(size)
            scores[np.triu_indices(T, 1)] = -np.inf
            outputs.append(np.exp(log_softmax(scores)) @ v[:, mine])
        h = h + linear(block + "attn.c_proj", np.concatenate(outputs, axis=-1))
        h = h + linear(block + "mlp.c_proj", gelu_new(linear(block + "mlp.c_fc", norm(block + "ln_2", h))))
    return norm("transformer.ln_f", h) @ state["lm_head.weight"].T
