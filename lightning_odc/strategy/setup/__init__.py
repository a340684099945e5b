"""What is there before the first step: options, ranks and their groups, the engine, the model, its checkpoints."""
