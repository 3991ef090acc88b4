"""Gradient statistics: eager reference and interpreted Triton kernel against float64."""

import math

import pytest
import torch

from triaccel.kernels import checks, grad_stats
from triaccel.kernels.chunks import CHUNK, chunk_plan, flat, same_order
from triaccel.kernels.tolerance import TOLERANCE, deviation
from triaccel.types import TriAccelError

COUNT, TOTAL, SQUARE, NONFINITE, MAXIMUM, NONZERO, UNDERFLOW = range(7)


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off, tests/gpu covers the Triton kernels")
    return request.param


def exact(grads, segments, count):
    rows = torch.zeros(count, 7, dtype=torch.float64)
    scale = torch.zeros(count, dtype=torch.float64)
    for grad, s in zip(grads, segments, strict=True):
        g = grad.double().reshape(-1)
        kept = g[g.isfinite()]
        rows[s, COUNT] += g.numel()
        rows[s, TOTAL] += kept.sum()
        rows[s, SQUARE] += kept.square().sum()
        rows[s, NONFINITE] += g.numel() - kept.numel()
        if kept.numel():
            rows[s, MAXIMUM] = max(rows[s, MAXIMUM], kept.abs().max())
        rows[s, NONZERO] += (g != 0).sum()
        rows[s, UNDERFLOW] += ((kept != 0) & (kept.abs() < 2.0**-24)).sum()
        scale[s] += kept.abs().sum()
    return rows, scale


def agree(grads, segments, count, backend, extremes=True):
    found = grad_stats(grads, segments, segment_count=count, extremes=extremes, backend=backend).values
    rows, scale = exact(grads, segments, count)
    dtype = grads[0].dtype
    assert (
        deviation(found[:, TOTAL], rows[:, TOTAL], scale.clamp_min(1e-30)) <= TOLERANCE["total", dtype].value
    )
    squares = rows[:, SQUARE].clamp_min(1e-30)
    assert deviation(found[:, SQUARE], rows[:, SQUARE], squares) <= TOLERANCE["square", dtype].value
    exactly = [COUNT, NONFINITE] + ([MAXIMUM, NONZERO, UNDERFLOW] if extremes else [])
    torch.testing.assert_close(found[:, exactly], rows[:, exactly], rtol=0, atol=0)
    if not extremes:
        assert found[:, MAXIMUM:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 31, 1024, 1025, CHUNK, CHUNK + 1, 100_003])
def test_sizes(size, dtype, backend):
    agree([torch.randn(size).to(dtype)], [0], 1, backend)


def test_ten_million_entries(backend):
    agree([torch.randn(10**7)], [0], 1, backend, extremes=False)


def test_five_hundred_tensors_of_mixed_sizes_and_empty_layers(backend):
    sizes = [int(n) for n in torch.randint(0, 300, (500,))]
    grads = [torch.randn(n) for n in sizes]
    segments = [(i * 7) % 90 for i in range(500)]
    agree(grads, segments, 100, backend)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(40, 30).t(),
        lambda: torch.randn(40, 30)[::2, 1:],
        lambda: torch.randn(1, 30).expand(20, 30),
        lambda: torch.randn(0, 4),
        lambda: torch.randn(()),
    ],
    ids=["channels_last", "transposed", "sliced", "expanded", "empty", "scalar"],
)
def test_memory_layouts(make, backend):
    agree([make(), torch.randn(5)], [0, 1], 2, backend)


@pytest.mark.parametrize("where", [[0], [4095], [1, 2, 3], [16383, 16384, 39999], list(range(700))])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nonfinite_entries_are_counted_exactly(where, value, backend):
    grad = torch.randn(40_000)
    grad[where] = value
    agree([grad, torch.randn(10)], [1, 0], 2, backend)


def test_infinities_of_both_signs_do_not_cancel(backend):
    grad = torch.ones(100)
    grad[3], grad[4] = math.inf, -math.inf
    found = grad_stats([grad], [0], segment_count=1, backend=backend)
    assert found.nonfinite.tolist() == [2]
    assert found.total.tolist() == [98]


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # the interpreter's, in FP32 as on the card
def test_finite_entries_whose_sum_overflows_are_not_called_nonfinite(backend):
    found = grad_stats([torch.full((4,), 3e38)], [0], segment_count=1, backend=backend)
    assert found.nonfinite.tolist() == [0]


def test_underflow_counts_what_fp16_would_lose(backend):
    grad = torch.tensor([0.0, 2.0**-24, 2.0**-25, -(2.0**-26), 1.0, -0.0])
    found = grad_stats([grad], [0], segment_count=1, extremes=True, backend=backend)
    assert (found.underflow.item(), found.nonzero.item(), found.maximum.item()) == (2, 4, 1)


def test_mixed_dtypes_add_up(backend):
    grads = [torch.randn(500), torch.randn(300).bfloat16(), torch.randn(200).half()]
    found = grad_stats(grads, [0, 0, 1], segment_count=2, extremes=True, backend=backend).values
    rows, _ = exact(grads, [0, 0, 1], 2)
    torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-4)


def test_no_gradients_at_all():
    assert grad_stats([], [], segment_count=3).values[:, :4].tolist() == [[0.0] * 4] * 3


def test_equal_gradients_give_equal_bits(backend):
    grads = [torch.randn(30_000), torch.randn(77)]
    first, second = (grad_stats(grads, [0, 0], segment_count=1, backend=backend).values for _ in range(2))
    assert first[:, :4].equal(second[:, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gpu_check_holds_when_interpreted(dtype):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off")
    results = checks.check_stats(torch.device("cpu"), dtype=dtype)
    assert results
    assert all(result["ok"] for result in results), results


@pytest.mark.parametrize(
    ("grads", "segments", "match"),
    [
        ([torch.ones(2)], [0, 1], "1 gradients but 2 segment"),
        ([torch.ones(2, dtype=torch.float64)], [0], "gradient 0 is torch.float64"),
        ([torch.ones(2).to_sparse()], [0], "gradient 0 is sparse"),
    ],
)
def test_errors_name_the_gradient(grads, segments, match):
    with pytest.raises(TriAccelError, match=match):
        grad_stats(grads, segments, segment_count=2)


def test_chunks_cover_every_entry_once_and_lie_together_by_segment():
    plan = chunk_plan((CHUNK + 5, 0, 3, 2 * CHUNK), (2, 0, 0, 2), 4, torch.device("cpu"))
    assert plan.start.tolist() == [0, 1, 1, 5, 5]
    assert plan.count.tolist() == [3, 0, 3 * CHUNK + 5, 0]
    covered = sorted(zip(plan.tensor.tolist(), plan.offset.tolist(), plan.size.tolist(), strict=True))
    assert covered == [(0, 0, CHUNK), (0, CHUNK, 5), (2, 0, 3), (3, 0, CHUNK), (3, CHUNK, CHUNK)]


def test_flat_is_a_view_exactly_where_memory_is_one_run():
    dense = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert flat(dense).data_ptr() == dense.data_ptr()
    assert flat(dense).sort().values.equal(dense.reshape(-1).sort().values)
    holes = torch.randn(4, 4)[:, ::2]
    assert flat(holes).equal(holes.reshape(-1))
    assert flat(holes).is_contiguous()
    assert same_order(torch.ones(4, 3, 2, 2), dense).stride() == dense.stride()
