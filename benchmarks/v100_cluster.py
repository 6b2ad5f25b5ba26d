"""One model of the paper's cluster, p3.16xlarge nodes of V100s, for all of its settings.

Six parameters, each a property of the machines: two from data sheets and measurements of others,
four fitted, and an upper limit on one of the four. What the program does with them was counted in
the authors' published code: half-precision weights and gradients, gradients of every slice added to
those of the slices before, attention in separate operations over the whole rectangle of scores with
a softmax in fp32, one rank of a stage sending to the next, which hands on to its tensor-parallel
peers, an all-reduce of gradients between replicas after the last backward, and Adam in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from terapipe_ds.scheme import SliceScheme

HEAD_WIDTH = 128
# V100: tensor cores' peak; memory as programs reach it (Jia et al. 2018 measured 83% of 900 GB/s).
PEAK_FLOPS = 125e12
MEMORY_BYTES_PER_S = 750e9

# Bytes for each weight of a layer and slice: read forward, read for the input's gradient; for its
# own gradient written, and added (two reads, one write).
_WEIGHT_READ = 2
_WEIGHT_GRADIENT = 8
# Bytes for each score. Forward: product written 2, mask added 4, softmax read in fp16 and written
# in fp32 6, rounded 6, read by the second product 2. Backward: two products written or read 4,
# rounding undone 6, softmax 10, read by two products 4.
_SCORE_FORWARD = 20
_SCORE_BACKWARD = 24
# Bytes for each weight in the optimizer's step: gradient to fp32 6, unscaled 8, Adam 28, weights to
# fp16 6.
_STEP = 48


@dataclass(frozen=True)
class Cluster:
    """What the machines do.

    Attributes:
        flops: half-precision arithmetic of one GPU, 1/s.
        layer_s: fixed time of a layer for every slice, forward and backward.
        tensor: bytes/s of all-reduces and broadcasts between a node's GPUs.
        stage: bytes/s from one stage to the next.
        replica: bytes/s of all-reduces between replicas, one GPU's share of its node's network.
        memory: bytes/s of a GPU's memory.
    """

    flops: float
    layer_s: float
    tensor: float
    stage: float
    replica: float
    memory: float = MEMORY_BYTES_PER_S


FITTED = ("flops", "layer_s", "tensor", "stage", "replica")
_START = Cluster(flops=60e12, layer_s=1e-3, tensor=25e9, stage=3e9, replica=0.3e9)
_LIMITS = {"flops": PEAK_FLOPS}


@dataclass(frozen=True)
class Setting:
    """How a model is spread over the cluster."""

    layers: int
    hidden: int
    stages: int
    tensor_parallel: int
    data_parallel: int

    @property
    def layers_of_stage(self) -> float:
        return self.layers / self.stages

    @property
    def weights(self) -> float:
        """Of one layer on one GPU."""
        return 12 * self.hidden**2 / self.tensor_parallel


@dataclass(frozen=True)
class StageTimes:
    """What slices cost on a stage; a cost for the planner."""

    cluster: Cluster
    setting: Setting

    def parts(self, length: Any, context: Any, sequences: Any = 1) -> tuple[Any, Any, Any]:
        """ms of the forward, the input's gradient and the weights' gradients of a slice.

        Transfers to the neighbours count as time of the stage, as in the paper's formula.
        """
        cluster, setting = self.cluster, self.setting
        length, context = np.asarray(length, float), np.asarray(context, float)
        tokens = length * np.asarray(sequences, float)
        h, tp, weights = setting.hidden, setting.tensor_parallel, setting.weights
        scores = tokens * (context + length) * h / HEAD_WIDTH / tp
        # A product of weights is as slow as its arithmetic, or as reading the weights.
        product = np.maximum(
            2 * weights * tokens / cluster.flops, _WEIGHT_READ * weights / cluster.memory
        )
        attention = 4 * HEAD_WIDTH * scores / cluster.flops
        activation = 2 * tokens * h
        reduced = 2 * 2 * (tp - 1) / tp * activation / cluster.tensor
        hop = activation / cluster.stage + (activation / cluster.tensor if tp > 1 else 0.0)
        fixed = cluster.layer_s / 3
        forward = product + attention + _SCORE_FORWARD * scores / cluster.memory + reduced + fixed
        backward = (
            product + 2 * attention + _SCORE_BACKWARD * scores / cluster.memory + reduced + fixed
        )
        own = 2 * weights * tokens / cluster.flops + _WEIGHT_GRADIENT * weights / cluster.memory
        layers = 1e3 * setting.layers_of_stage
        return layers * forward + 1e3 * hop, layers * backward + 1e3 * hop, layers * (own + fixed)

    def time(self, length: Any, context: Any, sequences: Any = 1) -> Any:
        """ms of a slice, forward and backward."""
        return sum(self.parts(length, context, sequences))

    def after_ms(self) -> float:
        """What follows the last backward: replicas' gradients summed, and the optimizer."""
        cluster, setting = self.cluster, self.setting
        weights = setting.layers_of_stage * setting.weights
        share = 2 * (setting.data_parallel - 1) / setting.data_parallel
        return 1e3 * weights * (share * 2 / cluster.replica + _STEP / cluster.memory)

    def latency_ms(self, scheme: SliceScheme) -> float:
        """ms of an iteration under the paper's schedule: sum of all t plus (K - 1) max t."""
        times = np.concatenate(
            [
                self.time(
                    np.array(group.lengths),
                    np.array([tokens.start for tokens in group.ranges()]),
                    group.sequences,
                )
                for group in scheme.groups
            ]
        )
        return float(times.sum() + (self.setting.stages - 1) * times.max()) + self.after_ms()


