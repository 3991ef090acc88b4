"""Block Lanczos and Hutchinson against dense FP64 matrices; block Hessians against dense and independent ones."""

import gc
import math

import pytest
import torch
from torch import nn

from triaccel.hessian import hessian_probe, hessian_trace
from triaccel.lanczos import block_lanczos, hutchinson_trace, rademacher
from triaccel.layers import find_layers
from triaccel.types import TriAccelError

CE = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LANCZOS = {"top_k": 5, "tolerance": 1e-8, "max_iterations": 300, "seed": 0}


def symmetric(eigenvalues, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return (q * torch.as_tensor(eigenvalues, dtype=torch.float64)) @ q.T


def noise(n, seed=1, scale=0.3):
    return (
        (torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5)
        .mul(scale)
        .tolist()
    )


SPECTRA = {
    "indefinite": [-9.0, -7.0, 4.0, 3.0, 2.0, 1.0, 0.5, *noise(100)],
    "threefold repeated": [5.0, 5.0, 5.0, 2.0, 1.0, *noise(100)],
    "repeated more often than k": [3.0] * 7 + noise(60),
    "all negative": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0],
    "rank one": [2.0] + [0.0] * 50,
    "zero": [0.0] * 12,
    "smaller than k": [1.0, -1.0, 3.0],
    "one number": [-2.5],
}


@pytest.mark.parametrize("max_bytes", [2**30, 1], ids=["all kept", "restarted"])
@pytest.mark.parametrize("case", SPECTRA)
def test_largest_algebraic_eigenvalues(case, max_bytes):
    eigenvalues = SPECTRA[case]
    h = symmetric(eigenvalues)
    found = block_lanczos(lambda v: v @ h, len(h), dtype=torch.float64, max_bytes=max_bytes, **LANCZOS)
    expected = sorted(eigenvalues, reverse=True)[:5]
    norm = max(map(abs, eigenvalues))
    assert found.converged
    assert len(found.eigenvalues) == len(found.residuals) == len(expected)
    assert found.eigenvalues == pytest.approx(expected, abs=1e-7 * norm + 1e-14)


def test_unconverged_says_so_and_residuals_are_true():
    """No convergence and no sign of it (hessian-eigenthings 17, 23): residual and converged flag."""
    h = symmetric(noise(400, scale=1.0))
    found = block_lanczos(lambda v: v @ h, 400, dtype=torch.float64, **(LANCZOS | {"max_iterations": 3}))
    assert not found.converged
    assert found.iterations == 3
    assert found.matvecs == 15
    exact = torch.linalg.eigvalsh(h)
    for value, residual in zip(found.eigenvalues, found.residuals, strict=True):
        assert float((exact - value).abs().min()) <= residual * (1 + 1e-9)  # the residual bounds the error
        assert residual > 1e-3


def test_the_seed_decides_and_is_recorded():
    h = symmetric(noise(60))
    one, same, other = (
        block_lanczos(
            lambda v: v @ h, 60, dtype=torch.float64, **(LANCZOS | {"seed": s, "max_iterations": 2})
        )
        for s in (4, 4, 5)
    )
    assert one == same
    assert one.seed == 4
    assert one.eigenvalues != other.eigenvalues


def test_nan_product_is_not_converged():
    found = block_lanczos(lambda v: v * math.nan, 9, **LANCZOS)
    assert not found.converged
    assert not found.finite


def test_rademacher_draws_both_signs_evenly():
    """A Rademacher draw whose upper bound is exclusive gives only -1: both signs, mean 0, independent columns."""
    z = rademacher(4, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert set(z.unique().tolist()) == {-1.0, 1.0}
    assert float(z.mean(1).abs().max()) < 0.03
    assert float((z @ z.T / 20_000 - torch.eye(4)).abs().max()) < 0.03


def test_hutchinson_trace():
    h = symmetric(SPECTRA["indefinite"])
    found = hutchinson_trace(lambda v: v @ h, len(h), samples=400, seed=1, dtype=torch.float64)
    assert abs(found.mean - float(h.trace())) < 4 * found.standard_error
    assert 0 < found.standard_error < 1.0
    exact = hutchinson_trace(
        lambda v: 3 * v, 7, samples=2, seed=1
    )  # a multiple of the identity has no variance
    assert (exact.mean, exact.standard_error) == (21.0, 0.0)
    with pytest.raises(TriAccelError, match="at least 2"):
        hutchinson_trace(lambda v: v, 7, samples=1, seed=1)


# ---------------------------------------------------------------- networks


def small_net():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)
    ).double()


def small_batch():
    generator = torch.Generator().manual_seed(6)
    return torch.randn(8, 2, 4, 4, generator=generator).double(), torch.randint(
        0, 4, (8,), generator=generator
    )


