"""Outlines: the parameters of the built-in networks by their sizes, which are checked here.

A plan is read and accounted for from them, without torch: which patterns match, which groups there
are, and how large. The networks themselves are in ``privpart.models``, whose tests compare the two.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError
from privpart.patterns import Outline

Norm = Literal["group", "batch"]
Shape = tuple[int, ...]
Layer = tuple[str, str, Shape, bool]
"""Name, class, shape of the weight, and whether there is a bias, of as many numbers as rows."""
_BASES = {"Conv2d": ("_ConvNd",), "BatchNorm2d": ("_BatchNorm", "_NormBase")}
_NORMS: Mapping[str, str] = {"group": "GroupNorm", "batch": "BatchNorm2d"}


def _outline(layers: Sequence[Layer]) -> Outline:
    shapes: dict[str, Shape] = {}
    kinds = {}
    for layer, kind, shape, biased in layers:
        own = {"weight": shape} | ({"bias": shape[:1]} if biased else {})
        for name, of in own.items():
            shapes[f"{layer}.{name}"] = of
            kinds[f"{layer}.{name}"] = (kind, *_BASES.get(kind, ()), "Module", "object")
    return Outline(shapes, {name: name for name in shapes}, kinds, tuple(shapes))


def _dense(name: str, inputs: int, outputs: int) -> Layer:
    return name, "Linear", (outputs, inputs), True


def _conv(name: str, inputs: int, outputs: int, kernel: int, *, biased: bool = False) -> Layer:
    return name, "Conv2d", (outputs, inputs, kernel, kernel), biased


def _norm(name: str, channels: int, kind: str = "GroupNorm") -> Layer:
    return name, kind, (channels,), True


def small_cnn(
    *,
    channels: tuple[int, int],
    hidden: int,
    image_size: int,
    classes: int = 10,
    kernel: int = 3,
    groups: int = 2,
) -> Outline:
    """Return the outline of ``privpart.models.small_cnn``."""
    first, second = (checks.count("channels", c) for c in channels)
    _refuse_sizes(hidden=hidden, classes=classes, kernel=kernel)
    if kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}: must be odd, so that the image keeps its size.")
    if checks.count("groups", groups, minimum=0) and second % groups:
        raise ConfigError(f"groups={groups}: must divide the {second} filters of conv2, or be 0.")
    features = second * (checks.count("image_size", image_size, minimum=4) // 4) ** 2
    return _outline(
        [
            _conv("conv1", 1, first, kernel, biased=True),
            _conv("conv2", first, second, kernel, biased=True),
            *([_norm("norm", second)] if groups else []),
            _dense("dense1", features, hidden),
            _dense("dense2", hidden, classes),
        ]
    )


def emnist_cnn(*, classes: int = 62) -> Outline:
    """Return the outline of ``privpart.models.emnist_cnn``."""
    return small_cnn(
        channels=(32, 64), hidden=512, image_size=28, classes=classes, kernel=5, groups=32
    )


def mcmahan_cnn(*, classes: int = 62) -> Outline:
    """Return the outline of ``privpart.models.mcmahan_cnn``."""
    return small_cnn(
        channels=(32, 64), hidden=512, image_size=28, classes=classes, kernel=5, groups=0
    )


def mcmahan_2nn(*, inputs: int = 784, hidden: int = 200, classes: int = 62) -> Outline:
    """Return the outline of ``privpart.models.mcmahan_2nn``."""
    _refuse_sizes(inputs=inputs, hidden=hidden, classes=classes)
    widths = [inputs, hidden, hidden, classes]
    return _outline([_dense(f"dense{i}", *widths[i - 1 : i + 1]) for i in (1, 2, 3)])


def bag_of_words(*, words: int = 10_000, tags: int = 500) -> Outline:
    """Return the outline of ``privpart.models.bag_of_words``."""
    return _outline([_dense("dense", checks.count("words", words), checks.count("tags", tags))])


def resnet8(
    *, classes: int = 10, width: int = 64, channels: int = 3, norm: Norm = "group"
) -> Outline:
    """Return the outline of ``privpart.models.resnet8``."""
    return _resnet((1, 1, 1), classes, width, channels, norm)


def resnet18(
    *, classes: int = 10, width: int = 64, channels: int = 3, norm: Norm = "group"
) -> Outline:
    """Return the outline of ``privpart.models.resnet18``."""
    return _resnet((2, 2, 2, 2), classes, width, channels, norm)


def _resnet(blocks: Sequence[int], classes: int, width: int, channels: int, norm: Norm) -> Outline:
    _refuse_sizes(classes=classes, width=width, channels=channels)
    if norm not in get_args(Norm):
        raise ConfigError(f"norm={norm!r}: must be 'group' or 'batch'.")
    kind, inputs = _NORMS[norm], width
    layers = [_conv("stem", channels, width, 7), _norm("norm", width, kind)]
    for stage, depth in enumerate(blocks):
        outputs = width * 2**stage
        for block in range(depth):
            name = f"stages.{stage}.{block}"
            layers += [
                _conv(f"{name}.conv1", inputs, outputs, 3),
                _norm(f"{name}.norm1", outputs, kind),
                _conv(f"{name}.conv2", outputs, outputs, 3),
                _norm(f"{name}.norm2", outputs, kind),
            ]
            layers += _shortcut(name, inputs, outputs, kind)
            inputs = outputs
    return _outline([*layers, _dense("head", inputs, classes)])


def _shortcut(block: str, inputs: int, outputs: int, kind: str = "GroupNorm") -> list[Layer]:
    if inputs == outputs:
        return []
    name = f"{block}.shortcut"
    return [_conv(f"{name}.0", inputs, outputs, 1), _norm(f"{name}.1", outputs, kind)]


def resnet18_gn(*, classes: int = 100) -> Outline:
    """Return the outline of ``privpart.models.resnet18_gn``."""
    inputs = 64
    layers = [_conv("stem", 3, inputs, 7), _norm("stem_norm", inputs)]
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"stages.{stage}.{block}"
            layers += [_norm(f"{name}.norm1.0", inputs)] if stage or block else []
            layers += [
                _conv(f"{name}.conv1", inputs, outputs, 3),
                _norm(f"{name}.norm2.0", outputs),
                _conv(f"{name}.conv2", outputs, outputs, 3),
                *_shortcut(name, inputs, outputs),
            ]
            inputs = outputs
    head = _dense("head", inputs, checks.count("classes", classes))
    return _outline([*layers, _norm("norm", inputs), head])


def word_lm(
    *,
    vocabulary: int = 10_004,
    width: int = 96,
    heads: int = 8,
    hidden: int = 2048,
    layers: int = 3,
) -> Outline:
    """Return the outline of ``privpart.models.word_lm``."""
    embedding, *encoder = _encoder(vocabulary, width, heads, hidden, layers)
    inner, outer = (_dense(f"project_{way}", width, width) for way in ("in", "out"))
    return _outline([embedding, inner, *encoder, outer])


def text_transformer(
    *,
    vocabulary: int = 30_333,
    classes: int = 5,
    width: int = 200,
    heads: int = 2,
    hidden: int = 200,
    layers: int = 3,
) -> Outline:
    """Return the outline of ``privpart.models.text_transformer``."""
    encoder = _encoder(vocabulary, width, heads, hidden, layers)
    return _outline([*encoder, _dense("head", width, checks.count("classes", classes))])


def _encoder(vocabulary: int, width: int, heads: int, hidden: int, layers: int) -> list[Layer]:
    _refuse_sizes(vocabulary=vocabulary, width=width, heads=heads, hidden=hidden)
    count = checks.count("layers", layers, maximum=1000)
    if width % heads or width % 2:
        raise ConfigError(f"width={width}: must be even and a multiple of heads={heads}.")
    attention = (f"attention.{part}" for part in ("query", "key", "value", "output"))
    block = [
        *(_dense(part, width, width) for part in attention),
        _norm("norm1", width, "LayerNorm"),
        _dense("linear1", width, hidden),
        _dense("linear2", hidden, width),
        _norm("norm2", width, "LayerNorm"),
    ]
    layer: Layer = ("embedding", "Embedding", (vocabulary, width), False)
    return [layer, *((f"layers.{i}.{b[0]}", *b[1:]) for i in range(count) for b in block)]


def _refuse_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        checks.count(name, value)


def _resnet_groups(blocks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return FedPart's groups #1, #2, ...: each convolution with its norm, then the dense layer."""
    groups: list[tuple[str, ...]] = [("stem.*", "norm.*")]
    for stage, depth in enumerate(blocks):
        for block in range(depth):
            prefix = f"stages.{stage}.{block}"
            groups += [(f"{prefix}.conv{i}.*", f"{prefix}.norm{i}.*") for i in (1, 2)]
            if stage and not block:
                groups.append((f"{prefix}.shortcut.*",))
    return (*groups, ("head.*",))


