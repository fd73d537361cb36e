"""The learner: lays groups out as micro-batches, accumulates the gradient and moves the weights."""
