"""Gram matrices of per-sample gradients: both routes, eager and interpreted, against float64."""

import pytest
import torch

from triaccel.kernels import gram, gram_route
from triaccel.kernels.tolerance import TOLERANCE, deviation
from triaccel.types import TriAccelError

SHAPES = [
    (1, 4, 1, 5, 3),
    (1, 6, 9, 8, 4),
    (2, 5, 33, 40, 17),
    (7, 3, 4, 9, 1),
    (1, 17, 2, 1, 1),
    (1, 1, 5, 3, 2),
]


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off, tests/gpu covers the Triton kernels")
    return request.param


def tensors(shape, dtype=torch.float32):
    n, b, t, i, o = shape
    return torch.randn(n, b, t, i, dtype=dtype), torch.randn(n, b, t, o, dtype=dtype)


def exact(a, g):
    gradients = torch.einsum("nbti,nbto->bnoi", a.double(), g.double()).flatten(1)
    return gradients @ gradients.T


@pytest.mark.parametrize("route", ["outer", "pairs"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routes_against_float64(shape, route, backend):
    a, g = tensors(shape)
    found, expected = gram(a, g, route=route, backend=backend), exact(a, g)
    assert deviation(found, expected, expected.diagonal().max()) <= TOLERANCE["gram", torch.float32].value
    assert deviation(found, found.T, found.diagonal().max()) <= 1e-6


@pytest.mark.parametrize("route", ["outer", "pairs"])
def test_reference_in_float64_is_exact_to_float64(route):
    a, g = tensors((2, 6, 7, 5, 4), torch.float64)
    torch.testing.assert_close(gram(a, g, route=route), exact(a, g), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", ["outer", "pairs"])
def test_tiling_to_few_bytes_changes_nothing(route, backend):
    a, g = tensors((2, 5, 6, 7, 9))
    torch.testing.assert_close(
        gram(a, g, route=route, max_bytes=1, backend=backend),
        gram(a, g, route=route, backend=backend),
        rtol=1e-5,
        atol=1e-4,
    )


def test_gradients_of_a_linear_layer_by_autograd(backend):
    """With one position, K is that of the layer's own per-sample gradients."""
    layer, x = torch.nn.Linear(6, 4, bias=False), torch.randn(5, 6)
    rows = []
    for sample in x:
        (grad,) = torch.autograd.grad(layer(sample).square().sum(), layer.weight)
        rows.append(grad.flatten())
    expected = torch.stack(rows) @ torch.stack(rows).T
    out = layer(x).detach()
    found = gram(x[None, :, None], 2 * out[None, :, None], backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_cheaper_route_is_taken():
    assert gram_route(32, 1, 512, 10) == "pairs"
    assert gram_route(32, 1024, 27, 64) == "outer"


def test_the_kernel_says_when_samples_are_too_many():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off")
    a, g = tensors((1, 129, 2, 3, 3))
    with pytest.raises(TriAccelError, match="at most 128 samples, got 129"):
        gram(a, g, route="outer", backend="triton")


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(TriAccelError, match=r"\(1, 2, 3, 4\) and \(1, 2, 4, 4\)"):
        gram(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 4, 4))
