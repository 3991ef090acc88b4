"""A precision map on any module: what runs, what stays as it was, what the joins do."""

import copy
import io
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triaccel.casting import Caster
from triaccel.layers import find_layers
from triaccel.regions import autocast_format, map_tensors, raised
from triaccel.types import Precision, TriAccelError

FP16, BF16, FP32 = Precision


def caster_for(model, **formats):
    layers = find_layers(model)
    caster = Caster(model, layers, device_type="cpu")
    chosen = {layer.name: FP32 for layer in layers if layer.info.role == "compute"}
    chosen.update({name.replace("__", "."): precision for name, precision in formats.items()})
    return caster, chosen


def run(caster, model, *inputs, **kwargs):
    with caster.forward():
        return model(*inputs, **kwargs)


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def output_dtypes(model, *names):
    seen = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, out, name=name: seen.__setitem__(name, out.dtype)
        )
        for name in names
    ]
    return seen, handles


@pytest.mark.parametrize("low", [BF16, FP16])
def test_each_layer_runs_in_its_format_and_the_model_gives_fp32(low):
    model = convnet()
    caster, chosen = caster_for(model, **{"0": low, "3": FP32, "7": low})
    caster.apply(chosen, version=1)
    out = run(caster, model, torch.randn(4, 3, 6, 6))
    assert out.dtype is torch.float32
    assert caster.verified["0"] is low.torch_dtype
    assert caster.verified["3"] is torch.float32
    assert caster.verified["7"] is low.torch_dtype
    assert caster.mismatches() == ()
    out.sum().backward()
    assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in model.parameters())


def test_values_are_those_of_regions_written_by_hand():
    model = convnet().eval()
    caster, chosen = caster_for(model, **{"0": BF16, "3": FP32, "7": BF16})
    caster.apply(chosen, version=1)
    x = torch.randn(4, 3, 6, 6)
    with torch.no_grad():
        got = run(caster, model, x)
        low = torch.bfloat16
        h = F.conv2d(x.to(low), model[0].weight.to(low), model[0].bias.to(low), padding=1)
        h = F.relu(
            F.batch_norm(h, model[1].running_mean, model[1].running_var, model[1].weight, model[1].bias)
        )
        h = F.conv2d(h.float(), model[3].weight, model[3].bias, padding=1, groups=8)
        h = F.batch_norm(h, model[4].running_mean, model[4].running_var, model[4].weight, model[4].bias)
        h = F.adaptive_avg_pool2d(h, 1).flatten(1)
        expected = F.linear(h.to(low), model[7].weight.to(low), model[7].bias.to(low)).float()
    assert torch.equal(got, expected)


def test_norm_follows_its_input_unless_pinned_pytorch_88929():
    """pytorch 88929: BatchNorm follows its input's dtype; that is the stated policy, and a pin overrides it."""
    model = convnet()
    x = torch.randn(4, 3, 6, 6)
    caster, chosen = caster_for(model, **{"0": BF16, "3": BF16, "7": BF16})
    caster.apply(chosen, version=1)
    run(caster, model, x)
    assert caster.verified["1"] is torch.bfloat16
    caster.apply(chosen | {"1": FP32}, version=2)
    run(caster, model, x)
    assert caster.verified["1"] is torch.float32
    assert caster.verified["4"] is torch.bfloat16
    caster.apply(chosen | {"0": FP32, "1": BF16}, version=3)
    run(caster, model, x)
    assert caster.verified["1"] is torch.bfloat16
    assert model[1].running_mean.dtype is torch.float32


def test_all_fp32_installs_nothing_and_is_bit_identical():
    model = convnet()
    caster, chosen = caster_for(model)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    caster.apply(chosen, version=0)
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    x = torch.randn(4, 3, 6, 6)
    plain = copy.deepcopy(model)
    assert torch.equal(run(caster, model, x), plain(x))
    assert caster.verified["0"] is torch.float32
    assert not any(module._forward_hooks for module in model.modules())


