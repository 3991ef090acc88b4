"""Gram probes against explicit per-sample gradients in FP64, against curvlinops, and against their own promises."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triaccel.gram import gram_matrices, gram_probe
from triaccel.gram_routes import choose_route, outer_sum_gram
from triaccel.layers import find_layers
from triaccel.types import TriAccelError

B = 6
CE = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Apply(nn.Module):
    """Modules and a forward written as a function of them."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            if isinstance(module, nn.Parameter):
                self.register_parameter(name, module)
            else:
                self.add_module(name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def image_net(*layers):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(4))


def conv(*args, **kwargs):
    return lambda: image_net(nn.Conv2d(*args, **kwargs), nn.Tanh())


def images(channels=4, size=7):
    return lambda g: torch.randn(B, channels, size, size, generator=g)


def tokens(length=5):
    return lambda g: torch.randint(0, 9, (B, length), generator=g)


def sequences(length=5, width=3):
    return lambda g: torch.randn(B, length, width, generator=g)


def tied_linears():
    model = Apply(
        lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))),
        a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 4),
    )  # fmt: skip
    model.b.weight = model.a.weight
    return model


def tied_embedding():
    model = Apply(
        lambda s, x: s.out(torch.tanh(s.emb(x)).mean(1)), emb=nn.Embedding(9, 3), out=nn.Linear(3, 9)
    )
    model.out.weight = model.emb.weight
    return model


def tied_convs():
    model = Apply(
        lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x)))).mean((2, 3))),
        a=nn.Conv2d(4, 4, 3), b=nn.Conv2d(4, 4, 3, stride=2), head=nn.Linear(4, 4),
    )  # fmt: skip
    model.b.weight = model.a.weight
    return model


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 4))


def gru(s, x):
    return s.head(s.rnn(x.transpose(0, 1))[0][-1])


def attention(s, x):
    return s.head(s.mha(x, x, x, need_weights=False)[0].mean(1))


