"""The fit of bytes against batch: exact on lines, bounded on convex courses, refused on nonsense; and on real networks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from triaccel.memory import live_tensor_bytes
from triaccel.memory_fit import fit_memory

torchvision = pytest.importorskip("torchvision")


@given(
    base=st.integers(0, 10**9),
    sample=st.integers(1_000, 10**7),
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True),
)
def test_a_line_is_found_exactly(base, sample, sizes):
    peaks = [(16 * b, 3, base + sample * 16 * b) for b in sizes]
    fit = fit_memory(peaks, map_version=3)
    apart = [b for b in sizes if b <= 0.8 * max(sizes)]
    if apart and sample * 16 * max(sizes) > 0.011 * (base + sample * 16 * max(sizes)):
        assert fit.usable
        for b in (2 * max(sizes) * 16, 16 * max(sizes) - 8):
            assert fit.predict(b) == pytest.approx(base + sample * b, rel=1e-6)


@given(
    lines=st.lists(st.tuples(st.integers(10**6, 10**8), st.integers(0, 10**6)), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 32), min_size=2, max_size=6, unique=True),
)
def test_between_observed_sizes_the_prediction_is_never_too_low(lines, sizes):
    def peak(batch):
        return max(a + b * batch for a, b in lines)

    fit = fit_memory([(8 * b, 0, peak(8 * b)) for b in sizes], map_version=0)
    assert fit.points == tuple(sorted((8 * b, peak(8 * b)) for b in sizes))
    if fit.usable:
        for batch in range(8 * min(sizes), 8 * max(sizes)):
            assert fit.predict(batch) >= peak(batch) * (1 - 1e-9)


@given(
    lines=st.lists(st.tuples(st.integers(10**6, 10**8), st.integers(0, 10**6)), min_size=1, max_size=5),
    size=st.integers(8, 256),
    factor=st.integers(2, 8),
)
def test_with_one_size_a_larger_batch_is_never_predicted_too_low(lines, size, factor):
    def peak(batch):
        return max(a + b * batch for a, b in lines)

    resident = min(a for a, _ in lines)
    fit = fit_memory([(size, 0, peak(size))], map_version=0, resident_bytes=resident)
    assert fit.predict(size * factor) >= peak(size * factor) * (1 - 1e-9)
    assert fit.predict(size // 2) is None


def test_the_base_carries_over_to_a_new_map():
    peaks = [(96, 0, 100 + 96 * 4), (192, 0, 100 + 192 * 4), (192, 1, 100 + 192 * 2)]
    fit = fit_memory(peaks, map_version=1)
    assert fit.predict(384) == pytest.approx(100 + 384 * 2)
    assert fit.predict(48) == pytest.approx(100 + 48 * 2)
    assert fit_memory(peaks, map_version=2) is None


def test_a_later_peak_replaces_an_earlier_one():
    fit = fit_memory([(96, 0, 500), (192, 0, 900), (96, 0, 600)], map_version=0)
    assert fit.predict(96) == 600


@pytest.mark.parametrize(
    "peaks",
    [
        [(96, 0, 900), (192, 0, 500)],  # falls with the batch
        [(96, 0, 100), (192, 0, 900)],  # rises ninefold for twice the samples
    ],
)
def test_nonsense_is_no_fit(peaks):
    """yolov5 9287: a bad fit must be known as one."""
    fit = fit_memory(peaks, map_version=0)
    assert not fit.usable
    assert fit.predict(384) is None
    assert fit.predict(192) == peaks[1][2]


def real_peaks(name, sizes, *, bf16):
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def step(batch):
        inputs = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = model(inputs)
        nn.functional.cross_entropy(outputs.float(), torch.randint(10, (batch,))).backward()
        optimizer.step()

    step(4)  # the optimizer has its state from here on
    found = {}
    for batch in sizes:
        with live_tensor_bytes() as tracker:
            step(batch)
        found[batch] = tracker.peak_bytes, tracker.before_bytes
    return found


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_four_sizes_predict_the_others_within_five_percent(name, bf16):
    observed, others = (32, 96, 192, 384), (16, 24, 48, 64, 128, 256, 512)
    peaks = real_peaks(name, sorted(observed + others), bf16=bf16)
    fit = fit_memory(
        [(b, 0, peaks[b][0]) for b in observed], map_version=0, resident_bytes=peaks[observed[0]][1]
    )
    for batch in others:
        assert fit.predict(batch) == pytest.approx(peaks[batch][0], rel=0.05), batch


def test_resnet18_in_short():
    peaks = real_peaks("resnet18", (32, 48, 64, 96), bf16=False)
    fit = fit_memory([(b, 0, peaks[b][0]) for b in (32, 64)], map_version=0)
    for batch in (48, 96):
        assert fit.predict(batch) == pytest.approx(peaks[batch][0], rel=0.05)