_ENCODER_PARTS = (("attention.*",), ("linear?.*", "norm?.*"))
GROUPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "resnet8": _resnet_groups((1, 1, 1)),
    "resnet18": _resnet_groups((2, 2, 2, 2)),
    # FedPart's eight groups, from github.com/FLAIR-Community/Fling.
    "text_transformer": (
        ("embedding.*",),
        *(tuple(f"layers.{i}.{p}" for p in parts) for i in range(3) for parts in _ENCODER_PARTS),
        ("head.*",),
    ),
}
"""FedPart's layer groups #1, #2, ... in order, as patterns that cover the network once."""
_LAYERED = (small_cnn, emnist_cnn, mcmahan_cnn, mcmahan_2nn, bag_of_words)
_DEEP = (resnet18_gn, resnet8, resnet18, word_lm, text_transformer)
OUTLINES: Mapping[str, Callable[..., Outline]] = {
    outline.__name__: outline for outline in (*_LAYERED, *_DEEP)
}


def outline_of(name: str, **sizes: object) -> Outline:
    """Return the outline of a built-in network by its name.

    Raises:
        ConfigError: no network has this name, or it has no such sizes.
    """
    if name not in OUTLINES:
        near = difflib.get_close_matches(str(name), OUTLINES, n=3, cutoff=0.3)
        raise ConfigError(f"model {name!r}: unknown. Near it: {', '.join(near or OUTLINES)}.")
    try:
        return OUTLINES[name](**sizes)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {name!r}: {str(error).rstrip('.')}.") from None
