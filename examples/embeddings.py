"""Embeddings of texts by sentence-transformers, with an encoder whose attention is fused: docs/plugs.md.

    pip install sentence-transformers
    python examples/embeddings.py [FOLDER]

Without a FOLDER the encoder is a tiny BERT of random weights, so its similarities mean nothing.
"""

import sys
import tempfile

from sentence_transformers import SentenceTransformer
from tiny_checkpoint import tiny_encoder

import attngraph

folder = sys.argv[1] if sys.argv[1:] else tiny_encoder(tempfile.mkdtemp())

# --- embed
model = SentenceTransformer(folder, device="cpu")
model[0].model = attngraph.compile(model[0].model, padding="unused")  # the encoder; pooling stays as it is
texts = ["Once upon a time", "there was a model that was small", "the end"]
embeddings = model.encode(texts)
print(model.similarity(embeddings, embeddings))
