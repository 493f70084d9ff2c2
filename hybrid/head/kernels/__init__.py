"""Fast kernels for quantised products. None yet; each will stand behind `hybrid.head.linear.QuantLinear`, the one
door through which the decoder multiplies by a weight."""
