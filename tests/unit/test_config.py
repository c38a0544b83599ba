"""A config is checked whole, hashed by what changes numbers, and complained about in one line."""

import pytest

from hpcvfl.cli import load_config
from hpcvfl.config import Config, all_fields, build, digest, flatten, merge, nest, scope_of
from hpcvfl.engine import folder
from hpcvfl.engine.policies import plan_of, policy_of
from hpcvfl.engine.rates import learning_rate
from hpcvfl.errors import ConfigError


def test_every_field_has_a_scope_and_a_docstring():
    for path, scope in all_fields():
        assert scope in ("shared", "how", "local"), path
        model = Config
        *sections, leaf = path.split(".")
        for section in sections:
            model = model.model_fields[section].annotation
        assert model.model_fields[leaf].description, path


def test_digest_covers_shared_fields_only():
    base = digest(Config())
    assert digest(build({"run": {"folder": "elsewhere"}, "transport": {"timeout_s": 5}})) == base
    assert digest(build({"codec": "none", "optimizer": {"lr": 1.0}})) == base
    for over in (
        {"seed": 1},
        {"algorithm": {"local_steps": 2}},
        {"head_codec": "none"},
        {"threads": 2},
    ):
        assert digest(build(over)) != base


def test_party_table_overrides_local_fields_of_one_block():
    config = build({"party": {"2": {"model": {"tower": "cnn"}, "codec": "none"}}})
    assert config.for_block(2).model.tower == "cnn"
    assert config.for_block(2).codec == "none"
    assert config.for_block(1) is config
    assert digest(config) == digest(Config())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"foo": 1}, "unknown field 'foo'; fields there: name, num_parties"),
        ({"data": {"batch": 1}}, r"unknown field 'data.batch'; fields there: data.dataset"),
        ({"data": {"batch_size": 0}}, "data.batch_size = 0: .*greater than or equal to 1"),
        ({"data": {"batch_size": "many"}}, "data.batch_size = 'many'"),
        ({"num_parties": 0}, "num_parties = 0"),
        ({"dtype": "int8"}, "dtype = 'int8': .*'float32' or 'float64'"),
        ({"transport": {"timeout_s": -1}}, "transport.timeout_s = -1"),
        ({"optimizer": {"momentum": 1.0}}, "optimizer.momentum = 1.0"),
        ({"party": {"9": {"codec": "none"}}}, r"party.9: blocks are 0 \(server\) to 4"),
        ({"party": {"1": {"lr": 1}}}, "party.1.lr: unknown field; local fields: codec, data.root"),
        ({"party": {"1": {"seed": 1}}}, "party.1.seed: only local fields may differ"),
        ({"party": {"0": {"codec": "none"}}}, "party.0.codec: block 0 is the server"),
        ({"party": {"2": {"model": 1, "model.tower": "cnn"}}}, "model is given as a value and as"),
        ({"party": {"x": {}}}, "'x': due is a table of fields"),
        ({"name": "a/b"}, "name = 'a/b'"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(table, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(table)
    assert "\n" not in str(caught.value)


def test_nest_and_flatten_are_inverse():
    table = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert nest(dict(flatten(table))) == table
    assert merge(table, {"b": {"c": 5}}) == {"a": 1, "b": {"c": 5, "d": {"e": 3}}}
    assert scope_of("data.root") == "local"
    assert scope_of("data.nothing") is None


def test_config_written_to_a_folder_is_read_back_equal(tmp_path):
    config = build(
        {"run": {"folder": str(tmp_path)}, "party": {"1": {"codec": "none", "optimizer.lr": 0.5}}}
    )
    path = folder.create(config)
    assert folder.read_config(path) == config
    assert folder.create(config) != path


@pytest.mark.parametrize("preset", ["digits", "fashion-mnist", "synthetic"])
def test_presets_load_and_take_overrides(preset):
    config = load_config([preset, "--algorithm.local-steps", "7", "--codec", "scalar:bits=2"])
    assert (config.algorithm.local_steps, config.codec) == (7, "scalar:bits=2")
    assert config.name == preset


def test_party_overrides_on_the_command_line():
    words = [
        "digits",
        "--party",
        "2.codec",
        "none",
        "--party",
        "2.optimizer.lr",
        "0.5",
        "--seed",
        "3",
    ]
    config = load_config(words)
    assert config.for_block(2).codec == "none"
    assert config.party[2]["optimizer"]["lr"] == 0.5
    assert config.for_block(2).optimizer.lr == 0.5
    assert config.for_block(1).codec != "none"
    assert config.seed == 3
    many = load_config(["digits", "--party", "1.optimizer.milestones", "3,5"])
    assert many.for_block(1).optimizer.milestones == (3, 5)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["digits", "--algorithm.local-step", "1"], r"\(near: --algorithm.local-steps"),
        (["digits", "--foo", "1"], "Unrecognized options: --foo"),
        (["digits", "--data.batch-size", "0"], "batch_size: .*greater than or equal to 1"),
        (["digits", "--data.batch-size", "x"], "--data.batch-size: invalid literal"),
        (["digits", "--data.batch-size"], "--data.batch-size"),
        (["digits", "--wire.checksum", "all"], "'header', 'payload'"),
        (["digits", "--party", "x.codec", "none"], "--party K.section.field value"),
        (["digits", "--party", "\u00b2.codec", "none"], "--party K.section.field value"),
        (["digits", "--party", "1.codec"], "--party K.section.field value"),
        (["digits", "--party", "1.seed", "2"], "party.1.seed: only local"),
        (
            ["digits", "--algorithm.driver", "vafl"],
            "line: algorithm.driver = 'vafl' needs labels.h",
        ),
        (
            ["digits", "--steps.policy", "wall-clock"],
            "line: steps.policy = 'wall-clock' needs",
        ),
        (["nothing"], r"no such preset \(digits, fashion-mnist, synthetic\)"),
        (["nothing.toml"], "nothing.toml: cannot be read"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, match):
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(words)
    assert "\n" not in str(caught.value)


def test_factors_of_the_rate_are_given_to_one_party_on_the_command_line():
    config = load_config(["digits", "--party", "1.optimizer.step_rates", "1,0.5"])
    assert config.for_block(1).optimizer.step_rates == (1.0, 0.5)
    everyone = load_config(["digits", "--optimizer.step-rates", "1", "0.25"])
    assert everyone.for_block(2).optimizer.step_rates == (1.0, 0.25)
    with pytest.raises(ConfigError, match=r"optimizer: step_rates.1: .*greater than 0"):
        load_config(["digits", "--optimizer.step-rates", "1", "0"])
    with pytest.raises(ConfigError, match=r"optimizer: proximal: due is lr .* 0.3 . 20 = 6"):
        load_config(["digits", "--optimizer.proximal", "20"])


def test_broken_toml_names_the_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n[data\n")
    with pytest.raises(ConfigError, match=r"run.toml: not valid TOML: .*line 2"):
        load_config([str(path)])


def test_schedules():
    optimizer = Config().optimizer
    assert learning_rate(optimizer, 7, 10, 100) == optimizer.lr
    cosine = optimizer.model_copy(update={"schedule": "cosine", "lr": 2.0})
    assert learning_rate(cosine, 0, 10, 100) == 2.0
    assert learning_rate(cosine, 50, 10, 100) == pytest.approx(1.0)
    assert 0 < learning_rate(cosine, 99, 10, 100) < 0.001
    steps = optimizer.model_copy(update={"schedule": "milestones", "milestones": (2, 5), "lr": 1.0})
    rates = [learning_rate(steps, r, 10, 100) for r in (0, 19, 20, 49, 50, 99)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    inverse = optimizer.model_copy(update={"schedule": "inverse", "lr": 2.0})
    assert [learning_rate(inverse, r, 10, 100) for r in (0, 10, 30)] == [2.0, 1.0, 0.5]
    config = build({"algorithm": {"local_steps": 2}})
    policy = policy_of(config, 1, plan_of(config))
    policy.begin_round(0)
    assert [policy.may_start(t) for t in range(4)] == [True, True, False, False]
