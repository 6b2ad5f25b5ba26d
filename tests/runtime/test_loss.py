"""The loss from slices: weights, values and gradients equal those of the whole micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from terapipe_ds.errors import ConfigError, TeraPipeError
from terapipe_ds.runtime.adapter import SequenceAdapter, TensorDims
from terapipe_ds.runtime.loss import (
    MicroBatchLoss,
    check_loss_fits,
    choose_loss,
    slice_weights,
)
from terapipe_ds.scheme import SliceScheme

SEQUENCES, TOKENS, CLASSES = 3, 8, 5
BATCH_FIRST = TensorDims(batch=0, sequence=1)
ONE_GROUP = SliceScheme([(SEQUENCES, [4, 3, 1])])
TWO_GROUPS = SliceScheme([(2, [4, 3, 1]), (1, [2, 6])])
schemes = pytest.mark.parametrize("scheme", [ONE_GROUP, TWO_GROUPS], ids=str)

Labels = tuple[Tensor, Tensor]


def masked_mean(outputs: Tensor, labels: Labels) -> Tensor:
    """Cross entropy, the mean over tokens whose mask is 1; 0/0 where none is."""
    tokens, mask = labels
    losses = functional.cross_entropy(outputs.transpose(1, 2), tokens, reduction="none")
    return (losses * mask).sum() / mask.sum()


def neighbours(outputs: Tensor, labels: Labels) -> Tensor:
    """A loss that is no mean and looks across the cuts."""
    return (outputs[:, 1:] * outputs[:, :-1]).sum().square() / 100


ADAPTER = SequenceAdapter(
    inputs=[BATCH_FIRST],
    labels=[BATCH_FIRST, BATCH_FIRST],
    boundary=[BATCH_FIRST],
    output=BATCH_FIRST,
    mean_over_valid_tokens=True,
    token_weights=lambda labels: labels[1],
)


def batch() -> tuple[Tensor, Labels]:
    """Outputs, and labels with a mask that differs between slices."""
    generator = torch.Generator().manual_seed(11)
    outputs = torch.randn(
        SEQUENCES, TOKENS, CLASSES, generator=generator, dtype=torch.float64, requires_grad=True
    )
    tokens = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=generator)
    mask = torch.ones(SEQUENCES, TOKENS, dtype=torch.float64)
    mask[0, 2:5] = 0
    mask[2, 1] = 0
    return outputs, (tokens, mask)


def micro_batch_loss(
    labels: Labels,
    scheme: SliceScheme,
    loss_fn: Callable[..., Any] = masked_mean,
    *,
    mode: str = "per_slice",
    additional: Callable[[], dict[str, Tensor] | None] = lambda: None,
) -> MicroBatchLoss:
    return MicroBatchLoss(
        loss_fn,
        ADAPTER,
        labels,
        scheme,
        mode=mode,
        keep_outputs=True,
        additional_losses=additional,
    )


def forward(loss: MicroBatchLoss, scheme: SliceScheme, leaf: Tensor) -> dict[tuple[int, int], Any]:
    """Runs every slice's forward; a slice's output has a graph of its own, as in the engine."""
    outputs = {}
    for group, (rows, cut) in enumerate(zip(scheme.rows(), scheme.groups, strict=True)):
        for index, tokens in enumerate(cut.ranges()):
            assert not loss.complete
            outputs[group, index] = leaf[rows, tokens.start : tokens.stop].tanh()
            loss.forward(group, index, outputs[group, index])
    assert loss.complete
    return outputs


def backward(loss: MicroBatchLoss, scheme: SliceScheme, scale: Callable[..., Tensor]) -> None:
    """Within a group last to first, as the schedules do."""
    for group, count in enumerate(scheme.slices):
        for index in reversed(range(count)):
            root, grad = loss.take_root(group, index, scale)
            root.backward(grad)


def whole(loss_fn: Callable[..., Tensor], leaf: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """The loss and the gradient, without slices."""
    copy = leaf.detach().clone().requires_grad_()
    value = loss_fn(copy.tanh(), labels)
    value.backward()
    return value.detach(), copy.grad


def test_weights_without_a_mask_are_shares_of_tokens() -> None:
    assert slice_weights(None, ONE_GROUP) == [[4 / 8, 3 / 8, 1 / 8]]
    assert slice_weights(None, TWO_GROUPS) == [[8 / 24, 6 / 24, 2 / 24], [2 / 24, 6 / 24]]


def test_weights_with_a_mask_are_shares_of_valid_tokens() -> None:
    mask = torch.zeros(SEQUENCES, TOKENS)
    mask[0, 0] = mask[1, 3] = mask[1, 5] = 1
    mask[2, 7] = 0.5
    total = 3.5
    assert slice_weights(mask, ONE_GROUP) == [[2 / total, 1 / total, 0.5 / total]]
    assert slice_weights(mask, TWO_GROUPS) == [[2 / total, 1 / total, 0.0], [0.0, 0.5 / total]]


def test_weights_are_added_in_double() -> None:
    """In bf16 a sum of ones stops at 256."""
    mask = torch.ones(1, 1200, dtype=torch.bfloat16)
    assert slice_weights(mask, SliceScheme([(1, [900, 300])])) == [[0.75, 0.25]]


@schemes
def test_weights_are_all_0_where_no_token_is_valid(scheme: SliceScheme) -> None:
    weights = slice_weights(torch.zeros(SEQUENCES, TOKENS), scheme)
    assert weights == [[0.0] * count for count in scheme.slices]


@schemes
def test_per_slice_equals_the_whole(scheme: SliceScheme) -> None:
    leaf, labels = batch()
    value, gradient = whole(masked_mean, leaf, labels)
    loss = micro_batch_loss(labels, scheme)
    assert loss.value is None
    forward(loss, scheme, leaf)
    assert loss.value == pytest.approx(float(value), rel=1e-14)
    assert not loss.value.requires_grad
    backward(loss, scheme, lambda part: part / 4)
    assert torch.allclose(leaf.grad, gradient / 4, rtol=1e-13, atol=1e-16)


def test_per_slice_without_token_weights() -> None:
    leaf, (tokens, mask) = batch()
    labels = (tokens, torch.ones_like(mask))
    value, gradient = whole(masked_mean, leaf, labels)
    adapter = SequenceAdapter(
        inputs=ADAPTER.inputs,
        labels=ADAPTER.labels,
        boundary=ADAPTER.boundary,
        output=ADAPTER.output,
        mean_over_valid_tokens=True,
    )
    loss = MicroBatchLoss(
        masked_mean,
        adapter,
        labels,
        TWO_GROUPS,
        mode="per_slice",
        keep_outputs=False,
        additional_losses=lambda: None,
    )
    forward(loss, TWO_GROUPS, leaf)
    assert loss.value == pytest.approx(float(value), rel=1e-14)
    backward(loss, TWO_GROUPS, lambda part: part)
    assert torch.allclose(leaf.grad, gradient, rtol=1e-13, atol=1e-16)


@schemes
def test_a_fully_masked_slice_adds_0(scheme: SliceScheme) -> None:
    """Its own loss would be 0/0; its gradient is 0, and there is one."""
    leaf, (tokens, mask) = batch()
    mask[:, :4] = 0
    labels = (tokens, mask)
    value, gradient = whole(masked_mean, leaf, labels)
    loss = micro_batch_loss(labels, scheme)
    outputs = forward(loss, scheme, leaf)
    assert loss.value == pytest.approx(float(value), rel=1e-14)
    root, grad = loss.take_root(0, 0, lambda part: part)
    assert root is outputs[0, 0]
    assert torch.equal(grad, torch.zeros_like(root))

    loss = micro_batch_loss(labels, scheme)
    forward(loss, scheme, leaf)
    backward(loss, scheme, lambda part: part)
    assert torch.allclose(leaf.grad, gradient, rtol=1e-13, atol=1e-16)
    assert torch.equal(leaf.grad[:, :4], torch.zeros(SEQUENCES, 4, CLASSES, dtype=torch.float64))


@schemes
def test_a_fully_masked_micro_batch_is_0(scheme: SliceScheme) -> None:
    leaf, (tokens, mask) = batch()
    loss = micro_batch_loss((tokens, torch.zeros_like(mask)), scheme)
    forward(loss, scheme, leaf)
    assert loss.value == 0
    backward(loss, scheme, lambda part: part)
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("loss_fn", [neighbours, masked_mean])
@pytest.mark.parametrize("lengths", [[4, 3, 1], [8]], ids=str)
def test_whole_sequence_equals_the_whole(
    loss_fn: Callable[..., Tensor], lengths: list[int]
) -> None:
    scheme = SliceScheme([(SEQUENCES, lengths)])
    leaf, labels = batch()
    value, gradient = whole(loss_fn, leaf, labels)
    calls = []

    def counted(outputs: Tensor, given: Labels) -> Tensor:
        calls.append(outputs.shape)
        return loss_fn(outputs, given)

    loss = micro_batch_loss(labels, scheme, counted, mode="whole_sequence")
    forward(loss, scheme, leaf)
    assert loss.value == pytest.approx(float(value), rel=1e-14)
    backward(loss, scheme, lambda part: part / 4)
    assert torch.allclose(leaf.grad, gradient / 4, rtol=1e-13, atol=1e-16)
    assert calls == [(SEQUENCES, TOKENS, CLASSES)]


def test_whole_sequence_has_no_value_before_the_last_slice() -> None:
    leaf, labels = batch()
    loss = micro_batch_loss(labels, ONE_GROUP, neighbours, mode="whole_sequence")
    loss.forward(0, 0, leaf[:, :4])
    loss.forward(0, 1, leaf[:, 4:7])
    assert loss.value is None
    loss.forward(0, 2, leaf[:, 7:])
    assert loss.value is not None


@pytest.mark.parametrize("mode", ["per_slice", "whole_sequence"])
def test_evaluation_under_no_grad(mode: str) -> None:
    leaf, labels = batch()
    value, _ = whole(masked_mean, leaf, labels)
    with torch.no_grad():
        loss = micro_batch_loss(labels, ONE_GROUP, mode=mode)
        forward(loss, ONE_GROUP, leaf)
    assert loss.value == pytest.approx(float(value), rel=1e-14)


@schemes
def test_additional_losses_weigh_as_the_loss_does(scheme: SliceScheme) -> None:
    leaf, labels = batch()
    reported = iter(range(1, 100))

    def additional() -> dict[str, Tensor]:
        return {"router": torch.tensor(float(next(reported)), requires_grad=True)}

    loss = micro_batch_loss(labels, scheme, additional=additional)
    assert loss.additional is None
    forward(loss, scheme, leaf)
    shares = [share for group in slice_weights(labels[1], scheme) for share in group]
    expected = sum(share * count for count, share in enumerate(shares, start=1))
    assert list(loss.additional) == ["router"]
    assert float(loss.additional["router"]) == pytest.approx(expected, rel=1e-6)
    assert not loss.additional["router"].requires_grad


def test_additional_losses_of_a_whole_sequence_count_once() -> None:
    leaf, labels = batch()
    additional = {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
    loss = micro_batch_loss(labels, ONE_GROUP, mode="whole_sequence", additional=lambda: additional)
    forward(loss, ONE_GROUP, leaf)
    assert dict(loss.additional) == additional


def test_no_additional_losses_is_none() -> None:
    leaf, labels = batch()
    loss = micro_batch_loss(labels, ONE_GROUP)
    forward(loss, ONE_GROUP, leaf)
    assert loss.additional is None


@schemes
@pytest.mark.parametrize("mode", ["per_slice", "outputs"])
def test_outputs_are_joined_over_slices_and_groups(scheme: SliceScheme, mode: str) -> None:
    leaf, labels = batch()
    loss = micro_batch_loss(labels, scheme, mode=mode)
    forward(loss, scheme, leaf)
    outputs = loss.take_outputs()
    assert torch.equal(outputs, leaf.detach().tanh())
    assert not outputs.requires_grad
    assert (loss.value is None) == (mode == "outputs")


def test_outputs_join_along_the_adapters_dimensions() -> None:
    """Outputs whose tokens come first, as megatron's do."""
    adapter = SequenceAdapter(
        inputs=[BATCH_FIRST],
        labels=[BATCH_FIRST],
        boundary=[None],
        output=TensorDims(batch=1, sequence=0),
    )
    outputs = torch.arange(TOKENS * SEQUENCES).view(TOKENS, SEQUENCES)
    loss = MicroBatchLoss(
        masked_mean,
        adapter,
        torch.zeros(SEQUENCES, TOKENS),
        TWO_GROUPS,
        mode="outputs",
        keep_outputs=False,
        additional_losses=lambda: None,
    )
    for group, (rows, cut) in enumerate(zip(TWO_GROUPS.rows(), TWO_GROUPS.groups, strict=True)):
        for index, tokens in enumerate(cut.ranges()):
            loss.forward(group, index, outputs[tokens.start : tokens.stop, rows])
    assert torch.equal(loss.take_outputs(), outputs)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors(entry)


