"""The probe runner: schedule, noise scale, failures, audit, resume; and what real images say of its estimates."""

import gc
import json
import math
import statistics

import pytest
import torch
from torch import nn

import triaccel.probes as probes
from triaccel.config import BatchConfig, CurvatureConfig
from triaccel.hessian import BlockSpectrum
from triaccel.layers import find_layers
from triaccel.noise import NoiseEstimator
from triaccel.probe_pass import training_square_norm
from triaccel.probes import LayerSignal, ProbeRunner, rank_correlation
from triaccel.types import TriAccelError

CE = nn.CrossEntropyLoss()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(seed=0, n=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator), torch.randint(0, 4, (n,), generator=generator)


def runner(model, *, batch_config=None, **options):
    options = {"probe_batch": 16, "interval_samples": 100} | options
    return ProbeRunner(
        find_layers(model), curvature=CurvatureConfig(**options), batch=batch_config or BatchConfig(), seed=3
    )


# ---------------------------------------------------------------- schedule


def test_interval_from_overhead():
    model = net()
    run = runner(model, interval_samples=None, max_overhead=0.02)
    with pytest.raises(TriAccelError, match="calibrate"):
        run.due(0)
    run.calibrate(probe_seconds=0.06, sample_seconds=0.0015)
    assert run.interval_samples == 2000
    assert [run.due(n) for n in (0, 1999, 2000)] == [False, False, True]
    run.run(model, *batch(), CE, samples_seen=2300)
    assert [run.due(n) for n in (2300, 3999, 4000)] == [False, False, True]
    with pytest.raises(TriAccelError, match="positive"):
        run.calibrate(probe_seconds=0.0, sample_seconds=1.0)


def test_configured_interval_wins_and_is_floored_by_nothing():
    run = runner(net(), interval_samples=64)
    run.calibrate(probe_seconds=9.0, sample_seconds=1e-6)
    assert run.interval_samples == 64


def test_adaptive_interval_follows_what_probes_take():
    model = net()
    run = runner(model, interval_samples=None, adaptive_interval=True)
    run.calibrate(probe_seconds=1e3, sample_seconds=1e-3)
    before = run.interval_samples
    run.run(model, *batch(), CE, samples_seen=0)
    assert run.interval_samples < before


def test_off_runs_only_what_the_batch_rule_needs():
    model = net()
    quiet = runner(model, estimator="off", batch_config=BatchConfig(rule="off"))
    assert not quiet.enabled
    assert not quiet.due(10**9)
    quiet.run(model, *batch(), CE, samples_seen=0)
    assert quiet.report()["probes"] == 0
    noise = runner(model, estimator="off", batch_config=BatchConfig(noise_interval_samples=50))
    assert noise.enabled
    assert noise.interval_samples == 50
    noise.run(model, *batch(), CE, samples_seen=0)
    assert noise.layer_signals() == {}
    assert noise.noise().trace > 0
    assert not runner(model, estimator="off", batch_config=BatchConfig(noise_cap=0)).enabled


# ---------------------------------------------------------------- signals


def test_signals_of_every_layer_carry_the_probe():
    model = net()
    run = runner(model)
    for number in range(2):
        run.run(model, *batch(number), CE, samples_seen=100 * number)
        signals = run.layer_signals()
        assert set(signals) == {"0", "2", "4"}
        for signal in signals.values():
            assert signal.probe_id == number
            assert len(signal.eigenvalues) == 5
            assert signal.curvature == pytest.approx(statistics.fmean(signal.eigenvalues))
            assert signal.sample_variance > 0
    top = runner(model, reduce="max")
    top.run(model, *batch(1), CE, samples_seen=0)
    assert all(s.curvature == s.eigenvalues[0] for s in top.layer_signals().values())


def test_nan_keeps_the_former_values_and_is_counted():
    model = net()
    run = runner(model)
    run.run(model, *batch(), CE, samples_seen=0)
    before, noise = run.layer_signals(), run.noise()
    x, y = batch(1)
    x[0, 0] = math.nan
    run.run(model, x, y, CE, samples_seen=100)
    assert run.layer_signals() == before
    assert run.noise() == noise
    report = run.report()
    assert (report["probes"], report["failed"]) == (2, 1)


def test_a_probe_batch_smaller_than_k_is_an_error():
    model = net()
    with pytest.raises(TriAccelError, match="exceeds the probe batch"):
        runner(model).run(model, *batch(n=3), CE, samples_seen=0)


def test_unconverged_hessian_keeps_the_former_values(monkeypatch):
    """No convergence and no sign of it (hessian-eigenthings 17, 23): unconverged spectra never enter."""
    model = net()
    run = runner(model, estimator="hessian", lanczos_max_iterations=60)
    run.run(model, *batch(), CE, samples_seen=0)
    before = run.layer_signals()
    assert all(s.probe_id == 0 and s.curvature is not None for s in before.values())

    def unconverged(model, layers, *args, **kwargs):
        return {x.name: BlockSpectrum((9e9,) * 5, (1.0,) * 5, 60, 300, False, 0) for x in layers}

    monkeypatch.setattr(probes, "hessian_probe", unconverged)
    run.run(model, *batch(), CE, samples_seen=100)
    after = run.layer_signals()
    assert {n: s.curvature for n, s in after.items()} == {n: s.curvature for n, s in before.items()}
    assert all(s.probe_id == 0 for s in after.values())
    assert run.report()["unconverged_layers"] == 3
    assert run.report()["failed"] == 1


