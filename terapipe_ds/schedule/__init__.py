"""Schedules over token slices: plain data, and what reads it."""

from .check import check, check_named, grid
from .order import Action, Order, actions, in_flight_bound

__all__ = ["Action", "Order", "actions", "check", "check_named", "grid", "in_flight_bound"]
