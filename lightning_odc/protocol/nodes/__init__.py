"""Several nodes: on demand inside each of them, and between them every byte once per minibatch."""
