"""The torchmetrics twins: states are sums or rows, the maths is `functional`'s."""
