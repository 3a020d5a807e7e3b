"""The step as one writes it in an afternoon: scan over layers, no remat, plain einsum attention, optax."""

from __future__ import annotations

import functools

from steps import serve


def make_step(size: dict):
    """A GPT-2-like step in bare JAX."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    layers, dims, hidden = size["num_layers"], size["model_dims"], size["hidden_dims"]
    heads, vocab, length, batch = size["num_heads"], size["vocab_size"], size["seq_len"], size["batch"]
    random = np.random.RandomState(0)

    def normal(*shape):
        return jnp.asarray(random.randn(*shape).astype(np.float32) * 0.02)

    params = {
        "table": normal(vocab, dims),
        "positions": normal(length, dims),
        "final": {"scale": jnp.ones(dims), "bias": jnp.zeros(dims)},
        "layers": {
            "norm1": {"scale": jnp.ones((layers, dims)), "bias": jnp.zeros((layers, dims))},
            "norm2": {"scale": jnp.ones((layers, dims)), "bias": jnp.zeros((layers, dims))},
            "qkv": {"w": normal(layers, dims, 3 * dims), "b": jnp.zeros((layers, 3 * dims))},
            "out": {"w": normal(layers, dims, dims), "b": jnp.zeros((layers, dims))},
            "up": {"w": normal(layers, dims, hidden), "b": jnp.zeros((layers, hidden))},
            "down": {"w": normal(layers, hidden, dims), "b": jnp.zeros((layers, dims))},
        },
    }

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["w"] + p["b"]

    def block(x, p):
        q, k, v = (
            part.reshape(batch, length, heads, -1) for part in jnp.split(dense(norm(x, p["norm1"]), p["qkv"]), 3, -1)
        )
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (dims // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v).reshape(batch, length, dims)
        x = x + dense(mixed, p["out"])
        return x + dense(jax.nn.gelu(dense(norm(x, p["norm2"]), p["up"])), p["down"]), None

    def loss(params, tokens):
        x = params["table"][tokens[:, :-1]] + params["positions"]
        x, _ = jax.lax.scan(block, x, params["layers"])
        logits = norm(x, params["final"]) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = optimizer.init(params)

    value = jnp.zeros([])

    def step() -> None:
        nonlocal params, opt_state, value
        tokens = random.randint(0, vocab, (batch, length + 1))
        params, opt_state, value = train_step(params, opt_state, tokens)

    return step, lambda: value.block_until_ready()


if __name__ == "__main__":
    serve(make_step)
