"""megatron's own layers as a class of ours: what TransformerEngine's attention is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from terapipe_ds.models.built_layers import slice_layers, sliced_te_attention
from terapipe_ds.models.without_cuda import prepare_megatron
from terapipe_ds.runtime.attention import plain_math
from terapipe_ds.runtime.kv_context import SequenceContext, current_slice
from terapipe_ds.scheme import SliceScheme


class FakeTE(nn.Module):
    """Has the arguments of ``TEDotProductAttention``, and its masks' meaning."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
    ) -> Tensor:
        """Attends; causal is for squares alone."""
        assert attn_mask_type is AttnMaskType.causal_bottom_right or len(query) == len(key)
        return plain_math(query, key, value)


def test_te_attention_sees_the_context() -> None:
    attention = FakeTE()
    attention.__class__ = sliced_te_attention(FakeTE)
    torch.manual_seed(1)
    tensors = [torch.randn(12, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out_grad = torch.randn(12, 2, 3, 4, dtype=torch.float64)
    whole = attention(*tensors, torch.ones(1), AttnMaskType.causal)
    expected = torch.autograd.grad(whole, tensors, out_grad)

    context = SequenceContext()
    (group,) = SliceScheme([(2, [5, 1, 6])]).groups
    outputs = []
    for tokens in group.ranges():
        with current_slice(tokens, context):
            cut = [tensor[tokens.as_slice] for tensor in tensors]
            outputs.append(attention(*cut, torch.ones(1), AttnMaskType.causal, attention_bias=None))
    torch.testing.assert_close(torch.cat(outputs), whole)
    for tokens, output in reversed(list(zip(group.ranges(), outputs, strict=True))):
        with current_slice(tokens, context, backward=True):
            output.backward(out_grad[tokens.as_slice])
    for tensor, grad in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad)


@pytest.mark.parametrize("copied", [False, True])
def test_a_slice_has_its_rows_of_the_rotary_table(copied: bool) -> None:
    prepare_megatron()
    model = nn.ModuleList([RotaryEmbedding(8, 1.0, use_cpu_initialization=True)])
    slice_layers(model)
    slice_layers(model)
    (rotary,) = copy.deepcopy(model) if copied else model
    table = rotary(12)
    (group,) = SliceScheme([(2, [5, 7])]).groups
    for tokens in group.ranges():
        with current_slice(tokens, SequenceContext()):
            for found in (rotary(tokens.length), rotary(max_seq_len=tokens.length)):
                assert torch.equal(found, table[tokens.as_slice])
    assert torch.equal(rotary(12), table)
