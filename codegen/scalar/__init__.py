"""What both backends share of writing a score program: derivatives, weights, gradients of reads."""
