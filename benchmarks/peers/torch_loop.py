"""A plain PyTorch loop: fused attention, fused AdamW, no compilation (which gains nothing on a CPU)."""

from __future__ import annotations

from steps import serve


def make_step(size: dict):
    """A GPT-2-like step in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    dims, hidden, heads, vocab = size["model_dims"], size["hidden_dims"], size["num_heads"], size["vocab_size"]
    length, batch = size["seq_len"], size["batch"]
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
            self.qkv, self.out = nn.Linear(dims, 3 * dims), nn.Linear(dims, dims)
            self.up, self.down = nn.Linear(dims, hidden), nn.Linear(hidden, dims)

        def forward(self, x):
            shape = (batch, length, 3, heads, dims // heads)
            q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dims))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.positions = nn.Embedding(vocab, dims), nn.Embedding(length, dims)
            self.layers = nn.Sequential(*(Block() for _ in range(size["num_layers"])))
            self.norm = nn.LayerNorm(dims)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, 0, 0.02)

        def forward(self, ids, labels):
            x = self.norm(self.layers(self.table(ids) + self.positions.weight))
            logits = functional.linear(x, self.table.weight)
            return functional.cross_entropy(logits.view(-1, vocab), labels.reshape(-1))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        tokens = torch.randint(0, vocab, (batch, length + 1))
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


if __name__ == "__main__":
    serve(make_step)
