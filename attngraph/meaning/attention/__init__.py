"""The recogniser: which values of a graph are attention, as claims over views of its tensors."""