def test_hessian_layers_take_turns(monkeypatch):
    model = net()
    monkeypatch.setattr(probes, "ROTATION", 2)
    run = runner(model, estimator="hessian", lanczos_max_iterations=60, lanczos_tolerance=1e-2)
    ids = []
    for number in range(3):
        run.run(model, *batch(), CE, samples_seen=100 * number)
        ids.append({n: s.probe_id for n, s in run.layer_signals().items()})
    assert ids == [{"0": 0, "2": 0, "4": -1}, {"0": 1, "2": 0, "4": 1}, {"0": 1, "2": 2, "4": 2}]


def test_audit_logs_rank_correlation_and_drives_nothing():
    model = net()
    run, plain = runner(model, audit=True, lanczos_tolerance=1e-2, lanczos_max_iterations=60), runner(model)
    for r in (run, plain):
        r.run(model, *batch(), CE, samples_seen=0)
    assert run.layer_signals() == plain.layer_signals()
    ((samples, layers, rho),) = run.report()["rank_correlations"]
    assert (samples, layers) == (0, 3)
    assert -1 <= rho <= 1
    assert plain.report()["rank_correlations"] == []


def test_rank_correlation_against_scipy():
    from scipy.stats import spearmanr

    a, b = [1.0, 2.0, 2.0, 9.0, -1.0], [3.0, 1.0, 5.0, 5.0, 0.0]
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


def test_state_survives_json():
    model = net()
    run = runner(model, audit=True, lanczos_tolerance=1e-2, lanczos_max_iterations=60)
    run.run(model, *batch(), CE, samples_seen=120)
    run.observe_gradient(square_norm=1.0, batch_size=96)
    other = runner(model, audit=True, lanczos_tolerance=1e-2, lanczos_max_iterations=60)
    other.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert other.state_dict() == run.state_dict()
    for r in (run, other):
        r.run(model, *batch(1), CE, samples_seen=200)
    assert other.layer_signals() == run.layer_signals()
    assert isinstance(next(iter(other.layer_signals().values())), LayerSignal)
    assert other.noise() == run.noise()


def test_hundred_probes_leave_memory_flat():
    """VRAM grows with each HVP (PyHessian 28, 25): live tensors plateau over 100 probes."""
    model = net()
    run = runner(model)
    counts = []
    for number in range(100):
        run.run(model, *batch(), CE, samples_seen=100 * number)
        if number % 33 == 0:
            gc.collect()
            counts.append(sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)))
    assert counts[1:] == counts[:1] * (len(counts) - 1)


# ---------------------------------------------------------------- noise scale


def test_noise_scale_of_known_gradients():
    """g_B ~ G + noise / sqrt(B) with tr Σ = 50, |G|² = 2: B_simple = 25."""
    generator = torch.Generator().manual_seed(0)
    noise = NoiseEstimator()
    mean = torch.zeros(100)
    mean[0] = 2**0.5
    for _ in range(8):
        rows = mean + torch.randn(32, 100, generator=generator) * 0.5**0.5
        variance = float((rows - rows.mean(0)).square().sum() / 31)
        noise.add_probe(trace=variance, square_norm=float(rows.mean(0).square().sum()) - variance / 32)
    for _ in range(16):
        g = mean + torch.randn(100, generator=generator) * (0.5 / 96) ** 0.5
        noise.add_gradient(square_norm=float(g.square().sum()), batch_size=96)
    found = noise.read()
    assert found.probes == 8
    assert found.trace == pytest.approx(50, rel=0.1)
    assert found.square_norm == pytest.approx(2, rel=0.15)
    assert found.value == pytest.approx(25, rel=0.2)


def test_noise_scale_is_unknown_while_its_interval_includes_zero():
    noise = NoiseEstimator()
    assert noise.read() is None
    noise.add_probe(trace=50.0, square_norm=3.0)
    assert noise.read().value is None  # one value has no spread
    for value in (-4.0, 5.0, 1.0):
        noise.add_probe(trace=50.0, square_norm=value)
    assert noise.read().value is None
    for _ in range(4):
        noise.add_gradient(square_norm=50 / 96 + 2.0, batch_size=96)
    assert noise.read().value == pytest.approx(25.0)
    noise.add_gradient(square_norm=math.nan, batch_size=96)
    assert noise.read().value == pytest.approx(25.0)


# ---------------------------------------------------------------- real images


