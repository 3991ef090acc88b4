"""Layer discovery: each trainable parameter in exactly one layer; pins and ties."""

import pytest
import torch
import torchvision
from torch import nn

from triaccel.layers import find_layers
from triaccel.types import Precision, TriAccelError


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "vit_b_16"])
def test_every_parameter_belongs_to_exactly_one_layer(name):
    with torch.device("meta"):
        model = getattr(torchvision.models, name)(num_classes=10)
    layers = find_layers(model)
    owned = [n for layer in layers for n in layer.parameter_names]
    assert sorted(owned) == sorted(n for n, _ in model.named_parameters())
    assert sum(layer.info.numel for layer in layers) == sum(p.numel() for p in model.parameters())


def test_resnet18_has_21_compute_layers():
    with torch.device("meta"):
        model = torchvision.models.resnet18(num_classes=10)
    assert sum(layer.info.role == "compute" for layer in find_layers(model)) == 21


def test_attention_and_rnn_are_one_layer_each():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "rnn": nn.LSTM(8, 8, num_layers=2)})
    layers = find_layers(model)
    assert [(layer.name, layer.info.role) for layer in layers] == [
        ("attention", "compute"),
        ("rnn", "compute"),
    ]
    assert sum(layer.info.numel for layer in layers) == sum(p.numel() for p in model.parameters())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_belong_to_the_first_layer():
    embedding, head = find_layers(Tied())
    assert head.info.tied_to == "embedding"
    assert head.parameters == ()
    assert embedding.info.numel == 28


def test_a_module_used_twice_is_one_layer():
    shared = nn.Linear(3, 3)
    assert [layer.name for layer in find_layers(nn.Sequential(shared, nn.ReLU(), shared))] == ["0"]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    first, second = find_layers(model)
    assert first.parameters == ()
    assert len(second.parameters) == 2


def test_parameters_of_the_root_form_a_layer():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)

    root, linear = find_layers(Scaled())
    assert (root.name, root.info.role, root.parameter_names) == ("", "other", ("scale",))
    assert linear.name == "linear"


def test_pins_by_pattern_and_the_later_wins():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pinned = find_layers(model, {"*": Precision.BF16, "1": Precision.FP32})
    assert [layer.info.pin for layer in pinned] == [Precision.BF16, Precision.FP32]


def test_unknown_pin_pattern_lists_layers():
    with pytest.raises(TriAccelError, match=r"'fc\.\*' matches no layer.*'0'"):
        find_layers(nn.Sequential(nn.Linear(2, 2)), {"fc.*": Precision.FP32})


def test_tied_layers_pinned_apart():
    with pytest.raises(TriAccelError, match="'embedding' and 'head' share a parameter"):
        find_layers(Tied(), {"embedding": Precision.FP32, "head": Precision.BF16})