def frozen_weight():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    model[0].weight.requires_grad_(False)
    return model


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), lambda g: torch.randn(B, 3, generator=g)),
    "linear, leading dimensions": (lambda: Apply(lambda s, x: s.b(torch.tanh(s.a(x)).mean((1, 2))), a=nn.Linear(3, 8), b=nn.Linear(8, 4)), lambda g: torch.randn(B, 2, 3, 3, generator=g)),  # noqa: E501
    "linear, many positions": (lambda: Apply(lambda s, x: s.b(torch.tanh(s.a(x)).mean(1)), a=nn.Linear(3, 4), b=nn.Linear(4, 4)), sequences(40)),  # noqa: E501
    "conv": (conv(4, 5, 3), images()),
    "conv, stride and padding": (conv(4, 5, 3, stride=2, padding=1, bias=False), images()),
    "conv, rectangular": (conv(4, 5, (3, 2), stride=(1, 2), padding=(0, 1)), images()),
    "conv, dilation": (conv(4, 5, 3, dilation=2, padding=2), images()),
    "conv, same with an even kernel": (conv(4, 5, 4, padding="same"), images()),
    "conv, 1x1": (conv(4, 5, 1), images()),
    "conv, 1x1 strided": (conv(4, 5, 1, stride=2), images()),
    "conv, circular": (conv(4, 5, 3, padding=2, padding_mode="circular"), images()),
    "conv, reflect": (conv(4, 5, 3, padding=1, padding_mode="reflect"), images()),
    "conv, replicate": (conv(4, 5, 3, padding=1, padding_mode="replicate"), images()),
    "conv, groups": (conv(4, 6, 3, groups=2, padding=1), images()),
    "conv, depthwise": (conv(4, 4, 3, groups=4, padding=1), images()),
    "conv, depthwise strided": (conv(4, 4, 5, groups=4, padding=2, stride=2), images()),
    "conv, depthwise multiplier": (conv(4, 8, 3, groups=4, padding=1, dilation=2), images()),
    "conv, depthwise circular": (conv(4, 4, 3, groups=4, padding=1, padding_mode="circular"), images()),
    "conv, depthwise larger than the map": (conv(4, 4, 5, groups=4, padding=2), images(size=1)),
    "conv, one position": (conv(4, 5, 3, padding=1), images(size=1)),
    "embedding": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.emb(x)).mean(1)), emb=nn.Embedding(9, 3, padding_idx=2), head=nn.Linear(3, 4)), tokens()),  # noqa: E501
    "layer norm": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.norm(x)).mean(1)), norm=nn.LayerNorm(3), head=nn.Linear(3, 4)), sequences()),  # noqa: E501
    "layer norm over two dimensions": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.norm(x)).mean(1)), norm=nn.LayerNorm((5, 3)), head=nn.Linear(3, 4)), sequences()),  # noqa: E501
    "rms norm": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.norm(x)).mean(1)), norm=nn.RMSNorm(3), head=nn.Linear(3, 4)), sequences()),  # noqa: E501
    "group norm": (lambda: image_net(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Tanh()), images()),
    "batch norm": (lambda: image_net(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)), images()),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)), lambda g: torch.randn(B, 3, generator=g)),  # noqa: E501
    "batch norm without affine": (lambda: image_net(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Tanh()), images()),
    "batch norm without running statistics": (lambda: image_net(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)), images()),  # noqa: E501
    "only a bias trains": (frozen_weight, lambda g: torch.randn(B, 3, generator=g)),
    "module used twice": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.a(torch.tanh(s.a(x))))), a=nn.Linear(3, 3), head=nn.Linear(3, 4)), lambda g: torch.randn(B, 3, generator=g)),  # noqa: E501
    "conv used twice": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.a(torch.tanh(s.a(x)))).mean((2, 3))), a=nn.Conv2d(4, 4, 3), head=nn.Linear(4, 4)), images()),  # noqa: E501
    "depthwise used twice": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.a(torch.tanh(s.a(x)))).mean((2, 3))), a=nn.Conv2d(4, 4, 3, groups=4), head=nn.Linear(4, 4)), images()),  # noqa: E501
    "tied linears": (tied_linears, lambda g: torch.randn(B, 3, generator=g)),
    "tied convolutions": (tied_convs, images()),
}  # fmt: skip
GENERIC = {
    "instance norm": (lambda: image_net(nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.Tanh()), images(), "1"),
    "conv 1d": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.c(x)).mean(2)), c=nn.Conv1d(5, 4, 2), head=nn.Linear(4, 4)), sequences(), "c"),  # noqa: E501
    "conv 3d": (lambda: Apply(lambda s, x: s.head(torch.tanh(s.c(x)).mean((2, 3, 4))), c=nn.Conv3d(1, 4, 2), head=nn.Linear(4, 4)), lambda g: torch.randn(B, 1, 3, 3, 3, generator=g), "c"),  # noqa: E501
    "transposed": (lambda: image_net(nn.ConvTranspose2d(4, 5, 2), nn.Tanh()), images(), "0"),
    "LSTM": (lambda: Apply(lambda s, x: s.head(s.rnn(x)[0][:, -1]), rnn=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 4)), sequences(), "rnn"),  # noqa: E501
    "GRU, batch second": (lambda: Apply(gru, rnn=nn.GRU(3, 4, num_layers=2, dropout=0.5), head=nn.Linear(4, 4)), sequences(), "rnn"),  # noqa: E501
    "attention": (lambda: Apply(attention, mha=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 4)), sequences(width=4), "mha"),  # noqa: E501
    "tied embedding and linear": (tied_embedding, tokens(), "emb"),
    "weight norm": (weight_normed, lambda g: torch.randn(B, 3, generator=g), "0.parametrizations.weight"),
    "raw parameter": (lambda: Apply(lambda s, x: s.head(torch.tanh(x + s.shift)), shift=nn.Parameter(torch.ones(3)), head=nn.Linear(3, 4)), lambda g: torch.randn(B, 3, generator=g), ""),  # noqa: E501
    "used as a raw tensor elsewhere": (lambda: Apply(lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight), a=nn.Linear(4, 4)), lambda g: torch.randn(B, 4, generator=g), "a"),  # noqa: E501
    "batch folded into positions": (lambda: Apply(lambda s, x: s.b(torch.tanh(s.a(x.flatten(0, 1))).unflatten(0, (-1, 5)).mean(1)), a=nn.Linear(3, 3), b=nn.Linear(3, 4)), sequences(), "a"),  # noqa: E501
    "batch in dimension 1, as long as the sequence": (lambda: Apply(lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1))).mean(0)), a=nn.Linear(3, 3), b=nn.Linear(3, 4)), sequences(B), "a"),  # noqa: E501
    "a forward of its own": (lambda: nn.Sequential(OwnForward(3, 5), nn.Tanh(), nn.Linear(5, 4)), lambda g: torch.randn(B, 3, generator=g), "0"),  # noqa: E501
    "called by keyword": (lambda: Apply(lambda s, x: s.b(torch.tanh(s.a(input=x))), a=nn.Linear(3, 3), b=nn.Linear(3, 4)), lambda g: torch.randn(B, 3, generator=g), "a"),  # noqa: E501
}  # fmt: skip


