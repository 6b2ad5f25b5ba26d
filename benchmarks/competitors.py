"""Engines that train one and the same pipeline: DeepSpeed's, torch's, megatron-core's, and ours.

Each takes the same layers with the same weights, the same loss and the same optimizer, plain SGD,
and gets its micro-batches of one sequence each as DeepSpeed's iterator yields them. What an engine
needs to be at its best it gets: torch's split backwards use the same split linear layers as
``zb-h1`` does (megatron's linear layers, left to autograd, would compute both gradients twice), and
no engine scales its gradients in a pass of its own.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from sleeping import WIDTH, Dilation, SleepingLayer, mean_square, sleeping_pipeline
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import terapipe_ds
from terapipe_ds.models.gpt import batch, gpt_pipeline, split_backward, token_mean_loss
from terapipe_ds.models.gpt_layers import (
    GPTEmbedding,
    GPTFinalNorm,
    GPTHead,
    GPTTransformerLayer,
)
from terapipe_ds.models.megatron_core import token_slice_layer_spec
from terapipe_ds.models.without_cuda import prepare_megatron
from terapipe_ds.planner import Plan
from terapipe_ds.runtime.weight_grads import Work, put_off

LEARNING_RATE = 1e-4
SEED = 1234
# With which a step's change of the weights tells its gradients, whatever the weights' size.
_TELLING_RATE = 1024.0

MicroBatch = tuple[Any, Any]
"""Inputs and labels, each a tensor or a tuple of tensors ``[1, L, ...]``."""


class Model(Protocol):
    """A pipeline of layers, cut as an engine needs it; all ranks build it alike."""

    config: TransformerConfig
    crossing: tuple[int, int, int]
    """The shape of what crosses between stages."""
    output: tuple[int, int, int]
    """The shape of what the last layer gives."""

    def pipeline(self) -> Any:
        """This rank's stage as DeepSpeed's ``PipelineModule``, weights set."""

    def layers(self, chunk: int, chunks: int) -> dict[int, nn.Module]:
        """The layers of one of ``chunks`` equal parts by their place in the model, weights set."""

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """A mean over the tokens; ``target`` is the first tensor of a micro-batch's labels."""

    def split_backward(self, module: nn.Module) -> None:
        """Lets a module's linear layers put their weights' gradients off."""

    def data(self, micro_batches: int) -> list[MicroBatch]:
        """The micro-batches of a step."""


