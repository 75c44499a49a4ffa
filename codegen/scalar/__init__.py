"""The parts of emitting a score program that both backends share: derivatives, weights, gradients of
reads."""
