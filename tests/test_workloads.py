import numpy as np
import pytest
import torch
from PIL import Image

from ablations.run import _DATASETS, _MODELS
from ablations.workloads import (
    DATASETS,
    MODELS,
    Images,
    ResidentImages,
    WorkloadError,
    _digits_table,
    build_model,
    held_out,
    load_images,
    statistics,
)

CPU = torch.device("cpu")


def images(count=40, classes=4, flip=True) -> Images:
    generator = torch.Generator().manual_seed(0)
    return Images(
        torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.arange(count) % classes,
        classes,
        flip,
    )


def resident(data: Images, *, augment=True, seed=0) -> ResidentImages:
    mean, std = statistics(data)
    return ResidentImages(data, mean=mean, std=std, device=CPU, augment=augment, seed=seed)


def test_the_command_line_knows_the_same_names():
    assert tuple(MODELS) == _MODELS
    assert tuple(DATASETS) == _DATASETS


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    first, again, other = (build_model(name, num_classes=7, seed=seed, device=CPU) for seed in (1, 1, 2))
    out = first.eval()(torch.rand(2, 3, 32, 32))
    assert out.shape == (2, 7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert next(p for p in first.parameters() if p.dim() == 4).is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_the_paper_s_models_are_torchvision_s_unchanged(name):
    import torchvision

    torch.manual_seed(3)
    theirs = getattr(torchvision.models, name)(weights=None, num_classes=10)
    ours = build_model(name, num_classes=10, seed=3, device=CPU)
    assert str(ours) == str(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_normalised_without_augmentation_is_the_formula():
    data = images()
    mean, std = statistics(data)
    pixels = data.images.double() / 255
    torch.testing.assert_close(mean.double(), pixels.mean((0, 2, 3)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(std.double(), pixels.std((0, 2, 3), correction=0), rtol=1e-5, atol=1e-7)
    got, labels = resident(data, augment=False).fetch(torch.tensor([3, 0]), 5)
    want = (pixels[[3, 0]] - mean.double()[:, None, None]) / std.double()[:, None, None]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert labels.tolist() == [3, 0]
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_is_a_padded_crop_and_a_flip():
    data = images(count=64)
    flat = Images(data.images, data.labels, data.classes)
    mean, std = torch.zeros(3), torch.full((3,), 1 / 255)  # pixel values come through as they are
    got, _ = ResidentImages(flat, mean=mean, std=std, device=CPU, augment=True, seed=0).fetch(
        torch.arange(64), 2
    )
    padded = torch.nn.functional.pad(data.images, (4,) * 4).float()
    flips, shifts = set(), set()
    for index in range(64):
        windows = {
            (top, left, flip): padded[index, :, top : top + 32, left : left + 32].flip(2)
            if flip
            else padded[index, :, top : top + 32, left : left + 32]
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
        }
        hits = [key for key, window in windows.items() if torch.allclose(window, got[index], atol=1e-2)]
        assert len(hits) == 1
        flips.add(hits[0][2])
        shifts.add(hits[0][:2])
    assert flips == {False, True}
    assert len(shifts) > 30


def test_augmentation_is_keyed_by_seed_epoch_and_index_never_by_batch_shape():
    data = resident(images())
    whole, _ = data.fetch(torch.arange(40), 1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [data.fetch(part, 1)[0] for part in order.split(7)]
    assert torch.equal(torch.cat(parts)[order.argsort()], whole)
    assert not torch.equal(data.fetch(torch.arange(40), 2)[0], whole)
    assert not torch.equal(resident(images(), seed=1).fetch(torch.arange(40), 1)[0], whole)


def test_digits_are_mirrored_never():
    train, test = load_images("digits")
    assert (len(train.labels), len(test.labels), train.classes, train.flip) == (1437, 360, 10, False)
    assert train.images.shape[1:] == (3, 32, 32)
    assert train.images.dtype == torch.uint8
    from sklearn.datasets import load_digits

    table, theirs = _digits_table(), load_digits()
    assert np.array_equal(table[:, :-1], theirs.data)
    assert np.array_equal(table[:, -1], theirs.target)


def test_the_validation_split_is_a_fixed_tenth():
    data = images(count=50)
    kept, held = held_out(data)
    again = held_out(data)[1]
    assert (len(kept.labels), len(held.labels)) == (45, 5)
    assert torch.equal(held.images, again.images)
    joined = torch.cat([kept.images, held.images]).flatten(1)
    assert len(torch.unique(joined, dim=0)) == 50


def test_subsets_are_the_same_for_every_seed():
    data = images()
    assert torch.equal(data.subset(10).images, data.subset(10).images)
    with pytest.raises(WorkloadError, match="41 images asked for, the data set has 40"):
        data.subset(41)


def draw(path, seed, size=(32, 32)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIACCEL_CACHE", str(tmp_path / "cache"))


def test_a_folder_with_train_and_test(tmp_path):
    root = tmp_path / "set"
    pixels = {}
    for part in ("train", "test"):
        for index, name in enumerate(("cat", "dog")):
            for n in range(3):
                pixels[part, index, n] = draw(
                    root / part / name / f"{n}.png", 10 * index + n + (part == "test")
                )
    for _ in range(2):  # decoded, then from the cache
        train, test = load_images(f"folder:{root}")
        assert train.labels.tolist() == test.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert np.array_equal(train.images[4].permute(1, 2, 0).numpy(), pixels["train", 1, 1])
        assert np.array_equal(test.images[0].permute(1, 2, 0).numpy(), pixels["test", 0, 0])


def test_one_folder_is_split_by_a_hash_of_the_names(tmp_path):
    root = tmp_path / "set"
    for index, name in enumerate(("cat", "dog")):
        for n in range(30):
            draw(root / name / f"{n}.png", 100 * index + n)
    train, test = load_images(f"folder:{root}")
    assert len(train.labels) + len(test.labels) == 60
    assert 3 <= len(test.labels) <= 20
    before = test.images.clone()
    draw(root / "cat" / "new.png", 7)
    again = load_images(f"folder:{root}")[1]
    assert {i.numpy().tobytes() for i in before} <= {i.numpy().tobytes() for i in again.images}


def test_a_damaged_cache_is_made_again(tmp_path):
    root = tmp_path / "set"
    for part in ("train", "test"):
        draw(root / part / "cat" / "0.png", 1)
    first, _ = load_images(f"folder:{root}")
    for path in (tmp_path / "cache").rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:60])
    assert torch.equal(load_images(f"folder:{root}")[0].images, first.images)


def test_bad_folders(tmp_path):
    with pytest.raises(WorkloadError, match=r"no folder .*PATH/train/<class>/IMAGE"):
        load_images(f"folder:{tmp_path / 'nothing'}")
    (tmp_path / "empty" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "empty" / "test" / "cat").mkdir(parents=True)
    with pytest.raises(WorkloadError, match="has no training images"):
        load_images(f"folder:{tmp_path / 'empty'}")
    draw(tmp_path / "half" / "train" / "cat" / "0.png", 0)
    with pytest.raises(WorkloadError, match="has train/ but no test/"):
        load_images(f"folder:{tmp_path / 'half'}")
    root = tmp_path / "sizes"
    draw(root / "cat" / "0.png", 0)
    draw(root / "cat" / "1.png", 0, size=(16, 16))
    with pytest.raises(WorkloadError, match=r"1\.png has size .*resize the images"):
        load_images(f"folder:{root}")
    root = tmp_path / "broken"
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(WorkloadError, match=r"0\.png is not a readable image"):
        load_images(f"folder:{root}")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist", "cifar10-jpeg"])
def test_missing_files_say_which_where_and_what_works_without(name, tmp_path, monkeypatch):
    """Nothing is fetched unasked: no socket is opened."""
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("network"))
    monkeypatch.setenv("TRIACCEL_CIFAR_JPEG", str(tmp_path / "not-there"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match=rf"{tmp_path}.*'digits' works without any file") as caught:
        load_images(name, root=tmp_path)
    assert any(
        word in str(caught.value) for word in ("cifar-10", "cifar-100", "FashionMNIST/raw", "cifar10-jpeg")
    )


def test_unknown_names():
    with pytest.raises(
        WorkloadError, match=r"unknown data set 'mnist'; the data sets are digits, .*folder:PATH"
    ):
        load_images("mnist")
    with pytest.raises(WorkloadError, match="unknown model 'resnet9'; the models are resnet18"):
        build_model("resnet9", num_classes=2, seed=0, device=CPU)


def test_real_images(cifar_jpeg):
    train, test = load_images(f"folder:{cifar_jpeg}")
    assert (len(train.labels), len(test.labels), train.classes) == (2000, 400, 10)
    assert train.labels.bincount().tolist() == [200] * 10
    mean, _ = statistics(train)
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.02, rtol=0)
