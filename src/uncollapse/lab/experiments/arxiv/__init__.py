"""RevGAT with D-ContraNorm, label reuse and self-distillation on ogbn-arxiv."""