def dense_block(model, x, y, layer, loss=CE):
    """Dense Hessian of one layer with the batch's statistics as constants, by torch.func."""
    model = model.eval()
    names = layer.parameter_names
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                seen = model[: int(name)](x)
                module.running_mean.copy_(seen.mean((0, 2, 3)))
                module.running_var.copy_(torch.maximum(module.running_var, seen.var((0, 2, 3), correction=0)))
    sizes = [p.numel() for p in layer.parameters]

    def value(flat):
        parts = {
            n: f.view(p.shape) for n, f, p in zip(names, flat.split(sizes), layer.parameters, strict=True)
        }
        return loss(torch.func.functional_call(model, parts, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in layer.parameters])
    hessian = torch.autograd.functional.hessian(value, flat)
    model.train()
    return hessian


def test_blocks_match_dense_fp64_hessians():
    model, (x, y) = small_net(), small_batch()
    layers = find_layers(model)
    found = hessian_probe(model, layers, x, y, CE, **LANCZOS)
    traces = hessian_trace(model, layers, x, y, CE, samples=200, seed=0)
    for layer in layers:
        h = dense_block(small_net(), x, y, find_layers(small_net_like(model))[layer.info.index])
        reference = torch.linalg.eigvalsh(h).flip(0)[:5]
        got = torch.tensor(found[layer.name].eigenvalues, dtype=torch.float64)
        assert found[layer.name].converged
        assert (got - reference[: len(got)]).abs().max() <= 1e-7 * float(torch.linalg.matrix_norm(h, 2))
        assert abs(traces[layer.name].mean - float(h.trace())) <= 5 * traces[layer.name].standard_error + 1e-9


def small_net_like(model):
    twin = small_net()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")
def test_agrees_with_curvlinops_and_scales_a_sum():
    from curvlinops import HessianLinearOperator

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(8, 3).double(), torch.randint(0, 4, (8,))
    layers = find_layers(model)
    found = hessian_probe(model, layers, x, y, CE, **LANCZOS)
    summed = hessian_probe(model, layers, x, y, nn.CrossEntropyLoss(reduction="sum"), **LANCZOS)
    for layer in layers:
        operator = HessianLinearOperator(
            model, CE, list(layer.parameters), [(x, y)], check_deterministic=False
        )
        dense = operator @ torch.eye(layer.info.numel).double()
        reference = torch.linalg.eigvalsh((dense + dense.T) / 2).flip(0)[:5].tolist()
        assert found[layer.name].eigenvalues == pytest.approx(reference, rel=1e-6)
        assert summed[layer.name].eigenvalues == pytest.approx(reference, rel=1e-6)


def test_a_linear_loss_has_a_zero_hessian():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    found = hessian_probe(model, find_layers(model), x, x, lambda out, _: out.mean(), **LANCZOS)
    assert found[""].eigenvalues == (0.0,) * 5
    assert found[""].converged


def test_unused_and_frozen_layers_are_left_out():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.a(x)

    model = Net()
    x, y = torch.randn(4, 3), torch.randint(0, 4, (4,))
    assert set(hessian_probe(model, find_layers(model), x, y, CE, **LANCZOS)) == {"a"}
    model.requires_grad_(False)
    with pytest.raises(TriAccelError, match="unfreeze"):
        hessian_probe(model, find_layers(model), x, y, CE, **LANCZOS)


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g.clone()


def test_missing_double_backward_is_named():
    """Double backward missing for flash attention (pytorch 116350): the error names it and the Gram route needs none."""
    from triaccel.gram import gram_probe

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.tanh(OnceOnly.apply(self.a(x))))

    model = Net()
    x, y = torch.randn(4, 3), torch.randint(0, 4, (4,))
    with pytest.raises(TriAccelError, match=r"second derivative.*OnceOnly.*fisher"):
        hessian_probe(model, find_layers(model), x, y, CE, **LANCZOS)
    assert gram_probe(model, find_layers(model), x, y, CE, top_k=2).finite


def test_attention_has_second_derivatives_in_a_probe():
    """Double backward missing for flash attention (pytorch 116350): the math backend has one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.mha(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(4, 5, 4), torch.randint(0, 4, (4,))
    found = hessian_probe(model, find_layers(model), x, y, CE, **(LANCZOS | {"tolerance": 1e-3}))
    assert all(s.converged and s.finite for s in found.values())


def test_memory_is_flat_and_grad_untouched():
    """VRAM grows with each HVP (PyHessian 28, 25): autograd.grad only, live tensors flat over 100 probes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(4, 3), torch.randint(0, 4, (4,))
    layers = find_layers(model)

    def live():
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))

    counts = []
    for index in range(100):
        hessian_probe(model, layers, x, y, CE, top_k=1, tolerance=1e-2, max_iterations=2, seed=index)
        if index % 33 == 0:
            counts.append(live())
    assert counts[1:] == counts[:1] * (len(counts) - 1)
    assert all(p.grad is None for p in model.parameters())
