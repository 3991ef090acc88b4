"""Fused update: eager reference and interpreted Triton kernel against float64 and ``torch.optim``."""

import math

import pytest
import torch

from triaccel.kernels import AdamWRule, SgdRule, checks, fused_update_, grad_stats
from triaccel.kernels.reference import round_stochastic_
from triaccel.kernels.tolerance import TOLERANCE, deviation
from triaccel.types import TriAccelError

RULES = [
    SgdRule(),
    SgdRule(momentum=0.9),
    SgdRule(momentum=0.9, nesterov=True),
    SgdRule(momentum=0.9, dampening=0.1, maximize=True),
    AdamWRule(),
    AdamWRule(0.8, 0.99, 1e-6, maximize=True),
]


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off, tests/gpu covers the Triton kernels")
    return request.param


@pytest.fixture
def one_thread():
    """Thousands of tiny steps: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state(parameters, rule, dtype=torch.float32):
    adam = isinstance(rule, AdamWRule)
    first = [torch.zeros_like(p, dtype=dtype) for p in parameters] if adam or rule.momentum else []
    return first, [torch.zeros_like(p) for p in parameters] if adam else []


def update(parameters, grads, moments, rule, step, **options):
    given = {
        "rates": [0.01 * (1 + i % 3) for i in range(len(parameters))],
        "weight_decays": [0.01] * len(parameters),
        "steps": [step] * len(parameters),
    } | options
    return fused_update_(parameters, grads, *moments, rule=rule, **given)


def torch_optimizer(parameters, rule, dtype=torch.float64):
    """The same rule by torch.optim, one group per parameter so that each has its own rate."""
    leaves = [p.to(dtype).clone().requires_grad_() for p in parameters]
    groups = [{"params": [p], "lr": 0.01 * (1 + i % 3)} for i, p in enumerate(leaves)]
    if isinstance(rule, AdamWRule):
        return leaves, torch.optim.AdamW(
            groups, betas=(rule.beta1, rule.beta2), eps=rule.eps, weight_decay=0.01, maximize=rule.maximize
        )
    return leaves, torch.optim.SGD(
        groups,
        momentum=rule.momentum,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        weight_decay=0.01,
        maximize=rule.maximize,
    )


def run_beside_torch(rule, steps, backend, shapes, low=False):
    parameters = [torch.randn(shape) for shape in shapes]
    leaves, optimizer = torch_optimizer(parameters, rule)
    moments = state(parameters, rule, torch.bfloat16 if low else torch.float32)
    start = [p.clone() for p in parameters]
    for step in range(1, steps + 1):
        grads = [torch.randn(shape) for shape in shapes]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.double()
        optimizer.step()
        update(parameters, grads, moments, rule, step, backend=backend, sequence=step)
    travelled = [
        (e - s.double()).norm() / math.sqrt(max(1, s.numel())) for e, s in zip(leaves, start, strict=True)
    ]
    return parameters, [leaf.detach() for leaf in leaves], travelled


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_three_steps_against_float64(rule, backend):
    parameters, exact, _ = run_beside_torch(rule, 3, backend, [(1,), (0,), (17, 5), (1025,), (16385,)])
    for p, e in zip(parameters, exact, strict=True):
        assert deviation(p, e) <= 3 * TOLERANCE["update", torch.float32].value


@pytest.mark.parametrize(
    "rule", [SgdRule(momentum=0.9), SgdRule(momentum=0.9, nesterov=True), AdamWRule()], ids=str
)
@pytest.mark.usefixtures("one_thread")
def test_thousand_steps_of_the_reference(rule):
    parameters, exact, _ = run_beside_torch(rule, 1000, "reference", [(2000,), (3, 4, 5, 5)])
    kind = "1000 steps AdamW" if isinstance(rule, AdamWRule) else "1000 steps"
    for p, e in zip(parameters, exact, strict=True):
        assert deviation(p, e) <= TOLERANCE[kind, torch.float32].value


@pytest.mark.parametrize("rule", [SgdRule(momentum=0.9), AdamWRule()], ids=str)
@pytest.mark.usefixtures("one_thread")
def test_thousand_steps_of_the_kernel(rule):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off, tests/gpu covers the Triton kernels")
    parameters, exact, _ = run_beside_torch(rule, 1000, "triton", [(300,)])
    assert deviation(parameters[0], exact[0]) <= TOLERANCE["1000 steps", torch.float32].value


@pytest.mark.parametrize("rule", [SgdRule(momentum=0.9), AdamWRule()], ids=str)
@pytest.mark.usefixtures("one_thread")
def test_thousand_steps_with_bf16_momentum(rule):
    parameters, exact, travelled = run_beside_torch(rule, 1000, "reference", [(4000,)], low=True)
    error = (parameters[0].double() - exact[0]).norm() / math.sqrt(4000)
    assert error / travelled[0] <= TOLERANCE["1000 steps", torch.bfloat16].value


def test_channels_last_parameters_with_gradients_in_another_order(backend):
    parameter = torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)
    expected, grad = parameter.clone(), torch.randn(8, 3, 5, 5)
    moment = torch.zeros_like(parameter)
    update(
        [parameter], [grad], ([moment], []), SgdRule(momentum=0.9), 1, weight_decays=[0.0], backend=backend
    )
    torch.testing.assert_close(parameter, expected - 0.01 * grad, rtol=1e-6, atol=1e-7)
    assert parameter.stride() == expected.stride()
    torch.testing.assert_close(moment, grad)


def test_five_hundred_tensors(backend):
    shapes = [(int(n),) for n in torch.randint(0, 200, (500,))]
    parameters, exact, _ = run_beside_torch(SgdRule(momentum=0.9), 2, backend, shapes)
    assert max(deviation(p, e) for p, e in zip(parameters, exact, strict=True)) <= 2e-6


@pytest.mark.parametrize("rule", [SgdRule(momentum=0.9), AdamWRule()], ids=str)
def test_statistics_of_the_same_gradients_after_unscaling(rule, backend):
    parameters = [torch.randn(3000), torch.randn(20, 20), torch.randn(5)]
    grads = [torch.randn_like(p) * 1024 for p in parameters]
    grads[2][1] = math.nan
    options = {"segments": [1, 0, 1], "segment_count": 3, "extremes": True, "backend": backend}
    found = update(parameters, grads, state(parameters, rule), rule, 1, inv_scale=1 / 1024, **options)
    exact = grad_stats(
        [g / 1024 for g in grads], [1, 0, 1], segment_count=3, extremes=True, backend="reference"
    )
    torch.testing.assert_close(found.values, exact.values, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("rule", [SgdRule(momentum=0.9), AdamWRule()], ids=str)
def test_found_inf_stops_every_parameter_or_one(rule, backend):
    parameters = [torch.randn(2000), torch.randn(30)]
    before = [p.clone() for p in parameters]
    grads = [torch.randn_like(p) for p in parameters]
    moments = state(parameters, rule)
    update(parameters, grads, moments, rule, 1, found_inf=torch.ones(1), backend=backend)
    assert all(p.equal(b) for p, b in zip(parameters, before, strict=True))
    assert all(not m.any() for kind in moments for m in kind)
    update(parameters, grads, moments, rule, 1, found_inf=torch.tensor([1.0, 0.0]), backend=backend)
    assert parameters[0].equal(before[0])
    assert not parameters[1].equal(before[1])


# ---------------------------------------------------------------- stochastic rounding


def rounded(value, *, seed=0, sequence=1, backend="reference", entries=1 << 16):
    first = [torch.zeros(entries, dtype=torch.bfloat16)]
    update(
        [torch.zeros(entries)],
        [torch.full((entries,), value)],
        (first, []),
        SgdRule(momentum=0.9),
        1,
        weight_decays=[0.0],
        seed=seed,
        sequence=sequence,
        backend=backend,
    )
    return first[0].double()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
def test_rounding_is_unbiased_and_goes_to_neighbours_only(fraction, sign, backend):
    up = (rounded(sign * (1 + fraction * 2.0**-7), backend=backend) * sign - 1) * 2.0**7
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    limit = 5 * math.sqrt(fraction * (1 - fraction) / up.numel())
    assert abs(float(up.mean()) - fraction) <= limit


def test_rounding_is_fixed_by_seed_and_step(backend):
    value = 1 + 0.5 * 2.0**-7
    base = rounded(value, seed=3, sequence=5, backend=backend, entries=4096)
    assert base.equal(rounded(value, seed=3, sequence=5, backend=backend, entries=4096))
    for seed, sequence in ((4, 5), (3, 6)):
        other = rounded(value, seed=seed, sequence=sequence, backend=backend, entries=4096)
        assert 0.4 < float((other == base).double().mean()) < 0.6


def test_parameters_do_not_share_their_rounding(backend):
    entries, value = 4096, 1 + 0.5 * 2.0**-7
    parameters = [torch.zeros(entries) for _ in range(2)]
    first = [torch.zeros(entries, dtype=torch.bfloat16) for _ in range(2)]
    grads = [torch.full((entries,), value) for _ in range(2)]
    rule = SgdRule(momentum=0.9)
    update(parameters, grads, (first, []), rule, 1, weight_decays=[0.0] * 2, backend=backend)
    assert 0.4 < float((first[0] == first[1]).double().mean()) < 0.6


def test_rounding_does_not_depend_on_which_parameters_are_updated_together(backend):
    """With equal keys, one call for both parameters and one call each give the same bits (gradient release)."""
    together, alone = ([torch.zeros(3000, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
    grads = [torch.randn(3000), torch.randn(3000)]
    rule = SgdRule(momentum=0.9)
    options = {"seed": 1, "sequence": 2, "backend": backend}
    update(
        [torch.zeros(3000) for _ in range(2)],
        grads,
        (together, []),
        rule,
        1,
        keys=[4, 9],
        rates=[0.1] * 2,
        **options,
    )
    for i, key in enumerate((4, 9)):
        update([torch.zeros(3000)], [grads[i]], ([alone[i]], []), rule, 1, keys=[key], rates=[0.1], **options)
    assert all(a.equal(b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, math.inf, -math.inf, 2.0**-126, 3.3895313892515355e38])
def test_values_that_bf16_has_stay_as_they_are(value):
    noise = torch.arange(0, 65536, dtype=torch.int32)
    out = round_stochastic_(torch.empty(65536, dtype=torch.bfloat16), torch.full((65536,), value), noise)
    assert out.view(torch.int16).unique().numel() == 1
    assert float(out[0]) == value


def test_rounding_probability_is_exact_over_all_noise():
    """Summed over all 65,536 noises the mean is the value itself, with no statistics involved."""
    noise = torch.arange(0, 65536, dtype=torch.int32)
    for value in torch.randn(20).tolist():
        v = torch.full((65536,), value)
        exact = float(v[0])
        out = round_stochastic_(torch.empty(65536, dtype=torch.bfloat16), v, noise)
        assert float(out.double().mean()) == pytest.approx(exact, rel=1e-12)


def test_the_gpu_checks_hold_when_interpreted():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the interpreter is off")
    device = torch.device("cpu")
    results = checks.check_rounding(device, entries=1 << 15)
    for rule in RULES[:2]:
        results += checks.check_update(device, rule, shapes=[(1,), (1025,)])
    assert all(result["ok"] for result in results), results


@pytest.mark.parametrize(
    ("parameter", "grad", "match"),
    [
        (torch.ones(2).bfloat16(), torch.ones(2), "parameter 0 is torch.bfloat16"),
        (torch.ones(2), torch.ones(2).half(), "gradient 0 is torch.float16"),
        (torch.ones(2), torch.ones(2).to_sparse(), "gradient 0 is sparse"),
    ],
)
def test_errors_name_the_tensor(parameter, grad, match):
    with pytest.raises(TriAccelError, match=match):
        update([parameter], [grad], ([], []), SgdRule(), 1)
