"""The model: one function over a flat batch of tokens and a paged KV cache.

All tokens of a step run through the linear layers together; attention runs per kind of work: the decode rows as one padded
batch, each prefill chunk on its own. The KV pool is one tensor [blocks, layers, 2, block_tokens, kv_heads, head_dim], so that
a block of all layers is one contiguous piece of memory (what NIXL moves) and a gather of blocks needs no transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fleet_worker.engine.lora import Adapter, add_deltas, group_rows
from fleet_worker.engine.modelconfig import ModelConfig, RopeScaling
from fleet_worker.engine.weights import EMBED, HEAD, weights_digest


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` new tokens of one sequence, beginning at position `start`; `table` lists the sequence's blocks."""

    start: int
    count: int
    table: tuple[int, ...]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k and v are one matrix, gate and up are one matrix."""

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Decode:
    """Index tensors of the decode rows, shared by all layers."""

    rows: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Index tensors of one prefill chunk."""

    rows: slice
    table: torch.Tensor
    length: int
    mask: torch.Tensor


class Llama:
    """Weights, rotary tables and the forward pass. Not thread safe; one engine thread owns it."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], block_tokens: int, text: str = "") -> None:
        """`weights` is empty of layers afterwards: with theirs beside the joined matrices each would be there twice. `text`:
        digest of what makes tokens of a request (weights.text_digest)."""
        self.config = config
        self.block_tokens = block_tokens
        self.weights_digest = weights_digest(config, weights, text)
        self.dtype = weights[EMBED].dtype
        self._embed = weights[EMBED]
        self._head = self._embed if config.tied and HEAD not in weights else weights[HEAD]
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, f"model.layers.{i}") for i in range(config.layers)]
        self._cos, self._sin = rotary_tables(config)

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        """Zeroed KV memory for `num_blocks` blocks."""
        c = self.config
        return torch.zeros(num_blocks, c.layers, 2, self.block_tokens, c.kv_heads, c.head_dim, dtype=self.dtype)

    def forward(self, tokens: list[int], chunks: list[Chunk], pool: torch.Tensor) -> torch.Tensor:
        """Run `tokens` (the chunks' tokens back to back), write their KV, return float32 logits [len(chunks), vocab] of each
        chunk's last token."""
        positions = torch.cat([torch.arange(c.start, c.start + c.count) for c in chunks])
        blocks, offsets = self._slots(chunks)
        decode, prefills = self._plan(chunks)
        groups = group_rows([c.adapter for c in chunks], [c.count for c in chunks])
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = F.embedding(torch.tensor(tokens), self._embed)
        for index, layer in enumerate(self._layers):
            x = rms_norm(hidden, layer.norm_in, self.config.norm_eps)
            q, k, v = self._split(add_deltas(F.linear(x, layer.qkv, layer.qkv_bias), x, groups, index, "qkv"))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys, values = pool[:, index, 0], pool[:, index, 1]
            keys[blocks, offsets] = k
            values[blocks, offsets] = v
            attended = self._attend(q, keys, values, decode, prefills)
            hidden = hidden + add_deltas(F.linear(attended, layer.out, layer.out_bias), attended, groups, index, "out")
            x = rms_norm(hidden, layer.norm_mlp, self.config.norm_eps)
            both = add_deltas(F.linear(x, layer.gate_up, layer.gate_up_bias), x, groups, index, "gate_up")
            gate, up = both.chunk(2, -1)
            x = F.silu(gate) * up
            hidden = hidden + add_deltas(F.linear(x, layer.down, layer.down_bias), x, groups, index, "down")
        last = torch.tensor([c.count for c in chunks]).cumsum(0) - 1
        return F.linear(rms_norm(hidden[last], self._norm, self.config.norm_eps), self._head).float()

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        by_head = qkv.view(len(qkv), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = by_head.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        return q, k, v

    def _slots(self, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pool block and offset of every token of the step."""
        size, blocks, offsets = self.block_tokens, list[int](), list[int]()
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                blocks.append(chunk.table[position // size])
                offsets.append(position % size)
        return torch.tensor(blocks), torch.tensor(offsets)

    def _plan(self, chunks: list[Chunk]) -> tuple[_Decode | None, list[_Prefill]]:
        decode_rows, decode_chunks, prefills, row = list[int](), list[Chunk](), list[_Prefill](), 0
        for chunk in chunks:
            if chunk.count == 1:
                decode_rows.append(row)
                decode_chunks.append(chunk)
            else:
                prefills.append(self._plan_prefill(chunk, row))
            row += chunk.count
        return (self._plan_decode(decode_rows, decode_chunks) if decode_chunks else None), prefills

    def _plan_prefill(self, chunk: Chunk, row: int) -> _Prefill:
        length = chunk.start + chunk.count
        used = chunk.table[: -(-length // self.block_tokens)]
        query = torch.arange(chunk.start, length).unsqueeze(1)
        mask = torch.arange(length).unsqueeze(0) <= query
        groups = self.config.heads // self.config.kv_heads
        return _Prefill(slice(row, row + chunk.count), torch.tensor(used), length, mask.repeat(groups, 1))

    def _plan_decode(self, rows: list[int], chunks: list[Chunk]) -> _Decode:
        lengths = torch.tensor([c.start + 1 for c in chunks])
        width = -(-int(lengths.max()) // self.block_tokens)
        tables = torch.empty(len(chunks), width, dtype=torch.long)
        for i, chunk in enumerate(chunks):
            used = -(-(chunk.start + 1) // self.block_tokens)
            tables[i, :used] = torch.tensor(chunk.table[:used])
            tables[i, used:] = chunk.table[0]  # its own: another's numbers may not be finite, and 0 times these is none either
        mask = torch.arange(width * self.block_tokens).unsqueeze(0) < lengths.unsqueeze(1)
        return _Decode(torch.tensor(rows), tables, mask[:, None, None, :])

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decode: _Decode | None, prefills: list[_Prefill]
    ) -> torch.Tensor:
        """Attention of all rows: q [rows, heads, dim] → [rows, heads × dim]. The query heads that share a KV head are laid
        along the query axis, so that keys and values are never repeated."""
        c = self.config
        groups = c.heads // c.kv_heads
        out = torch.empty(len(q), c.heads * c.head_dim, dtype=q.dtype)
        if decode is not None:
            batch = len(decode.rows)
            k = keys[decode.tables].view(batch, -1, c.kv_heads, c.head_dim).transpose(1, 2)
            v = values[decode.tables].view(batch, -1, c.kv_heads, c.head_dim).transpose(1, 2)
            grouped = q[decode.rows].view(batch, c.kv_heads, groups, c.head_dim)
            found = F.scaled_dot_product_attention(grouped, k, v, attn_mask=decode.mask)
            out[decode.rows] = found.reshape(batch, -1)
        for part in prefills:
            count = part.rows.stop - part.rows.start
            k = keys[part.table].view(-1, c.kv_heads, c.head_dim)[: part.length].transpose(0, 1)
            v = values[part.table].view(-1, c.kv_heads, c.head_dim)[: part.length].transpose(0, 1)
            grouped = (
                q[part.rows].view(count, c.kv_heads, groups, c.head_dim).permute(1, 2, 0, 3).reshape(c.kv_heads, -1, c.head_dim)
            )
            found = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=part.mask)[0]
            out[part.rows] = found.view(c.kv_heads, groups, count, c.head_dim).permute(2, 0, 1, 3).reshape(count, -1)
        return out


def _layer(weights: dict[str, torch.Tensor], at: str) -> Layer:
    def joined(*names: str) -> torch.Tensor | None:
        parts = [weights.pop(f"{at}.{name}", None) for name in names]
        return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

    def one(name: str) -> torch.Tensor:
        return weights.pop(f"{at}.{name}")

    qkv, gate_up = (
        joined(*(f"self_attn.{n}_proj.weight" for n in "qkv")),
        joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    )
    return Layer(
        norm_in=one("input_layernorm.weight"),
        qkv=qkv if qkv is not None else one("self_attn.q_proj.weight"),
        qkv_bias=joined(*(f"self_attn.{n}_proj.bias" for n in "qkv")),
        out=one("self_attn.o_proj.weight"),
        out_bias=weights.pop(f"{at}.self_attn.o_proj.bias", None),
        norm_mlp=one("post_attention_layernorm.weight"),
        gate_up=gate_up if gate_up is not None else one("mlp.gate_proj.weight"),
        gate_up_bias=joined("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        down=one("mlp.down_proj.weight"),
        down_bias=weights.pop(f"{at}.mlp.down_proj.bias", None),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm in float32, as Llama does it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves layout: x [rows, heads, dim], cos and sin [rows, 1, dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for every position: [max_positions, head_dim], in the model's dtype."""
    inverse = 1.0 / (config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim))
    if config.rope_scaling is not None:
        inverse = _llama3_frequencies(inverse, config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_positions).float(), inverse)
    both = torch.cat((angles, angles), dim=-1)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype, torch.float32)
    return both.cos().to(dtype), both.sin().to(dtype)


def _llama3_frequencies(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a smooth ramp between (model card of Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    ramp = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    mixed = (1 - ramp) * inverse / scaling.factor + ramp * inverse
    return torch.where(wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, mixed))
