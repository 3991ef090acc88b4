"""Per-layer rates over the user's own optimizer, and the fused step on its state."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from triaccel.config import EngineConfig
from triaccel.layers import find_layers
from triaccel.optim import Updater, scaled_groups
from triaccel.types import TriAccelError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}
SCALES = {"0": 0.5, "1": 2.0, "4": 1.5}
FUSED = EngineConfig(fused_update=True)
LOW = EngineConfig(fused_update=True, momentum_bf16=True)


def make(optimizer="sgd", engine=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 4)
    ).to(memory_format=torch.channels_last)
    built = (
        OPTIMIZERS[optimizer](model.parameters())
        if isinstance(optimizer, str)
        else optimizer(model.parameters())
    )
    return model, built, Updater(built, find_layers(model), engine=engine, **options)


def backward(model, step=0):
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(5, 3, 6, 6, generator=generator)
    targets = torch.randint(4, (5,), generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss


def train(model, optimizer, updater, steps, scales=None, factor=1.0, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        updater.step(scales=scales or {}, factor=factor)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---------------------------------------------------------------- the optimizer's own step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_scales_it_is_the_plain_step_bit_for_bit(name):
    model, optimizer, updater = make(name)
    plain, plain_optimizer, _ = make(name)
    train(model, optimizer, updater, 3)
    for step in range(3):
        plain_optimizer.zero_grad()
        backward(plain, step)
        plain_optimizer.step()
    assert weights(model).equal(weights(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scales_equal_an_optimizer_built_with_those_rates(name):
    model, optimizer, updater = make(name)
    plain, template, _ = make(name)
    base = template.param_groups[0]
    groups = []
    for layer in find_layers(plain):
        if layer.parameters:
            groups.append(
                {"params": list(layer.parameters), "lr": base["lr"] * SCALES.get(layer.name, 1.0) * 0.7}
            )
    reference = OPTIMIZERS[name](groups)
    train(model, optimizer, updater, 4, SCALES, 0.7)
    for step in range(4):
        reference.zero_grad()
        backward(plain, step)
        reference.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_users_groups_are_the_same_objects_with_the_same_values(name):
    model, optimizer, updater = make(name)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    before = {k: (list(v) if k == "params" else copy.copy(v)) for k, v in group.items()}
    train(model, optimizer, updater, 2, SCALES, 0.5)
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert len(groups) == 1
    assert group.keys() == before.keys()
    assert all(p is q for p, q in zip(group["params"], before["params"], strict=True))
    assert all(group[k] == before[k] for k in before if k != "params")


def test_groups_come_back_when_the_step_fails():
    model, optimizer, updater = make()
    groups = optimizer.param_groups
    backward(model)

    def fail():
        raise RuntimeError("closure")

    with pytest.raises(RuntimeError, match="closure"):
        updater.step(scales=SCALES, closure=fail)
    assert optimizer.param_groups is groups


def test_state_dict_loads_in_plain_pytorch_and_back():
    model, optimizer, updater = make()
    train(model, optimizer, updater, 2, SCALES)
    plain, plain_optimizer, plain_updater = make()
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, updater, 2, SCALES, start=2)
    train(plain, plain_optimizer, plain_updater, 2, SCALES, start=2)
    assert weights(model).equal(weights(plain))


@pytest.mark.parametrize("engine", [None, FUSED], ids=["ordinary", "fused"])
def test_schedulers_step_without_a_warning_and_are_followed(engine):
    model, optimizer, updater = make(engine=engine)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, updater, 1, SCALES)
        scheduler.step()
    before = weights(model)
    train(model, optimizer, updater, 1, SCALES, start=1)
    assert optimizer.param_groups[0]["lr"] == 0
    assert weights(model).equal(before)


@pytest.mark.parametrize("engine", [None, FUSED], ids=["ordinary", "fused"])
def test_step_hooks_run_once(engine):
    model, optimizer, updater = make(engine=engine)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, updater, 1, SCALES)
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("engine", [None, FUSED], ids=["ordinary", "fused"])
def test_closures_run_once_with_gradients_on(engine):
    model, _, updater = make(engine=engine)
    losses = []
    updater.step(scales=SCALES, closure=lambda: losses.append(backward(model)) or losses[-1])
    assert len(losses) == 1
    assert losses[0].requires_grad


@pytest.mark.parametrize("engine", [None, FUSED], ids=["ordinary", "fused"])
def test_parameters_of_no_layer_have_scale_one(engine):
    extra = nn.Parameter(torch.ones(3))
    _, _, updater = make(lambda p: torch.optim.SGD([*p, extra], lr=0.1), engine)
    extra.grad = torch.ones(3)
    updater.step(scales=SCALES, factor=2.0)
    torch.testing.assert_close(extra.detach(), torch.full((3,), 0.8))


@pytest.mark.parametrize("engine", [None, FUSED], ids=["ordinary", "fused"])
def test_several_groups_keep_their_own_rate_and_decay(engine):
    def build(parameters):
        first, *rest = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": rest}], lr=0.1
        )

    model, _, updater = make(build, engine)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model)
    updater.step(scales={"0": 0.5})
    first, second = list(model.parameters())[:2]
    torch.testing.assert_close(first.detach(), before[0] - 0.25 * (first.grad + 0.1 * before[0]))
    torch.testing.assert_close(second.detach(), before[1] - 0.1 * second.grad)


def test_a_named_optimizer_keeps_names_beside_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    first = model[0].weight
    pairs = scaled_groups(optimizer.param_groups, scale_of={first: 0.5}, factor=1.0)
    assert [part["param_names"] for part, _ in pairs] == [["0.weight"], ["0.bias", "1.weight", "1.bias"]]
    assert [part["lr"] for part, _ in pairs] == [0.05, 0.1]


class CountingSGD(torch.optim.SGD):
    """Keeps a count in its group, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["seen"] = max(group.get("seen", 0.0), group["lr"]) if group.get("watch") else 0.0
        return super().step(closure)