def resnet_after_one_epoch(folder, *, images, passes=1):
    """ResNet-18 trained at batch 96 on real images, and those images."""
    from torchvision.datasets import ImageFolder
    from torchvision.models import resnet18
    from torchvision.transforms.functional import to_tensor

    files = ImageFolder(str(folder / "train"), transform=lambda x: (to_tensor(x) - 0.47) / 0.25)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))[:images]
    data = [files[int(i)] for i in order]
    x = torch.stack([image for image, _ in data]).to(memory_format=torch.channels_last)
    y = torch.tensor([label for _, label in data])
    torch.manual_seed(1)
    model = resnet18(num_classes=10).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0375, momentum=0.9, weight_decay=5e-4)
    for start in list(range(0, len(x) - 95, 96)) * passes:
        optimizer.zero_grad()
        CE(model(x[start : start + 96]), y[start : start + 96]).backward()
        optimizer.step()
    return model, x, y


def square_norm(model, x, y):
    grads = torch.autograd.grad(CE(model(x), y), list(model.parameters()))
    return sum(float(g.double().square().sum()) for g in grads)


@pytest.mark.long
def test_stability_and_noise_on_real_images(cifar_jpeg):
    """After one epoch: CV of tr Σ over six probes at most 0.5; B_simple within 2x of the train-mode two-batch-size estimate."""
    model, x, y = resnet_after_one_epoch(cifar_jpeg, images=2000, passes=3)
    generator = torch.Generator().manual_seed(7)
    run = ProbeRunner(find_layers(model), curvature=CurvatureConfig(), batch=BatchConfig(), seed=0)
    traces, raw = [], []
    for number in range(6):
        pick = torch.randperm(len(x), generator=generator)[:32]
        result = probes.gram_probe(model, find_layers(model), x[pick], y[pick], CE, top_k=5)
        traces.append(result.typical_trace)
        raw.append(result.trace)
        run._noise.add_probe(trace=result.typical_trace, square_norm=result.square_norm)
        assert number == len(traces) - 1
    small, large = 96, 384
    norms = {small: [], large: []}
    for size, count in ((small, 60), (large, 30)):
        for _ in range(count):
            pick = torch.randperm(len(x), generator=generator)[:size]
            norms[size].append(square_norm(model, x[pick], y[pick]))
            if size == small:
                run.observe_gradient(square_norm=norms[size][-1], batch_size=size)
    g_small, g_large = statistics.fmean(norms[small]), statistics.fmean(norms[large])
    gradient = (large * g_large - small * g_small) / (large - small)
    trace = (g_small - g_large) / (1 / small - 1 / large)
    variation = statistics.stdev(traces) / statistics.fmean(traces)
    found = run.noise()
    ours = found.trace / (
        g_small - found.trace / small
    )  # the runner's own window of 16 gradients is noisier than these 60
    print(
        f"\ntr Σ over six probes: mean {found.trace:.0f}, CV {variation:.2f} "
        f"(unclipped: mean {statistics.fmean(raw):.0f}, CV {statistics.stdev(raw) / statistics.fmean(raw):.2f}); "
        f"two batch sizes: {trace:.0f}\n"
        f"B_simple: {ours:.0f} (the runner's window: {found.value}); two batch sizes {trace / gradient:.0f}"
    )
    assert variation <= 0.5
    assert 0.5 <= ours / (trace / gradient) <= 2.0


def test_noise_scale_from_two_batch_sizes_does_not_use_the_probes_trace():
    """|g_n|² = 2 + 50 / n: B_simple = 25, whatever the Gram matrices say of another network."""
    noise = NoiseEstimator()
    for _ in range(4):
        noise.add_probe(trace=500.0, square_norm=-9.0)
        noise.add_gradient(square_norm=2.0 + 50.0 / 96, batch_size=96)
    assert noise.read().value is None
    for _ in range(4):
        noise.add_small(square_norm=2.0 + 50.0 / 32, batch_size=32)
    found = noise.read()
    assert (found.trace, found.square_norm) == pytest.approx((50.0, 2.0))
    assert found.value == pytest.approx(25.0)
    other = NoiseEstimator()
    other.load_state_dict(noise.state_dict())
    assert other.read() == found


def test_a_lower_bound_is_known_before_the_noise_scale_is():
    noise = NoiseEstimator()
    for shift in (-0.4, 0.0, 0.4, -0.4, 0.0, 0.4):
        noise.add_probe(trace=1.0, square_norm=1.0)
        noise.add_gradient(square_norm=0.01 + (50.0 + 20 * shift) / 96, batch_size=96)
        noise.add_small(square_norm=0.01 + (50.0 + 20 * shift) / 32, batch_size=32)
    found = noise.read()
    assert found.value is None
    assert 50 < found.lower < 50 / 0.01
    assert found.trusted == found.lower


def test_training_square_norm_is_that_of_a_training_step_and_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(12, 6), torch.randint(3, (12,))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    found = training_square_norm(
        model, list(model.parameters()), [(x[:6], y[:6]), (x[6:], y[6:])], CE, device=torch.device("cpu")
    )
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    expected = 0.0
    for part in (slice(0, 6), slice(6, 12)):
        model.zero_grad()
        CE(model(x[part]), y[part]).backward()
        expected += sum(float(p.grad.double().square().sum()) for p in model.parameters()) / 2
    assert found == pytest.approx(expected, rel=1e-5)
