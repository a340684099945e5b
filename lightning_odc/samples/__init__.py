"""What the samples of a batch hold: lengths, shapes, counts, and what a ``collate_fn`` makes of them."""
