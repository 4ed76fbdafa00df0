"""Parts of the training loop: initial state, rollouts, evolution, evaluation, records, several processes."""
