"""Gradient statistics against dense float64; non-finite gradients found every step and kept out of every mean."""

import math

import pytest
import torch
from torch import nn

from triaccel.layers import find_layers
from triaccel.statistics import GradientStatistics
from triaccel.types import TriAccelError

DECAY = 0.8


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 16, 7), nn.Linear(7, 2)
    )


def statistics_of(model, **kwargs):
    options = {"decay": DECAY, "reference_batch": 32, "count_underflow": False} | kwargs
    return GradientStatistics(find_layers(model), **options)


def set_gradients(model, generator, scale=1.0, shift=0.1):
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) + shift) * scale


def layer_gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()]).double()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("backend", [None, "reference", "triton"])
def test_running_variance_is_the_dense_one(generator, backend):
    model = net()
    stats = statistics_of(model, backend=backend)
    expected, weight = dict.fromkeys(["0", "1", "3", "4"], 0.0), 0.0
    for batch in (32, 64, 16):
        set_gradients(model, generator, scale=1e-3)
        assert stats.nonfinite_layers() == ()
        stats.read(batch_size=batch)
        weight = DECAY * weight + 1 - DECAY
        for name in expected:
            v = layer_gradient(model.get_submodule(name)).var(correction=0).item() * batch / 32
            expected[name] = DECAY * expected[name] + (1 - DECAY) * v
    seen = stats.snapshot()
    for name, value in expected.items():
        assert seen[name].variance == pytest.approx(value / weight, rel=1e-5)
        assert seen[name].nonfinite == 0
        assert seen[name].underflow is None


def test_a_large_gradient_keeps_its_precision(generator):
    model = nn.Linear(2048, 1024)
    stats = statistics_of(model)
    set_gradients(model, generator, scale=1e-4, shift=0.0)
    stats.read(batch_size=32)
    assert stats.snapshot()[""].variance == pytest.approx(
        layer_gradient(model).var(correction=0).item(), rel=1e-4
    )


def test_the_batch_scales_noise_to_the_reference(generator):
    """Growing the batch divides the noise variance; scaled to B_ref it stays what it was."""
    noise = torch.randn(4096, 1000, generator=generator, dtype=torch.float64)
    model = nn.Linear(1000, 1, bias=False)
    seen = []
    for batch in (64, 1024):
        stats = statistics_of(model, reference_batch=64)
        for start in range(0, 4096, batch):
            model.weight.grad = noise[start : start + batch].mean(0, keepdim=True).float()
            stats.read(batch_size=batch)
        seen.append(stats.snapshot()[""].variance)
    assert seen[0] == pytest.approx(1 / 64, rel=0.2)
    assert seen[1] == pytest.approx(seen[0], rel=0.2)


def test_square_norm_of_the_last_reading(generator):
    model = net()
    stats = statistics_of(model)
    assert stats.gradient_square_norm() is None
    for _ in range(2):
        set_gradients(model, generator)
        stats.read(batch_size=32)
    expected = sum(p.grad.double().square().sum().item() for p in model.parameters())
    assert stats.gradient_square_norm() == pytest.approx(expected, rel=1e-5)
    stats.snapshot()
    assert stats.gradient_square_norm() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_layers_are_named_nearest_the_loss_first_transformers_12225(generator, bad):
    """transformers 12225: "which layer overflowed?" """
    model = net()
    stats = statistics_of(model)
    set_gradients(model, generator)
    model[0].weight.grad[0, 0, 0, 0] = bad
    model[3].weight.grad[:2, 0] = bad
    assert stats.nonfinite_layers() == ("3", "0")
    seen = stats.snapshot()
    assert {n: s.nonfinite for n, s in seen.items()} == {"0": 1, "1": 0, "3": 2, "4": 0}
    assert stats.snapshot()["3"].nonfinite == 0


def test_order_of_execution_names_the_last_layer_first(generator):
    model = net()
    stats = statistics_of(model)
    stats.order = ("4", "3", "1", "0")
    set_gradients(model, generator)
    for i in (0, 3, 4):
        model[i].weight.grad.fill_(math.nan)
    assert stats.nonfinite_layers() == ("0", "3", "4")


def test_a_norm_that_overflows_is_not_a_nonfinite_gradient():
    model = nn.Linear(100, 1, bias=False)
    model.weight.grad = torch.full((1, 100), 3e37)
    stats = statistics_of(model)
    assert stats.nonfinite_layers() == ()
    assert stats.snapshot()[""].nonfinite == 0


