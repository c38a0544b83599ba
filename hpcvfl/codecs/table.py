"""All codecs by name. A new codec is one class in its own file and one line here."""

from __future__ import annotations

from functools import lru_cache

from hpcvfl.codecs.auto import AutoCodec
from hpcvfl.codecs.base import Codec, split_spec
from hpcvfl.codecs.best import BestCodec
from hpcvfl.codecs.feedback import FeedbackCodec, HalfFeedbackCodec
from hpcvfl.codecs.floats import BFloat16Codec, Float16Codec, NoneCodec
from hpcvfl.codecs.lattice import LatticeCodec
from hpcvfl.codecs.lattice_paper import LatticePaperCodec
from hpcvfl.codecs.qsgd import QsgdCodec
from hpcvfl.codecs.randomk import RandomKCodec
from hpcvfl.codecs.scalar import ScalarCodec
from hpcvfl.codecs.topk import TopKCodec
from hpcvfl.errors import ConfigError

_CLASSES: tuple[type[Codec], ...] = (
    NoneCodec,
    Float16Codec,
    BFloat16Codec,
    ScalarCodec,
    LatticeCodec,
    LatticePaperCodec,
    AutoCodec,
    FeedbackCodec,
    HalfFeedbackCodec,
    TopKCodec,
    RandomKCodec,
    QsgdCodec,
    BestCodec,
)

CODECS = {c.name: c for c in _CLASSES}


LONGEST_SPEC = 300
"""Characters of a spec string: more than any sensible one has, few enough to be told in a line."""


@lru_cache(maxsize=256)
def parse(spec: str) -> Codec:
    """The codec of a spec string such as "scalar:bits=2,scope=column"; ConfigError if there is
    none.
    """
    if len(spec) > LONGEST_SPEC:
        raise ConfigError(f"codec {spec[:40]!r}..: {len(spec)} characters, at most {LONGEST_SPEC}")
    name, options = split_spec(spec)
    if name not in CODECS:
        raise ConfigError(f"codec {spec!r}: unknown codec {name!r}; codecs: {', '.join(CODECS)}")
    return CODECS[name].from_options(options, parse)


def _check_table() -> None:
    """Every entry has examples that parse, and a canonical spec that parses to itself."""
    for name, codec_class in CODECS.items():
        assert codec_class.name == name
        assert codec_class.examples, name
        for example in codec_class.examples:
            codec = parse(example)
            assert isinstance(codec, codec_class)
            assert parse(codec.spec).spec == codec.spec, (example, codec.spec)


_check_table()