def built(build, make):
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    model, x = build(), make(generator)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules say that they are new
        copy_ = model(x) if any(isinstance(m, nn.LazyLinear) for m in model.modules()) else None
    del copy_
    return model.train(), x, torch.randint(0, 4, (len(x),), generator=generator)


def with_constant_statistics(model, x):
    """FP64 eval copy whose batch norms hold the statistics of ``x``, layer after layer."""
    twin = copy.deepcopy(model).double().eval()
    norms = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def fix(module, args):
        dims = [d for d in range(args[0].dim()) if d != 1]
        variance = args[0].var(dims, correction=0)
        if module.running_var is not None:
            variance = torch.maximum(variance, module.running_var)
        module.running_mean, module.running_var = args[0].mean(dims), variance
        module.track_running_stats = True

    handles = [norm.register_forward_pre_hook(fix) for norm in norms]
    with torch.no_grad():
        twin(x)
    for handle in handles:
        handle.remove()
    return twin


def wide(x):
    return x.double() if x.is_floating_point() else x


def explicit(model, x, y, *, loss=CE):
    """``layer -> (B, P)`` per-sample gradients by one backward a sample."""
    twin = with_constant_statistics(model, wide(x))
    layers = find_layers(twin)
    rows = {layer.name: [] for layer in layers if layer.parameters}
    for i in range(len(x)):
        value = loss(twin(wide(x[i : i + 1])), y[i : i + 1])
        for layer in layers:
            if layer.parameters:
                found = torch.autograd.grad(
                    value, layer.parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                rows[layer.name].append(torch.cat([g.flatten() for g in found]))
    return {name: torch.stack(r) for name, r in rows.items()}


def check(model, x, y, *, loss=CE, tolerance=1e-5, **options):
    layers = find_layers(model)
    result = gram_probe(model, layers, x, y, loss, top_k=4, **options)
    expected = explicit(model, x, y, loss=loss)
    assert set(result.layers) == set(expected)
    for name, gradients in expected.items():
        reference = torch.linalg.eigvalsh(gradients @ gradients.T).flip(0)[:4] / len(x)
        found = torch.tensor(result.layers[name].eigenvalues, dtype=torch.float64)
        assert (found - reference).abs().max() <= tolerance * reference[0], name
        mean = gradients.mean(0)
        variance = float((gradients - mean).square().sum() / (len(x) - 1))
        assert result.layers[name].sample_variance == pytest.approx(variance, rel=10 * tolerance), name
        unbiased = float(mean.square().sum()) - variance / len(x)
        scale = float(mean.square().sum()) + variance
        assert result.layers[name].square_norm == pytest.approx(unbiased, abs=10 * tolerance * scale), name
    return result


@pytest.mark.parametrize("case", CASES)
def test_matches_explicit_per_sample_gradients(case):
    model, x, y = built(*CASES[case])
    assert check(model, x, y).generic == {}


@pytest.mark.parametrize("case", GENERIC)
def test_generic_route_matches_and_is_named(case):
    *parts, name = GENERIC[case]
    model, x, y = built(*parts)
    result = check(model, x, y)
    assert name in result.generic
    assert result.layers[name].route == "generic"


@pytest.mark.parametrize("case", [*CASES, "transposed", "attention"])
@pytest.mark.parametrize("max_bytes", [1, 3000])
def test_tiling_changes_nothing(case, max_bytes):
    model, x, y = built(*(CASES.get(case) or GENERIC[case][:2]))
    layers = find_layers(model)
    whole = gram_matrices(model, layers, x, y, CE)
    for name, tiled in gram_matrices(model, layers, x, y, CE, max_bytes=max_bytes).items():
        torch.testing.assert_close(tiled, whole[name], rtol=1e-4, atol=1e-5 * float(whole[name].abs().max()))


@pytest.mark.parametrize("route", ["outer", "inner"])
@pytest.mark.parametrize("positions", [1, 7, 300])
def test_both_routes_are_exact(route, positions):
    left, right = torch.randn(4, positions, 3).double(), torch.randn(4, positions, 5).double()
    gradients = (left.transpose(1, 2) @ right).flatten(1)
    for max_bytes in (2**30, 4000):
        gram, used = outer_sum_gram(
            left, lambda s, u: right[s, :, u], units=5, width=1, max_bytes=max_bytes, route=route
        )
        assert used == route
        torch.testing.assert_close(gram, gradients @ gradients.T)


def test_route_follows_the_cost():
    sizes = {"samples": 32, "left": 512, "right": 4608, "max_bytes": 2**28}
    assert choose_route(positions=1, **sizes) == "inner"
    assert choose_route(positions=1024, **sizes) == "outer"
    assert choose_route(positions=4096, samples=2, left=9999, right=99999, max_bytes=2**20) == "outer"


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")
def test_fp64_agrees_with_curvlinops_empirical_fisher():
    """KFAC off by 2x (curvlinops 82, 107): reduction and scale are pinned against an independent library."""
    from curvlinops import EFLinearOperator

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(8, 3).double(), torch.randint(0, 4, (8,))
    layers = find_layers(model)
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        result = gram_probe(model, layers, x, y, loss, top_k=5)
        for layer in layers:
            fisher = EFLinearOperator(
                model, loss, list(layer.parameters), [(x, y)], check_deterministic=False
            )
            size = layer.info.numel
            dense = fisher @ torch.eye(size).double()
            # curvlinops sums under "sum"; the block is defined for the mean in either case.
            scale = len(x) if reduction == "sum" else 1
            reference = torch.linalg.eigvalsh(dense).flip(0)[:5] / scale
            found = torch.tensor(result.layers[layer.name].eigenvalues, dtype=torch.float64)
            assert (found - reference).abs().max() <= 1e-6 * reference[0]


def test_running_statistics():
    model, x, y = built(*CASES["batch norm"])
    model(x)
    model.eval()
    other = copy.deepcopy(model).train()
    expected = gram_matrices(model, find_layers(model), x, y, CE)
    found = gram_matrices(other, find_layers(other), x, y, CE, norm_statistics="running")
    for name, gram in expected.items():
        torch.testing.assert_close(found[name], gram)


def test_a_norm_frozen_by_the_user_keeps_its_running_statistics():
    model, x, y = built(*CASES["batch norm"])
    for _ in range(3):
        model(2 * x + 1)
    model[1].eval()
    frozen = gram_matrices(model, find_layers(model), x, y, CE)
    running = gram_matrices(model, find_layers(model), x, y, CE, norm_statistics="running")
    torch.testing.assert_close(frozen["0"], running["0"])


def test_sequence_loss_with_ignored_positions():
    model = Apply(lambda s, x: s.head(s.emb(x)).transpose(1, 2), emb=nn.Embedding(9, 3), head=nn.Linear(3, 9))
    x = torch.randint(0, 9, (B, 5))
    y = torch.randint(0, 9, (B, 5))
    y[0, 1:] = y[3, 2] = -100
    result = gram_probe(model, find_layers(model), x, y, CE, top_k=3)
    twin = copy.deepcopy(model).double()
    valid = int((y != -100).sum())
    rows = []
    for i in range(B):
        value = F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1], reduction="sum") * B / valid
        rows.append(torch.autograd.grad(value, twin.head.weight)[0].flatten())
    gradients = torch.stack(rows)
    bias = torch.stack(
        [
            torch.autograd.grad(
                F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1], reduction="sum") * B / valid, twin.head.bias
            )[0]
            for i in range(B)
        ]
    )
    full = torch.cat([gradients, bias], 1)
    reference = torch.linalg.eigvalsh(full @ full.T).flip(0)[:3] / B
    found = torch.tensor(result.layers["head"].eigenvalues, dtype=torch.float64)
    assert (found - reference).abs().max() <= 1e-5 * reference[0]


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_input_forms(form):
    plain, x, y = built(*CASES["linear"])
    expected = gram_matrices(plain, find_layers(plain), x, y, CE)
    model = Apply(lambda s, left, right: s.net(left + right), net=plain)
    inputs = (x, torch.zeros_like(x)) if form == "tuple" else {"left": x, "right": torch.zeros_like(x)}
    found = gram_matrices(model, find_layers(model), inputs, y, CE)
    torch.testing.assert_close(found["net.0"], expected["0"])


