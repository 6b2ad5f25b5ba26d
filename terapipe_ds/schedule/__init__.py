"""Schedules over token slices: plain data, and what reads it."""

from .check import check, check_named, grid
from .order import Action, Order, actions, in_flight_bound
from .simulator import Event, Timeline, lower_bound, simulate, simulate_order

__all__ = [
    "Action",
    "Event",
    "Order",
    "Timeline",
    "actions",
    "check",
    "check_named",
    "grid",
    "in_flight_bound",
    "lower_bound",
    "simulate",
    "simulate_order",
]