@pytest.mark.parametrize(
    ("mode", "loss_fn"), [("per_slice", masked_mean), ("whole_sequence", neighbours)]
)
def test_an_evaluated_micro_batch_keeps_no_outputs(mode: str, loss_fn: Any) -> None:
    """An evaluation has no backward, and more micro-batches to come."""
    leaf, labels = batch()
    labels[1][:, :4] = 0  # a slice without a valid token
    loss = micro_batch_loss(labels, ONE_GROUP, loss_fn, mode=mode)
    with torch.no_grad():
        forward(loss, ONE_GROUP, leaf)
        expected = loss_fn(leaf.tanh(), labels)
    loss.take_outputs()
    assert torch.allclose(loss.value, expected, rtol=1e-12)
    held = [kept for name, kept in vars(loss).items() if name != "_labels"]
    assert [kept.shape for kept in tensors(held) if kept.numel() > 1] == []


def test_whole_sequence_refuses_groups() -> None:
    with pytest.raises(ConfigError, match=r"^terapipe\.loss: found a whole-sequence loss with 2 "):
        check_loss_fits("whole_sequence", TWO_GROUPS)
    for mode, scheme in (
        ("whole_sequence", ONE_GROUP),
        ("per_slice", TWO_GROUPS),
        ("outputs", TWO_GROUPS),
    ):
        check_loss_fits(mode, scheme)


