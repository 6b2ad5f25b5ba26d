"""A small language model with the same seams as megatron's scripts from before megatron.core's."""

from .state import get_args, set_args

__all__ = ["get_args", "set_args"]
