"""The four arrows of the closed loop, each forced on a real model and seen to move the next signal.

curvature -> precision and rate; precision -> bytes; bytes -> batch; batch -> gradient variance.
"""

import pytest
import torch
from torch import nn

from triaccel import Precision, TriAccel, TriAccelConfig
from triaccel.memory import FakeMemory, live_tensor_bytes


class Gained(nn.Module):
    """A small network in which ``gain`` multiplies the input of ``head``.

    With the weight divided by it the function stays the same and so does the curvature of every other layer, while that of
    ``head`` goes with the square of ``gain``.
    """

    def __init__(self, width=8):
        super().__init__()
        self.gain = 1.0
        self.body = nn.Conv2d(3, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.tanh(self.middle(torch.relu(self.body(x))))
        return self.head(self.gain * x.mean((2, 3)))


def make(width=8):
    torch.manual_seed(0)
    return Gained(width)


def batch(n, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, size, size, generator=generator), torch.randint(4, (n,), generator=generator)


def config(**parts):
    base = {
        "precision": {"rule": "off"},
        "curvature": {"estimator": "off"},
        "batch": {"rule": "off", "initial": 32},
    }
    return TriAccelConfig.model_validate({**base, **parts})


def test_curvature_moves_precision_and_rate():
    model = make()
    settings = config(
        precision={"rule": "paper", "tau_low": 1e-30, "tau_high": 1e6, "tau_curvature": 3.0, "min_dwell": 1},
        curvature={"estimator": "fisher", "interval_samples": 32, "top_k": 2, "decay": 0.0},
        tick_samples=32,
    )
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.0), settings)
    for seed in range(3):
        calm = accel.step(batch(32, seed=seed), nn.CrossEntropyLoss())
    assert accel.precision_map["head"] is Precision.BF16
    calm_scale = calm.rate_scales["head"]
    model.gain = 30.0
    with torch.no_grad():
        model.head.weight /= 30.0
    for seed in range(3):
        steep = accel.step(batch(32, seed=seed), nn.CrossEntropyLoss())
    assert accel.trace.entries[-1].curvature["head"] > 3.0
    assert accel.precision_map["head"] is Precision.FP32
    assert steep.rate_scales["head"] < calm_scale
    why = [change.why for change in accel.trace.changes if change.layer == "head" and change.after == "fp32"]
    assert any("curvature" in reason for reason in why)


def test_precision_moves_bytes():
    peaks = {}
    for name, high in (("fp32", 2e-30), ("bf16", 1e6)):
        model = make(width=32)
        settings = config(
            precision={"rule": "paper", "tau_low": 1e-30, "tau_high": high, "gate": "off"}, tick_samples=32
        )
        accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), settings)
        for seed in range(3):
            accel.step(batch(32, size=32, seed=seed), nn.CrossEntropyLoss())
        assert set(accel.precision_map.values()) == {Precision(name)}
        accel.optimizer.zero_grad()
        with live_tensor_bytes() as tracker:
            accel.step(batch(32, size=32), nn.CrossEntropyLoss())
        peaks[name] = tracker.peak_bytes
    assert peaks["bf16"] < 0.85 * peaks["fp32"]


@pytest.mark.parametrize("rule", ["paper", "model"])
def test_bytes_move_the_batch(rule):
    model = make()
    settings = config(
        batch={
            "rule": rule,
            "initial": 32,
            "minimum": 8,
            "maximum": 64,
            "delta": 16,
            "cooldown": 1,
            "noise_cap": 0.0,
            "min_updates": 0.0,
        },
        tick_samples=32,
    )
    budget = {"bytes": 100_000}
    memory = FakeMemory(lambda size, _map, _step: 10_000 + 1_000 * size, lambda _step: budget["bytes"])
    accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.01), settings, memory=memory)
    data = batch(2048)
    sizes = []
    for i, pair in enumerate(accel.batches(data, epochs=2)):
        sizes.append(accel.step(pair, nn.CrossEntropyLoss()).batch_size)
        if i == 20:
            budget["bytes"] = 30_000
        if i == 40:
            budget["bytes"] = 100_000
    assert max(sizes[:21]) > 32
    assert max(sizes[26:41]) <= 17
    assert max(sizes[50:]) > 32
    assert sum(sizes) == 2 * 2048


def test_batch_moves_the_variance():
    raw = {}
    for size in (16, 128):
        model = make()
        settings = config(
            precision={
                "rule": "paper",
                "tau_low": 1e-30,
                "tau_high": 2e-30,
                "stats_every": 1,
                "reference_batch": size,
            },
            batch={"rule": "off", "initial": size},
            tick_samples=2048,
        )
        accel = TriAccel(model, torch.optim.SGD(model.parameters(), 0.0), settings)
        for pair in accel.batches(batch(2048), epochs=1):
            accel.step(pair, nn.CrossEntropyLoss())
        raw[size] = accel.trace.entries[-1].variance["middle"]
    # labels are random, so the gradient is nearly all noise and its variance goes as 1/B
    assert 4.0 < raw[16] / raw[128] < 14.0
