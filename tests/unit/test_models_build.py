"""Towers and heads: shapes, weights that depend on the key alone, names that fail clearly."""

import re

import pytest
import torch
from torch import nn

from hpcvfl import seeds
from hpcvfl.errors import ConfigError
from hpcvfl.models import build_head, build_tower
from hpcvfl.sections import ModelConfig

IMAGE = (1, 14, 14)
SHAPES = {
    "mlp": [(5,), (1, 8, 1), IMAGE],
    "cnn": [(1, 4, 4), (1, 4, 9), (3, 16, 16), IMAGE, (1, 28, 5)],
    "resnet18": [(1, 4, 4), (3, 16, 16)],
    "lstm": [(6, 3), IMAGE, (3, 2, 8)],
}
TOWER_CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


class WithDropout(nn.Module):
    """A user's class whose construction and forward both draw from torch's generator."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        self.linear = nn.Linear(input_shape[0], embedding_dim)
        self.noise = torch.rand(embedding_dim)

    def forward(self, x):
        return self.linear(x) + torch.rand(1)


class HeadOfSums(nn.Module):
    def __init__(self, input_dim, num_classes):
        super().__init__()
        self.linear = nn.Linear(input_dim, num_classes, bias=False)

    def forward(self, h):
        return self.linear(h)


class TooWide(WithDropout):
    def forward(self, x):
        return torch.zeros(len(x), 17)


class ReturnsTuple(WithDropout):
    def forward(self, x):
        return x, x


class ForwardFails(WithDropout):
    def forward(self, x):
        raise IndexError("no such\ncolumn")


class OtherArguments(nn.Module):
    def __init__(self, width):
        super().__init__()


class ConstructionFails(nn.Module):
    def __init__(self, input_shape, embedding_dim):
        raise ValueError("needs an even width")


class NoModule:
    def __init__(self, input_shape, embedding_dim):
        pass


def tower(name, shape=(8,), key=1, dtype=torch.float32, **fields):
    return build_tower(ModelConfig(tower=name, **fields), shape, dtype, key)


def own(class_):
    return f"{class_.__module__}:{class_.__name__}"


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize(("name", "shape"), TOWER_CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tower_maps_a_batch_to_embeddings_and_every_weight_gets_a_gradient(name, shape, dtype):
    module = tower(name, shape, dtype=dtype, embedding_dim=7)
    assert module.training
    x = torch.randn((3, *shape), dtype=getattr(torch, dtype))
    h = module(x)
    assert h.shape == (3, 7)
    assert h.dtype == x.dtype
    (h * torch.linspace(-1, 2, 7, dtype=h.dtype)).sum().backward()
    grads = [p.grad for p in module.parameters()]
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads)
    assert sum(grad.abs().sum() for grad in grads) > 0


@pytest.mark.parametrize(("name", "shape"), TOWER_CASES)
def test_an_embedding_depends_on_its_own_sample_and_on_its_columns(name, shape):
    module = tower(name, shape, dtype="float64").eval()
    x = torch.randn((2, *shape), dtype=torch.float64)
    changed = x.clone()
    changed[1] = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        before, after = module(x), module(changed)
    assert torch.allclose(before[0], after[0], rtol=0, atol=1e-12)
    assert not torch.allclose(before[1], after[1])


def test_the_lstm_reads_time_steps_in_order_and_image_rows_as_steps():
    module = tower("lstm", (6, 4)).eval()
    x = torch.randn(2, 6, 4)
    with torch.no_grad():
        states, _ = module.lstm(x)
        assert torch.equal(module(x), module.embed(states[:, 5]))
        image = x[:, None]
        assert torch.equal(tower("lstm", (1, 6, 4)).eval()(image), module(x))


def test_an_image_row_of_the_lstm_holds_all_channels_of_that_row():
    module = tower("lstm", (3, 5, 4)).eval()
    x = torch.randn(2, 3, 5, 4)
    by_hand = torch.stack([torch.cat([x[:, c, row] for c in range(3)], 1) for row in range(5)], 1)
    with torch.no_grad():
        assert torch.equal(module(x), module.embed(module.lstm(by_hand)[0][:, -1]))


def test_resnet18_has_the_widths_of_the_paper_and_keeps_small_images_large():
    module = tower("resnet18", (3, 16, 16), embedding_dim=16)
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert len([m for m in convolutions if m.kernel_size == (3, 3)]) == 17
    assert sorted({m.out_channels for m in convolutions}) == [64, 128, 256, 512]
    seen = []
    module.layer1.register_forward_hook(lambda layer, args, out: seen.append(out.shape))
    module(torch.zeros(2, 3, 16, 16))
    assert seen == [(2, 64, 16, 16)]
    assert isinstance(module.fc, nn.Linear)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_an_embedding_of_the_cnn_has_mean_zero_and_variance_one_whatever_the_scale(scale):
    h = tower("cnn", IMAGE, dtype="float64")(scale * torch.randn(5, *IMAGE, dtype=torch.float64))
    assert torch.allclose(h.mean(1), torch.zeros(5, dtype=h.dtype), atol=1e-12)
    assert torch.allclose(h.var(1, correction=0), torch.ones(5, dtype=h.dtype), atol=0.02)


def test_a_cnn_embedding_of_one_value_still_depends_on_the_image():
    h = tower("cnn", IMAGE, embedding_dim=1)(torch.randn(5, *IMAGE))
    assert len(set(h.flatten().tolist())) == 5


def test_the_linear_head_of_four_parties_has_650_parameters():
    head = build_head(ModelConfig(embedding_dim=16), 4, 10, "float32", 1)
    assert len(weights(head)) == 650


@pytest.mark.parametrize("name", ["linear", "mlp", own(HeadOfSums)])
def test_a_head_maps_the_concatenated_embeddings_to_logits(name):
    config = ModelConfig(head=name, embedding_dim=5, head_hidden_dim=9)
    head = build_head(config, 3, 4, torch.float64, 1)
    logits = head(torch.randn(6, 15, dtype=torch.float64))
    assert logits.shape == (6, 4)
    assert (logits < 0).any(), "logits, not probabilities or rectified values"


def test_hidden_widths_come_from_the_config():
    assert tower("mlp", (3,), hidden_dim=5).layers[1].out_features == 5
    assert tower("lstm", (3, 2), hidden_dim=5).lstm.hidden_size == 5
    head = build_head(ModelConfig(head="mlp", head_hidden_dim=5), 2, 3, "float32", 1)
    assert head.layers[0].out_features == 5


@pytest.mark.parametrize("name", [*SHAPES, own(WithDropout)])
def test_initial_weights_depend_on_the_key_alone(name):
    shape = SHAPES.get(name, [(8,)])[0]
    torch.manual_seed(1)
    first = tower(name, shape, key=5)
    torch.manual_seed(2)
    torch.rand(3)
    again, other = tower(name, shape, key=5), tower(name, shape, key=6)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("name", [*SHAPES, own(WithDropout)])
def test_building_does_not_move_torchs_global_generator(name):
    before = torch.get_rng_state()
    tower(name, SHAPES.get(name, [(8,)])[0])
    build_head(ModelConfig(head="mlp"), 4, 10, "float32", 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_both_dtypes_start_from_the_same_weights():
    single, double = tower("cnn", IMAGE), tower("cnn", IMAGE, dtype="float64")
    assert torch.equal(weights(single).double(), weights(double))


@pytest.mark.parametrize("key", [0, 2**63, 2**64 - 1, seeds.key64(0, "tower", 1)])
def test_every_64_bit_key_is_accepted(key):
    assert len(weights(tower("mlp", key=key))) > 0


def test_the_trial_forward_leaves_batch_statistics_alone():
    module = tower("resnet18", (1, 4, 4))
    assert module.bn1.running_mean.abs().sum() == 0
    assert module.bn1.num_batches_tracked == 0


BAD_TOWERS = {
    "mpl": "model.tower = 'mpl': unknown; choices: mlp, cnn, resnet18, lstm, package.module:Class",
    ":Class": "unknown; choices:",
    "no_such_package.module:Class": "cannot be imported: ModuleNotFoundError: .* PYTHONPATH",
    "torch.nn:NoSuchClass": "cannot be imported: AttributeError: .*NoSuchClass",
    own(
        OtherArguments
    ): "cannot be built with the keyword arguments input_shape, embedding_dim: Ty",
    own(ConstructionFails): "cannot be built .*: ValueError: needs an even width",
    own(NoModule): r"gives a NoModule, must be a torch\.nn\.Module",
    own(TooWide): r"gives \(2, 17\) for 2 samples of shape \(8,\), must give \(2, 16\)",
    own(ReturnsTuple): r"gives tuple for 2 samples",
    own(ForwardFails): r"cannot take samples of shape \(8,\): IndexError: no such column",
    "cnn": r"model.tower = 'cnn': needs images .* shape \(8,\); choose mlp",
    "resnet18": r"model.tower = 'resnet18': needs images .* shape \(8,\); choose mlp",
    "lstm": r"model.tower = 'lstm': needs sequences .* shape \(8,\); choose mlp",
}


@pytest.mark.parametrize("name", BAD_TOWERS)
def test_a_tower_that_cannot_be_is_one_line_that_names_field_and_value(name):
    with pytest.raises(ConfigError, match=BAD_TOWERS[name]) as caught:
        tower(name)
    assert str(caught.value).startswith(f"model.tower = {name!r}")
    assert "\n" not in str(caught.value)


def test_an_image_too_small_for_the_cnn_is_refused():
    with pytest.raises(ConfigError, match=re.escape("at least 4x4, this party's samples have")):
        tower("cnn", (1, 2, 8))


def test_an_unknown_head_is_refused_with_the_choices():
    with pytest.raises(
        ConfigError, match=r"model.head = 'cnn': unknown; choices: linear, mlp, pac"
    ):
        build_head(ModelConfig(head="cnn"), 4, 10, "float32", 1)


def test_a_head_of_the_wrong_width_is_refused():
    name = "torch.nn:Identity"
    with pytest.raises(ConfigError, match=r"gives \(2, 64\) .* must give \(2, 10\)"):
        build_head(ModelConfig(head=name), 4, 10, "float32", 1)
