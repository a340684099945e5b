"""Say, before training, what on-demand communication and balancing would gain for lengths, a model and devices."""
