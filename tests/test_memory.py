"""Bytes: the live-tensor tracker against counts by hand, limits against made-up files, CUDA against a scripted allocator."""

import copy
import json
import os
import sys
import types

import psutil
import pytest
import torch
from torch import nn

from triaccel import cuda_memory, limits
from triaccel import memory as memory_module
from triaccel.cuda_memory import CudaMemory, other_tenants_bytes
from triaccel.limits import Limit, cgroup
from triaccel.memory import CpuMemory, FakeMemory, live_tensor_bytes, make_memory_probe
from triaccel.types import TriAccelError

MIB = 2**20


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def train(model, optimizer, batch, *, seed=3):
    torch.manual_seed(seed)
    inputs = torch.randn(batch, 3, 8, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), torch.arange(batch) % 10)
    loss.backward()
    optimizer.step()
    return loss.item()


# ---------------------------------------------------------------- tracker


def test_peak_counted_by_hand():
    with live_tensor_bytes() as tracker:
        a = torch.empty(MIB, dtype=torch.uint8)  # 1
        b = torch.empty(2 * MIB, dtype=torch.uint8)  # 3
        view = b.view(2, MIB)[0]
        del b
        assert tracker.live_bytes == 3 * MIB  # the view keeps the storage
        del view
        assert tracker.live_bytes == MIB
        c = a + 1  # 2
        a.add_(1)
        assert tracker.live_bytes == 2 * MIB
    assert tracker.peak_bytes == 3 * MIB
    assert tracker.before_bytes == 0
    del a, c
    assert tracker.live_bytes == 2 * MIB  # outside the region nothing is followed


def test_what_was_there_before_counts_in_hindsight():
    before = torch.ones(MIB, dtype=torch.uint8)
    with live_tensor_bytes() as tracker:
        made = torch.empty(3 * MIB, dtype=torch.uint8)
        del made
        before.add_(1)
    assert tracker.before_bytes == MIB
    assert tracker.peak_bytes == 4 * MIB


def test_resident_tensors_count_untouched():
    kept = torch.ones(MIB, dtype=torch.uint8)
    with live_tensor_bytes([kept]) as tracker:
        torch.empty(MIB, dtype=torch.uint8)
    assert tracker.peak_bytes == 2 * MIB


def test_resize_and_sparse_are_followed():
    with live_tensor_bytes() as tracker:
        grown = torch.empty(0, dtype=torch.uint8)
        grown.resize_(MIB)
        assert tracker.live_bytes >= MIB
        indices = torch.zeros(1, 4, dtype=torch.int64)
        sparse = torch.sparse_coo_tensor(
            indices, torch.ones(4, MIB, dtype=torch.uint8), (8, MIB), check_invariants=True
        )
        assert tracker.live_bytes >= 5 * MIB
        del sparse
    assert tracker.peak_bytes >= 5 * MIB


def test_backward_and_update_are_seen():
    weight = nn.Parameter(torch.ones(MIB // 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with live_tensor_bytes() as tracker:
        weight.exp().sum().backward()
        # parameter, its gradient; the activation is gone
        assert tracker.live_bytes == 2 * MIB
        optimizer.step()
        # and the momentum
        assert tracker.live_bytes == 3 * MIB
    assert tracker.before_bytes == MIB
    assert tracker.peak_bytes >= 3 * MIB


def test_tracking_changes_nothing():
    plain, tracked = net(), net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, tracked)]
    for step in range(4):
        a = train(plain, optimizers[0], 16, seed=step)
        state = torch.get_rng_state()
        with live_tensor_bytes():
            b = train(tracked, optimizers[1], 16, seed=step)
        assert a == b
        assert torch.equal(state, torch.get_rng_state())
    for p, q in zip(plain.state_dict().values(), tracked.state_dict().values(), strict=True):
        assert torch.equal(p, q)


def test_nothing_stays_held_after_tracking():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer, 16)
    peaks = []
    for _ in range(20):
        with live_tensor_bytes() as tracker:
            train(model, optimizer, 16)
        peaks.append(tracker.peak_bytes)
        assert not tracker._storages
    assert len(set(peaks)) == 1