@dataclass(frozen=True)
class Row:
    """One measurement of the paper."""

    name: str
    setting: Setting
    scheme: SliceScheme
    measured_s: float
    fitted: bool

    def predicted_s(self, cluster: Cluster) -> float:
        return StageTimes(cluster, self.setting).latency_ms(self.scheme) / 1e3

    def error(self, cluster: Cluster) -> float:
        """Relative."""
        return self.predicted_s(cluster) / self.measured_s - 1


def fit(rows: Sequence[Row]) -> Cluster:
    """The parameters with the least squared error of logarithms over these rows.

    Levenberg-Marquardt on the parameters' logarithms, so that all stay positive.
    """
    start = np.log([getattr(_START, name) for name in FITTED])
    limits = np.log([_LIMITS.get(name, np.inf) for name in FITTED])
    measured = np.log([row.measured_s for row in rows])

    def cluster_of(logs: Any) -> Cluster:
        return Cluster(**dict(zip(FITTED, np.exp(np.minimum(logs, limits)), strict=True)))

    def residuals(logs: Any) -> Any:
        cluster = cluster_of(logs)
        return np.log([row.predicted_s(cluster) for row in rows]) - measured

    return cluster_of(_least_squares(residuals, start))


def _least_squares(residuals: Callable[[Any], Any], x: Any) -> Any:
    step, damping, found = 1e-5, 1e-2, residuals(x)
    for _ in range(300):
        columns = [(residuals(x + offset) - found) / step for offset in np.eye(len(x)) * step]
        jacobian = np.array(columns).T
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ found
        while damping < 1e8:
            scaled = damping * np.diag(np.diag(normal) + 1e-9)
            move = np.clip(np.linalg.solve(normal + scaled, -gradient), -1, 1)
            tried = residuals(x + move)
            if tried @ tried < found @ found:
                x, found, damping = x + move, tried, damping / 3
                break
            damping *= 3
        else:
            return x
        if np.abs(move).max() < 1e-9:
            return x
    return x


def parameters(cluster: Cluster) -> dict[str, float]:
    """By name."""
    return {field.name: getattr(cluster, field.name) for field in fields(Cluster)}