def test_checkpointed_region_counts_once():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randn(B, 3), torch.randint(0, 4, (B,))
    expected = gram_matrices(model, find_layers(model), x, y, CE)
    wrapped = Apply(lambda s, z: checkpoint(s.net, z, use_reentrant=False), net=model)
    found = gram_matrices(wrapped, find_layers(wrapped), x, y, CE)
    torch.testing.assert_close(found["net.0"], expected["0"])
    reentrant = Apply(lambda s, z: checkpoint(s.net, z.requires_grad_(), use_reentrant=True), net=model)
    with pytest.raises(TriAccelError, match="use_reentrant=False"):
        gram_probe(reentrant, find_layers(reentrant), x, y, CE, top_k=2)


def test_layers_without_gradient_are_reported():
    model = Apply(lambda s, x: s.a(x), a=nn.Linear(3, 4), unused=nn.Linear(3, 4), frozen=nn.Linear(3, 4))
    model.frozen.requires_grad_(False)
    x, y = torch.randn(B, 3), torch.randint(0, 4, (B,))
    result = gram_probe(model, find_layers(model), x, y, CE, top_k=2)
    assert set(result.layers) == {"a"}
    assert "unused" in result.without_gradient["unused"]
    assert "frozen" in result.without_gradient["frozen"]