class GPT:
    """megatron-core's layers, with an output layer of its own.

    Args:
        hidden: width of the layers.
        heads: attention heads.
        layers: transformer layers, as many in each stage.
        vocab: entries of the vocabulary.
        seq_length: tokens of a micro-batch.
    """

    def __init__(self, *, hidden: int, heads: int, layers: int, vocab: int, seq_length: int):
        self.config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        self.vocab, self.seq_length = vocab, seq_length
        self.crossing = (seq_length, 1, hidden)
        self.output = (seq_length, 1, vocab)
        self._mask = torch.ones(1, seq_length)

    def pipeline(self) -> Any:
        module = gpt_pipeline(
            self.config,
            vocab_size=self.vocab,
            seq_length=self.seq_length,
            num_stages=torch.distributed.get_world_size(),
            tied_head=False,
        )
        _set_weights(_layers_of(module))
        return module

    def layers(self, chunk: int, chunks: int) -> dict[int, nn.Module]:
        count = self.config.num_layers
        each = count // chunks
        if each * chunks != count:
            raise ValueError(f"layers: found {count}, allowed is a multiple of {chunks}")
        made: dict[int, nn.Module] = {}
        if chunk == 0:
            made[0] = GPTEmbedding(
                self.config,
                vocab_size=self.vocab,
                seq_length=self.seq_length,
                positions="learned_absolute",
            )
        spec = token_slice_layer_spec(self.config)
        for place in range(1 + each * chunk, 1 + each * (chunk + 1)):
            made[place] = GPTTransformerLayer(self.config, spec, layer_number=place, rotary=None)
        if chunk == chunks - 1:
            made[count + 1] = GPTFinalNorm(self.config, spec)
            made[count + 2] = GPTHead(self.config, vocab_size=self.vocab)
        _set_weights(made)
        return made

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return token_mean_loss(outputs, (target, self._mask))

    def split_backward(self, module: nn.Module) -> None:
        split_backward(module)

    def data(self, micro_batches: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(SEED)
        shape = (micro_batches, 1, self.seq_length + 1)
        texts = torch.randint(0, self.vocab, shape, generator=generator)
        return [batch(text[:, :-1], text[:, 1:].contiguous()) for text in texts]


class Sleeping:
    """Layers that sleep, two in each stage, so that it can be cut in two."""

    def __init__(self, dilation: Dilation, *, seq_length: int) -> None:
        self.dilation, self.seq_length = dilation, seq_length
        self.crossing = self.output = (1, seq_length, WIDTH)
        # What megatron's schedule reads; it says nothing about the layers.
        self.config = TransformerConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=1)

    def pipeline(self) -> Any:
        return sleeping_pipeline(self.dilation, layers_per_stage=2)

    def layers(self, chunk: int, chunks: int) -> dict[int, nn.Module]:
        count = 2 * torch.distributed.get_world_size()
        each = count // chunks
        return {
            place: SleepingLayer(self.dilation, 1 / 2)
            for place in range(each * chunk, each * (chunk + 1))
        }

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return mean_square(outputs, target)

    def split_backward(self, module: nn.Module) -> None:
        """They always can."""

    def data(self, micro_batches: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randn(2, micro_batches, 1, self.seq_length, WIDTH, generator=generator)
        return list(zip(*drawn, strict=True))


class Competitor(ABC):
    """An engine with its model and its optimizer.

    Attributes:
        name: for tables.
        is_ours: whether it is this project.
        optimizer: SGD over this rank's parameters.
        loss: of the last step, the mean over its micro-batches; None on ranks that do not know it.
    """

    name: str
    is_ours = False
    optimizer: torch.optim.Optimizer
    loss: float | None = None

    @abstractmethod
    def prepare(self, micro_batches: int) -> str:
        """Gets ready for steps of so many micro-batches.

        Returns:
            What runs in detail: the schedule, the slices.

        Raises:
            NotApplicable: if the engine cannot run so few.
        """

    @abstractmethod
    def step(self, data: Sequence[MicroBatch]) -> None:
        """One training step, optimizer included."""

    @abstractmethod
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers by their place in the model."""


class NotApplicable(Exception):
    """A schedule refuses a number of micro-batches."""


class DeepSpeed(Competitor):
    """Stock ``PipelineEngine``; with a ``"terapipe"`` block ours.

    Args:
        name: for tables.
        model: what it trains.
        block: the ``"terapipe"`` block.
        planned: for a number of micro-batches the plan; the block's own if None.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        block: dict[str, Any] | None = None,
        planned: Callable[[int], Plan] | None = None,
    ) -> None:
        self.name, self.is_ours, self._planned = name, block is not None, planned
        self._seq_length = model.data(1)[0][1][0].shape[-1]
        self._module = model.pipeline()
        self.optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            **({} if block is None else {"terapipe": block}),
        }
        made = terapipe_ds.initialize(model=self._module, optimizer=self.optimizer, config=config)
        self.engine = made[0]

    def prepare(self, micro_batches: int) -> str:
        engine = self.engine
        engine.set_train_batch_size(micro_batches)
        if not self.is_ours:
            return "1F1B"
        block = engine.terapipe
        if self._planned is not None:
            chosen = self._planned(micro_batches)
            cut = {"slices": tuple(chosen.scheme.groups[0].lengths), "warmup": chosen.warmup}
            block = block.model_copy(update=cut)
            engine.terapipe = block
        return block.schedule

    def slices(self) -> str:
        """The slices' lengths in the last step."""
        if self.engine.plans:
            (plan,) = self.engine.plans.values()
            (group,) = plan.scheme.groups
            return str(list(group.lengths))
        slices = self.engine.terapipe.slices
        return str(slices if isinstance(slices, int) else list(slices))

    def warmup(self) -> int:
        """The schedule's slack in the last step."""
        return int(self.engine._warmup(self.engine.plans))

    def step(self, data: Sequence[MicroBatch]) -> None:
        self.loss = float(self.engine.train_batch(iter(data)))

    def layers(self) -> dict[int, nn.Module]:
        return _layers_of(self._module)


class _Chunk(nn.Module):
    """Some layers in a row, as torch and megatron-core call them."""

    model_type = ModelType.encoder_or_decoder
    """What megatron's schedule asks."""

    def __init__(self, layers: dict[int, nn.Module], config: TransformerConfig) -> None:
        super().__init__()
        self.by_place = layers
        self.parts = nn.ModuleList(layers.values())
        self.config = config
        self._received: Tensor | None = None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        """megatron's way to hand over what came from the stage before."""
        (self._received,) = received

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Any = inputs if len(inputs) > 1 else inputs[0]
        if self._received is not None:
            hidden, self._received = self._received, None
        for layer in self.parts:
            hidden = layer(hidden)
        return hidden


