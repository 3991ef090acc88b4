"""What the formats cost on this device, measured: the ladder, the table, and the cheapest map.

``device_ladder`` says which formats the device accelerates, ``measure_costs`` times every layer in each of them inside the whole
model within a budget of seconds, ``CostTable`` is what came out, ``best_map`` the minimum of node and edge costs within bounds.
"""

from .cost_map import best_map
from .cost_measure import measure_costs
from .cost_table import CostTable
from .ladder import Ladder, device_ladder

__all__ = ["CostTable", "Ladder", "best_map", "device_ladder", "measure_costs"]
