"""Policies: observed bytes and gradient noise -> batch size. Pure: no tensor, no clock.

``off``    the configured batch, always.
``paper``  +δ while utilisation is below ρ_low, −δ above ρ_high (arXiv 2508.16905, in words; the numbers are ours).
``model``  bytes(B | map) fitted on observed peaks (``memory_fit``), to the largest rung of a short ladder under ρ_high·budget.
           Growth waits for the cooldown and for room that has lasted that long, at most doubles the largest size that ran
           under the map, and stops at ``noise_cap``·B_simple (arXiv 1812.06162) and at ``min_updates``; shrinking is immediate.

With ``effective="grow"`` the update's batch changes and the rate follows; with ``"hold"`` it stays and the micro-batch
follows memory. Cost: a few hundred floating-point operations a control tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import BatchConfig
from .memory_fit import MemoryFit, fit_memory
from .types import BatchDecision, Change, LayerInfo, MemoryReading, Observation, Policy

__all__ = ["BatchState", "FixedBatch", "ModelBatch", "PaperBatch", "make_batch_policy"]

_RETRY = 1.10
"""A size that ran out of memory is tried again when the budget exceeds the one it failed under by this factor."""
_PATIENCE = 8
"""Growths undone soon after they were made lengthen the cooldown, at most by this factor."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """State of every batch policy, plain JSON values.

    Attributes:
        size: the quantity that follows memory, samples: the batch under ``grow``, the micro-batch under ``hold``.
        tick: control ticks so far.
        changed: tick of the last change; far in the past before the first.
        grown: tick of the last growth.
        wait: ticks that a growth waits after a change.
        budgets: budget bytes of the last ticks, newest last.
        said: reasons that were given once and need no repeating.
    """

    size: int
    tick: int = 0
    changed: int = -(1 << 20)
    grown: int = -(1 << 20)
    wait: int = 0
    budgets: tuple[int, ...] = ()
    said: tuple[str, ...] = ()


class _BatchPolicy:
    """What the policies share: the decision that goes with a size, and changes with reasons."""

    def __init__(self, config: BatchConfig, *, total_samples: int | None) -> None:
        self.config = config
        self.total_samples = total_samples
        self._hold = config.effective == "hold"

    def init(self, layers: tuple[LayerInfo, ...]) -> BatchState:
        """State before the first step."""
        del layers
        return BatchState(size=self.config.initial, wait=self.config.cooldown)

    def initial(self, state: BatchState) -> BatchDecision:
        """Decision in force for the first step."""
        return self._decision(state)

    def _decision(self, state: BatchState, changes: tuple[Change, ...] = ()) -> BatchDecision:
        initial = self.config.initial
        if self._hold:
            return BatchDecision(initial, min(state.size, initial), 1.0, changes)
        ratio = state.size / initial
        factor = {"sqrt": ratio**0.5, "linear": ratio, "none": 1.0}[self.config.rate_rule]
        return BatchDecision(state.size, state.size, factor, changes)

    def _move(self, state: BatchState, size: int, why: str) -> tuple[BatchState, BatchDecision]:
        change = Change("batch", None, state.size, size, why)
        grew = size > state.size
        after = replace(state, size=size, changed=state.tick, grown=state.tick if grew else state.grown)
        return after, self._decision(after, (change,))

    def _stay(self, state: BatchState, why: str = "") -> tuple[BatchState, BatchDecision]:
        """No change; a reason worth reading is given once."""
        key = why.partition(":")[0]
        if not why or key in state.said:
            return state, self._decision(state)
        after = replace(state, said=(*state.said, key))
        return after, self._decision(after, (Change("batch", None, state.size, state.size, why),))


class FixedBatch(_BatchPolicy):
    """``off``: the configured batch, always."""

    def step(self, state: BatchState, observation: Observation) -> tuple[BatchState, BatchDecision]:
        """The same decision again."""
        return replace(state, tick=state.tick + 1), self._decision(state)


class PaperBatch(_BatchPolicy):
    """``paper``: δ up or down at two utilisations; along ``ladder``, one rung, where one is given."""

    def step(self, state: BatchState, observation: Observation) -> tuple[BatchState, BatchDecision]:
        """Next state and decision."""
        config = self.config
        state = replace(state, tick=state.tick + 1)
        memory = observation.memory
        if memory is None:
            return self._stay(state, "memory unknown: the batch stays")
        if any(
            version == observation.map_version and batch == state.size for batch, version, _ in memory.failed
        ):
            used = float(memory.budget_bytes + 1)
        else:
            used = float(_peak(memory, state.size, observation.map_version) or memory.used_bytes)
        share = used / memory.budget_bytes
        said = f"memory {share:.0%} of budget"
        if share > config.rho_high:
            size = self._down(state.size)
            if size < state.size:
                return self._move(state, size, f"{said}, above {config.rho_high:.0%}")
            return self._stay(state, f"at the floor of {size}: {said}, nothing smaller is allowed")
        if share < config.rho_low and state.tick - state.changed >= config.cooldown:
            size = self._up(state.size)
            if size > state.size and not _failed(memory, size, observation.map_version):
                return self._move(state, size, f"{said}, below {config.rho_low:.0%}")
        return state, self._decision(state)

    def _ceiling(self) -> int:
        return self.config.initial if self._hold else self.config.maximum

    def _up(self, size: int) -> int:
        if self.config.ladder is not None:
            return min((r for r in self.config.rungs if size < r <= self._ceiling()), default=size)
        return min(size + self.config.delta, self._ceiling())

    def _down(self, size: int) -> int:
        if self.config.ladder is not None:
            return max((r for r in self.config.rungs if r < size), default=size)
        return max(size - self.config.delta, self.config.minimum)


class ModelBatch(_BatchPolicy):
    """``model``: the largest rung that the fit of observed peaks allows."""

    def __init__(self, config: BatchConfig, *, total_samples: int | None) -> None:
        super().__init__(config, total_samples=total_samples)
        ceiling = config.initial if self._hold else config.maximum
        self._rungs = tuple(rung for rung in config.rungs if rung <= ceiling)

    def step(self, state: BatchState, observation: Observation) -> tuple[BatchState, BatchDecision]:
        """Next state and decision."""
        config = self.config
        state = replace(state, tick=state.tick + 1)
        memory = observation.memory
        if memory is None:
            return self._stay(state, "memory unknown: the batch stays")
        budgets = (*state.budgets, memory.budget_bytes)[-max(1, config.cooldown) :]
        state = replace(state, budgets=budgets)
        version = observation.map_version
        fit = fit_memory(memory.peaks, map_version=version, resident_bytes=memory.resident_bytes)
        limit = config.rho_high * memory.budget_bytes
        failed = _failed(memory, state.size, version)
        current = fit.predict(state.size) if fit else None
        if failed or (current is not None and current > limit):
            said = "ran out of memory" if failed else f"memory {current / memory.budget_bytes:.0%} of budget"  # type: ignore[operator]
            return self._shrink(state, fit, limit, memory, version, said)
        if fit is None or current is None:
            return state, self._decision(state)
        if not fit.usable:
            return self._stay(state, f"no fit: {fit.why}; the batch stays")
        return self._grow(state, fit, memory, observation)

    def _shrink(
        self,
        state: BatchState,
        fit: MemoryFit | None,
        limit: float,
        memory: MemoryReading,
        version: int,
        said: str,
    ) -> tuple[BatchState, BatchDecision]:
        smaller = [rung for rung in self._rungs if rung < state.size and not _failed(memory, rung, version)]
        if not smaller:
            return self._stay(state, f"at the floor of {state.size}: {said}, nothing smaller is allowed")
        fits = [r for r in smaller if fit is not None and (p := fit.predict(r)) is not None and p <= limit]
        if fits:
            size = max(fits)
        elif fit is not None and fit.usable and fit.lower is None:
            # one size seen: its line is a lower bound below it, so go twice as far, see, and come back
            base, sample = fit.upper or (0.0, limit)
            size = max((r for r in smaller if r <= (limit - base) / sample / 2), default=smaller[0])
        elif fit is None or not fit.usable:
            size = max((r for r in smaller if r <= state.size / 2), default=smaller[0])
        else:
            size = smaller[0]
        recent = state.tick - state.grown <= 2 * state.wait
        longer = min(2 * state.wait, _PATIENCE * self.config.cooldown) if recent else self.config.cooldown
        return self._move(replace(state, wait=longer), size, f"{said}, above {self.config.rho_high:.0%}")

    def _grow(
        self, state: BatchState, fit: MemoryFit, memory: MemoryReading, observation: Observation
    ) -> tuple[BatchState, BatchDecision]:
        config = self.config
        if state.tick - state.changed < state.wait:
            return state, self._decision(state)
        room = config.rho_high * min(state.budgets)
        version = observation.map_version
        ceiling = max(2 * fit.largest, state.size)
        larger = [
            rung
            for rung in self._rungs
            if state.size < rung <= ceiling
            and (predicted := fit.predict(rung)) is not None
            and predicted <= room
            and not _failed(memory, rung, version)
        ]
        if not larger:
            return state, self._decision(state)
        worth = larger if self._hold else [rung for rung in larger if not self._unworthy(rung, observation)]
        if not worth:
            return self._stay(state, self._unworthy(larger[0], observation))
        size = max(worth)
        share = (fit.predict(size) or 0.0) / memory.budget_bytes
        return self._move(state, size, f"{size} predicted at {share:.0%} of budget ({fit.why})")

    def _unworthy(self, size: int, observation: Observation) -> str:
        """Why a batch that would fit is not worth having; empty if it is."""
        config = self.config
        if config.noise_cap > 0:
            noise = observation.noise
            if noise is None or noise.trusted is None:
                return "noise scale unknown: the batch does not grow"
            if size > config.noise_cap * noise.trusted:
                said = f"{noise.trusted:.0f}" + (
                    "" if noise.value is not None else ", all that can be told of it"
                )
                return f"noise cap: {size} is past {config.noise_cap:g} x the noise scale {said}"
        total = observation.total_samples or self.total_samples
        if config.min_updates > 0:
            if total is None:
                return (
                    "total_samples unknown: min_updates could not be kept if the batch grew; "
                    "pass total_samples or set min_updates=0"
                )
            left = max(0, total - observation.samples_seen) / size
            least = config.min_updates * total / config.initial
            if observation.updates + left < least:
                return f"min_updates: {size} would leave {observation.updates + left:.0f} updates of at least {least:.0f}"
        return ""


def _peak(memory: MemoryReading, batch_size: int, map_version: int) -> int | None:
    found = [peak for batch, version, peak in memory.peaks if batch == batch_size and version == map_version]
    return found[-1] if found else None


def _failed(memory: MemoryReading, batch_size: int, map_version: int) -> bool:
    """Whether this size, or a smaller one, ran out of memory under this map and the budget has not risen since."""
    return any(
        batch <= batch_size and version == map_version and memory.budget_bytes <= _RETRY * at
        for batch, version, at in memory.failed
    )


_RULES: Mapping[str, type[FixedBatch] | type[PaperBatch] | type[ModelBatch]] = {
    "off": FixedBatch,
    "paper": PaperBatch,
    "model": ModelBatch,
}


def make_batch_policy(config: BatchConfig, *, total_samples: int | None) -> Policy[BatchState, BatchDecision]:
    """The policy of ``config.rule``.

    Args:
        config: batch component.
        total_samples: samples of the whole run; ``None`` where unknown: then ``min_updates`` lets nothing grow, and says so.
    """
    return _RULES[config.rule](config, total_samples=total_samples)