class Torch(Competitor):
    """A schedule of ``torch.distributed.pipelining``.

    Args:
        name: for tables.
        model: what it trains.
        schedule: ``Schedule1F1B``, or one of two stages a rank.
    """

    def __init__(self, name: str, model: Model, schedule: type) -> None:
        self.name, self._model, self._schedule_type = name, model, schedule
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._total = ranks if schedule is Schedule1F1B else 2 * ranks
        places = {
            Schedule1F1B: [rank],
            ScheduleInterleavedZeroBubble: [rank, ranks + rank],
            ScheduleZBVZeroBubble: [rank, 2 * ranks - 1 - rank],
        }[schedule]
        self._chunks = {
            place: _Chunk(model.layers(place, self._total), model.config) for place in places
        }
        self._owed: list[Work] = []
        self._splits = schedule is not Schedule1F1B
        if self._splits:
            for chunk in self._chunks.values():
                model.split_backward(chunk)
        parameters = [p for chunk in self._chunks.values() for p in chunk.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        self._has_first, self._has_last = 0 in places, self._total - 1 in places

    def prepare(self, micro_batches: int) -> str:
        stages = [self._stage(place, chunk) for place, chunk in self._chunks.items()]
        kind = self._schedule_type
        if kind is Schedule1F1B and micro_batches < self._total:
            # It refuses so few, for which this is the same order.
            kind = ScheduleGPipe

        def share(outputs: Tensor, target: Tensor) -> Tensor:
            return self._model.loss(outputs, target) / micro_batches

        given = stages if self._splits else stages[0]
        try:
            self._schedule = kind(given, micro_batches, loss_fn=share, scale_grads=False)
        except ValueError as error:
            raise NotApplicable(str(error)) from None
        return kind.__name__.removeprefix("Schedule")

    def _stage(self, place: int, chunk: _Chunk) -> PipelineStage:
        # Shapes are given, or it would run a step's layers once more to find them.
        if place == 0:
            loaded = _tensors(self._model.data(1)[0][0])
        else:
            loaded = (_promised(self._model.crossing),)
        is_last = place == self._total - 1
        return PipelineStage(
            chunk,
            place,
            self._total,
            torch.device("cpu"),
            input_args=loaded,
            output_args=_promised(self._model.output if is_last else self._model.crossing),
            dw_builder=self._take_owed if self._splits else None,
        )

    def _take_owed(self) -> Work:
        owed = self._owed.copy()
        self._owed.clear()

        def run() -> None:
            for index, work in enumerate(owed):
                owed[index] = _nothing
                work()

        return run

    def step(self, data: Sequence[MicroBatch]) -> None:
        inputs: tuple[Tensor, ...] = ()
        if self._has_first:
            parts = zip(*(_tensors(loaded) for loaded, _ in data), strict=True)
            inputs = tuple(torch.cat(part) for part in parts)
        target = torch.cat([_tensors(labels)[0] for _, labels in data])
        losses: list[Tensor] = []
        options = {"losses": losses, "target": target} if self._has_last else {}
        if self._splits:
            with put_off(self._owed):
                self._schedule.step(*inputs, return_outputs=False, **options)
        else:
            self._schedule.step(*inputs, return_outputs=False, **options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = sum(loss.item() for loss in losses) if losses else None

    def layers(self) -> dict[int, nn.Module]:
        return {
            place: layer
            for chunk in self._chunks.values()
            for place, layer in chunk.by_place.items()
        }


class Megatron(Competitor):
    """megatron-core's own 1F1B, ``forward_backward_pipelining_without_interleaving``.

    Args:
        name: for tables.
        model: what it trains.
    """

    def __init__(self, name: str, model: Model) -> None:
        prepare_megatron()
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
        self.name, self._model = name, model
        self._is_last = rank == ranks - 1
        self._chunk = _Chunk(model.layers(rank, ranks), _for_schedule(model.config))
        self.optimizer = torch.optim.SGD(self._chunk.parameters(), lr=LEARNING_RATE)
        if not torch.cuda.is_available():
            megatron_schedules.torch = _without_cuda()

    def prepare(self, micro_batches: int) -> str:
        return "1F1B"

    def step(self, data: Sequence[MicroBatch]) -> None:
        first, second, width = self._model.crossing
        self._chunk.config.hidden_size = width
        losses = megatron_schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=self._forward,
            data_iterator=iter(data),
            model=self._chunk,
            num_microbatches=len(data),
            seq_length=first,
            micro_batch_size=second,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = sum(loss.item() for loss in losses) / len(data) if self._is_last else None

    def _forward(self, data: Iterator[MicroBatch], chunk: _Chunk) -> tuple[Tensor, Any]:
        inputs, labels = next(data)

        def loss(outputs: Tensor) -> tuple[Tensor, Tensor]:
            found = self._model.loss(outputs, _tensors(labels)[0])
            return found, found.detach().clone()

        return chunk(*_tensors(inputs)), loss

    def layers(self) -> dict[int, nn.Module]:
        return self._chunk.by_place


def peers(model: Model) -> list[Competitor]:
    """All engines but ours; DeepSpeed's comes first, whose model sets megatron's groups up."""
    return [
        DeepSpeed("DeepSpeed", model),
        Torch("torch 1F1B", model, Schedule1F1B),
        Torch("torch interleaved zero-bubble", model, ScheduleInterleavedZeroBubble),
        Torch("torch ZBV", model, ScheduleZBVZeroBubble),
        Megatron("megatron-core 1F1B", model),
    ]


def gradients_of_a_step(
    competitor: Competitor, data: Sequence[MicroBatch]
) -> tuple[float, dict[str, Tensor]]:
    """Trains one step and takes it back.

    Args:
        competitor: prepared for as many micro-batches.
        data: the step's.

    Returns:
        The loss, and all ranks' gradients by place and name, as the optimizer's step tells them.
    """
    parameters = {
        f"{place}.{name}": parameter
        for place, layer in competitor.layers().items()
        for name, parameter in layer.named_parameters()
    }
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    (group,) = competitor.optimizer.param_groups
    group["lr"] = _TELLING_RATE
    competitor.step(data)
    group["lr"] = LEARNING_RATE
    mine = {}
    for name, parameter in parameters.items():
        mine[name] = (before[name] - parameter.detach()) / _TELLING_RATE
        parameter.data.copy_(before[name])
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (competitor.loss, mine))
    loss = next(found for found, _ in ranks if found is not None)
    return loss, {name: grad for _, found in ranks for name, grad in found.items()}


def differences(
    competitors: Sequence[Competitor], data: Sequence[MicroBatch]
) -> dict[str, tuple[float, float]]:
    """How far each one's loss and gradients are from the first one's, relative.

    Gradients are compared parameter by parameter, against the largest entry.

    Raises:
        ValueError: if a competitor has other parameters than the first one.
    """
    found: dict[str, tuple[float, float]] = {}
    reference: tuple[float, dict[str, Tensor]] | None = None
    for competitor in competitors:
        try:
            competitor.prepare(len(data))
        except NotApplicable:
            continue
        loss, grads = gradients_of_a_step(competitor, data)
        if reference is None:
            reference = loss, grads
        if grads.keys() != reference[1].keys():
            odd = sorted(grads.keys() ^ reference[1].keys())
            raise ValueError(f"{competitor.name}: parameters {odd} on one side only")
        worst = max(
            ((grad - reference[1][name]).abs().max() / reference[1][name].abs().max()).item()
            for name, grad in grads.items()
        )
        found[competitor.name] = (abs(loss / reference[0] - 1), worst)
    return found


def _set_weights(layers: dict[int, nn.Module]) -> None:
    """Weights that depend on a layer's place alone."""
    for place, layer in layers.items():
        generator = torch.Generator().manual_seed(SEED + place)
        for name, parameter in layer.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(0.02 * drawn + float(is_scale))


def _layers_of(module: Any) -> dict[int, nn.Module]:
    return dict(enumerate(module.forward_funcs, start=module._local_start))


def _tensors(loaded: Any) -> tuple[Tensor, ...]:
    return loaded if isinstance(loaded, tuple) else (loaded,)


def _promised(shape: tuple[int, ...]) -> Tensor:
    """A tensor's shape, and that it needs a gradient."""
    return torch.empty(shape, device="meta", requires_grad=True)


def _nothing() -> None:
    """Stands for work that has been done."""


def _for_schedule(config: TransformerConfig) -> TransformerConfig:
    made = copy.copy(config)
    made.pipeline_dtype = torch.float32
    # There is no stream to wait for.
    made.batch_p2p_sync = torch.cuda.is_available()
    return made


def _without_cuda() -> Any:
    """torch as megatron's schedule sees it: what it puts on the GPU (one number) is on the CPU."""

    def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*size, **options)

    return SimpleNamespace(**{**vars(torch), "zeros": zeros})