@pytest.mark.parametrize("backend", [None, "reference"])
def test_nonfinite_values_never_enter_a_running_mean(generator, backend):
    model = net()
    stats = statistics_of(model, backend=backend)
    set_gradients(model, generator)
    stats.read(batch_size=32)
    before = {n: s.variance for n, s in stats.snapshot().items()}
    set_gradients(model, generator, scale=5.0)
    model[3].bias.grad[0] = math.inf
    model[4].bias.grad[0] = math.nan
    stats.read(batch_size=32)
    after = {n: s.variance for n, s in stats.snapshot().items()}
    assert after["3"] == before["3"]
    assert after["4"] == before["4"]
    assert after["0"] > before["0"]
    assert stats.gradient_square_norm() is None


def test_missing_sparse_and_frozen_gradients(generator):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    stats = statistics_of(model)
    stats.read(batch_size=32)
    assert all(s.variance is None for s in stats.snapshot().values())
    model(torch.tensor([1, 1, 3])).square().sum().backward()
    assert stats.nonfinite_layers() == ()
    stats.read(batch_size=32)
    seen = stats.snapshot()
    dense = model[0].weight.grad.to_dense().double()
    assert seen["0"].variance == pytest.approx(dense.var(correction=0).item(), rel=1e-5)
    assert seen["2"].variance is None
    model[1].weight.grad = None
    stats.read(batch_size=32)
    assert stats.snapshot()["1"].variance is not None
    model[0].weight.grad._values().fill_(math.inf)
    assert stats.nonfinite_layers() == ("0",)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_underflow_is_the_share_of_nonzero_entries_that_fp16_loses(backend):
    model = nn.Linear(4, 2, bias=False)
    model.weight.grad = torch.tensor([[0.0, 1.0, 2.0**-24, 2.0**-25], [1e-9, -1e-9, 0.0, -1.0]])
    stats = statistics_of(model, count_underflow=True, backend=backend)
    stats.read(batch_size=32)
    assert stats.snapshot()[""].underflow == pytest.approx(3 / 6)


def test_reading_changes_no_gradient_and_reuses_what_the_check_read(generator, monkeypatch):
    model = net()
    stats = statistics_of(model)
    set_gradients(model, generator)
    before = [p.grad.clone() for p in model.parameters()]
    calls = []
    sums = stats._sums
    monkeypatch.setattr(stats, "_sums", lambda grads: calls.append(1) or sums(grads))
    stats.nonfinite_layers()
    stats.read(batch_size=32)
    assert len(calls) == 1
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    set_gradients(model, generator)
    stats.read(batch_size=32)
    assert len(calls) == 2


def test_state_goes_on_where_it_stopped(generator):
    model = net()
    one = statistics_of(model, count_underflow=True)
    set_gradients(model, generator)
    one.read(batch_size=32)
    two = statistics_of(model, count_underflow=True)
    two.load_state_dict(one.state_dict())
    set_gradients(model, generator)
    one.read(batch_size=48)
    two.read(batch_size=48)
    assert one.snapshot() == two.snapshot()
    with pytest.raises(TriAccelError, match="another model"):
        statistics_of(nn.Linear(2, 2)).load_state_dict(one.state_dict())


def test_a_model_without_layers_has_no_statistics():
    stats = GradientStatistics((), decay=0.5, reference_batch=1, count_underflow=True)
    assert stats.nonfinite_layers() == ()
    stats.read(batch_size=1)
    assert stats.snapshot() == {}


def test_statistics_that_a_kernel_made_count_as_a_reading(generator):
    from triaccel.kernels import grad_stats

    model = net()
    read, taken = statistics_of(model, count_underflow=True), statistics_of(model, count_underflow=True)
    rows = [i for i, layer in enumerate(find_layers(model)) for _ in layer.parameters]
    for _ in range(2):
        set_gradients(model, generator)
        read.read(batch_size=16)
        grads = [p.grad for layer in find_layers(model) for p in layer.parameters]
        taken.take(grad_stats(grads, rows, segment_count=4, extremes=True), batch_size=16)
    for name, seen in taken.snapshot().items():
        expected = read.snapshot()[name]
        assert seen.variance == pytest.approx(expected.variance, rel=1e-5)
        assert seen.underflow == expected.underflow
