"""On demand inside a node, one sum of gradients over nodes per minibatch."""
