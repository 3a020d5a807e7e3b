"""A plain PyTorch loop: fused attention, fused AdamW, autocast to bfloat16 where asked, compiled where asked.

The task has the sizes, `kind` (`gpt2` or `llama`), `dtype` and `compile`. It runs on the GPU if there is one.
"""

from __future__ import annotations

from steps import serve


def make_step(size: dict):
    """A training step in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the fastest first

    dims, hidden, heads, vocab = size["model_dims"], size["hidden_dims"], size["num_heads"], size["vocab_size"]
    length, batch, is_llama = size["seq_len"], size["batch"], size.get("kind") == "llama"
    kv_heads = size.get("num_kv_heads") or heads
    head_dims = dims // heads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    def norm():
        return nn.RMSNorm(dims, eps=1e-5) if is_llama else nn.LayerNorm(dims)

    def linear(inputs: int, outputs: int):
        return nn.Linear(inputs, outputs, bias=not is_llama)

    angles = torch.outer(torch.arange(length), 10_000 ** -(torch.arange(0, head_dims, 2) / head_dims)).to(device)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = norm(), norm()
            self.qkv, self.out = linear(dims, (heads + 2 * kv_heads) * head_dims), linear(dims, dims)
            self.up, self.down = linear(dims, hidden * (2 if is_llama else 1)), linear(hidden, dims)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).view(batch, length, heads + 2 * kv_heads, head_dims).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            if is_llama:
                q, k = rotate(q), rotate(k)
            with sdpa_kernel(backends, set_priority=True):
                mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < heads)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dims))
            up = self.up(self.norm2(x))
            if is_llama:
                gate, up = up.chunk(2, dim=-1)
                return x + self.down(functional.silu(gate) * up)
            return x + self.down(functional.gelu(up, approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(vocab, dims)
            self.positions = None if is_llama else nn.Embedding(length, dims)
            self.layers = nn.ModuleList(Block() for _ in range(size["num_layers"]))
            self.norm, self.head = norm(), nn.Linear(dims, vocab, bias=False)
            if not is_llama:
                self.head.weight = self.table.weight
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, 0, 0.02)

        def forward(self, ids, labels):
            x = self.table(ids) if self.positions is None else self.table(ids) + self.positions.weight
            for layer in self.layers:
                if size.get("recompute"):
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                else:
                    x = layer(x)
            return functional.cross_entropy(self.head(self.norm(x)).view(-1, vocab).float(), labels.reshape(-1))

    with device:
        model = Model()
    run = torch.compile(model) if size.get("compile") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    in_bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=size.get("dtype") == "bfloat16")

    def step() -> None:
        tokens = torch.randint(0, vocab, (batch, length + 1), device=device)
        optimizer.zero_grad(set_to_none=True)
        with in_bfloat16:
            loss = run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, torch.cuda.synchronize if device.type == "cuda" else lambda: None


if __name__ == "__main__":
    serve(make_step)
