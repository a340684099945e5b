"""What happens to a training that is broken, stopped or killed on purpose, or that is long."""
