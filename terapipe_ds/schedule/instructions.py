"""Instructions on token slices, in the idiom of ``deepspeed.runtime.pipe.schedule``.

``micro_batch`` counts the groups of a step as ``order.py`` does, ``slice`` the slices of a group.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.schedule import PipeInstruction


class SliceInstruction(PipeInstruction):
    """An instruction about one slice of one micro-batch.

    Args:
        micro_batch (int): the micro-batch.
        slice (int): the slice of the micro-batch.
    """

    micro_batch: int
    slice: int

    def __init__(self, micro_batch: int, slice: int) -> None:
        super().__init__(micro_batch=micro_batch, slice=slice)


class ForwardSlice(SliceInstruction):
    """Compute a slice's forward; on the last stage also its loss.

    .. code-block:: python

        with current_slice(contexts[micro_batch], ranges[micro_batch][slice]):
            outputs[micro_batch][slice] = forward(inputs[micro_batch][slice])
    """


class BackwardSlice(SliceInstruction):
    """Compute a slice's backward, which adds to the gradients of the slices before it.

    .. code-block:: python

        with current_slice(contexts[micro_batch], ranges[micro_batch][slice]):
            backward(outputs[micro_batch][slice], grads[micro_batch][slice])
    """


class BackwardInput(SliceInstruction):
    """Compute the gradient of a slice's inputs; its weights' gradients are put off.

    .. code-block:: python

        with current_slice(contexts[micro_batch], ranges[micro_batch][slice]), put_off(work):
            backward(outputs[micro_batch][slice], grads[micro_batch][slice])
    """


class BackwardWeight(SliceInstruction):
    """Compute the gradients of weights that a slice's ``BackwardInput`` has put off.

    .. code-block:: python

        due.append(work[micro_batch][slice])
        if not joins_next:
            settle(due)

    Args:
        micro_batch (int): the micro-batch.
        slice (int): the slice of the micro-batch.
        joins_next (bool): whether the next instruction, which is one of these too, does its work.
    """

    joins_next: bool

    def __init__(self, micro_batch: int, slice: int, joins_next: bool) -> None:
        PipeInstruction.__init__(self, micro_batch=micro_batch, slice=slice, joins_next=joins_next)


class SendActivationSlice(SliceInstruction):
    """Post the send of a slice's outputs to the next stage.

    .. code-block:: python

        downstream.send(outputs[micro_batch][slice])
    """


class RecvActivationSlice(SliceInstruction):
    """Wait for a slice's inputs from the previous stage; the receive was posted earlier.

    .. code-block:: python

        inputs[micro_batch][slice] = upstream.receive()
    """


class SendGradSlice(SliceInstruction):
    """Post the send of the gradients of a slice's inputs to the previous stage.

    .. code-block:: python

        upstream.send(grads_of(inputs[micro_batch][slice]))
    """


class RecvGradSlice(SliceInstruction):
    """Wait for the gradients of a slice's outputs from the next stage.

    .. code-block:: python

        grads[micro_batch][slice] = downstream.receive()
    """
