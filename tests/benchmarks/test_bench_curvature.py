"""What a curvature probe costs: against a plain forward+backward, against training time, and against power iteration on HVPs.

Ratios of alternating pairs: the median, and the interval between the 2nd smallest and 2nd largest pair.
"""

import statistics
import time

import pytest
import torch
import torchvision
from torch import nn

from triaccel.config import CurvatureConfig
from triaccel.gram import gram_probe
from triaccel.hessian import hessian_probe
from triaccel.layers import find_layers

CE = nn.CrossEntropyLoss()
PAIRS = 11
LIMITS = {"resnet18": 2.5, "efficientnet_b0": 2.0}


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def prepared(name, samples):
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10).to(memory_format=torch.channels_last).train()
    x = torch.randn(samples, 3, 32, 32).to(memory_format=torch.channels_last)
    return model, find_layers(model), x, torch.randint(0, 10, (samples,))


def plain(model, x, y):
    CE(model(x), y).backward()
    model.zero_grad(set_to_none=True)


def probe(model, layers, x, y):
    gram_probe(model, layers, x, y, CE, top_k=5)


@pytest.mark.parametrize("name", list(LIMITS))
def test_probe_against_forward_and_backward(benchmark, name):
    model, layers, x, y = prepared(name, 32)

    def compare():
        pairs = []
        for index in range(PAIRS + 2):
            base, ours = seconds(lambda: plain(model, x, y)), seconds(lambda: probe(model, layers, x, y))
            if index >= 2:
                pairs.append((base, ours))
        return pairs

    pairs = benchmark.pedantic(compare, rounds=1)
    ratios = sorted(ours / base for base, ours in pairs)
    ratio = statistics.median(ratios)
    print(
        f"\n{name}: probe {statistics.median(o for _, o in pairs) * 1e3:.0f} ms, forward+backward "
        f"{statistics.median(b for b, _ in pairs) * 1e3:.0f} ms, ratio {ratio:.2f} [{ratios[1]:.2f}, {ratios[-2]:.2f}], "
        f"limit {LIMITS[name]}"
    )
    assert ratio <= LIMITS[name]


def test_overhead_at_the_defaults(benchmark):
    """Interval as calibration sets it; the probe's share of training time when measured again."""
    model, layers, x, y = prepared("resnet18", 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step():
        plain(model, x, y)
        optimizer.step()

    def measure():
        for _ in range(2):
            step(), probe(model, layers, x[:32], y[:32])
        steps, probes = zip(
            *((seconds(step), seconds(lambda: probe(model, layers, x[:32], y[:32]))) for _ in range(10)),
            strict=True,
        )
        return steps, probes

    steps, probes = benchmark.pedantic(measure, rounds=1)
    first = statistics.median(probes[:3]) / (0.02 * statistics.median(steps[:3]) / 96)
    share = statistics.median(probes[3:]) / (first * statistics.median(steps[3:]) / 96)
    print(
        f"\nResNet-18, batch 96: interval {first:.0f} samples from calibration; measured again {100 * share:.2f} % of training "
        f"(limit {100 * CurvatureConfig().max_overhead:.0f} %)"
    )
    assert share <= 1.5 * CurvatureConfig().max_overhead  # two medians of a noisy machine


def power_iteration(model, x, y, parameters, tolerance, limit=200):
    """Top eigenvalue of one layer's Hessian block, to a relative residual, as common libraries do it."""
    gradients = torch.autograd.grad(CE(model(x), y), parameters, create_graph=True)
    vectors = [torch.randn_like(p) for p in parameters]
    count = 0
    while count < limit:
        count += 1
        norm = torch.sqrt(sum(v.square().sum() for v in vectors))
        vectors = [v / norm for v in vectors]
        products = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True)
        value = sum((v * p).sum() for v, p in zip(vectors, products, strict=True))
        residual = torch.sqrt(
            sum((p - value * v).square().sum() for v, p in zip(vectors, products, strict=True))
        )
        if residual <= tolerance * value.abs():
            break
        vectors = [p.detach() for p in products]
    return count, float(residual / value.abs())


def test_against_iterations_on_hessian_vector_products(benchmark):
    """Per-layer top-1 by power iteration, top-5 by block Lanczos, on a few layers, extrapolated to all; printed, not asserted."""
    model, layers, x, y = prepared("resnet18", 32)
    compute = [layer for layer in layers if layer.info.role == "compute"]
    chosen = compute[:: len(compute) // 3]

    def measure():
        probe(model, layers, x, y)
        gram = statistics.median(seconds(lambda: probe(model, layers, x, y)) for _ in range(5))
        power, notes = [], []
        for layer in chosen:
            start = time.perf_counter()
            notes.append(power_iteration(model, x, y, list(layer.parameters), 1e-3))
            power.append(time.perf_counter() - start)
        lanczos = seconds(
            lambda: hessian_probe(model, chosen, x, y, CE, top_k=5, tolerance=1e-3, max_iterations=40, seed=0)
        )
        return gram, power, notes, lanczos

    gram, power, notes, lanczos = benchmark.pedantic(measure, rounds=1)
    share = len(compute) / len(chosen)
    print(
        f"\nall layers, top 5, by Gram matrices: {gram * 1e3:.0f} ms\n"
        f"power iteration, top 1, residual 1e-3 (at most 200 products), {len(compute)} layers: {sum(power) * share:.1f} s, "
        f"{sum(power) * share / gram:.0f} x; products and residual reached: {notes}\n"
        f"block Lanczos, top 5, residual 1e-3: {lanczos * share:.1f} s, {lanczos * share / gram:.0f} x"
    )
