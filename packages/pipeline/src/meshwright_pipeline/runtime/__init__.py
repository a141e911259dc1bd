"""One pipelined step: call, executor, p2p, gradients, end of step."""