@pytest.mark.parametrize(
    ("result", "named"), [(1.5, "float"), (None, "NoneType"), (torch.zeros(2), "Tensor")]
)
@pytest.mark.parametrize("mode", ["per_slice", "whole_sequence"])
def test_refuses_a_loss_that_is_no_scalar(mode: str, result: Any, named: str) -> None:
    leaf, labels = batch()
    loss = micro_batch_loss(labels, ONE_GROUP, lambda outputs, labels: result, mode=mode)
    with pytest.raises(TeraPipeError, match=f"^loss: found a loss_fn that returns {named}"):
        forward(loss, ONE_GROUP, leaf)


@pytest.mark.parametrize("mode", ["per_slice", "whole_sequence"])
def test_refuses_a_loss_without_gradient(mode: str) -> None:
    leaf, labels = batch()
    loss = micro_batch_loss(
        labels, ONE_GROUP, lambda outputs, labels: outputs.detach().mean(), mode=mode
    )
    with pytest.raises(TeraPipeError, match="no gradient to the outputs"):
        forward(loss, ONE_GROUP, leaf)


def test_whole_sequence_refuses_a_loss_that_ignores_the_outputs() -> None:
    leaf, labels = batch()
    constant = torch.ones((), requires_grad=True)
    loss = micro_batch_loss(
        labels, ONE_GROUP, lambda outputs, labels: constant * 2, mode="whole_sequence"
    )
    forward(loss, ONE_GROUP, leaf)
    with pytest.raises(TeraPipeError, match="no gradient to the outputs"):
        loss.take_root(0, 2, lambda part: part)


@pytest.mark.parametrize(
    ("setting", "is_mean", "chosen"),
    [
        ("auto", True, "per_slice"),
        ("auto", False, "whole_sequence"),
        ("per_slice", True, "per_slice"),
        ("whole_sequence", True, "whole_sequence"),
        ("whole_sequence", False, "whole_sequence"),
    ],
)
def test_choose_loss(setting: str, is_mean: bool, chosen: str) -> None:
    adapter = SequenceAdapter(
        inputs=[], labels=[], boundary=[], output=BATCH_FIRST, mean_over_valid_tokens=is_mean
    )
    assert choose_loss(setting, adapter) == chosen


def test_choose_loss_refuses_per_slice_where_the_loss_is_not_a_mean() -> None:
    adapter = SequenceAdapter(inputs=[], labels=[], boundary=[], output=BATCH_FIRST)
    with pytest.raises(ConfigError, match=r'^terapipe\.loss: found "per_slice" .*mean_over_valid'):
        choose_loss("per_slice", adapter)
