"""Stock classes of transformers, built small: as decoders, and as files for other runtimes."""
