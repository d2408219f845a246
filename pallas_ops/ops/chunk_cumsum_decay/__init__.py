"""Running sums that restart at every chunk: api, reference, vjp, kernel, config, in that order."""
