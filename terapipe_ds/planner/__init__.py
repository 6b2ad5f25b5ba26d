"""What slices cost, and the best way to cut: measured costs in, a plan out. numpy only."""

from .cost import CostModel, Fit, Sample, StageCost, Transfer
from .dp import Optimum, solve
from .fit import fit_stage
from .memory import StageMemory
from .planning import Candidate, Plan, paper_latency, plan
from .prediction import peak_memory, predict

__all__ = [
    "Candidate",
    "CostModel",
    "Fit",
    "Optimum",
    "Plan",
    "Sample",
    "StageCost",
    "StageMemory",
    "Transfer",
    "fit_stage",
    "paper_latency",
    "peak_memory",
    "plan",
    "predict",
    "solve",
]
