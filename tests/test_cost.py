"""The cost table: what is measured, that measuring changes nothing, and that the map is the cheapest one."""

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from triaccel.cost import CostTable, Ladder, best_map, device_ladder, measure_costs
from triaccel.cost_profile import run_pass
from triaccel.cost_table import Edge, MeasuredMap, Node
from triaccel.ladder import _off_cuda
from triaccel.layers import find_layers
from triaccel.mincut import minimum_cut
from triaccel.types import LayerInfo, Precision, TriAccelError

FP16, BF16, FP32 = Precision
CPU = Ladder((BF16, FP32))


class Block(nn.Module):
    """A residual block, a gate and a head: every kind of edge."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.left = nn.Conv2d(width, width, 3, padding=1)
        self.gate = nn.Conv2d(width, width, 1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        y = self.left(x) + x
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return self.head(self.drop(y.mean((2, 3))))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def measured(model, inputs, **kwargs):
    options = {"batch_sizes": [len(inputs)], "ladder": CPU, "budget_seconds": 0.3} | kwargs
    return measure_costs(model, find_layers(model), inputs, **options)


# ------------------------------------------------------------------------------------------------ measuring


def test_the_graph_with_its_joins(block):
    table = measured(block, torch.randn(4, 3, 6, 6))
    names = [node.name for node in table.nodes]
    assert table.layer_names == ("stem", "left", "gate", "head")
    index = {name: i for i, name in enumerate(names)}
    edges = {(names[e.source], names[e.target]): e for e in table.edges}
    joins = [name for name in names if name.startswith("join")]
    assert len(joins) == 2
    add, multiply = joins
    assert set(edges) == {
        ("stem", "left"),
        ("left", add),
        ("stem", add),
        (add, "gate"),
        ("gate", multiply),
        (add, multiply),
        (multiply, "head"),
    }
    assert edges["stem", "left"].elements == 8 * 6 * 6
    assert edges["stem", "left"].kept  # ReLU keeps its result already
    assert not edges["multiply" if "multiply" in index else multiply, "head"].kept
    assert table.missing == {"unused": "it did not run while costs were measured"}


def test_labels_of_joins_are_the_widest_of_their_inputs(block):
    table = measured(block, torch.randn(4, 3, 6, 6))
    labels = dict(
        zip(
            [n.name for n in table.nodes],
            table.labels({"stem": BF16, "left": FP32, "gate": BF16, "head": BF16}),
            strict=True,
        )
    )
    assert [labels[n] for n in labels if n.startswith("join")] == [FP32, FP32]
    low = table.labels(dict.fromkeys(table.layer_names, BF16))
    assert set(low) == {BF16}


def test_what_a_join_is_labelled_is_what_runs(block):
    """Oracle: dtypes seen in a real forward under mixed maps."""
    from triaccel.casting import Caster

    x = torch.randn(4, 3, 6, 6)
    layers = find_layers(block)
    table = measured(block, x)
    caster = Caster(block, layers, device_type="cpu")
    compute = {layer.name: layer.module for layer in layers if layer.info.role == "compute"}
    for version, formats in enumerate(itertools.product([BF16, FP32], repeat=4)):
        chosen = dict(zip(table.layer_names, formats, strict=True))
        if BF16 not in formats:
            continue
        caster.apply(chosen, version=version)

        def call():
            with caster.forward():
                return block(x)

        seen = run_pass(block, compute, call, device=torch.device("cpu"), keep_bytes=False)
        real = [node.dtype for node in seen.nodes.values()]
        assert real == [label.torch_dtype for label in table.labels(chosen)]


def test_bytes_are_those_that_autograd_keeps(block):
    """Oracle: the storages that saved-tensor hooks see, parameters left out, in uniform and in mixed maps."""
    from triaccel.casting import Caster

    block = Block(width=16)
    x = torch.randn(8, 3, 12, 12)
    table = measured(block, x)
    caster = Caster(block, find_layers(block), device_type="cpu")
    own = {t.untyped_storage()._cdata for t in (*block.parameters(), *block.buffers(), x)}
    for version, low in enumerate([(), ("stem", "left", "gate", "head"), ("left",), ("stem", "head")]):
        formats = {name: BF16 if name in low else FP32 for name in table.layer_names}
        caster.apply(formats, version=version)
        kept = {}

        def pack(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), caster.forward():
            out = block(x)
        assert table.kept_bytes(formats, batch_size=8) == pytest.approx(sum(kept.values()), rel=0.12)
        del out


def test_measuring_leaves_everything_bit_identical(block):
    block.left.eval()
    for p in block.stem.parameters():
        p.grad = torch.ones_like(p)
    state = {k: v.clone() for k, v in block.state_dict().items()}
    modes = [m.training for m in block.modules()]
    attributes = [set(m.__dict__) for m in block.modules()]
    rng = torch.get_rng_state()
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    measured(block, x, batch_sizes=[2, 4, 16])
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, state[k]) for k, v in block.state_dict().items())
    assert [m.training for m in block.modules()] == modes
    assert [set(m.__dict__) for m in block.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in block.modules())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in block.stem.parameters())
    assert block.head.weight.grad is None
    assert torch.equal(x, before)


def test_the_budget_is_kept_and_sizes_share_buckets():
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    x = torch.randn(16, 3, 16, 16)
    table = measured(model, x, batch_sizes=[4, 8, 16, 32, 64, 128, 4096], budget_seconds=0.8)
    assert table.measured_seconds < 1.6
    assert 16 in table.buckets
    assert 4096 not in table.buckets
    assert table.bucket(16) == table.buckets.index(16)
    assert table.bucket(4096) == len(table.buckets) - 1


def test_whole_maps_are_timed_and_the_choice_is_never_one_that_was_slower():
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(3)], nn.Flatten(), nn.Linear(8 * 64, 64)
    )
    x = torch.randn(32, 8, 8, 8)
    table = measured(model, x, budget_seconds=0.6)
    infos = [layer.info for layer in find_layers(model)]
    chosen, why = best_map(
        table, infos, batch_size=32, prefer="time", allowed=dict.fromkeys(["0", "1", "2", "4"], BF16)
    )
    assert set(why) == set(chosen) == {"0", "1", "2", "4"}
    times = [m.seconds[0] for m in table.measured if m.seconds[0] is not None]
    assert len(times) >= 1
    assert table.seconds(chosen, batch_size=32) <= min(times) / 0.99


def test_shared_modules_dicts_tuples_and_views():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x, scale):
            h = self.a(x).view(-1, 2, 3).transpose(1, 2).reshape(-1, 6)
            h.mul_(2.0)
            return {"out": self.a(h * scale), "hidden": (h, None)}

    model = Model()
    x, scale = torch.randn(4, 6), torch.ones(4, 1)
    for inputs in ((x, scale), {"x": x, "scale": scale}):
        table = measure_costs(
            model, find_layers(model), inputs, batch_sizes=[4, 8], ladder=CPU, budget_seconds=0.2
        )
        assert table.layer_names == ("a",)
        assert table.edges == ()


def test_a_layer_that_ignores_the_region_is_off_the_ladder():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, tokens):
            return self.head(self.embed(tokens).mean(1))

    model = Model()
    table = measured(model, torch.zeros(3, 5, dtype=torch.long))
    infos = [layer.info for layer in find_layers(model)]
    chosen, why = best_map(table, infos, batch_size=3, prefer="memory", allowed={"embed": BF16, "head": BF16})
    assert chosen["embed"] is FP32
    assert why["embed"] == "its operation does not follow bf16 on this device"


def test_nothing_to_measure_is_an_error(block):
    with pytest.raises(TriAccelError, match="no tensor with a sample dimension"):
        measured(block, [], batch_sizes=[1])
    with pytest.raises(TriAccelError, match="no backward pass to measure"):
        measured(block.requires_grad_(False), torch.randn(2, 3, 6, 6))


def test_a_saved_table_is_read_back_and_another_model_has_its_own(block, tmp_path):
    x = torch.randn(4, 3, 6, 6)
    first = measured(block, x, cache_dir=tmp_path)
    assert measured(block, x, cache_dir=tmp_path) == first
    assert measured(Block(16), x, cache_dir=tmp_path) != first
    assert len(list(tmp_path.glob("costs-*.json"))) == 2


def test_json_round_trip_and_digest(block):
    table = measured(block, torch.randn(4, 3, 6, 6))
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    assert again.digest == table.digest
    assert dataclasses.replace(table, measured_seconds=9.0).digest == table.digest
    assert dataclasses.replace(table, convert_overhead=9.0).digest != table.digest
    with pytest.raises(TriAccelError, match="not a cost table"):
        CostTable.from_json({"format": 0})
    with pytest.raises(TriAccelError, match="not a cost table"):
        CostTable.from_json({k: v for k, v in table.to_json().items() if k != "edges"})


# ------------------------------------------------------------------------------------------------ ladders


def test_the_ladder_of_this_cpu_says_why():
    ladder = device_ladder("cpu")
    assert ladder.precisions[-1] is FP32
    assert set(ladder.precisions) | set(ladder.reasons) == set(Precision)
    assert all(reason for reason in ladder.reasons.values())
    assert not ladder.follows("Embedding", BF16)
    assert ladder.follows("Linear", BF16)


def test_a_named_format_is_used_although_slow():
    ladder = device_ladder("cpu", allowed=(FP32, FP16))
    assert ladder.precisions == (FP16, FP32)
    assert BF16 in ladder.reasons
    assert ladder.up(BF16) is FP32
    assert ladder.up(FP16, kind="Embedding") is FP32


def test_a_format_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setattr("triaccel.ladder._failure", lambda device, p: "fp16 fails" if p is FP16 else None)
    with pytest.raises(TriAccelError, match=r"precision\.ladder asks for fp16"):
        device_ladder("cpu", allowed=(FP32, FP16))


@pytest.mark.parametrize(
    ("capability", "on"),
    [((5, 2), {FP32}), ((6, 0), {FP16, FP32}), ((6, 1), {FP32}), ((7, 0), {FP16, FP32}), ((7, 5), {FP16, FP32}),
     ((8, 0), {FP16, BF16, FP32}), ((9, 0), {FP16, BF16, FP32}), ((10, 0), {FP16, BF16, FP32})],
)  # fmt: skip
def test_cuda_ladders_by_capability(capability, on):
    assert set(Precision) - set(_off_cuda(capability)) == on


def test_the_ladder_leaves_the_random_stream_alone():
    from triaccel import ladder

    ladder._ignoring_kinds.cache_clear()
    before = torch.get_rng_state()
    device_ladder("cpu")
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ the cheapest map


@st.composite
def cuts(draw):
    n = draw(st.integers(1, 6))
    cost = st.floats(0.0, 10.0)
    keep = {i: draw(cost) for i in range(n)}
    move = {i: draw(st.floats(-10.0, 10.0)) for i in range(n)}
    pairs = [(u, v) for u in range(n) for v in range(n) if u != v]
    arcs = draw(st.dictionaries(st.sampled_from(pairs), st.floats(0.0, 5.0), max_size=8)) if pairs else {}
    return keep, move, arcs


@given(cuts())
def test_minimum_cut_is_the_minimum(problem):
    keep, move, arcs = problem

    def cost(moved):
        total = sum(move[i] if i in moved else keep[i] for i in keep)
        return total + sum(c for (u, v), c in arcs.items() if u not in moved and v in moved)

    best = min(
        cost(set(subset)) for size in range(len(keep) + 1) for subset in itertools.combinations(keep, size)
    )
    assert cost(minimum_cut(keep, move, arcs)) == pytest.approx(best, abs=1e-6)


@st.composite
def tables(draw, precisions):
    n = draw(st.integers(2, 6))
    nodes, edges = [], []
    time = st.floats(0.1e-3, 5e-3)
    for i in range(n):
        join = i > 2 and draw(st.booleans())
        seconds = {p: (draw(time) * (0.2 if join else 1.0),) for p in precisions}
        if join:  # an elementwise operation on narrower tensors is no slower
            seconds = dict(zip(precisions, sorted(seconds.values()), strict=True))
        size = draw(st.floats(100.0, 5000.0))
        nodes.append(
            Node(
                f"join {i}" if join else f"l{i}",
                not join,
                "s",
                seconds,
                {p: size * (1.0 if p is FP32 else 0.5) for p in precisions},
                dict.fromkeys(precisions, 0.0),
                tuple(precisions),
            )
        )
        sources = draw(st.sets(st.integers(0, i - 1), min_size=2 if join else 0, max_size=2)) if i else set()
        edges += [Edge(s, i, draw(st.floats(0.0, 2e3)), draw(st.booleans())) for s in sorted(sources)]
    pairs = {f"{a}>{b}": 5e-9 for a in precisions for b in precisions if a is not b}
    return CostTable(tuple(precisions), (100,), tuple(nodes), tuple(edges), pairs, 1e-5)


def exhaustive(table, names, allowed, cost):
    options = [[p for p in table.precisions if p.rank >= allowed[n].rank] for n in names]
    return min(cost(dict(zip(names, formats, strict=True))) for formats in itertools.product(*options))


@pytest.mark.parametrize("prefer", ["time", "memory"])
@given(tables((BF16, FP32)), st.data())
@settings(max_examples=150, deadline=None)
def test_with_two_formats_the_map_is_within_a_percent_of_exhaustive_search(prefer, table, data):
    names = table.layer_names
    infos = [LayerInfo(name, "Linear", "compute", i, 1) for i, name in enumerate(names)]
    allowed = {name: data.draw(st.sampled_from([BF16, BF16, BF16, FP32])) for name in names}
    chosen, _ = best_map(table, infos, batch_size=100, prefer=prefer, allowed=allowed)
    assert all(chosen[n].rank >= allowed[n].rank for n in names)
    if prefer == "time":

        def cost(formats):
            return table.modelled_seconds(formats, batch_size=100)
    else:

        def cost(formats):
            return table.kept_bytes(formats, batch_size=100)

    assert cost(chosen) <= exhaustive(table, names, allowed, cost) / 0.985


@given(tables((FP16, BF16, FP32)))
@settings(max_examples=60, deadline=None)
def test_with_three_formats_it_is_close(table):
    names = table.layer_names
    infos = [LayerInfo(name, "Linear", "compute", i, 1) for i, name in enumerate(names)]
    allowed = dict.fromkeys(names, FP16)
    chosen, _ = best_map(table, infos, batch_size=100, prefer="time", allowed=allowed)

    def cost(formats):
        return table.modelled_seconds(formats, batch_size=100)

    assert cost(chosen) <= 1.10 * exhaustive(table, names, allowed, cost)


def test_a_timed_map_corrects_the_sum():
    """The sum says BF16; timed whole, it was slower: FP32 stays."""
    node = Node(
        "a",
        True,
        "s",
        {BF16: (1.0,), FP32: (2.0,)},
        dict.fromkeys((BF16, FP32), 0.0),
        dict.fromkeys((BF16, FP32), 0.0),
        (BF16, FP32),
    )
    table = CostTable((BF16, FP32), (8,), (node,), (), {}, 0.0)
    infos = [LayerInfo("a", "Linear", "compute", 0, 1)]
    assert best_map(table, infos, batch_size=8, prefer="time", allowed={"a": BF16})[0] == {"a": BF16}
    timed = dataclasses.replace(table, measured=(MeasuredMap((BF16,), (3.0,)), MeasuredMap((FP32,), (2.0,))))
    assert best_map(timed, infos, batch_size=8, prefer="time", allowed={"a": BF16})[0] == {"a": FP32}


def test_a_thousand_layers_are_solved_in_a_moment():
    import time

    names = [f"l{i}" for i in range(1000)]
    nodes = tuple(
        Node(
            n,
            True,
            "s",
            {BF16: (1.0 + i % 3,), FP32: (2.0,)},
            dict.fromkeys((BF16, FP32), 1.0),
            dict.fromkeys((BF16, FP32), 0.0),
            (BF16, FP32),
        )
        for i, n in enumerate(names)
    )
    edges = tuple(Edge(i, i + 1, 0.2, False) for i in range(999))
    table = CostTable((BF16, FP32), (1,), nodes, edges, {"bf16>fp32": 1.0, "fp32>bf16": 1.0}, 0.0)
    infos = [LayerInfo(n, "Linear", "compute", i, 1) for i, n in enumerate(names)]
    start = time.process_time()
    best_map(table, infos, batch_size=1, prefer="time", allowed=dict.fromkeys(names, BF16))
    assert time.process_time() - start < 10.0