def test_gradient_release_and_checkpointing_show_in_the_peak():
    blocks = nn.ModuleList(
        [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    )

    def peak(checkpointed):
        inputs = torch.randn(2048, 64)
        with live_tensor_bytes() as tracker:
            hidden = inputs
            for block in blocks:
                if checkpointed:
                    hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
                else:
                    hidden = block(hidden)
            hidden.sum().backward()
        return tracker.peak_bytes

    assert peak(True) < 0.8 * peak(False)


# ---------------------------------------------------------------- CPU probe


def observe(probe, model, optimizer, batch, version=0):
    with probe.observe(batch_size=batch, map_version=version):
        train(model, optimizer, batch)


def test_the_first_step_is_not_recorded():
    """rf-detr PR 1342: a step without optimizer state is no measure of one with it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe = make_memory_probe("cpu", budget_bytes=None, margin=0.0)
    observe(probe, model, optimizer, 16)
    assert probe.reading() is None
    observe(probe, model, optimizer, 16)
    reading = probe.reading()
    with live_tensor_bytes() as tracker:
        train(model, optimizer, 16)
    assert reading.peaks == ((16, 0, tracker.peak_bytes),)
    assert reading.used_bytes == tracker.peak_bytes
    state_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert reading.resident_bytes >= sum(p.nbytes for p in model.parameters()) + state_bytes


def test_one_tracked_step_for_each_new_pair(monkeypatch):
    tracked = []

    def spy(*args):
        tracked.append(1)
        return live_tensor_bytes(*args)

    monkeypatch.setattr(memory_module, "live_tensor_bytes", spy)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = make_memory_probe("cpu", budget_bytes=None, margin=0.0)
    for batch, version in [(8, 0), (8, 0), (8, 0), (16, 0), (16, 0), (16, 1), (8, 0), (16, 1)]:
        observe(probe, model, optimizer, batch, version)
    assert len(tracked) == 3


def test_used_is_the_largest_since_the_last_reading_and_not_an_epochs_tail():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = make_memory_probe("cpu", budget_bytes=None, margin=0.0)
    for batch in (32, 32, 4):
        observe(probe, model, optimizer, batch)
    peaks = {batch: peak for batch, _, peak in probe.reading().peaks}
    observe(probe, model, optimizer, 32)
    observe(probe, model, optimizer, 4)
    assert probe.reading().used_bytes == peaks[32]


def test_budget_is_the_tightest_limit_less_the_margin(monkeypatch):
    probe = CpuMemory(budget_bytes=900, margin=0.1)
    probe._held = 100
    monkeypatch.setattr(memory_module, "resident_set_bytes", lambda: 300)
    monkeypatch.setattr(memory_module, "system_memory", lambda: Limit(10_000, 4_000))
    monkeypatch.setattr(memory_module, "cgroup", lambda: Limit(1_500, 400))
    monkeypatch.setattr(memory_module, "address_space", lambda: None)
    assert probe._available() == {"system": 6_100, "cgroup": 1_200, "RLIMIT_AS": None}
    assert probe._budget() == 810
    probe._cap = None
    assert probe._budget() == 1_080
    monkeypatch.setattr(memory_module, "address_space", lambda: Limit(2_000, 1_800))
    assert probe._available()["RLIMIT_AS"] == 300
    assert probe._budget() == 270


def test_a_budget_below_one_sample_says_what_one_sample_needs():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = make_memory_probe("cpu", budget_bytes=1_000, margin=0.05)
    for _ in range(2):
        observe(probe, model, optimizer, 16)
    with pytest.raises(
        TriAccelError, match=r"one sample needs about \d+ \(\d+ whatever the batch, \d+ per sample\): raise"
    ) as error:
        probe.reading()
    enough = int(str(error.value).split(" to ")[-1].split(" ")[0])
    generous = make_memory_probe("cpu", budget_bytes=enough, margin=0.05)
    for _ in range(2):
        observe(generous, model, optimizer, 16)
    assert generous.reading().utilisation > 1  # too much for 16, but some size can do


def test_sizes_that_ran_out_are_reported_and_their_observation_is_void():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = make_memory_probe("cpu", budget_bytes=10**9, margin=0.0)
    observe(probe, model, optimizer, 8)
    observe(probe, model, optimizer, 8)
    with probe.observe(batch_size=64, map_version=0):
        probe.out_of_memory(batch_size=64, map_version=0)
        train(model, optimizer, 8)
    reading = probe.reading()
    assert [batch for batch, *_ in reading.peaks] == [8]
    assert reading.failed == ((64, 0, 10**9),)


def test_an_error_inside_is_not_recorded():
    probe = make_memory_probe("cpu", budget_bytes=None, margin=0.0)
    with probe.observe(batch_size=8, map_version=0):
        pass
    with pytest.raises(ZeroDivisionError), probe.observe(batch_size=8, map_version=0):
        raise ZeroDivisionError
    assert probe.reading() is None


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_state_survives_json(kind):
    def make():
        if kind == "cpu":
            return make_memory_probe("cpu", budget_bytes=10**9, margin=0.0)
        return FakeMemory(lambda batch, version, step: 1_000 * batch + step, lambda step: 10**6 + step)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = make()
    for batch in (8, 8, 16, 4):
        observe(probe, model, optimizer, batch)
    probe.out_of_memory(batch_size=64, map_version=0)
    restored = make()
    restored.load_state_dict(json.loads(json.dumps(probe.state_dict())))
    assert restored.reading() == probe.reading()
    # a state of another device leaves the peaks empty
    other = copy.deepcopy(make())
    other.load_state_dict(probe.state_dict() | {"source": "elsewhere"})
    assert other.reading() is None


def test_other_devices_are_refused():
    with pytest.raises(TriAccelError, match="'meta' device"):
        make_memory_probe("meta", budget_bytes=None, margin=0.0)


# ---------------------------------------------------------------- limits


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_v2_takes_the_tightest_level_and_its_working_set(tmp_path):
    write(
        tmp_path,
        {
            "proc": "0::/user/job\n",
            "fs/user/job/memory.max": "max\n",
            "fs/user/job/memory.current": "500\n",
            "fs/user/memory.max": "1000\n",
            "fs/user/memory.current": "700\n",
            "fs/user/memory.stat": "anon 500\ninactive_file 150\n",
        },
    )
    assert cgroup(proc=tmp_path / "proc", root=tmp_path / "fs") == Limit(1000, 550)


def test_cgroup_v1_and_a_path_that_is_the_hosts(tmp_path):
    write(
        tmp_path,
        {
            "proc": "3:cpu:/x\n4:memory:/docker/abc\n",
            "fs/memory/memory.limit_in_bytes": "2000",
            "fs/memory/memory.usage_in_bytes": "900",
            "fs/memory/memory.stat": "total_inactive_file 100\n",
        },
    )
    found = cgroup(proc=tmp_path / "proc", root=tmp_path / "fs")
    assert found == Limit(2000, 800)
    assert found.free_bytes == 1200


def test_no_cgroup_is_none(tmp_path):
    assert cgroup(proc=tmp_path / "missing", root=tmp_path) is None
    write(tmp_path, {"proc": "0::/\n", "memory.max": "max", "memory.current": "1"})
    assert cgroup(proc=tmp_path / "proc", root=tmp_path) is None


def test_address_space_limit(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.address_space() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**40, 2**40))
    assert limits.address_space().limit_bytes == 2**40
    assert 0 < limits.address_space().used_bytes < 2**40
    assert limits.headroom_bytes() <= psutil.virtual_memory().total


# ---------------------------------------------------------------- CUDA, on a scripted allocator


class Allocator:
    """What ``torch.cuda`` would report: bytes reserved stay until the cache is emptied."""

    def __init__(self, monkeypatch, *, free=10_000):
        self.allocated = self.reserved = self.emptied = 0
        self.free = free
        for name in (
            "memory_stats",
            "memory_reserved",
            "mem_get_info",
            "empty_cache",
            "reset_peak_memory_stats",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def step(self, allocated, overhead):
        self.allocated = allocated
        self.reserved = max(self.reserved, allocated + overhead)

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.peak": self.allocated,
            "allocated_bytes.all.current": 50,
            "reserved_bytes.all.peak": self.reserved,
        }

    def memory_reserved(self, device):
        return self.reserved

    def mem_get_info(self, device):
        return self.free - self.reserved, 20_000

    def empty_cache(self):
        self.emptied += 1
        self.reserved = 0

    def reset_peak_memory_stats(self, device):
        pass


def test_cuda_reports_reserved_bytes_and_fragmentation(monkeypatch):
    """pytorch 31252: variable sizes fragment; reserved less allocated is recorded, and counted against the budget."""
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(cuda_memory, "other_tenants_bytes", lambda device: (None, "NVML: not here"))
    probe = CudaMemory(torch.device("cuda", 0), budget_bytes=None, margin=0.1)
    for batch in (10, 10, 10, 20, 20):
        with probe.observe(batch_size=batch, map_version=0):
            allocator.step(100 * batch, 20 * batch)
    reading = probe.reading()
    assert reading.peaks == ((10, 0, 1_200), (20, 0, 2_400))
    assert reading.used_bytes == 2_400
    assert reading.reserved_unused_bytes == 400
    assert reading.resident_bytes == 50
    assert reading.budget_bytes == 9_000  # free and held by us, less the margin
    assert reading.other_tenants_bytes is None
    assert reading.unavailable == ("NVML: not here",)


def test_fragmentation_suggests_expandable_segments_once(monkeypatch):
    """pytorch 31252: what helps is said, once, and not to those who have it."""
    allocator = Allocator(monkeypatch)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def run():
        probe = CudaMemory(torch.device("cuda", 0), budget_bytes=None, margin=0.0)
        for batch in (10, 10, 20, 30):
            with probe.observe(batch_size=batch, map_version=0):
                allocator.step(100 * batch, 50 * batch)

    with pytest.warns(UserWarning, match="expandable_segments:True") as caught:
        run()
    assert len(caught) == 1
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run()


def test_cuda_empties_the_cache_when_a_smaller_batch_has_come_to_stay(monkeypatch):
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(cuda_memory, "other_tenants_bytes", lambda device: (0, None))
    probe = CudaMemory(torch.device("cuda", 0), budget_bytes=None, margin=0.0)

    def run(*batches):
        for batch in batches:
            with probe.observe(batch_size=batch, map_version=0):
                allocator.step(100 * batch, 0)

    run(20, 20, 20, 4, 20)  # an epoch's tail
    assert allocator.emptied == 0
    assert {batch: peak for batch, _, peak in probe.reading().peaks} == {20: 2_000, 4: 400}
    run(8, 8, 8)
    assert allocator.emptied == 1
    assert allocator.reserved == 800


class FakeNvml(types.ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, *, processes=(), error=None):
        super().__init__("pynvml")
        self.processes, self.error, self.asked = processes, error, None
        self.running = 0

    def nvmlInit(self):
        if self.error == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked = uuid
        if self.error == "uuid":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self.processes


def process(pid, used):
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.fixture
def nvml(monkeypatch):
    def install(module):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        properties = types.SimpleNamespace(uuid="1234-5678")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return other_tenants_bytes(torch.device("cuda", 0))

    return install


def test_nvml_by_uuid(nvml):
    module = FakeNvml(processes=[process(os.getpid(), 100), process(1, 30), process(2, 12)])
    assert nvml(module) == (42, None)
    assert module.asked == "GPU-1234-5678"
    assert module.running == 0


@pytest.mark.parametrize("error", ["init", "uuid"])
def test_nvml_failing_is_said_and_never_zero(nvml, error):
    module = FakeNvml(error=error)
    found, why = nvml(module)
    assert found is None
    assert why.startswith("NVML: ")
    assert module.running == 0


def test_nvml_without_rights_is_said_and_never_zero(nvml):
    found, why = nvml(FakeNvml(processes=[process(1, None)]))
    assert found is None
    assert "does not tell" in why


def test_nvml_missing_is_said_and_never_zero(nvml):
    found, why = nvml(None)
    assert found is None
    assert "not installed" in why


@pytest.mark.gpu
def test_cuda_probe_on_a_real_device():
    device = torch.device("cuda")
    model = nn.Linear(1024, 1024, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    probe = make_memory_probe(device, budget_bytes=None, margin=0.05)
    for batch in (256, 256, 1024, 4096):
        with probe.observe(batch_size=batch, map_version=0):
            optimizer.zero_grad()
            model(torch.randn(batch, 1024, device=device)).square().mean().backward()
            optimizer.step()
    reading = probe.reading()
    peaks = {batch: peak for batch, _, peak in reading.peaks}
    assert peaks[4096] > peaks[1024] > peaks[256] >= 3 * sum(p.nbytes for p in model.parameters())
    assert reading.used_bytes <= reading.budget_bytes <= torch.cuda.mem_get_info()[1]
