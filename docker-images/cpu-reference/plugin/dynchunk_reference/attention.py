"""Attention that costs what a sparse-attention indexer costs on a GPU, in memory and in time.

One forward of T new rows on top of a prefix of L tokens holds the scores of every head at once:
4 * heads * T * (L + T) bytes, and computes as many products. That is the c*T*L transient and the
a*(2*L*T + T*T) time DynChunk exists for. Tiling would remove the very thing to be shown.
(The engine's torch_native backend pads the new rows to the whole sequence: it costs (L + T)^2.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def causal_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window_tokens: int | None = None
) -> torch.Tensor:
    """Exact attention of the last `rows` tokens of one sequence against all its `n_keys` tokens, in fp32.

    query [rows, heads, dim], keys [n_keys, kv_heads, dim], values [n_keys, kv_heads, value_dim]
    -> [rows, heads, value_dim] fp32. Row i sees key j if j <= prefix + i (and, with a window,
    j >= prefix + i - window_tokens), prefix = n_keys - rows. Peak: one [heads, rows, n_keys] fp32 tensor.
    """
    rows, heads, dim = query.shape
    n_keys, kv_heads, value_dim = values.shape
    group = heads // kv_heads  # query heads that share one key head
    prefix = n_keys - rows

    # Scaling the few queries instead of the many scores saves a pass over the large tensor.
    grouped = (query.float() * scale).view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, group * rows, dim), keys.float().permute(1, 2, 0))

    by_row = scores.view(kv_heads, group, rows, n_keys)
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
    by_row[..., prefix:].masked_fill_(future, -torch.inf)
    if window_tokens is not None:
        for row in range(rows):  # a row at a time: a [rows, n_keys] mask would add to the peak
            by_row[..., row, : max(0, prefix + row - window_tokens)] = -torch.inf

    torch.softmax(scores, dim=-1, out=scores)
    output = torch.bmm(scores, values.float().transpose(0, 1))
    return output.view(kv_heads, group, rows, value_dim).permute(2, 0, 1, 3).reshape(rows, heads, value_dim)


class _Sequence(NamedTuple):
    """Where one request of the batch is."""

    slot: int  # row of req_to_token
    rows: int  # its new tokens in this forward
    n_keys: int  # its tokens in the KV pool, the new ones included


class ReferenceAttentionBackend(AttentionBackend):  # type: ignore[misc]  # untyped engine
    """Causal self-attention over the engine's token-major KV pool, one sequence after the other."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError("dynchunk_reference: start with --disable-hybrid-swa-memory")
        self._sequences: list[_Sequence] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Read the batch's lengths once a forward, not once a layer."""
        slots = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            rows = [1] * len(slots)
        else:
            rows = forward_batch.extend_seq_lens.tolist()
        self._sequences = [_Sequence(*sequence) for sequence in zip(slots, rows, lengths, strict=True)]

    def forward_extend(  # noqa: PLR0917  # the engine's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_unused: object,
    ) -> torch.Tensor:
        """One layer: q [tokens, heads * dim], k and v [tokens, kv_heads, dim] -> [tokens, heads * value_dim].

        The tokens of all sequences lie one after the other. A mixed batch is an extend in which some have one row.
        """
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise NotImplementedError("dynchunk_reference: causal self-attention only")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)

        window = layer.sliding_window_size
        window_tokens = window if window is not None and window >= 0 else None
        key_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)  # padding rows stay 0
        start = 0
        for slot, rows, n_keys in self._sequences:
            tokens = self.req_to_token_pool.req_to_token[slot, :n_keys]
            output[start : start + rows] = causal_attention(
                query[start : start + rows],
                key_pool[tokens],
                value_pool[tokens],
                scale=layer.scaling,
                window_tokens=window_tokens,
            )
            start += rows
        return output.view(query.shape[0], -1)

    forward_decode = forward_extend  # a decode is an extend of one row a sequence

    def support_triton(self) -> bool:
        """No: the engine then writes req_to_token with torch."""
        return False
