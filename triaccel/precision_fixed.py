"""Policies that decide once: FP32 everywhere, or the cost table's best map; and what is pinned. Source: ours."""

from __future__ import annotations

from dataclasses import dataclass

from .config import PrecisionConfig
from .cost import CostTable, Ladder, best_map
from .types import Change, LayerInfo, Observation, Precision, PrecisionDecision, TriAccelError

__all__ = ["FixedPrecision", "FixedState", "pinned_formats"]


def pinned_formats(layers: tuple[LayerInfo, ...], ladder: Ladder) -> dict[str, Precision]:
    """Pinned format per layer; a tied layer has that of its group.

    Raises:
        TriAccelError: the device cannot run a pinned format, or a group is pinned to two.
    """
    groups: dict[str, tuple[str, Precision]] = {}
    for info in layers:
        if info.pin is None:
            continue
        if info.pin in ladder.unavailable:
            raise TriAccelError(
                f"layer {info.name!r} is pinned to {info.pin}, which this device cannot run: {ladder.unavailable[info.pin]}; "
                "pin it to another format"
            )
        first, pin = groups.setdefault(info.tied_to or info.name, (info.name, info.pin))
        if pin != info.pin:
            raise TriAccelError(
                f"layers {first!r} and {info.name!r} share a parameter but are pinned to {pin} and {info.pin}: "
                "tied layers share one precision; pin them to the same format"
            )
    return {
        info.name: groups[info.tied_to or info.name][1]
        for info in layers
        if (info.tied_to or info.name) in groups and (info.role == "compute" or info.pin is not None)
    }


@dataclass(frozen=True, slots=True)
class FixedState:
    """Map, what decided each layer, and why."""

    precision_map: dict[str, Precision]
    decided_by: dict[str, str]
    reasons: dict[str, str]


class FixedPrecision:
    """One map for the whole run: FP32, or the cost table's best. Pins are in it."""

    def __init__(
        self, config: PrecisionConfig, *, ladder: Ladder, costs: CostTable | None, batch: int
    ) -> None:
        self._prefer = config.prefer
        self._ladder = ladder
        self._costs = costs
        self._batch = batch

    def init(self, layers: tuple[LayerInfo, ...]) -> FixedState:
        """Decide."""
        pins = pinned_formats(layers, self._ladder)
        decided = {info.name: "fixed" for info in layers if info.role == "compute"}
        precision_map = dict.fromkeys(decided, Precision.FP32)
        reasons: dict[str, str] = {}
        if self._costs is not None:
            bounds = dict.fromkeys(precision_map, self._ladder.lowest) | pins
            precision_map, reasons = best_map(
                self._costs,
                layers,
                batch_size=self._batch,
                prefer=self._prefer,
                allowed=bounds,
                pinned=pins,
            )
            decided = dict.fromkeys(decided, "cost")
        return FixedState(precision_map | pins, decided | dict.fromkeys(pins, "pin"), reasons)

    def initial(self, state: FixedState) -> PrecisionDecision:
        """The map."""
        changes = tuple(
            Change("precision", name, Precision.FP32, precision, state.reasons.get(name, "pinned"))
            for name, precision in state.precision_map.items()
            if precision is not Precision.FP32
        )
        return PrecisionDecision(state.precision_map, changes, state.decided_by)

    def step(self, state: FixedState, observation: Observation) -> tuple[FixedState, PrecisionDecision]:
        """The same map, whatever is observed."""
        return state, PrecisionDecision(state.precision_map, (), state.decided_by)