def test_what_an_optimizer_counts_in_its_group_is_kept():
    model, optimizer, updater = make(lambda p: CountingSGD(p, lr=0.1))
    train(model, optimizer, updater, 3, SCALES)
    assert optimizer.param_groups[0]["k"] == 3
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_group_value_that_follows_the_rate_is_refused():
    model, optimizer, updater = make(lambda p: CountingSGD(p, lr=0.1))
    optimizer.param_groups[0]["watch"] = True
    with pytest.raises(TriAccelError, match="'seen' per parameter group that depends on the learning rate"):
        train(model, optimizer, updater, 1, SCALES)


def test_unknown_layers_and_lbfgs_are_refused():
    model, _, updater = make()
    backward(model)
    with pytest.raises(TriAccelError, match=r"\['nowhere'\], which are no layers"):
        updater.step(scales={"nowhere": 1.0})
    _, _, updater = make(torch.optim.LBFGS)
    with pytest.raises(TriAccelError, match="LBFGS keeps one curvature history"):
        updater.step(scales=SCALES)


def test_statistics_beside_the_ordinary_step():
    model, _, updater = make()
    backward(model)
    grads = [p.grad.clone() for p in model[4].parameters()]
    updater.step(scales={}, statistics=True)
    row = [layer.name for layer in updater.layers].index("4")
    expected = sum(float(g.double().square().sum()) for g in grads)
    assert updater.gradient_stats.square[row].item() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- the fused step

FUSED_OPTIMIZERS = {
    "sgd": OPTIMIZERS["sgd"],
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), eps=1e-4),
}