# ---------------------------------------------------------------- labels


def test_sampled_labels_give_the_fisher_in_expectation():
    model, x, y = built(*CASES["linear"])
    layers = find_layers(model)
    generator = torch.Generator().manual_seed(0)
    observed = gram_probe(model, layers, x, y, CE, top_k=B)
    traces = []
    for _ in range(300):
        probe = gram_probe(model, layers, x, y, CE, top_k=B, labels="sampled", generator=generator)
        assert probe.trace == observed.trace  # noise is always that of the observed labels
        assert probe.square_norm == observed.square_norm
        traces.append(sum(probe.layers["2"].eigenvalues))
    # tr F of the last layer in closed form: mean over samples of E_y |p - onehot(y)|² (|h|² + 1).
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        hidden, p = twin[:2](x.double()), twin(x.double()).softmax(1)
        exact = float(((1 - p.square().sum(1)) * (hidden.square().sum(1) + 1)).mean())
    assert sum(traces) / len(traces) == pytest.approx(exact, rel=0.05)


def test_sampled_labels_need_a_generator_and_a_known_loss():
    model, x, y = built(*CASES["linear"])
    layers = find_layers(model)
    with pytest.raises(TriAccelError, match="generator"):
        gram_probe(model, layers, x, y, CE, top_k=1, labels="sampled")
    with pytest.raises(TriAccelError, match="observed"):
        gram_probe(
            model, layers, x, torch.randn(B, 4), nn.MSELoss(), top_k=1, labels="sampled",
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    bits = (torch.rand(B, 4) < 0.5).float()
    result = gram_probe(
        model, layers, x, bits, nn.BCEWithLogitsLoss(), top_k=1, labels="sampled",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert result.finite


# ---------------------------------------------------------------- bad input


def test_bad_input():
    model, x, y = built(*CASES["linear"])
    layers = find_layers(model)
    with pytest.raises(TriAccelError, match="top_k 7 exceeds the probe batch of 6"):
        gram_probe(model, layers, x, y, CE, top_k=7)
    with pytest.raises(TriAccelError, match="at least 2 samples"):
        gram_probe(model, layers, x[:1], y[:1], CE, top_k=1)
    with pytest.raises(TriAccelError, match="scalar"):
        gram_probe(model, layers, x, y, nn.CrossEntropyLoss(reduction="none"), top_k=1)
    with pytest.raises(TriAccelError, match="detached"):
        gram_probe(model, layers, x, y, lambda out, t: CE(out.detach(), t), top_k=1)
    model.requires_grad_(False)
    with pytest.raises(TriAccelError, match="nothing to probe"):
        gram_probe(model, find_layers(model), x, y, CE, top_k=1)


def test_nan_loss_is_reported_not_raised():
    model, x, y = built(*CASES["linear"])
    x[2, 0] = math.nan
    result = gram_probe(model, find_layers(model), x, y, CE, top_k=2)
    assert not result.finite
    assert math.isnan(result.layers["0"].curvature)


# ---------------------------------------------------------------- nothing changes


def fingerprint(model):
    state = {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "rng": torch.get_rng_state(),
    }
    plain = {
        "ids": [(n, id(p), id(p.grad)) for n, p in model.named_parameters()]
        + [(n, id(b)) for n, b in model.named_buffers()],
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "hooks": [
            (
                n,
                list(m._forward_hooks),
                list(m._forward_pre_hooks),
                list(m._backward_hooks),
                sorted(m.__dict__),
            )
            for n, m in model.named_modules()
        ],
        "flags": (
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_autocast_enabled("cpu"),
        ),
    }
    return state, plain


def assert_unchanged(before, after):
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert before[1] == after[1]


def everything_net():
    return Apply(
        lambda s, x: s.head(
            torch.cat([s.drop(F.relu(s.bn(s.conv(x)))).mean((2, 3)), s.inorm(x).mean((2, 3))], 1)
        ),
        conv=nn.Conv2d(4, 6, 3),
        bn=nn.BatchNorm2d(6),
        drop=nn.Dropout(0.5),
        inorm=nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        head=nn.Linear(10, 4),
    )


@pytest.mark.parametrize("statistics", ["probe", "running"])
def test_a_probe_changes_nothing(statistics):
    """BN buffers mutated by the probe (functorch 986): buffers, flags, gradients, RNG and hooks stay bit-identical."""
    torch.manual_seed(2)
    model = everything_net()
    model.drop.eval()
    model.bn.register_forward_hook(lambda *args: None)
    x, y = torch.randn(B, 4, 7, 7), torch.randint(0, 4, (B,))
    CE(model(x), y).backward()
    before = fingerprint(model)
    gram_probe(
        model, find_layers(model), x, y, CE, top_k=2, norm_statistics=statistics, labels="sampled",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert_unchanged(before, fingerprint(model))


def test_a_probe_that_raises_changes_nothing():
    torch.manual_seed(2)
    model = everything_net()
    x, y = torch.randn(B, 4, 7, 7), torch.randint(0, 4, (B,))

    def failing(outputs, targets):
        torch.rand(3)
        raise RuntimeError("in the loss")

    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="in the loss"):
        gram_probe(model, find_layers(model), x, y, failing, top_k=2)
    assert_unchanged(before, fingerprint(model))


def test_embedding_renormalised_in_forward_is_restored():
    model = Apply(
        lambda s, x: s.head(s.emb(x).mean(1)), emb=nn.Embedding(9, 3, max_norm=0.1), head=nn.Linear(3, 4)
    )
    x, y = torch.randint(0, 9, (B, 5)), torch.randint(0, 4, (B,))
    before = fingerprint(model)
    gram_probe(model, find_layers(model), x, y, CE, top_k=2)
    assert_unchanged(before, fingerprint(model))


def test_dropout_is_off_and_the_result_repeats():
    model, x, y = built(
        lambda: nn.Sequential(nn.Linear(3, 9), nn.Dropout(0.5), nn.Linear(9, 4)), CASES["linear"][1]
    )
    layers = find_layers(model)
    first, second = (gram_probe(model, layers, x, y, CE, top_k=3) for _ in range(2))
    assert first.layers == second.layers


def test_fp32_even_inside_autocast_and_with_reduced_matmul():
    """Probe in FP16 gives NaN (adahessian 22): FP32, autocast off, no reduced matrix products."""
    model, x, y = built(*CASES["conv"])
    layers = find_layers(model)
    expected = gram_probe(model, layers, x, y, CE, top_k=3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            found = gram_probe(model, layers, x, y, CE, top_k=3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.layers == expected.layers


def test_math_attention_backend_is_in_force():
    """Double backward missing for flash attention (pytorch 116350): the probe forces the math backend."""
    seen = []

    def attend(s, x):
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return s.head(F.scaled_dot_product_attention(s.q(x), x, x).mean(1))

    model = Apply(attend, q=nn.Linear(4, 4), head=nn.Linear(4, 4))
    x, y = torch.randn(B, 5, 4), torch.randint(0, 4, (B,))
    gram_probe(model, find_layers(model), x, y, CE, top_k=2)
    assert seen[0] == (False, True)
