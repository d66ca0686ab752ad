"""Muon: momentum whose matrix-shaped updates are made nearly orthogonal by a Newton-Schulz iteration."""

import collections

import torch


def orthogonalise(matrices, steps=5):
    """[N, rows, columns] -> the nearest orthogonal matrices, roughly (singular values between 0.7 and 1.2)."""
    a, b, c = 3.4445, -4.7750, 2.0315  # the quintic iteration of Keller Jordan's Muon
    x = matrices.bfloat16()
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions, or three: a stack of matrices. Equal shapes share one batched iteration."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = collections.defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape[-2:]].append(p)
            for shape, params in by_shape.items():
                gradient = torch.cat([p.grad.reshape(-1, *shape) for p in params])
                state = self.state[params[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonalise(gradient.lerp(state["momentum"], group["momentum"]))
                update = update.float() * max(1.0, shape[0] / shape[1]) ** 0.5
                sizes = [p.numel() // shape.numel() for p in params]
                updates = [u.reshape(p.shape) for u, p in zip(update.split(sizes), params)]
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, updates, alpha=-group["lr"])