def test_remove_leaves_the_model_as_found():
    model = convnet()
    model[3].forward = model[3].forward  # a user's own instance attribute
    mine = model[3].__dict__["forward"]
    caster, chosen = caster_for(model, **{"0": BF16, "3": FP32, "7": BF16})
    caster.apply(chosen, version=1)
    run(caster, model, torch.randn(4, 3, 6, 6))
    assert model[3].__dict__["forward"] is not mine
    caster.remove()
    assert model[3].__dict__["forward"] is mine
    assert [n for n, m in model.named_modules() if "forward" in m.__dict__] == ["3"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_map_of_another_model_is_refused():
    caster, chosen = caster_for(convnet())
    with pytest.raises(TriAccelError, match="'head'"):
        caster.apply(chosen | {"head": BF16}, version=1)


def test_state_dict_hooks_and_signature_are_unchanged():
    model = convnet()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    x = torch.randn(4, 3, 6, 6, requires_grad=True)
    names = list(model.state_dict())
    caster, chosen = caster_for(model, **{"0": FP32, "3": BF16, "7": BF16})
    caster.apply(chosen, version=1)
    assert list(model.state_dict()) == names
    run(caster, model, x).sum().backward()
    assert calls == ["forward", "backward"]
    import inspect

    assert list(inspect.signature(model[0].forward).parameters) == ["input"]


def test_deepcopy_binds_the_regions_to_the_copy():
    model = convnet()
    caster, chosen = caster_for(model, **{"0": FP32, "3": BF16, "7": BF16})
    caster.apply(chosen, version=1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(4, 3, 6, 6)
    assert twin[0].forward.__self__ is twin[0]
    seen, _ = output_dtypes(twin, "0", "3")
    with caster.forward():
        twin(x)
    assert seen == {"0": torch.float32, "3": torch.bfloat16}
    assert not torch.equal(run(caster, model, x), twin(x))


def test_pickling_leaves_the_regions_out():
    model = convnet()
    caster, chosen = caster_for(model, **{"0": FP32, "3": BF16, "7": BF16})
    caster.apply(chosen, version=1)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.randn(4, 3, 6, 6)
    caster.remove()
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_evaluation_between_steps_runs_in_fp32():
    model = convnet().eval()
    x = torch.randn(4, 3, 6, 6)
    expected = model(x)
    caster, chosen = caster_for(model, **{"0": BF16, "3": FP32, "7": BF16})
    caster.apply(chosen, version=1)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert run(caster, model, x).grad_fn is not None
    with torch.no_grad():
        first = run(caster, model, x)
    assert torch.equal(first, run(caster, model, x))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float())
        return self.c(x)


def test_an_autocast_region_inside_the_model_is_the_users():
    model = Nested()
    caster, chosen = caster_for(model, a=BF16, b=BF16, c=FP32)
    caster.apply(chosen, version=1)
    run(caster, model, torch.randn(2, 4))
    assert caster.verified == {"a": torch.bfloat16, "b": torch.float32, "c": torch.float32}
    assert caster.mismatches() == ("b",)


def test_an_autocast_region_around_the_step_does_not_override_the_map():
    model = Nested()
    caster, chosen = caster_for(model)
    caster.apply(chosen, version=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(caster, model, torch.randn(2, 4))
        assert autocast_format("cpu") is torch.bfloat16
    assert out.dtype is torch.float32
    assert caster.mismatches() == ()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.head = nn.Linear(8, 2)
        self.seen = []

    def forward(self, x):
        a, b = self.left(x), self.right(x)
        both = a + b
        joined = torch.cat([a, b], dim=-1)
        product = a @ b.transpose(-1, -2)
        self.seen = [both.dtype, joined.dtype, product.dtype]
        return self.head(joined + both.repeat(1, 2)) + product.mean()


def test_joins_of_two_formats_take_the_wider_one_and_products_the_outer_one():
    model = Residual()
    caster, chosen = caster_for(model, left=BF16, right=FP32, head=FP32)
    caster.apply(chosen, version=1)
    out = run(caster, model, torch.randn(3, 4))
    assert model.seen == [torch.float32, torch.float32, torch.bfloat16]
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", [BF16, FP32])
def test_attention_is_one_layer(training, precision):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            h = self.up(x)
            mask = torch.zeros(5, 5)
            return self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]

    model = Block().train(training)
    other = FP32 if precision is BF16 else BF16
    caster, chosen = caster_for(model, up=other, attention=precision)
    assert set(chosen) == {"up", "attention"}
    caster.apply(chosen, version=1)
    out = run(caster, model, torch.randn(2, 5, 8))
    assert caster.mismatches() == ()
    assert out.dtype is torch.float32
    out.sum().backward()


def test_an_rnn_is_one_layer_and_one_that_ignores_the_region_is_said():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.rnn = nn.GRU(4, 4, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(tokens), torch.tensor([3, 2]), batch_first=True
            )
            _, state = self.rnn(packed)
            return self.head(state[-1])

    model = Reader()
    caster, chosen = caster_for(model, embed=BF16, rnn=FP32, head=BF16)
    caster.apply(chosen, version=1)
    out = run(caster, model, torch.zeros(2, 3, dtype=torch.long))
    assert caster.mismatches() == ("embed",)
    assert caster.verified["rnn"] is torch.float32
    out.sum().backward()
    caster.apply(chosen | {"rnn": BF16}, version=2)
    run(caster, model, torch.zeros(2, 3, dtype=torch.long))
    assert "rnn" in caster.mismatches()


def test_tied_weights_and_their_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = Tied()
    caster, chosen = caster_for(model, first=BF16, second=BF16)
    caster.apply(chosen, version=1)
    x = torch.randn(8, 4)
    run(caster, model, x).sum().backward()
    low = model.first.weight.grad.clone()
    caster.remove()
    model.zero_grad()
    model(x).sum().backward()
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, model.first.weight.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_recompute_runs_under_the_same_map(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = convnet()
            self.dtypes = []
            self.body[3].register_forward_hook(lambda _m, _i, out: self.dtypes.append(out.dtype))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model = Checkpointed()
    caster, chosen = caster_for(model, body__0=BF16, body__3=FP32, body__7=BF16)
    caster.apply(chosen, version=1)
    out = run(caster, model, torch.randn(4, 3, 6, 6, requires_grad=True))
    out.sum().backward()
    assert model.dtypes == [torch.float32, torch.float32]
    assert caster.verified["body.0"] is torch.bfloat16


class Own(nn.Module):
    """A module with an operation on a parameter of its own, and a layer inside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(F.linear(x, self.weight))


def test_a_custom_module_can_be_kept_in_fp32_deepspeed_5812():
    """DeepSpeed 5812, 4689: a chosen layer is kept in FP32, also one that is no stock layer; layers inside keep theirs."""
    model = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 2))
    seen = []
    model[1].inner.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0].dtype))
    caster, chosen = caster_for(model, **{"0": BF16, "1": FP32, "1__inner": BF16, "2": BF16})
    caster.apply(chosen, version=1)
    run(caster, model, torch.randn(2, 4))
    assert seen == [torch.float32]
    assert caster.verified["1.inner"] is torch.bfloat16
    caster.apply(chosen | {"1": BF16, "1.inner": FP32}, version=2)
    run(caster, model, torch.randn(2, 4))
    assert seen[-1] is torch.bfloat16
    assert caster.verified["1.inner"] is torch.float32


def test_a_root_that_is_itself_a_layer():
    model = nn.Linear(4, 2)
    caster, _ = caster_for(model)
    caster.apply({"": BF16}, version=1)
    assert run(caster, model, torch.randn(3, 4)).dtype is torch.float32
    caster.remove()
    assert "forward" not in model.__dict__


class Pair(NamedTuple):
    logits: torch.Tensor
    name: str


def test_outputs_of_any_shape_leave_as_fp32():
    low = torch.ones(2, dtype=torch.bfloat16)
    index = torch.ones(2, dtype=torch.long)
    got = raised({"pair": Pair(low, "x"), "list": [low, index], "other": None})
    assert got["pair"].logits.dtype is torch.float32
    assert isinstance(got["pair"], Pair)
    assert got["list"][0].dtype is torch.float32
    assert got["list"][1] is index
    same = (torch.ones(2), {"a": index})
    assert map_tensors(same, lambda tensor: tensor) is same
    assert raised(torch.ones(1, dtype=torch.float64)).dtype is torch.float64


def test_keyword_inputs_are_taken_up_too():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale):
            return F.linear(x * scale, self.weight, self.bias)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = Scaled(4, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h, scale=h)

    model = Model()
    caster, chosen = caster_for(model, a=BF16, b=FP32)
    caster.apply(chosen, version=1)
    assert run(caster, model, torch.randn(2, 4)).dtype is torch.float32
    assert caster.mismatches() == ()


def test_maps_change_without_traces_of_the_former_one():
    model = convnet()
    caster, chosen = caster_for(model)
    x = torch.randn(4, 3, 6, 6)
    for version, precision in enumerate([BF16, FP32, FP16, BF16]):
        caster.apply(chosen | {"3": precision}, version=version)
        run(caster, model, x)
        assert caster.verified["3"] is precision.torch_dtype
        assert caster.version == version


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_code_is_made_once_per_map_and_never_keeps_an_old_one_pytorch_112260(in_place):
    """pytorch 112260: compiled code keeps an old precision; here the map is part of what dynamo guards on."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    caster = Caster(compiled, find_layers(compiled), device_type="cpu")
    prefix = "" if in_place else "_orig_mod."
    maps = [{"0": FP32, "2": FP32}, {"0": BF16, "2": BF16}, {"0": BF16, "2": FP32}]
    maps = [{prefix + name: precision for name, precision in m.items()} for m in maps]
    x = torch.randn(3, 4)
    counts, outputs = [], []
    for version, chosen in enumerate([*maps, *maps]):
        caster.apply(chosen, version=version)
        for _ in range(3):
            with caster.forward():
                out = compiled(x)
        counts.append(len(graphs))
        outputs.append(out.detach())
    assert counts == [1, 2, 3, 3, 3, 3]
    caster.remove()
    eager = nn.Sequential(*model)
    for chosen, out in zip(maps, outputs, strict=False):
        reference = Caster(eager, find_layers(eager), device_type="cpu")
        reference.apply({name.removeprefix("_orig_mod."): p for name, p in chosen.items()}, version=0)
        with reference.forward():
            assert torch.equal(eager(x), out)
        reference.remove()
    assert torch.equal(outputs[3], outputs[0])
