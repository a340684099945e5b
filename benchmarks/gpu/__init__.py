"""What the CUDA transport costs."""
