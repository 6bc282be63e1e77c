"""Adam: each number's own step size, by the mean of its gradients (m) and of their squares (v)."""

import math

from . import tensor


class Adam:
    """parameters: name -> tensor. Their gradients are used up by a step."""

    def __init__(self, parameters, lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8):
        self.parameters, self.lr, self.beta1, self.beta2, self.eps = parameters, lr, beta1, beta2, eps
        self.steps = 0
        self.m = {name: tensor.device.zeros(*w.shape) for name, w in parameters.items()}
        self.v = {name: tensor.device.zeros(*w.shape) for name, w in parameters.items()}

    def step(self):
        self.steps += 1
        # m and v begin at 0, so after t steps they are too small by 1 - beta^t. lr and eps make up for it.
        m_part, v_part = 1 - self.beta1**self.steps, math.sqrt(1 - self.beta2**self.steps)
        step_size, eps = self.lr * v_part / m_part, self.eps * v_part
        for name, w in self.parameters.items():
            tensor.device.adam(w.array, w.grad, self.m[name], self.v[name], step_size, self.beta1, self.beta2, eps)
            w.grad = None