@pytest.mark.parametrize("name", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("scales", [{}, SCALES], ids=["unscaled", "scaled"])
def test_fused_equals_torch(name, scales):
    ours, plain = make(FUSED_OPTIMIZERS[name], FUSED), make(FUSED_OPTIMIZERS[name])
    train(*ours, 5, scales, 0.9)
    train(*plain, 5, scales, 0.9)
    torch.testing.assert_close(weights(ours[0]), weights(plain[0]), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("engine", [FUSED, LOW], ids=["fp32", "bf16"])
def test_fused_state_goes_to_plain_pytorch_through_a_file_and_back(name, engine):
    model, optimizer, updater = make(FUSED_OPTIMIZERS[name], engine)
    train(model, optimizer, updater, 3, SCALES)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain, plain_optimizer, plain_updater = make(FUSED_OPTIMIZERS[name])
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        theirs = plain_optimizer.state[q]
        for key, value in optimizer.state[p].items():
            assert theirs[key].float().equal(value.float()), key
            assert theirs[key].dtype == torch.float32
    train(plain, plain_optimizer, plain_updater, 1, SCALES, start=3)
    back, back_optimizer, back_updater = make(FUSED_OPTIMIZERS[name], engine)
    back.load_state_dict(model.state_dict())
    back_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back_updater.load_state_dict(updater.state_dict())
    train(model, optimizer, updater, 2, SCALES, start=3)
    train(back, back_optimizer, back_updater, 2, SCALES, start=3)
    assert weights(model).equal(weights(back)), "rounding must follow the saved seed and step"


def test_bf16_momentum_halves_its_bytes_and_follows_fp32():
    ours, plain = make("sgd", LOW), make("sgd", FUSED)
    start = weights(ours[0])
    train(*ours, 5)
    train(*plain, 5)
    buffers = [ours[1].state[p]["momentum_buffer"] for p in ours[0].parameters()]
    assert {b.dtype for b in buffers} == {torch.bfloat16}
    error = (weights(ours[0]) - weights(plain[0])).norm() / (weights(plain[0]) - start).norm()
    assert 0 < float(error) < 0.05


def test_bf16_momentum_is_reproducible_by_seed():
    runs = []
    for seed in (1, 1, 2):
        model, optimizer, updater = make("sgd", LOW, seed=seed)
        train(model, optimizer, updater, 5)
        runs.append(weights(model))
    assert runs[0].equal(runs[1])
    assert not runs[0].equal(runs[2])


def test_fused_writes_are_seen_by_autograd():
    model, _, updater = make("sgd", FUSED)
    loss = model(torch.randn(2, 3, 6, 6, requires_grad=True)).sum()
    backward(model)
    updater.step(scales={})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_gradient_stay():
    model, optimizer, updater = make("adamw", FUSED)
    backward(model)
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    updater.step(scales={})
    assert model[0].weight.detach().equal(before)
    assert model[0].weight not in optimizer.state


def test_found_inf_on_the_device_needs_the_fused_update():
    model, _, updater = make("sgd", FUSED)
    backward(model)
    before = weights(model)
    updater.step(scales={}, found_inf=torch.ones(1))
    assert weights(model).equal(before)
    _, _, updater = make("sgd")
    with pytest.raises(TriAccelError, match=r"needs engine\.fused_update"):
        updater.step(scales={}, found_inf=torch.ones(1))


@pytest.mark.parametrize(
    ("build", "engine", "match"),
    [
        (OPTIMIZERS["adagrad"], FUSED, "covers torch.optim.SGD and AdamW, not Adagrad"),
        (lambda p: CountingSGD(p, lr=0.1), FUSED, "not CountingSGD"),
        (OPTIMIZERS["adamw amsgrad"], FUSED, "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), FUSED, "differentiable=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1), LOW, "momentum 0"),
    ],
)
def test_what_the_fused_update_does_not_have_is_refused_at_construction(build, engine, match):
    with pytest.raises(TriAccelError, match=match):
        make(build, engine)


def test_a_parameter_that_is_not_one_run_of_memory_is_refused():
    parameter = nn.Parameter(torch.randn(4, 4)[:, ::2])
    updater = Updater(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), (), engine=FUSED)
    parameter.grad = torch.ones(4, 2)
    with pytest.raises(TriAccelError, match="does not fill one run of memory"):
        updater.step(scales={})
